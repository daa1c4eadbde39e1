"""The arguments of an operator call as text, so that a key can be timed again.

JSON `[[positional...], {keyword: ...}]`. A tensor argument is `{"tensor": i}`, operand i of the key; a dtype
`{"dtype": "float32"}`; a layout, memory format or device `{"memory_format": "channels_last"}` and the like.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def encode(args: Sequence[Any], kwargs: Mapping[str, Any], special: Callable[[Any], Mapping[str, str] | None]) -> str:
    """Text of a call. `special` is asked about every argument that is no number, text, None or sequence: a mapping
    like {"dtype": "float32"}, or None for a tensor. Tensors are numbered in order of appearance, repeats counted."""
    count = 0

    def plain(value: Any) -> Any:
        nonlocal count
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, (tuple, list)):
            return [plain(item) for item in value]
        found = special(value)
        if found is not None:
            return dict(found)
        count += 1
        return {"tensor": count - 1}

    return json.dumps([[plain(a) for a in args], {name: plain(a) for name, a in kwargs.items()}])


def decode(text: str, make: Callable[[str, Any], Any]) -> tuple[list[Any], dict[str, Any]]:
    """The call again; `make(kind, value)` turns ("tensor", i), ("dtype", name), ... into arguments."""

    def full(value: Any) -> Any:
        if isinstance(value, dict):
            ((kind, item),) = value.items()
            return make(kind, item)
        return [full(item) for item in value] if isinstance(value, list) else value

    args, kwargs = json.loads(text) if text else ([], {})
    return [full(a) for a in args], {name: full(a) for name, a in kwargs.items()}


def argument(text: str, position: int, name: str, default: Any) -> Any:
    """One plain argument of a call, by position or keyword."""
    args, kwargs = json.loads(text) if text else ([], {})
    return kwargs.get(name, args[position] if position < len(args) else default)

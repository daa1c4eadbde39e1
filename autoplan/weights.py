"""Dense weights in safetensors files, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from autoplan.errors import UsageError


class SafetensorsFolder:
    """Tensors of one safetensors file, or of every one in a folder, read when they are asked for."""

    def __init__(self, path: str | Path) -> None:
        from safetensors import safe_open

        root = Path(path)
        files = [root] if root.is_file() else sorted(root.glob("*.safetensors"))
        if not files:
            raise UsageError(f"{root} holds no safetensors file: give a .safetensors file, or a folder with some.")
        self._files = [safe_open(str(file), framework="pt") for file in files]
        self._home = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118 (no mapping)

    def keys(self) -> Iterable[str]:
        return self._home.keys()

    def get(self, name: str) -> torch.Tensor | None:
        """The dense tensor called `name`; None if no file has it."""
        return self._home[name].get_tensor(name) if name in self._home else None


def dense_state(model: torch.nn.Module, source: Mapping[str, torch.Tensor] | SafetensorsFolder) -> Callable[[str], torch.Tensor | None]:
    """A function from a tensor's own name to its value in `source`, a state of `model`; buffers that no state holds keep the
    model's own value. A tied tensor may be there under one of its names. Raises UsageError for missing or unknown names."""
    own = model.state_dict(keep_vars=True)
    names: dict[int, list[str]] = {}
    for name, tensor in own.items():
        names.setdefault(id(tensor), []).append(name)
    given = dict.fromkeys(source.keys())
    unknown = [name for name in given if name not in own]
    missing = [group[0] for group in names.values() if not any(name in given for name in group)]
    if unknown or missing:
        told = [
            f"{what} {', '.join(found[:5])}{' ...' if len(found) > 5 else ''}" for what, found in (("lacks", missing), ("has the unknown", unknown)) if found
        ]
        raise UsageError(f"the state is not one of {type(model).__name__}: it {' and '.join(told)}. Its names must be those of model.state_dict().")
    kept = {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name not in own}
    return lambda name: kept[name] if name in kept else source.get(name)

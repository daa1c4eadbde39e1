"""What the forms of YAML files have in common: numbers, strictness, and mistakes named with file and key."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Annotated, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

T = TypeVar("T", bound=BaseModel)

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0, strict=True)]


class ClusterFileError(ValueError):
    """A cluster description that cannot be used: `file`, `key` and the nearest valid key are in the message."""

    def __init__(self, file: str, key: str, message: str) -> None:
        super().__init__(f"{file}: {key + ': ' if key else ''}{message}")
        self.file, self.key = file, key


class Strict(BaseModel):
    """A form without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class KeysOnce(yaml.SafeLoader):
    """Reads YAML whose mappings have every key once; plain YAML takes the last one without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} is there twice", node.start_mark)
        return super().construct_mapping(node, deep=deep)


def validate(model: type[T], content: object, file: str, forms: Sequence[type[BaseModel]]) -> T:
    """Content as a form. Raises ClusterFileError; for an unknown key with the nearest one of all `forms`."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        # a union reports the branches that were not meant too: the deepest complaint names the real key
        first = max(error.errors(), key=lambda e: (e["type"] == "extra_forbidden", len(e["loc"])))
        where = [str(part) for part in first["loc"] if not str(part).startswith("_") and part != "str"]
        if first["type"] == "extra_forbidden":
            valid = sorted({name for form in forms for name in form.model_fields})
            raise ClusterFileError(file, ".".join(where), f"unknown key; nearest valid key: {nearest(where[-1], valid)}") from None
        raise ClusterFileError(file, ".".join(where), f"{first['msg'].lower()}, found {first['input']!r}") from None


def nearest(name: str, valid: Sequence[str]) -> str:
    return (difflib.get_close_matches(name, valid, n=1, cutoff=0.0) or ["-"])[0]

"""Dense weights, one tensor at a time: of a model, and in safetensors files."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from autoplan.errors import UsageError
from autoplan.graph import Graph


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

    def dense(name: str) -> torch.Tensor | None:
        if name not in kept:
            return source.get(name)
        return _made_again(model, name) if kept[name].is_meta else kept[name]

    return dense


def without_values(model: torch.nn.Module) -> tuple[str, ...]:
    """Names of the tensors of `model`'s state that are on the meta device."""
    return tuple(name for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, torch.Tensor) and tensor.is_meta)


def dense_source(model: torch.nn.Module, graph: Graph) -> Callable[[str], torch.Tensor]:
    """A function from a tensor's own name to the dense tensor to start from: on the meta device where its values are to be loaded.
    Raises UsageError for a constant or buffer without values that no state could bring."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    loadable = model.state_dict(keep_vars=True).keys()

    def dense(fqn: str) -> torch.Tensor:
        found = graph.constants[fqn] if fqn in graph.constants else tensors[fqn]
        if not found.is_meta or fqn in loadable:
            return found
        if fqn in graph.constants:
            raise UsageError(f"the constant {fqn} of the model is on the meta device and has no values: build it on a real device.")
        return _made_again(model, fqn)

    return dense


def _made_again(model: torch.nn.Module, name: str) -> torch.Tensor:
    """A buffer that no state holds, on the CPU, as the model's own initialisation makes it: `_init_weights` of a transformers model, or
    `reset_parameters` of the module that has it."""
    owner = model.get_submodule(name.rpartition(".")[0])
    copied = copy.deepcopy(owner).to_empty(device="cpu")
    with torch.no_grad():
        for buffer in copied.buffers():
            buffer.fill_(torch.nan if buffer.is_floating_point() else 0)
        for parent in (copied, model):
            make = getattr(parent, "reset_parameters" if parent is copied else "_init_weights", None)
            if callable(make):
                make(*(() if parent is copied else (copied,)))
    found = dict(copied.named_buffers())[name.rpartition(".")[2]]
    if not found.is_floating_point() or bool(torch.isnan(found).any()):
        raise UsageError(
            f"buffer {name} is on the meta device, and no state holds its values: build it on a real device (with torch.device('cpu') around "
            f"its register_buffer), make it persistent, or give {type(owner).__name__} a reset_parameters() that sets it."
        )
    return found

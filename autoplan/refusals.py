"""What is refused by name: what an export would silently change, and calls that a model is not ready for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoplan.errors import CaptureError, UsageError
from autoplan.graph import Graph


def refuse(model: nn.Module) -> None:
    """Raise for what an export would silently change."""
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            raise CaptureError(
                "capture was called inside torch.autocast, which an export drops: leave the context and use precision='bf16', or autocast in the model"
            )
    for name, module in model.named_modules():
        kind, where = type(module).__name__, f"module {name!r}" if name else "the model"
        if isinstance(module, nn.parallel.DistributedDataParallel) or kind in ("FullyShardedDataParallel",) or kind.startswith("FSDP"):
            raise CaptureError(f"{where} is wrapped by {kind}: give the plain module, the plan distributes it")
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(f"{where} has backward hooks, which a plan cannot run: remove them (gradients can be read by pm.full_grads())")
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(f"{where} is a TorchScript module: give the Python module that it was made from")
        if any(part in type(module).__module__ for part in (".quantized", "bitsandbytes", "torchao")):
            raise CaptureError(
                f"{where} is quantised ({kind}), with packed weights that a plan cannot place: give the plain module, or int8 weights in buffers"
            )
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_backward_hooks", None) or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CaptureError(f"parameter {name!r} has gradient hooks, which a plan cannot run: remove them")
        if hasattr(parameter, "device_mesh"):
            raise CaptureError(f"parameter {name!r} is distributed already: give the plain module")
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise CaptureError(f"parameter {name!r} has no shape yet: run the model once on a batch first")
        if type(parameter) is not nn.Parameter or parameter.is_quantized:
            raise CaptureError(f"parameter {name!r} is a {type(parameter).__name__}, which a plan cannot place: give plain tensors, or int8 in buffers")


def refuse_without_values(names: Sequence[str]) -> None:
    """Raise where `names`, tensors from the meta device, have no values yet."""
    if names:
        raise UsageError(
            f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''} came from the meta device and have no values yet: "
            "load_full_state_dict(FILE, FOLDER or state) or load(CHECKPOINT) first."
        )


def refuse_without_loss(model: nn.Module, graph: Graph) -> None:
    """Raise where a graph of `model` has no loss."""
    if graph.loss is None:
        raise UsageError(
            f"{type(model).__name__} gives no loss: it must return a scalar, or an output with .loss or ['loss']; "
            "otherwise give parallelize(model, batch, loss_fn=...), a function of (output, batch)."
        )


@contextmanager
def watched_hooks(model: nn.Module) -> Iterator[None]:
    """Inside, the model is called once. Raises CaptureError for a forward hook that did nothing to the values: what else it does (it
    records, prints, counts) would not run in a step. Hooks of torch itself, which set weights, are trusted, and those of this package."""
    idle: dict[str, bool] = {}
    kept: list[tuple[Any, Any, Any]] = []
    for name, module in model.named_modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key, hook in hooks.items():
                if not type(hook).__module__.startswith(("torch.", "autoplan.")) and not getattr(hook, "__module__", "").startswith(
                    ("torch.", "transformers.")
                ):
                    kept.append((hooks, key, hook))
                    hooks[key] = _watched(hook, f"{name or 'the model'}: {getattr(hook, '__qualname__', type(hook).__name__)}", idle)
    try:
        yield
    finally:
        for hooks, key, hook in kept:
            hooks[key] = hook
    found = next((name for name, is_idle in idle.items() if is_idle), None)
    if found is not None:
        raise CaptureError(
            f"the forward hook of {found} changes no value: what else it does would not run in a step. Remove it, or let the model give what it records"
        )


def _watched(hook: Callable[..., Any], name: str, idle: dict[str, bool]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves((args[1:], kwargs)) if isinstance(leaf, torch.Tensor)]
        before = [tensor._version for tensor in tensors]
        result = hook(*args, **kwargs)
        idle[name] = idle.get(name, True) and result is None and [tensor._version for tensor in tensors] == before
        return result

    return called

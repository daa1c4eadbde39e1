"""Selective recomputation (Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models, section 5).

Of a block that is recomputed selectively the backward pass finds what entered it and the results of its *kept* instructions:
products with a tensor at rest, convolutions, and attention in one kernel. Those take long for what they save. All else is run
again: norms, activations, dropout, and attention that is written out, whose scores are quadratic in the sequence. Masks are
drawn again from the same state (runtime/random.py); collectives are repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from runtime.instr import Instr, uses

_PRODUCTS = ("linear", "mm", "addmm", "conv1d", "conv2d", "conv3d", "convolution")
_KERNELS = ("mm", "addmm", "linear", "convolution", "_scaled_dot_product")  # what such instructions run; no bmm: it makes scores
_is_kept_running: ContextVar[bool] = ContextVar("is_kept_running", default=False)


def is_kept(instr: Instr, stored: Collection[str]) -> bool:
    """Whether selective recomputation keeps the instruction's results. `stored`: names of tensors at rest."""
    if not instr.target.startswith("aten."):
        return False
    name = instr.target.split(".")[1]
    return name == "scaled_dot_product_attention" or (name in _PRODUCTS and any(operand in stored for operand in uses(instr)))


@contextmanager
def _marked() -> Iterator[None]:
    token = _is_kept_running.set(True)
    try:
        yield
    finally:
        _is_kept_running.reset(token)


def keeping(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, its results kept by the checkpoint around it."""

    def kept(*args: Any, **kwargs: Any) -> Any:
        with _marked():
            return function(*args, **kwargs)

    return kept


def contexts() -> Any:
    """What torch.utils.checkpoint takes as `context_fn`."""

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = str(op).removeprefix("aten.").split(".")[0]
        is_kernel = _is_kept_running.get() and str(op).startswith("aten.") and name.startswith(_KERNELS)
        return CheckpointPolicy.MUST_SAVE if is_kernel else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)

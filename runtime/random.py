"""Random masks as pure functions of what they belong to.

A mask is keyed by the run's seed, the step, the operator and

    by coordinates (`RandomState.exact` false)  the micro-batch and the rank's coordinates on the axes that divide
                                                the tensor: replicated tensors get equal masks, shards distinct ones;
    by element (`RandomState.exact` true)       the index of each element in the global tensor: the mask is the same
                                                under every plan, any micro-batch size, and in one process.

The key is the whole state: a mask can be made again in a recomputation, and torch's own generators are never read or
advanced. Element masks hash (key, index) with the finaliser of splitmix64 (Steele, Lea, Flood: Fast Splittable
Pseudorandom Number Generators, 2014), so a shard is made without its neighbours, equally on every device.

The state travels in a context variable. Autograd may run a recomputation on another thread, which does not inherit it:
wrap the recomputed function with `bound`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class RandomState:
    """What all random masks of one micro-batch depend on. `row_start`: its first row in the global batch."""

    seed: int
    step: int
    micro_batch: int
    row_start: int = 0
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Window:
    """The part [start, start + length) of the middle of a dimension seen as [outer, size, inner]."""

    dim: int
    outer: int
    size: int
    inner: int
    start: int
    length: int


_current: ContextVar[RandomState | None] = ContextVar("random_state", default=None)


def current_state() -> RandomState | None:
    """The state of the micro-batch that runs now; None outside of one."""
    return _current.get()


@contextmanager
def use_state(state: RandomState | None) -> Iterator[None]:
    """Within, random operators draw their masks from `state`."""
    token = _current.set(state)
    try:
        yield
    finally:
        _current.reset(token)


def bound(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` that always runs under the state of now, on whatever thread and however late."""
    state = _current.get()

    @wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        with use_state(state):
            return fn(*args, **kwargs)

    return run


def key(*parts: int | str) -> int:
    """63 bits that depend on every part and on their order."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seeded(fn: Callable[..., Any], op_id: str) -> Callable[..., Any]:
    """A random operator of torch that draws the same numbers on every rank and in every micro-batch of a step.

    Such an operator runs whole: ranks that repeat it have to agree, and what it makes does not belong to rows. torch's own
    generators are left as they were.
    """

    @wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        state = _current.get()
        if state is None:
            return fn(*args, **kwargs)
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(key(state.seed, state.step, op_id))
            return fn(*args, **kwargs)

    return run


def coordinate_mask(
    state: RandomState, op_id: str | int, coordinates: tuple[int, ...], shape: tuple[int, ...], keep: float, device: torch.device
) -> torch.Tensor:
    """A bool mask of `shape`, each element true with probability `keep`."""
    generator = torch.Generator(device=device)
    generator.manual_seed(key(state.seed, state.step, state.micro_batch, op_id, *coordinates))
    return torch.empty(shape, device=device).bernoulli_(keep, generator=generator).bool()


def element_mask(
    state: RandomState, op_id: str | int, windows: tuple[Window, ...], row_dim: int, shape: tuple[int, ...], keep: float, device: torch.device
) -> torch.Tensor:
    """The part that `windows` cut out of the global mask, as a bool tensor of the local `shape`.

    Windows of one dimension are listed in the order in which the dense dimension was cut. A dimension without a window
    is whole. Elements are counted with `row_dim` outermost, so that its length, the size of the batch, never enters.
    """
    indices = [torch.arange(n, device=device) for n in shape]
    sizes = list(shape)
    for window in reversed(windows):  # from the local index back to the dense one
        local = indices[window.dim]
        block = window.length * window.inner
        offset = local % block + window.start * window.inner
        indices[window.dim] = local // block * (window.size * window.inner) + offset
        sizes[window.dim] = window.outer * window.size * window.inner
    flat = torch.zeros((), dtype=torch.int64, device=device)
    for dim in sorted(range(len(shape)), key=lambda d: d != row_dim):
        flat = flat * sizes[dim] + indices[dim].reshape((-1,) + (1,) * (len(shape) - 1 - dim))
    bits = _mix(flat * _GOLDEN + _signed(key(state.seed, state.step, op_id)))
    return _shift_right(bits, 11) < int(keep * 2**53)


_GOLDEN = 0x9E3779B97F4A7C15 - 2**64


def _signed(bits: int) -> int:
    """A 64-bit pattern as the int64 that holds it."""
    bits &= 2**64 - 1
    return bits - 2**64 if bits >= 2**63 else bits


def _shift_right(x: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift of int64, whose own `>>` repeats the sign."""
    return (x >> count) & (2 ** (64 - count) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64; int64 products wrap as the unsigned ones do."""
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)

"""Times one operator call on the present device, forward and backward, on tensors made from its key.

The median of repeated runs on several sets of tensors in turn; short calls are timed in batches so that the clock does not count. Backward is
`torch.autograd.grad` on one kept graph; it is split into input and weight part in the ratio that the formulas give, for only
their sum can be told apart from outside.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from costmodel import argtext
from costmodel.opclass import base_name
from costmodel.opkey import OpKey
from costmodel.roofline import tensor_bytes

_BATCH_S = 2e-4  # a sample lasts at least this long
_MIN_SAMPLES = 3
_MAX_SAMPLES = 15
_SMALL_BYTES = 1 << 16
_CACHE_BYTES = 1 << 25
_MAX_COPIES = 8

Resolve = Callable[[str], Callable[..., Any]]


class NotMeasurableError(ValueError):
    """A key that cannot be run on its own: the reason is in the message."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call, medians; `num_runs` in all. `weight_s`: what of `backward_s` is the weights' half, where that can be told."""

    forward_s: float
    backward_s: float
    num_runs: int
    weight_s: float | None = None


def resolve_aten(target: str) -> Callable[..., Any]:
    """The function of an ATen or custom-library target. NotMeasurableError for functions of other packages."""
    namespace, _, rest = target.partition(".")
    name, _, overload = rest.rpartition(".")
    packet = getattr(getattr(torch.ops, namespace, None), name, None) if name else None
    found = getattr(packet, overload, None)
    if found is None:
        raise NotMeasurableError(f"{target} is no operator of torch.ops")
    return found


def measure(key: OpKey, resolve: Resolve = resolve_aten, device: str | None = None, budget_s: float = 0.05) -> Timing:
    """Time `key` for about `budget_s` seconds. NotMeasurableError where the call does not run on its own."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    call = resolve(key.target)
    try:
        prepared = [_prepare(key, call, where) for _ in range(_num_copies(key, where))]
    except NotMeasurableError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
        raise NotMeasurableError(f"{key.target}: {' '.join(str(error).split())[:200]}") from error
    forwards = itertools.cycle(forward for forward, _ in prepared)
    forward_s, runs = _median_s(lambda: next(forwards)(), where, budget_s / 2)
    backwards = [backward for _, backward in prepared if backward is not None]
    if not backwards:
        return Timing(forward_s, 0.0, runs)
    turn = itertools.cycle(backwards)
    backward_s, more = _median_s(lambda: next(turn)(), where, budget_s / 2)
    return Timing(forward_s, backward_s, runs + more)


def _num_copies(key: OpKey, device: torch.device) -> int:
    """Sets of tensors to go round, so that a CPU's cache does not hold what a step would have pushed out of it."""
    size = sum(tensor_bytes(*t) for t in (*key.operands, *key.outputs))
    return 1 if device.type != "cpu" or size < _SMALL_BYTES else max(1, min(_MAX_COPIES, _CACHE_BYTES // size))


def _prepare(key: OpKey, call: Callable[..., Any], device: torch.device) -> tuple[Callable[[], Any], Callable[[], Any] | None]:
    """The forward call on tensors of its own, and the backward pass of one such call."""
    tensors = _tensors(key, device)
    args, kwargs = argtext.decode(key.args, lambda kind, item: _argument(kind, item, tensors, device))
    with torch.enable_grad():
        result = call(*args, **kwargs)
    outputs = [t for t in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(t, torch.Tensor)]
    if tuple(tuple(t.shape) for t in outputs) != tuple(shape for shape, _ in key.outputs):
        raise NotMeasurableError(f"{key.target}: gives {[tuple(t.shape) for t in outputs]}, the key says {[s for s, _ in key.outputs]}")
    wanted = [t for t in tensors if t.requires_grad]
    roots = [t for t in outputs if t.requires_grad]

    def forward() -> Any:
        return call(*args, **kwargs)

    if not wanted or not roots:
        return forward, None
    cotangents = [torch.ones_like(t, memory_format=torch.contiguous_format) for t in roots]

    def backward() -> Any:
        return torch.autograd.grad(roots, wanted, cotangents, retain_graph=True, allow_unused=True)

    return forward, backward


OPTIMIZERS: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "adadelta": torch.optim.Adadelta,
}


def measure_optimizer(name: str, num_elements: int, device: str | None = None, budget_s: float = 0.2) -> Timing:
    """Time a step of torch's optimizer over `num_elements` float32 elements. NotMeasurableError for a name that is not known."""
    if name not in OPTIMIZERS:
        raise NotMeasurableError(f"optimizer {name!r} is not known; known: {', '.join(sorted(OPTIMIZERS))}")
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    parameter = torch.nn.Parameter(torch.zeros(num_elements, device=where))
    parameter.grad = torch.ones_like(parameter)
    optimizer = OPTIMIZERS[name]([parameter])
    seconds, runs = _median_s(optimizer.step, where, budget_s)
    return Timing(seconds, 0.0, runs)


def _median_s(run: Callable[[], Any], device: torch.device, budget_s: float) -> tuple[float, int]:
    """Median seconds of `run`, and how often it ran."""

    # one thread: its own processor time, so that others on the machine do not count
    clock = time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter

    def sample(count: int) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = clock()
        for _ in range(count):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (clock() - start) / count

    first = min(sample(1), sample(1))  # the very first call allocates and compiles
    count = max(1, round(_BATCH_S / max(first, 1e-7)))
    samples = max(_MIN_SAMPLES, min(_MAX_SAMPLES, int(budget_s / max(first * count, 1e-7))))
    if first > budget_s:
        samples = 1
    return statistics.median(sample(count) for _ in range(samples)), 2 + samples * count


def _tensors(key: OpKey, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for i, (shape, name) in enumerate(key.operands):
        dtype = getattr(torch, name)
        if dtype.is_floating_point or dtype.is_complex:
            tensor = torch.randn(shape, generator=generator, dtype=torch.float32).mul_(0.5).to(device, dtype)
            if i < len(key.grads) and key.grads[i]:
                tensor.requires_grad_()
        elif dtype == torch.bool:
            tensor = torch.ones(shape, dtype=dtype, device=device)
        else:
            tensor = torch.randint(0, _bound(key, i), shape, generator=generator).to(device, dtype)
        made.append(tensor)
    return made


def _bound(key: OpKey, index: int) -> int:
    """What integers of operand `index` may index without leaving the other operands."""
    name = base_name(key.target)
    if name in ("embedding", "embedding_bag"):
        return max(1, key.operands[0][0][0])
    if name in ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"):
        return max(1, key.operands[0][0][min(1, len(key.operands[0][0]) - 1)])
    sizes = [n for i, (shape, _) in enumerate(key.operands) if i != index for n in shape]
    return max(1, min(sizes, default=2))


def _argument(kind: str, item: Any, tensors: list[torch.Tensor], device: torch.device) -> Any:
    if kind == "tensor":
        if item >= len(tensors):
            raise NotMeasurableError(f"the call uses tensor {item} of {len(tensors)}")
        return tensors[item]
    return device if kind == "device" else getattr(torch, item)

"""Prices of sums over the data axis that the runtime makes itself: compressed, or one step late (runtime/reducer.py).

With B the bytes of all columns of a stage (runtime/stripes.py), n its trained elements on a rank, w bytes a value, g a gradient's, p ranks:

    compressed     all_to_all B, ZeRO-0 also all_gather B; quantising: so many elementwise passes over n, an `add`
                   of two tensors each, and as many launches for each tensor:

                       send + receive                        under ZeRO: all of a rank's own, and what it owns from all ranks
                       send (1 + 1/p) + 2 receive            ZeRO-0: what it owns once more, and all that is gathered

    late, exact    all_reduce n g in buckets; under ZeRO reduce_scatter n g in buckets
    memory         residuals w n, ZeRO-0 also w n / p for what a rank owns; codes and wire forms n + 2 B; under ZeRO gradients stay
                   whole until the sum: g n + g n / p; late sums keep one more result, and under ZeRO exact ones what is being summed

Late sums run beside the next step: a step takes the longer of the two. On CPUs the cores do both, so quantising is added to the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autoplan.load import BUCKET_BYTES, StageLoad
from autoplan.price import Pricer
from costmodel.memory import Widths
from costmodel.opkey import OpKey, RankGroup

# Elementwise passes to send and to receive a value: measured on a CPU (benchmarks/modes/compression.py --passes).
PASSES: Mapping[str, tuple[int, int]] = {"1bit": (22, 7), "1bit-adam": (15, 7), "8bit": (13, 2), "32bit": (8, 1)}
_ARGUMENTS = '[[{"tensor": 0}, {"tensor": 1}], {}]'
_SLAB = 2**20  # elements that are priced; more in proportion


@dataclass(frozen=True, slots=True)
class Mode:
    """How gradients are summed over the data axis. `compression` "": as they are; `delay`: late by so many steps."""

    compression: str = ""
    delay: int = 0

    @property
    def is_own(self) -> bool:
        """Whether the runtime makes the sums itself, under ZeRO too."""
        return bool(self.compression or self.delay)


EXACT = Mode()


@dataclass(frozen=True, slots=True)
class SumMemory:
    """Bytes besides those of exact sums at once: of gradients (whole ones under ZeRO, late ones), residuals and buffers; of a stage or an element."""

    gradients: float = 0
    residuals: float = 0
    communication: int = 0


def parts(mode: Mode, load: StageLoad, width: Widths, zero: int, group: RankGroup, pricer: Pricer) -> tuple[tuple[str, str, float], ...]:
    """(name, stream, seconds) of a stage's sums in a step."""
    if not mode.compression:
        kind = "reduce_scatter" if zero else "all_reduce"
        full, rest = divmod(load.trained_elements * width.gradient, BUCKET_BYTES)
        seconds = full * pricer.collective(kind, BUCKET_BYTES, group) + pricer.collective(kind, rest, group)
        return ((f"{kind} dp", "dp", seconds),)
    found = [("quantise", "compute", quantise_s(passes(mode.compression, zero, group.size), load.trained_elements, load.num_trained, pricer))]
    found.append(("all_to_all dp", "dp", pricer.collective("all_to_all", load.compressed_bytes, group)))
    if not zero:
        found.append(("all_gather dp", "dp", pricer.collective("all_gather", load.compressed_bytes, group)))
    return tuple(found)


def passes(compression: str, zero: int, num_ranks: int) -> float:
    """Elementwise passes to quantise gradients and to put them together."""
    send, receive = PASSES[compression]
    return send + receive if zero else send * (1 + 1 / num_ranks) + 2 * receive


def quantise_s(num_passes: float, num_elements: int, num_tensors: int, pricer: Pricer) -> float:
    """Seconds of so many passes over gradients of so many elements in so many tensors."""
    return num_passes * (_add_s(_SLAB, pricer) * num_elements / _SLAB + _add_s(1, pricer) * num_tensors)


def _add_s(num_elements: int, pricer: Pricer) -> float:
    vector = ((num_elements,), "float32")
    return pricer.op(OpKey("aten.add.Tensor", (vector, vector), (vector,), _ARGUMENTS, (False, False), 0)).forward_s


def memory(mode: Mode, load: StageLoad, width: Widths, zero: int, num_ranks: int) -> SumMemory:
    """The module's formulas."""
    n = load.trained_elements
    if not mode.is_own or num_ranks == 1:
        return SumMemory()
    each = _element(mode, width, zero, num_ranks)
    buffers = n + 2 * load.compressed_bytes if mode.compression else min(BUCKET_BYTES, width.gradient * n)
    return SumMemory(math.ceil(each.gradients * n), math.ceil(each.residuals * n), buffers)


def element_bytes(mode: Mode, width: Widths, zero: int, num_ranks: int) -> float:
    """Bytes of `memory` for each trained element, wire forms left out."""
    each = _element(mode, width, zero, num_ranks)
    return each.gradients + each.residuals + (1 if mode.compression and num_ranks > 1 else 0)


def _element(mode: Mode, width: Widths, zero: int, num_ranks: int) -> SumMemory:
    if not mode.is_own or num_ranks == 1:
        return SumMemory()
    whole, share = width.gradient, width.gradient / num_ranks
    gradients = (0.0, share, whole, whole)[zero]
    if mode.delay:
        gradients += (share if zero else whole) + (whole if zero and not mode.compression else 0)
    value = max(4, width.gradient) if mode.compression else 0
    return SumMemory(gradients, value * (1.0 if zero else 1.0 + 1.0 / num_ranks))

"""What is priced: one operator call on local shapes, one collective on one group of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OpKey:
    """One operator call. Equal keys cost the same.

    `target` is the ATen overload ("aten.linear.default"); `operands` are (shape, dtype name) of its tensor
    arguments in order, `outputs` likewise; `args` is the text of all its arguments (for measuring it again), as
    costmodel.argtext writes it;
    `grads` says which operands need a gradient; `flops` are those of the forward pass on these local shapes.
    """

    target: str
    operands: tuple[tuple[Shape, str], ...]
    outputs: tuple[tuple[Shape, str], ...]
    args: str
    grads: tuple[bool, ...]
    flops: int


@dataclass(frozen=True, slots=True)
class OpTime:
    """Seconds of one call. `backward_s` is `backward_input_s + backward_weight_s`."""

    forward_s: float
    backward_input_s: float
    backward_weight_s: float

    @property
    def backward_s(self) -> float:
        return self.backward_input_s + self.backward_weight_s


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks that talk: `size` ranks, `stride` apart, in a job whose ranks fill nodes in order.

    `concurrent` groups of the same shape run the same collective at the same time (they share NICs).
    """

    size: int
    stride: int = 1
    start: int = 0
    concurrent: int = 1


CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "push", "pull", "visit"]


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective. `num_bytes`: of the full tensor (all_gather: its output; reduce_scatter: its input;
    all_to_all: the local tensor; send: the message; push and pull: what each worker gives to, or takes from, all parameter
    servers together; visit: the same, one worker by itself, the one that takes longest).

    `servers` are the places in the group that serve equal parts, `workers` those that compute; (): every place."""

    kind: CollectiveKind
    num_bytes: int
    group: RankGroup
    servers: tuple[int, ...] = ()
    workers: tuple[int, ...] = ()

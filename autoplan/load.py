"""What a stage does in a step, as numbers: the input of the replay (autoplan/replay.py).

The search adds it up from priced choices (autoplan/stagework.py), a forecast reads it off the lowered program (autoplan/workload.py).
Seconds, bytes and FLOPs are of one rank; passes are of one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

BUCKET_BYTES = 25 * 2**20  # of deferred gradient sums, as the executor cuts them


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of one micro-batch: operators, and the collectives between them (on the same stream)."""

    compute_s: float = 0.0
    collective_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.compute_s + self.collective_s

    def plus(self, other: Pass) -> Pass:
        return Pass(self.compute_s + other.compute_s, self.collective_s + other.collective_s)


@dataclass(frozen=True, slots=True)
class Send:
    """A value that goes to another stage after every forward; `grad`: its gradient comes back. `num_bytes` of what a rank sends;
    `gathered_bytes` of the whole value, where it travels in pieces; `forward_s` and `backward_s` where the stages have other meshes: seconds of
    both ways."""

    dst: int
    num_bytes: int
    grad: bool
    gathered_bytes: int = 0
    forward_s: float | None = None
    backward_s: float | None = None

    @property
    def received_bytes(self) -> int:
        return max(self.num_bytes, self.gathered_bytes)


@dataclass(frozen=True, slots=True)
class Traffic:
    """A collective inside a pass, of one micro-batch ("forward", "backward") or of a step ("reduce")."""

    kind: str
    axis: str
    phase: str
    num_bytes: int


@dataclass(frozen=True)
class StageLoad:
    """One stage. `units` are the elements of each group of parameters that ZeRO gathers at once (a block each).

    `saved_bytes` stay from a micro-batch's forward to its backward; `transient_bytes` live during one backward (what a
    recomputed block saves). `deferred` are the sums of gradients over axes other than "dp", once a step. Where the schedule splits
    the backward pass, `weights_s` of it come later and `put_off_bytes` stay until then (runtime/split.py).
    """

    index: int
    first_block: str
    last_block: str
    forward: Pass
    backward: Pass  # without recomputation
    recompute: Pass
    sends: tuple[Send, ...]
    parameter_elements: int
    trained_elements: int
    parameter_width: int  # bytes of an element at rest, as captured
    units: tuple[int, ...]
    buffer_bytes: int
    saved_bytes: int
    transient_bytes: int
    flops: int  # of both passes, recomputation included
    traffic: tuple[Traffic, ...]
    deferred: tuple[tuple[str, int], ...]
    tied_bytes: int = 0
    preamble_s: float = 0.0
    compressed_bytes: int = 0  # of all columns of gradients, where they are compressed
    num_trained: int = 0  # tensors
    weights_s: float = 0.0
    put_off_bytes: int = 0

    @property
    def slot_s(self) -> float:
        """Seconds of one micro-batch, both passes."""
        return self.forward.seconds + self.backward.seconds + self.recompute.seconds


@dataclass(frozen=True)
class Model:
    """What a forecast needs to know of the model: FLOPs of the forward pass and tokens of the global batch."""

    flops: int
    tokens: int
    dtype: str
    split_share: float

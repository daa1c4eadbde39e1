"""The forecast of a plan: what a step is predicted to take, hold and send. Frozen data, filled by simulate."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Event:
    """One interval on a track. A track is (rank, stream); `kind` is forward, backward, recompute, collective,
    transfer, reduce, optimizer or idle. The measured timeline has the same form."""

    rank: int
    stream: str  # "compute", "tp", "dp", "pp"
    name: str  # "F 0.3" = forward of stage 0, micro-batch 3
    kind: str
    start_s: float
    end_s: float
    stage: int = -1
    micro_batch: int = -1


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank at its fullest moment, by kind."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    buffers: int = 0
    communication: int = 0
    residuals: int = 0  # of compressed gradients
    reserve: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))


MEMORY_KINDS = tuple(f.name for f in fields(Memory) if f.name != "reserve")  # that a plan can change


@dataclass(frozen=True, slots=True)
class CollectiveUse:
    """Traffic of one rank in one step. `num_bytes` is the sum of the tensors' own bytes (not wire bytes)."""

    kind: str  # "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"
    axis: str  # "dp", "tp", "pp", "tied"
    phase: str  # "forward", "backward", "reduce"
    num_bytes: int
    count: int


@dataclass(frozen=True, slots=True)
class StageForecast:
    """One stage on its fullest, slowest rank."""

    stage: int
    first_block: str
    last_block: str
    forward_s: float  # of one micro-batch
    backward_s: float  # of one micro-batch
    busy_s: float
    idle_s: float
    flops: int  # executed by one rank in one step, forward and backward
    memory: Memory
    memory_limit_bytes: int = 0  # usable memory of its device; 0: not known


@dataclass(frozen=True, slots=True)
class Forecast:
    """What one step is predicted to be. Times in seconds, memory in bytes per rank, FLOPs per step."""

    step_time_s: float
    peak_memory_bytes: int
    tokens_per_s: float
    mfu: float  # model FLOPs (forward and backward, no recomputation) over peak
    bubble: float  # idle share of the compute streams
    split_share: float  # share of the model's FLOPs in ops that the tensor axis divides (1.0 when there is none)
    stages: tuple[StageForecast, ...]
    collectives: tuple[CollectiveUse, ...]
    events: tuple[Event, ...]
    source: str  # "analytic" or "measured"
    assumptions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Measured:
    """A real step, beside its forecast. Events count from the beginning of the step, as the forecast's do."""

    step_time_s: float
    tokens_per_s: float
    mfu: float
    events: tuple[Event, ...]
    peak_memory_bytes: int = 0  # of the fullest rank; 0: not measured

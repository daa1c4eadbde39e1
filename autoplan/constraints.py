"""Constraints: what the user fixes. A field that is set is obeyed, a field left None is searched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod

from autoplan.errors import InfeasibleError, UsageError
from autoplan.schemes import SCHEMES

CHOICES: Mapping[str, tuple] = {
    "tensor": SCHEMES,
    "schedule": ("gpipe", "1f1b", "interleaved", "zb", "zbv"),
    "recompute": ("none", "selective", "full"),
    "sync": ("allreduce", "ps", "async"),
    "compression": ("8bit", "1bit", "1bit-adam"),
    "zero": (0, 1, 2, 3),
    "delay": (0, 1),
}
_COUNTS = ("dp", "tp", "pp", "cp", "ep", "zero_group", "micro_batch_size", "num_chunks", "max_memory_bytes")

_CHUNKS: Mapping[str, tuple[int, float]] = {"interleaved": (2, float("inf")), "zbv": (2, 2)}  # stages on a rank, 1 elsewhere


@dataclass(frozen=True, slots=True)
class Constraints:
    """Fixed parts of a plan. None: searched. See docs/getting-started.md for the values of each field.

    Raises UsageError for a value outside a field's range.
    """

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    tensor: str | None = None
    sequence_parallel: bool | None = None
    zero: int | None = None
    zero_group: int | None = None
    micro_batch_size: int | None = None
    schedule: str | None = None
    num_chunks: int | None = None
    stage_layers: tuple[int, ...] | None = None
    recompute: str | None = None
    placement: Mapping[str, int] | None = None
    sync: str | None = None
    staleness: int | None = None  # steps that a worker may be ahead of the slowest
    servers: tuple[int, ...] | None = None  # data ranks that serve parameters; None: all
    workers: tuple[int, ...] | None = None  # data ranks that compute; None: all
    delay: int | None = None
    compression: str | None = None
    max_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise UsageError(f"constraint {name}={value!r}: a whole number of at least 1 is needed")
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise UsageError(f"constraint {name}={value!r}: it must be one of {', '.join(map(str, allowed))}")
        if self.sequence_parallel is not None and not isinstance(self.sequence_parallel, bool):
            raise UsageError(f"constraint sequence_parallel={self.sequence_parallel!r}: it must be True or False")
        if self.stage_layers is not None:
            layers = tuple(self.stage_layers)
            if not layers or any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in layers):
                raise UsageError(f"constraint stage_layers={self.stage_layers!r}: one number of layers a stage is needed, like (8, 8, 8, 8)")
            object.__setattr__(self, "stage_layers", layers)
            chunks = self.chunks
            if self.pp is not None and self.pp * chunks != len(layers):
                raise UsageError(
                    f"constraints stage_layers={layers} and pp={self.pp} disagree: give {self.pp * chunks} numbers of layers, one for each stage, "
                    f"or pp={max(1, len(layers) // chunks)}"
                )
        if self.placement is not None:
            self._check_placement(self.placement)
        self._check_servers()

    def _check_placement(self, placement: Mapping[str, int]) -> None:
        places = placement.values() if isinstance(placement, Mapping) else ()
        if not places or any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in places):
            raise UsageError(f"constraint placement={placement!r}: module paths with the number of their stage are needed, like {{'encoder': 0, 'decoder': 1}}")
        if self.pp is not None and max(places) >= self.pp:
            raise UsageError(f"constraints placement and pp={self.pp} disagree: it names stage {max(places)}, so use pp={max(places) + 1} or more")
        if self.stage_layers is not None:
            raise UsageError("constraints placement and stage_layers both say what a stage holds: give one of them")

    def _check_servers(self) -> None:
        if self.staleness is not None and (not isinstance(self.staleness, int) or isinstance(self.staleness, bool) or self.staleness < 0):
            raise UsageError(f"constraint staleness={self.staleness!r}: a number of steps, 0 or more, is needed")
        for name, what in (("servers", "serve"), ("workers", "compute")):
            if (given := getattr(self, name)) is not None:
                ranks = tuple(given)
                if not ranks or any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in ranks) or len({*ranks}) < len(ranks):
                    raise UsageError(f"constraint {name}={given!r}: data ranks that {what} are needed, each once, like (0, 2)")
                object.__setattr__(self, name, tuple(sorted(ranks)))
        if self.workers is not None:
            self._check_workers(self.workers)

    def _check_workers(self, workers: tuple[int, ...]) -> None:
        """Every data rank works or serves, so that there are as many as are named: `dp` follows."""
        if self.servers is None:
            raise UsageError(f"constraint workers={workers} without servers: say which data ranks serve, for instance servers=({max(workers) + 1},)")
        named = {*workers, *self.servers}
        if idle := sorted({*range(max(named))} - named):
            raise UsageError(f"constraints workers={workers} and servers={self.servers}: data rank {idle[0]} would do nothing: name it in one of them")
        if self.dp not in (None, len(named)):
            raise UsageError(f"constraints workers={workers} and servers={self.servers} name {len(named)} data ranks, dp={self.dp}: leave dp out")
        object.__setattr__(self, "dp", len(named))

    @property
    def num_serving(self) -> int:
        """Data ranks that serve and compute nothing."""
        return len({*(self.servers or ())} - {*self.workers}) if self.workers is not None else 0

    @property
    def sums_plainly(self) -> bool:
        """Whether gradients are summed at once, by all_reduce, as they are."""
        return self.sync in (None, "allreduce") and not self.delay and self.compression is None

    @property
    def chunks(self) -> int:
        """Stages on every pipeline rank, as far as the constraints say; 1 where they leave it open."""
        return self.num_chunks or {"interleaved": 2, "zbv": 2}.get(self.schedule or "", 1)

    def described(self) -> str:
        """The fields that are set, as text: "tp=4, zero=3"."""
        return ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) is not None) or "none"


def check_supported(constraints: Constraints) -> None:
    """Raises InfeasibleError, with the reason, for a fixed value that the search cannot give."""
    least, most = _CHUNKS.get(constraints.schedule or "interleaved", (1, 1))
    if constraints.num_chunks is not None and not (constraints.schedule is None or least <= constraints.num_chunks <= most):
        holds = "one stage" if most == 1 else "two stages" if most == 2 else "two or more stages"
        raise InfeasibleError(
            f"constraint num_chunks={constraints.num_chunks} cannot be had with schedule={constraints.schedule!r}, which puts {holds} on a rank: "
            f"say num_chunks={least}, or schedule={'1f1b' if constraints.num_chunks == 1 else 'interleaved'!r}"
        )
    if constraints.schedule in ("interleaved", "zb", "zbv") and not constraints.sums_plainly:
        raise InfeasibleError(
            f"constraint schedule={constraints.schedule!r} cannot be had with sync, delay or compression, which were not tried with stages in turns "
            "or a split backward pass: say schedule='1f1b' or 'gpipe'"
        )


def check_modes(constraints: Constraints, optimizer: str) -> None:
    """Raises InfeasibleError where compressed or late gradients cannot be had together with what else is asked."""
    compression, zero, group = constraints.compression, constraints.zero, constraints.zero_group
    mode = f"compression={compression!r}" if compression is not None else f"delay={constraints.delay}"
    if (compression is not None or constraints.delay) and group is not None:
        raise InfeasibleError(f"zero_group={group} with {mode}: compressed and late sums go over the whole data axis. Leave zero_group out")
    if (compression is not None or constraints.delay) and constraints.sync in ("ps", "async"):
        raise InfeasibleError(
            f"sync={constraints.sync!r} with {mode}: servers sum gradients as they are, at once. Use sync='allreduce', or leave the other out"
        )
    if compression != "1bit-adam":
        return
    if zero:
        raise InfeasibleError(
            f"compression='1bit-adam' with zero={zero}: every rank needs the whole momenta, which ZeRO-{zero} divides. Use zero=0, or compression='1bit'"
        )
    if constraints.delay:
        raise InfeasibleError(
            "compression='1bit-adam' with delay=1: the momentum that is sent would lack the update that is on its way. Use delay=0, or compression='1bit'"
        )
    if optimizer not in ("adam", "adamw"):
        raise InfeasibleError(f"compression='1bit-adam' with optimizer={optimizer!r}: it compresses Adam's momentum. Use optimizer='adam' or 'adamw'")


def check_degrees(constraints: Constraints, world_size: int, batch: int | None) -> None:
    """Raises InfeasibleError where fixed degrees cannot multiply to `world_size` or do not divide the global batch."""
    fixed = _fixed_degrees(constraints)
    product = prod(fixed.values())
    if world_size % product or "cp" in fixed:
        check_filled(constraints, world_size, (1,))
    if world_size % product:
        raise InfeasibleError(f"constraints {_times(fixed)} multiply to {product}, which does not divide the cluster's {world_size} devices")
    replicas = (constraints.dp or 1) - constraints.num_serving
    if batch is not None and batch % replicas:
        if constraints.workers is not None:
            raise InfeasibleError(f"{replicas} workers do not divide the global batch of {batch} rows: nearest that do are {nearest_divisor(batch, replicas)}")
        raise InfeasibleError(f"dp={replicas} does not divide the global batch of {batch} rows: nearest that does is dp={nearest_divisor(batch, replicas)}")
    group = constraints.zero_group
    if group is not None and (world_size % group or (constraints.dp is not None and constraints.dp % group)):
        raise InfeasibleError(f"zero_group={group} does not divide dp={constraints.dp or world_size}: states are shared by equal groups of replicas")
    if group is not None and constraints.zero == 0:
        raise InfeasibleError(f"zero_group={group} with zero=0: nothing is shared under ZeRO-0. Use zero=1, 2 or 3, or leave zero_group out")
    size = constraints.micro_batch_size
    if batch is not None and size is not None:
        share = batch // replicas
        if share % size:
            raise InfeasibleError(
                f"micro_batch_size={size} does not divide the {share} rows of a replica (global batch {batch}, {replicas} of them): "
                f"nearest that does is {nearest_divisor(share, size)}"
            )


def check_filled(constraints: Constraints, world_size: int, cps: Sequence[int]) -> None:
    """Raises InfeasibleError where "pp", "dp" and "tp" are fixed and none of `cps`, which "cp" may be beside them, fills the cluster."""
    fixed = _fixed_degrees(constraints)
    product = prod(fixed.values())
    left = (1,) if "cp" in fixed else cps
    if {"pp", "dp", "tp"} <= fixed.keys() and all(product * cp != world_size for cp in left):
        raise InfeasibleError(
            f"constraints {_times(fixed)} multiply to {product}, but the cluster has {world_size} devices: leave one degree out, "
            f"or make the product {world_size}"
        )


def _fixed_degrees(constraints: Constraints) -> Mapping[str, int]:
    fixed = {name: getattr(constraints, name) for name in ("pp", "dp", "cp", "ep", "tp") if getattr(constraints, name) is not None}
    if constraints.stage_layers is not None:
        fixed["pp"] = max(1, len(constraints.stage_layers) // constraints.chunks)
    return fixed


def _times(degrees: Mapping[str, int]) -> str:
    return " x ".join(f"{name}={degree}" for name, degree in degrees.items())


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` nearest to `wanted`, the smaller of two."""
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: (abs(d - wanted), d))

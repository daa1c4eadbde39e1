"""Plans that well-known systems would use, as plans of the same type, priced by the same model.

    ddp        replicas only, no sharded state                       Li et al. 2020
    fsdp       replicas with ZeRO-3                                  Zhao et al. 2023
    megatron   tensor parallel inside a node (at most 8), the fewest stages that fit, then replicas; 1F1B, ZeRO-1, even stages
                                                                     Narayanan et al. 2021, section 3
    gpipe      as many stages as there are, even layer counts, GPipe, recomputation     Huang et al. 2019
    two-level  stages and meshes inside them, operators by integer programs, one row a micro-batch, 1F1B, recomputation, states
               sharded                                               Zheng et al. 2022 (Alpa)
    degrees    every pp x dp x tp, micro-batch and recomputation, even stages, 1F1B, ZeRO-0 or -1      Isaev et al. 2023 (Calculon)
    ps         replicas with parameter servers on all of them        Li et al. 2014; MXNet's dist_sync
    async      the same without waiting for each other               Dean et al. 2012; MXNet's dist_async

Each is the best plan of its own smaller space, so that what is compared is the strategy and not its tuning. Operators are
placed by our integer programs throughout, which favours the baselines where their own rules place them worse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from autoplan.constraints import Constraints
from autoplan.errors import InfeasibleError, UsageError
from autoplan.graph import Graph
from autoplan.plan import Plan
from autoplan.search import search
from autoplan.space import divisors
from costmodel.cluster import Cluster
from costmodel.prices import Prices


@dataclass(frozen=True)
class Setting:
    """What a baseline is asked for."""

    graph: Graph
    cluster: Cluster
    prices: Prices
    optimizer: str
    precision: str | None

    @property
    def num_layers(self) -> int:
        return sum(block.layer for block in self.graph.blocks)

    @property
    def num_stages(self) -> tuple[int, ...]:
        """Stage counts that the cluster and the layers allow, ascending."""
        return tuple(pp for pp in divisors(self.cluster.num_devices) if pp <= max(1, self.num_layers))


def even_layers(num_layers: int, num_stages: int) -> tuple[int, ...] | None:
    """Layers of each stage, as even as can be, larger shares first; None for one stage."""
    if num_stages == 1:
        return None
    return tuple(num_layers // num_stages + (j < num_layers % num_stages) for j in range(num_stages))


def _ddp(setting: Setting) -> Iterator[Constraints]:
    yield Constraints(pp=1, tp=1, zero=0)


def _fsdp(setting: Setting) -> Iterator[Constraints]:
    yield Constraints(pp=1, tp=1, zero=3)


def _megatron(setting: Setting) -> Iterator[Constraints]:
    """In the heuristic's own order of preference; the first that fits is taken."""
    inside = min(8, setting.cluster.groups[0].devices_per_node)
    for tp in reversed([d for d in divisors(inside) if setting.cluster.num_devices % d == 0]):
        for pp in setting.num_stages:
            if setting.cluster.num_devices % (tp * pp) == 0:
                yield Constraints(tp=tp, pp=pp, zero=1, schedule="1f1b", stage_layers=even_layers(setting.num_layers, pp))


def _gpipe(setting: Setting) -> Iterator[Constraints]:
    for pp in reversed(setting.num_stages):
        yield Constraints(pp=pp, tp=1, zero=0, schedule="gpipe", recompute="full", stage_layers=even_layers(setting.num_layers, pp))


def _two_level(setting: Setting) -> Iterator[Constraints]:
    yield Constraints(micro_batch_size=1, schedule="1f1b", recompute="full")


def _ps(setting: Setting) -> Iterator[Constraints]:
    yield Constraints(pp=1, tp=1, sync="ps")


def _async(setting: Setting) -> Iterator[Constraints]:
    yield Constraints(pp=1, tp=1, sync="async")


def _degrees(setting: Setting) -> Iterator[Constraints]:
    for pp in setting.num_stages:
        for zero in (0, 1):
            yield Constraints(pp=pp, zero=zero, schedule="1f1b", stage_layers=even_layers(setting.num_layers, pp))


# Name -> (constraint sets, whether the first that fits is taken instead of the fastest).
BASELINES: Mapping[str, tuple[Callable[[Setting], Iterable[Constraints]], bool]] = {
    "ddp": (_ddp, True),
    "fsdp": (_fsdp, True),
    "megatron": (_megatron, True),
    "gpipe": (_gpipe, True),
    "two-level": (_two_level, True),
    "degrees": (_degrees, False),
    "ps": (_ps, True),
    "async": (_async, True),
}


def baseline(name: str, graph: Graph, cluster: Cluster, prices: Prices, optimizer: str = "adamw", precision: str | None = None) -> Plan:
    """The plan that a strategy would use. Raises UsageError for an unknown name, InfeasibleError where none of its plans fits."""
    if name not in BASELINES:
        raise UsageError(f"no baseline is called {name!r}: known are {', '.join(BASELINES)}")
    sets, takes_first = BASELINES[name]
    setting = Setting(graph, cluster, prices, optimizer, precision)
    best: Plan | None = None
    last: InfeasibleError | None = None
    for constraints in sets(setting):
        try:
            plan = search(graph, cluster, prices, constraints, optimizer=optimizer, precision=precision)
        except InfeasibleError as error:
            last = error
            continue
        if best is None or plan.forecast.step_time_s < best.forecast.step_time_s:
            best = plan
        if takes_first:
            break
    if best is None:
        raise InfeasibleError(f"{name} has no plan that fits: {last}") from last
    return best

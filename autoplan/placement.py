"""Placement by hand: modules pinned to pipeline ranks, everything else placed where it costs least.

Units are what is placed together: all operators pinned to a rank, and of the free operators every run of one module. With
x[u, r] = 1 where unit u is on rank r of R, w_u its seconds for a micro-batch, c_v the seconds to send value v (forward, and its
gradient back), m micro-batches:

    minimise   max(1, m - 1) * T + m * sum over v, r of c_v y[v, r]
    where      sum over r of x[u, r] = 1,   T >= sum over u of w_u x[u, r],   sum over u of x[u, r] >= 1
               y[v, r] >= x[u, r] - x[maker of v, r]     for every reader u of v: once a destination, however many readers it has
                                                         (of a parameter that several units use, the first is its maker)
               position(r of maker) <= position(r of reader)

The last line holds for one order of the ranks in which pinned operators read each other; the stages are then the ranks in that order.
Where pinned operators read each other in a circle of ranks there is none: the line is left out, and the ranks take turns, each running what it can,
so that a rank has several stages. Several orders and numbers of micro-batches give candidates; the search forecasts each one.

Source: the group2ctx attribute of MXNet (Chen et al. 2015), whose copy between devices is the y above.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx

from autoplan.arrange import runs_of
from autoplan.batchaxis import batch_axis
from autoplan.errors import InfeasibleError
from autoplan.graph import Graph, Option, Runs
from autoplan.layout import WHOLE
from autoplan.price import LocalGraph, Pricer
from autoplan.solver import Program, minimise
from costmodel.opkey import RankGroup

_MAX_UNITS = 240  # of free operators; beyond, a block's free operators are one
_MAX_ORDERS = 6
_MAX_STAGES_A_RANK = 8


@dataclass(frozen=True, slots=True)
class Placed:
    """Where every operator goes: `runs` (autoplan/arrange.py), the rank of every stage, and the cost that the program above saw."""

    runs: Runs
    stage_ranks: tuple[int, ...]
    cost_s: float

    @property
    def is_chain(self) -> bool:
        """Whether every rank has one stage."""
        return len(set(self.stage_ranks)) == len(self.stage_ranks)


def pins_of(graph: Graph, placement: Mapping[str, int]) -> tuple[int | None, ...]:
    """The rank of every operator that is pinned: the longest of the names that its module lies under.

    Raises InfeasibleError for a name under which no operator lies, with the nearest ones.
    """
    known = modules_of(graph)
    for name in placement:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.3) or list(known)[:3]
            raise InfeasibleError(f"placement names {name!r}, but no operator of {graph.name} lies in a module of that name; nearest: {', '.join(near)}")

    def pin(module: str) -> int | None:
        under = [name for name in placement if name == "" or module == name or module.startswith(name + ".")]
        return placement[max(under, key=len)] if under else None

    return tuple(pin(op.module) for op in graph.ops)


def modules_of(graph: Graph) -> tuple[str, ...]:
    """Every module path that operators lie under, in the order in which they run; "" is the whole model."""
    found: dict[str, None] = {"": None}
    for op in graph.ops:
        parts = op.module.split(".") if op.module else []
        found.update((".".join(parts[: i + 1]), None) for i in range(len(parts)))
    return tuple(found)


def candidates(graph: Graph, pins: Sequence[int | None], num_ranks: int, rows: Sequence[int], stride: int, pricer: Pricer) -> tuple[Placed, ...]:
    """Placements worth a forecast, cheapest first. `rows` are the rows of a micro-batch to place for, `stride` the ranks of a stage.

    Raises InfeasibleError where a rank would have nothing to do.
    """
    reach = _reached(graph, pins, num_ranks)
    problem = _Problem.of(graph, pins, num_ranks)
    found: dict[tuple[Runs, tuple[int, ...]], Placed] = {}
    for order, count in itertools.product(_orders(reach), rows):
        assigned = _assign(problem, _Costs.of(problem, count, stride, pricer), order)
        if assigned is None:
            continue
        ranks, cost_s = assigned
        stages, stage_ranks = _in_order(ranks, order) if order else _in_turns(graph, ranks)
        placed = Placed(runs_of(stages), stage_ranks, cost_s)
        found.setdefault((placed.runs, stage_ranks), placed)
    if not found:
        unused = sorted(set(range(num_ranks)) - {pin for pin in pins if pin is not None})
        raise InfeasibleError(
            f"the placement leaves ranks {', '.join(map(str, unused)) or 'some'} of pp={num_ranks} without an operator: pin fewer modules, or use a smaller pp"
        )
    return tuple(sorted(found.values(), key=lambda p: (p.cost_s, p.stage_ranks, p.runs)))


def _reached(graph: Graph, pins: Sequence[int | None], num_ranks: int) -> nx.DiGraph:
    """Rank a -> rank b where something pinned to a leads to something pinned to b."""
    reach = nx.DiGraph()
    reach.add_nodes_from(range(num_ranks))
    above: list[frozenset[int]] = []
    for op, pin in zip(graph.ops, pins, strict=True):
        sources = frozenset().union(*(above[graph.producer[name]] for name in op.operands if name in graph.producer))
        if pin is not None:
            reach.add_edges_from((source, pin) for source in sources if source != pin)
            sources |= {pin}
        above.append(sources)
    return reach


def _orders(reach: nx.DiGraph) -> tuple[tuple[int, ...] | None, ...]:
    """Orders of the ranks that agree with what leads where, at most a few; (None,) where there is a circle."""
    if not nx.is_directed_acyclic_graph(reach):
        return (None,)
    natural = tuple(nx.lexicographical_topological_sort(reach))
    # ranks that nothing is pinned to are all alike, so orders that only exchange them are left out
    idle = [rank for rank in natural if reach.degree(rank) == 0]
    orders = [natural]
    if len(idle) < len(natural) or len(natural) <= 3:
        orders += itertools.islice((tuple(o) for o in nx.all_topological_sorts(reach)), 8 * _MAX_ORDERS)
    return tuple(list(dict.fromkeys(orders))[:_MAX_ORDERS])


@dataclass(frozen=True)
class _Problem:
    """Units and what flows between them. Units 0 .. R-1 are the pinned ones."""

    graph: Graph
    num_ranks: int
    unit_of: tuple[int, ...]  # of every operator
    num_units: int
    flows: tuple[tuple[int, int], ...]  # (maker, reader), each once
    is_used: tuple[bool, ...]  # whether a pinned unit has operators

    @staticmethod
    def of(graph: Graph, pins: Sequence[int | None], num_ranks: int) -> _Problem:
        block_of = {i: number for number, block in enumerate(graph.blocks) for i in range(block.start, block.stop)}
        for key_of in (lambda i: graph.ops[i].module or block_of[i], lambda i: block_of[i]):
            unit_of, num_units, last = [], num_ranks, None
            for i, pin in enumerate(pins):
                key = None if pin is not None else (key_of(i),)
                if key is not None and key != last:
                    num_units += 1
                unit_of.append(pin if pin is not None else num_units - 1)
                last = key
            if num_units - num_ranks <= _MAX_UNITS:
                break
        flows = {
            (unit_of[graph.producer[name]], unit_of[i]): None
            for i, op in enumerate(graph.ops)
            for name in op.operands
            if name in graph.producer and unit_of[graph.producer[name]] != unit_of[i]
        }
        used = tuple(rank in pins for rank in range(num_ranks))
        return _Problem(graph, num_ranks, tuple(unit_of), num_units, tuple(flows), used)


@dataclass(frozen=True)
class _Costs:
    """Seconds of one micro-batch. `sends`: (maker, readers, seconds) of each value or shared parameter (maker -1)."""

    num_micro_batches: int
    unit_s: tuple[float, ...]
    sends: tuple[tuple[int, tuple[int, ...], float], ...]

    @staticmethod
    def of(problem: _Problem, rows: int, stride: int, pricer: Pricer) -> _Costs:
        graph, batch = problem.graph, batch_axis(problem.graph)
        local = LocalGraph(graph, batch.options, batch.layouts, rows, 1, pricer)
        pair = RankGroup(2, stride, 0, stride)
        unit_s = [0.0] * problem.num_units
        step = frozenset(batch.body)
        for i in batch.body:
            op = graph.ops[i]
            time = local.op_time(i, Option("whole", (WHOLE,) * len(op.operands), (WHOLE,) * len(op.outputs)))
            trained = any(graph.values[name].requires_grad for name in op.outputs)
            unit_s[problem.unit_of[i]] += time.forward_s + (time.backward_s if trained else 0.0)
        m = max(1, (graph.batch_size or 1) // max(1, rows))
        sends = []
        for name, readers in graph.consumers.items():
            units = tuple(dict.fromkeys(problem.unit_of[i] for i in readers if i in step))
            value = graph.values[name]
            if name in graph.producer and graph.producer[name] in step and name not in batch.preamble_outputs:
                maker = problem.unit_of[graph.producer[name]]
                if any(unit != maker for unit in units):
                    once_s = pricer.collective("send", local.num_bytes(name), pair)
                    sends.append((maker, tuple(unit for unit in units if unit != maker), once_s * (2 if value.requires_grad else 1)))
            elif value.kind == "parameter" and value.requires_grad and len(units) > 1:
                sends.append((-1, units, 2 * pricer.collective("send", local.whole_bytes(name), pair) / m))
        return _Costs(m, tuple(unit_s), tuple(sends))


def _assign(problem: _Problem, costs: _Costs, order: tuple[int, ...] | None) -> tuple[tuple[int, ...], float] | None:
    """(the rank of every operator, seconds of the objective); None where the order cannot be had."""
    ranks = range(problem.num_ranks)
    place = {rank: i for i, rank in enumerate(order)} if order else {}

    def build(program: Program) -> None:
        x = [[program.binary() for _ in ranks] for _ in range(problem.num_units)]
        slowest = program.number(max(1, costs.num_micro_batches - 1))
        for unit, own in enumerate(x):
            program.equal([(v, 1.0) for v in own], 1.0)
            if unit < problem.num_ranks:
                program.equal([(own[unit], 1.0)], 1.0)
        for rank in ranks:
            program.at_most([*((own[rank], costs.unit_s[unit]) for unit, own in enumerate(x)), (slowest, -1.0)], 0.0)
            members = [(own[rank], -1.0) for unit, own in enumerate(x) if unit >= problem.num_ranks]
            if not problem.is_used[rank]:
                program.at_most(members, -1.0)
        for maker, readers, seconds in costs.sends:
            for rank in ranks:
                sent = program.number(costs.num_micro_batches * seconds)
                for reader in readers:
                    if maker >= 0:
                        program.at_most([(x[reader][rank], 1.0), (x[maker][rank], -1.0), (sent, -1.0)], 0.0)
                    elif reader != readers[0]:  # a shared parameter is kept where its first reader is
                        program.at_most([(x[reader][rank], 1.0), (x[readers[0]][rank], -1.0), (sent, -1.0)], 0.0)
        for maker, reader in problem.flows if place else ():
            program.at_most([*((x[maker][r], float(place[r])) for r in ranks), *((x[reader][r], -float(place[r])) for r in ranks)], 0.0)

    solved = minimise(build, "placement")
    if solved is None:
        return None
    values, cost_s = solved
    chosen = [max(ranks, key=lambda r: values[unit * problem.num_ranks + r]) for unit in range(problem.num_units)]
    return tuple(chosen[unit] for unit in problem.unit_of), cost_s


def _in_order(ranks: Sequence[int], order: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    place = {rank: i for i, rank in enumerate(order)}
    return tuple(place[rank] for rank in ranks), tuple(order)


def _in_turns(graph: Graph, ranks: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The stage of every operator, and the rank of every stage: a rank runs all that it can, then another one does."""
    best = min((tuple(_turns(graph, ranks, first)) for first in dict.fromkeys(ranks)), key=len)
    if len(best) > _MAX_STAGES_A_RANK * len(set(ranks)):
        raise InfeasibleError(
            f"the placement sends values back and forth between ranks, so that they would take turns in {len(best)} stages "
            f"({', '.join(_circle(graph, ranks))}): pin modules that follow each other to one rank"
        )
    stages = [0] * len(ranks)
    for number, (_, indices) in enumerate(best):
        for i in indices:
            stages[i] = number
    return tuple(stages), tuple(rank for rank, _ in best)


def _turns(graph: Graph, ranks: Sequence[int], first: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    left, done, rank = dict.fromkeys(range(len(ranks))), set(), first

    def ready(i: int) -> bool:
        return all(graph.producer[name] in done for name in graph.ops[i].operands if name in graph.producer)

    while left:
        own: list[int] = []
        for i in left:  # in captured order, so that what becomes ready on the way is seen
            if ranks[i] == rank and ready(i):
                done.add(i)
                own.append(i)
        for i in own:
            del left[i]
        if own:
            yield rank, tuple(own)
        if left:
            rank = next(ranks[i] for i in left if ready(i))


def _circle(graph: Graph, ranks: Sequence[int]) -> list[str]:
    """Modules along which values go from rank to rank and back."""
    hops: dict[tuple[int, int], str] = {}
    for i, op in enumerate(graph.ops):
        for name in op.operands:
            source = graph.producer.get(name)
            if source is not None and ranks[source] != ranks[i]:
                maker, reader = graph.ops[source].module or "the model", op.module or "the model"
                hops.setdefault((ranks[source], ranks[i]), f"{maker} on {ranks[source]} -> {reader} on {ranks[i]}")
    return [hops[a, b] for a, b in nx.find_cycle(nx.DiGraph(list(hops)))]

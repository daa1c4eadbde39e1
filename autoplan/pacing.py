"""How long a program takes on paced devices, instruction by instruction: from what its operators and links cost to runtime/paced.py."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from autoplan.api import load_cluster
from autoplan.graph import Graph
from autoplan.plan import Plan
from autoplan.price import Pricer, axis_group, precision_left
from autoplan.reading import Reader, Tally, fed
from autoplan.simulate import step_of
from autoplan.workload import load_of
from costmodel.cluster import Cluster
from costmodel.memory import widths
from costmodel.opkey import Collective, CollectiveKind, RankGroup
from costmodel.paced import PacedPrices
from costmodel.prices import Prices
from runtime.executor import Executor
from runtime.paced import InstrPace, Pace, Pacer, clock_of
from runtime.program import BlockCode, Program
from runtime.selective import keeps

SLACK_S = 0.05  # of a host that may be late: many ranks share a core


@dataclass(frozen=True)
class PricedLinks:
    """runtime.paceclock.Links from prices, on the mesh `axes`."""

    prices: Prices
    axes: tuple[tuple[str, int], ...]

    def seconds(self, kind: str, axis: str, num_bytes: int, ranks: tuple[int, ...]) -> float:
        """What all ranks agree on at the end of a step takes no time: its eight bytes a number belong to no plan."""
        if axis == "world" or len(ranks) == 1 or not num_bytes:
            return 0.0
        start, stride = min(ranks), abs(ranks[1] - ranks[0])
        size = num_bytes // len(ranks) if kind == "all_to_all" else num_bytes
        twins = axis_group(self.axes, "pp").stride if kind == "send" else stride
        return self.prices.collective(Collective(cast(CollectiveKind, kind), size, RankGroup(len(ranks), stride, start, twins)))


def pace_of(program: Program, plan: Plan, graph: Graph, prices: Prices, rank: int, slack_s: float = SLACK_S) -> Pace:
    """The pace of a program on the device of a global rank. `graph` is in the order of the plan's stages (autoplan/arrange.py)."""
    pricer = Pricer(prices, precision_left(graph, plan.precision), rank)
    step = step_of(program, plan)
    blocks: dict[tuple[int, int, str], tuple[InstrPace, ...]] = {}
    trained, width = 0, widths(plan.precision, plan.optimizer, 4)
    for stage in program.stages:
        load = load_of(program, stage, graph, pricer)
        trained += load.trained_elements
        width = widths(plan.precision, plan.optimizer, load.parameter_width)
        for body in stage.bodies:
            reader = Reader(program, stage, body, graph, pricer)
            blocks.update({(stage.index, body.rows, code.name): _block(reader, code) for code in body.blocks})
    if program.preamble is not None:
        stage = program.stages[0]
        reader = Reader(program, stage, stage.bodies[0], graph, pricer)
        for feed in program.preamble_feeds:
            reader.give(feed.name, fed(feed, program.preamble_rows[0]), False, resting=True)
        blocks[-1, 0, program.preamble.name] = _block(reader, program.preamble)
    update_s = prices.optimizer_s(math.ceil(trained / step.shards), plan.optimizer, float(width.total), rank)
    return Pace(blocks, PricedLinks(prices, plan.axes), update_s, slack_s)


def _block(reader: Reader, code: BlockCode) -> tuple[InstrPace, ...]:
    found = keeps(code)
    return tuple(_pace(reader.instruction(instr, code, found), code) for instr in code.instrs)


def _pace(tally: Tally, code: BlockCode) -> InstrPace:
    kept_s = tally.kept_s if code.recompute == "selective" else 0.0
    return InstrPace(tally.forward_s, tally.backward_s - tally.weights_s, tally.weights_s, tally.forward_s - kept_s)


def pacer_of(cluster: str | Path | Cluster | None, plan: Plan, graph: Graph, rank: int) -> Pacer | None:
    """How long programs of a plan take on the device of a global rank; None where the cluster's devices are not paced."""
    found = load_cluster(cluster) if cluster is not None else None
    if found is None or found.paced is None:
        return None
    prices = PacedPrices(found.paced)
    return lambda program: pace_of(program, plan, graph, prices, rank)


def rest_after_steps(optimizer: torch.optim.Optimizer, executor: Executor) -> torch.optim.Optimizer:
    """On a paced device the optimizer's step takes its time."""
    if executor.pace is not None:
        optimizer.register_step_post_hook(lambda *_: clock_of(executor.mesh).rest(executor.pace.optimizer_s if executor.pace else 0.0))
    return optimizer

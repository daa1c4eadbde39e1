"""The programs of a model by the shape of its inputs: captured again where a shape is new, lowered once for each."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from autoplan.agreement import from_first_rank
from autoplan.api import Batch
from autoplan.arrange import arranged
from autoplan.evaluation import evaluation_graph
from autoplan.graph import Graph
from autoplan.lower import lower
from autoplan.plan import Plan
from autoplan.retarget import retarget
from autoplan.shapes import shape_key, with_rows
from runtime.mesh import Mesh
from runtime.program import Program

_MAX_SHAPES = 8  # captured input shapes that are kept


class Programs:
    """Graphs, plans and programs by input shape. The first graph and plan, those that were planned for, are never dropped.

    `capture` captures a batch of another shape; `check` raises where the model evaluates otherwise than its graph.
    `is_shared`: all ranks call `find` alike, and take what the first one captures.
    """

    def __init__(
        self, key: str, graph: Graph, plan: Plan, capture: Callable[[Batch], Graph], check: Callable[[Batch, Graph], None], *, is_shared: bool
    ) -> None:
        self._capture, self._check, self._is_shared = capture, check, is_shared
        self._first_key = key
        self._graphs: OrderedDict[str, tuple[Graph, Plan]] = OrderedDict({key: (graph, plan)})
        self._programs: dict[tuple[str, str], Program] = {}

    @property
    def first(self) -> tuple[Graph, Plan]:
        """The graph, in the order of the plan's stages, and the plan of the shape that was planned for."""
        return self._graphs[self._first_key]

    def graph(self, batch: Batch, rows: int) -> Graph:
        """The graph of a shape that has a program."""
        return self._graphs[shape_key(batch, rows)][0]

    def find(self, batch: Batch, rows: int, kind: str, mesh: Mesh) -> Program:
        """The program of this rank for a batch of `rows` rows; captures again for inputs of another shape. `kind`: "train" or "evaluate"."""
        key = shape_key(batch, rows)
        if key not in self._graphs:
            self._capture_again(with_rows(batch, rows), key)
        if (key, kind) not in self._programs:
            graph, plan = self._graphs[key]
            if kind != "train":
                graph = evaluation_graph(graph)
                from_first_rank(lambda: self._check(with_rows(batch, rows), graph))
            programs = lower(plan, graph, rows, data_rank=mesh.axis("dp").index, outputs=kind != "train")
            self._programs[(key, kind)] = programs[mesh.axis("pp").index]
        return self._programs[(key, kind)]

    def _capture_again(self, batch: Batch, key: str) -> None:
        """Capture inputs of another shape and carry the plan's decisions over: same operators, other sizes. Numbers that the model
        computes from its sizes (a mean written as sum / x.shape[0]) are right only for the shape that they were captured with."""
        first_graph, plan = self.first
        graph = from_first_rank(lambda: self._capture(batch)) if self._is_shared else self._capture(batch)
        self._graphs[key] = (arranged(graph, plan), retarget(plan, first_graph, graph))
        if len(self._graphs) > _MAX_SHAPES:
            oldest = list(self._graphs)[1]
            del self._graphs[oldest]
            self._programs = {k: v for k, v in self._programs.items() if k[0] != oldest}

    def restart(self, plan: Plan, program: Program) -> None:
        """Go on with the first graph alone, under another plan; `program` trains it on this rank."""
        self._graphs = OrderedDict({self._first_key: (self.first[0], plan)})
        self._programs = {(self._first_key, "train"): program}

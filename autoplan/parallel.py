"""`parallelize`: a model becomes one that trains over all ranks of this job, with the results of the model in one process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from autoplan.api import Batch, LossFn, find_plan, load_cluster
from autoplan.constraints import Constraints
from autoplan.errors import AutoplanError, UnsupportedOpError, UsageError
from autoplan.evaluation import evaluation_graph
from autoplan.example import example_batch
from autoplan.forecast import Measured
from autoplan.frontend import capture
from autoplan.graph import Graph
from autoplan.lower import lower, row_shares
from autoplan.plan import Plan
from autoplan.retarget import check_plan, retarget
from autoplan.shapes import num_rows, shape_key, with_rows
from autoplan.timeline import joined, measured, rank_events
from autoplan.weights import SafetensorsFolder
from costmodel.cluster import Cluster
from costmodel.detect import detect
from runtime.executor import Executor
from runtime.mesh import Mesh, build_mesh, default_device, init_process_group
from runtime.program import Program

# They update every element from its own gradient and state alone, so a shard of a tensor updates as the whole tensor would.
ELEMENTWISE_OPTIMIZERS = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Rprop", "ASGD")
_MAX_SHAPES = 8  # captured input shapes that are kept


@dataclass(frozen=True)
class Share:
    """A data rank's own rows of a global batch of `total` rows: rows [start, start + its own) of it."""

    batch: Any
    start: int
    total: int


def parallelize(
    model: torch.nn.Module,
    batch: Batch | None = None,
    plan: Plan | str | Path | None = None,
    cluster: str | Path | Cluster | None = None,
    constraints: Constraints | None = None,
    loss_fn: LossFn | None = None,
    optimizer: str = "adamw",
    precision: str | None = None,
    seed: int = 0,
) -> ParallelModel:
    """`model` as this job trains it, under torchrun or alone. Every rank calls it with the same arguments.

    `batch` is an example of the global batch; without one it is taken from what the model offers, or planning waits for the
    first `forward_backward`. `plan` (a Plan or its file) is used instead of searching. Raises the errors of `find_plan`, and
    StalePlanError for a plan of another model or number of ranks.
    """
    if precision not in (None, "fp32"):
        raise UnsupportedOpError(f"precision {precision!r} can be planned but not executed yet: convert the model itself, or leave precision out.")
    device = default_device()
    init_process_group(device, timeout_s=600.0)
    given = Plan.load(plan) if isinstance(plan, (str, Path)) else plan
    settings = _Settings(given, cluster, constraints or Constraints(), loss_fn, optimizer, precision, seed, device)
    parallel = ParallelModel(model, settings)
    rows = given.global_batch if given is not None else max(8, 2 * _world_size())
    example = batch if batch is not None else example_batch(model, rows)
    if example is not None:
        parallel.prepare(example)
    return parallel


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@dataclass(frozen=True)
class _Settings:
    plan: Plan | None
    cluster: str | Path | Cluster | None
    constraints: Constraints
    loss_fn: LossFn | None
    optimizer: str
    precision: str | None
    seed: int
    device: torch.device


class ParallelModel:
    """A model that trains over all ranks of this job. Made by `parallelize`."""

    def __init__(self, model: torch.nn.Module, settings: _Settings) -> None:
        self.training = True
        self._model, self._settings = model, settings
        self._plan: Plan | None = None
        self._executor: Executor | None = None
        self._graphs: OrderedDict[str, tuple[Graph, Plan]] = OrderedDict()
        self._programs: dict[tuple[str, str], Program] = {}

    def prepare(self, batch: Batch) -> None:
        """Capture, plan and place the model's tensors for batches like `batch`. Done once; later calls change nothing."""
        if self._executor is not None:
            return
        graph = capture(self._model, batch, self._settings.loss_fn)
        plan = self._planned(graph)
        check_plan(plan, graph, _world_size())
        mesh = build_mesh(plan.axes, zero_group=plan.zero_group, device=self._settings.device)
        self._graphs[shape_key(batch, plan.global_batch)] = (graph, plan)
        self._plan = plan
        program = self._program(batch, plan.global_batch, "train", mesh)
        dense = _dense_source(self._model, graph)
        self._executor = Executor(program, mesh, dense, seed=self._settings.seed, random_by_element=True)

    def _planned(self, graph: Graph) -> Plan:
        """The given plan, or one that rank 0 searches and every rank takes."""
        settings = self._settings
        if settings.plan is not None:
            return settings.plan
        from autoplan.planfile import dumps, loads

        shared: list[Any] = [None]
        if not dist.is_initialized() or dist.get_rank() == 0:
            try:
                cluster = load_cluster(settings.cluster) if settings.cluster is not None else detect(_world_size())
                shared = [dumps(find_plan(graph, None, cluster, settings.constraints, settings.optimizer, settings.precision))]
            except AutoplanError as error:
                shared = [error]
        if dist.is_initialized():
            dist.broadcast_object_list(shared, src=0)
        if isinstance(shared[0], AutoplanError):
            raise shared[0]
        return loads(shared[0])

    def _program(self, batch: Batch, rows: int, kind: str, mesh: Mesh) -> Program:
        """The program of this rank for a batch of `rows` rows; captures again for inputs of another shape."""
        key = shape_key(batch, rows)
        if key not in self._graphs:
            self._capture_again(with_rows(batch, rows), key)
        if (key, kind) not in self._programs:
            graph, plan = self._graphs[key]
            if kind != "train":
                graph = evaluation_graph(graph)
            programs = lower(plan, graph, rows, data_rank=mesh.axis("dp").index, outputs=kind != "train")
            self._programs[(key, kind)] = programs[mesh.axis("pp").index]
        return self._programs[(key, kind)]

    def _capture_again(self, batch: Batch, key: str) -> None:
        """Capture inputs of another shape and carry the plan's decisions over: same operators, other sizes. Numbers that the model
        computes from its sizes (a mean written as sum / x.shape[0]) are right only for the shape that they were captured with."""
        first_graph, plan = next(iter(self._graphs.values()))
        graph = capture(self._model, batch, self._settings.loss_fn, check=False)
        self._graphs[key] = (graph, retarget(plan, first_graph, graph))
        if len(self._graphs) > _MAX_SHAPES:
            oldest = list(self._graphs)[1]
            del self._graphs[oldest]
            self._programs = {k: v for k, v in self._programs.items() if k[0] != oldest}

    @property
    def plan(self) -> Plan:
        """The plan that is executed."""
        return self._ready("plan")._plan  # type: ignore[return-value]

    @property
    def executor(self) -> Executor:
        """The runtime below: its storage, mesh and recorder."""
        executor = self._ready("executor")._executor
        assert executor is not None
        return executor

    def _ready(self, what: str) -> ParallelModel:
        if self._executor is None:
            raise UsageError(
                f"{what} is not there yet: {type(self._model).__name__} does not say what it takes, so planning waits for the first forward_backward(batch). "
                "Give an example batch to parallelize(model, batch), or call forward_backward first."
            )
        return self

    def train(self, mode: bool = True) -> ParallelModel:
        """Training mode; `forward_backward` needs it."""
        self.training = mode
        return self

    def eval(self) -> ParallelModel:
        """Evaluation mode: `forward_backward` refuses until `train()`."""
        return self.train(False)

    def forward_backward(self, batch: Batch | Share) -> torch.Tensor:
        """Run all micro-batches of a global batch (or of this rank's Share of one) and add to the gradients.

        Returns the loss of the global batch, the same scalar on every rank. Raises UsageError, before anything runs, for a batch
        that cannot be dealt to the ranks.
        """
        if not self.training:
            raise UsageError("forward_backward was called in evaluation mode: call train() first, or evaluate(batch).")
        return self._run(batch, "train")

    def evaluate(self, batch: Batch | Share) -> torch.Tensor:
        """The loss of a global batch in evaluation mode; no gradients, buffers unchanged. The same scalar on every rank."""
        return self._run(batch, "evaluate")

    def predict(self, batch: Batch | Share) -> Any:
        """The model's output besides the loss, in evaluation mode, all rows in order, on the data rank 0 of the stage that makes it;
        None elsewhere. A tuple where there are several."""
        executor = self._bound(batch, "evaluate")
        found = executor.predict(batch.batch if isinstance(batch, Share) else batch)
        outputs = tuple(found[name] for stage in executor.program.stages for name in stage.predictions)
        if not outputs or self.data_rank or executor.mesh.axis("tp").index:
            return None
        return outputs[0] if len(outputs) == 1 else outputs

    def _run(self, batch: Batch | Share, kind: str) -> torch.Tensor:
        executor = self._bound(batch, kind)
        content = batch.batch if isinstance(batch, Share) else batch
        return executor.step(content) if kind == "train" else executor.evaluate(content)

    def _bound(self, batch: Batch | Share, kind: str) -> Executor:
        """The executor with the program for this batch."""
        content = batch.batch if isinstance(batch, Share) else batch
        if self._executor is None:
            self.prepare(content)
        executor = self.executor
        program = self._program(content, self._global_rows(batch), kind, executor.mesh)
        if program is not executor.program:
            graph, _ = self._graphs[shape_key(content, program.global_rows)]
            executor.rebind(program, _dense_source(self._model, graph))
        return executor

    def _global_rows(self, batch: Batch | Share) -> int:
        """Rows of the global batch. Rows that are exactly this rank's share of the planned batch are taken for that share."""
        if isinstance(batch, Share):
            return batch.total
        rows, planned = num_rows(batch), self.plan.global_batch
        return planned if rows == row_shares(planned, self.data_size)[self.data_rank] else rows

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """This rank's parameters, for an optimizer. A rank whose stages hold none gives one of no elements, since torch's optimizers
        refuse an empty list."""
        held = [parameter for _, parameter in self.named_parameters()]
        return iter(held or [torch.nn.Parameter(torch.empty(0))])

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """This rank's parameters under the model's own names."""
        return iter(self._ready("parameters").executor.named_parameters())

    def optimizer(self, cls: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
        """`cls(parameters, **options)`. Raises UnsupportedOpError for an optimizer that needs whole tensors while tensors are split."""
        divided = self.plan.degree("tp") > 1 or (self.plan.zero > 0 and self.plan.degree("dp") > 1)
        if divided and cls.__name__ not in ELEMENTWISE_OPTIMIZERS:
            raise UnsupportedOpError(
                f"{cls.__name__} updates from whole tensors or all parameters at once, and this plan splits them: "
                f"use one of {', '.join(ELEMENTWISE_OPTIMIZERS)}, or constraints tp=1, zero=0."
            )
        return cls(self.parameters(), **options)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients by one factor so that their global norm is at most `max_norm`; returns the norm before."""
        return self.executor.clip_grad_norm_(max_norm, norm_type)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Dense parameters and buffers under the model's own names and shapes, on rank 0; empty elsewhere. Every rank calls it."""
        kept = self._model.state_dict().keys()
        return {name: tensor for name, tensor in self.executor.full_state_dict().items() if name in kept}

    def full_grads(self) -> dict[str, torch.Tensor]:
        """Dense gradients by parameter name, on rank 0; empty elsewhere. Parameters without a gradient are left out."""
        return self.executor.full_grads()

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor] | str | Path) -> None:
        """Write dense tensors, or a safetensors file or folder, into this rank's shards. Raises UsageError for missing or unknown names."""
        source = state if isinstance(state, Mapping) else SafetensorsFolder(state)
        self.executor.load_full_state_dict(source.get)

    def save(self, path: str | Path, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Write a checkpoint that loads under another plan and number of ranks. Atomic: the previous one stays until it is complete."""
        self.executor.save(path, optimizer)

    def load(self, path: str | Path, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Read a checkpoint that `save` wrote, under any plan."""
        self.executor.load(path, optimizer)

    @property
    def timeline(self) -> Measured:
        """The last step as this rank measured it, in the form of `plan.forecast`: events, step time, tokens per second, MFU."""
        mesh = self.executor.mesh
        return measured(self.plan, joined([rank_events(mesh.recorder, mesh.rank)]))

    @property
    def data_rank(self) -> int:
        """This rank's place among the data-parallel replicas."""
        return self.executor.mesh.axis("dp").index

    @property
    def data_size(self) -> int:
        """Number of data-parallel replicas."""
        return self.executor.mesh.axis("dp").size

    def shard(self, batch: Batch) -> Share:
        """This rank's own rows of a global batch."""
        self.prepare(batch)
        total = num_rows(batch)
        shares = row_shares(total, self.data_size)
        start = sum(shares[: self.data_rank])

        def cut(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == total:
                return leaf[start : start + shares[self.data_rank]]
            return leaf

        return Share(pytree.tree_map(cut, batch), start, total)


def _dense_source(model: torch.nn.Module, graph: Graph) -> Any:
    """A function from a tensor's own name to the dense tensor."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))

    def dense(fqn: str) -> torch.Tensor:
        if fqn in graph.constants:
            return graph.constants[fqn]
        found = tensors[fqn]
        if found.is_meta:
            raise UsageError(f"{fqn} is on the meta device and has no values: load weights into the model first, or build it on a real device.")
        return found

    return dense

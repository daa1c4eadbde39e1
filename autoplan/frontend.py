"""Capture: a module and an example batch -> Graph.

`torch.export` (non-strict) records the forward pass at the level of ATen operators; the passes of `autoplan.canonical` bring it into canonical form; what
the export cannot carry is refused with the reason. Where the model holds data, the graph is run against the model itself: loss and every
gradient, on the example and on a second batch of other content.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoplan import dropped
from autoplan.blocks import partition
from autoplan.canonical.affine import tensors_for_numbers
from autoplan.canonical.attention import fold_attention
from autoplan.canonical.broadcast import delay_expansion
from autoplan.canonical.experts import name_experts, whole_experts
from autoplan.canonical.fold import draws, evaluate, materialise, simplify
from autoplan.canonical.functional import functionalize
from autoplan.canonical.imported import import_program, source_of
from autoplan.canonical.linear import unfuse
from autoplan.canonical.lookup import gather_rows
from autoplan.canonical.loss import sum_over_count
from autoplan.canonical.tidy import tidy
from autoplan.canonical.trace import Trace
from autoplan.capture_check import check_against_model
from autoplan.dropped import Drawn, Refused, nothing_dropped
from autoplan.errors import CaptureError
from autoplan.evaluation_check import check_operators, check_outputs
from autoplan.factors import annotate, unknown_ops
from autoplan.fingerprint import fingerprint
from autoplan.flops import flops
from autoplan.graph import Graph, Op, Value
from autoplan.precision import cast_batch, check_precision, computing_in
from autoplan.refusals import refuse, watched_hooks
from autoplan.repeats import repeated
from autoplan.saved import saved
from autoplan.shardsim import with_proved_rules
from runtime.call import dtype_of
from runtime.instr import TensorSpec, uses

Batch = Mapping[str, Any] | tuple[Any, ...]
LossFn = Callable[[Any, Any], torch.Tensor]
_NOT_THE_USERS = (__file__, dropped.__file__, contextlib.__file__)
_PREFIX = "module."  # of everything that the wrapper holds


@contextmanager
def _outside_of_meta() -> Iterator[None]:
    """A capture computes tensors of its own; a caller's `with torch.device("meta")` is meant for the model and the batch."""
    with torch.device("cpu") if torch.get_default_device().type == "meta" else nullcontext():
        yield


@_outside_of_meta()
def capture(model: nn.Module, batch: Batch, loss_fn: LossFn | None = None, *, training: bool = True, check: bool = True, precision: str | None = None) -> Graph:
    """One training (or evaluation) step of `model` on the global batch, as a Graph.

    `batch` is a dict of keyword arguments or a tuple of positional ones; its tensors hold the rows of the batch in dim 0. The model may be on
    the meta device: nothing is allocated then. The loss is the model's scalar output, its `.loss` or ["loss"], or `loss_fn(output, batch)`; without
    one the graph's `loss` is None. With `check` a model that holds data is compared with the graph in loss and gradients. `precision`
    ("fp32", "bf16", "fp16") captures what the model computes in it (autoplan/precision.py).
    Raises CaptureError for what cannot be captured exactly, UsageError (a ValueError) for a batch that makes no sense.
    """
    check_precision(precision)
    if precision is not None:
        with computing_in(model, precision):
            graph = capture(model, cast_batch(batch, precision), loss_fn, training=training, check=check)
            return replace(graph, precision=precision, loss=_wide_loss(graph))
    refuse(model)
    paths, tensors, treedef, plain = _flatten(batch)
    notes = _rows(paths, tensors)
    device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    example = tuple(t.detach().clone() if device.type != "meta" else torch.empty_like(t, device="meta") for t in tensors)
    wrapper = _Wrapper(model, loss_fn, treedef, plain)

    def traced() -> Graph:
        with whole_experts(model), watched_hooks(model):
            program, assigned = _export(wrapper, example)
        trace = import_program(program, paths, _aliases(model), _trainable(model), _PREFIX, assigned)
        trace = canonical(name_experts(trace))
        graph = build(type(model).__name__, trace, wrapper.seen.loss, training, notes)
        if graph.batch_factor is not None and (means := _means_over_rows(graph)):
            graph = build(graph.name, sum_over_count(trace, means), wrapper.seen.loss, training, notes)
        return graph

    with _mode(model, training):
        graph = repeated(model, traced) or traced()
        if check and device.type != "meta" and graph.loss is not None and training:
            check_against_model(graph, model, wrapper, example)
    return with_proved_rules(graph)


@_outside_of_meta()
def check_evaluation(model: nn.Module, batch: Batch, graph: Graph, loss_fn: LossFn | None = None, *, precision: str | None = None) -> None:
    """Raise UnsupportedOpError where `model` in evaluation mode is not `graph`, the evaluation form of what it does in training."""
    _, tensors, treedef, plain = _flatten(cast_batch(batch, precision))
    device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    if device.type == "meta":
        check_operators(graph, capture(model, batch, loss_fn, training=False, check=False, precision=precision))
        return
    wrapper = _Wrapper(model, loss_fn, treedef, plain)
    with computing_in(model, precision), _mode(model, training=False):
        check_outputs(graph, model, wrapper, [t.to(device) for t in tensors])


def canonical(trace: Trace) -> Trace:
    """All passes, in order. Means over the batch other than losses are left: what carries the batch is known only in the graph."""
    trace = tidy(functionalize(trace))
    known = evaluate(trace)
    trace = simplify(trace, known)
    trace = gather_rows(fold_attention(trace, known), known)
    trace = delay_expansion(materialise(trace, known))
    return sum_over_count(tensors_for_numbers(unfuse(trace)), frozenset())


@dataclass
class _Seen:
    """What the wrapper found out; an export undoes assignments to a module's own attributes."""

    loss: bool = False


class _Wrapper(nn.Module):
    """The model on a flat list of tensors -> (loss, every other tensor of its output)."""

    def __init__(self, module: nn.Module, loss_fn: LossFn | None, treedef: Any, plain: Mapping[int, Any]) -> None:
        super().__init__()
        self.module = module
        self.loss_fn, self.treedef, self.plain = loss_fn, treedef, dict(plain)
        self.training = module.training
        self.seen = _Seen()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rest = iter(tensors)
        leaves = [self.plain[i] if i in self.plain else next(rest) for i in range(self.treedef.num_leaves)]
        batch = pytree.tree_unflatten(leaves, self.treedef)
        buffers = [(part, name, held) for part in self.module.modules() for name, held in part._buffers.items() if held is not None]
        output = self.module(**batch) if isinstance(batch, dict) else self.module(*batch)
        loss = loss_of(output, batch, self.loss_fn)
        self.seen.loss = loss is not None
        if torch.compiler.is_exporting():
            _write_assigned(self.module, buffers)
        others = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t is not loss]
        return (*([loss] if loss is not None else []), *others)


def _write_assigned(model: nn.Module, buffers: Iterable[tuple[nn.Module, str, torch.Tensor]]) -> None:
    """What the model assigned to a buffer (`self.mean = ...`) is written into the tensor that it held before: an export loses assignments below the root."""
    for part, name, held in buffers:
        now = part._buffers.get(name)
        if now is held:
            continue
        if now is None or (now.shape, now.dtype) != (held.shape, held.dtype):
            path = next(f"{path}.{name}".lstrip(".") for path, module in model.named_modules() if module is part)
            found = "nothing" if now is None else f"{tuple(now.shape)} {now.dtype}"
            raise CaptureError(f"the model assigns {found} to its buffer {path!r} of {tuple(held.shape)} {held.dtype}: a buffer keeps its shape and type")
        with torch.no_grad():
            held.copy_(now)
        part._buffers[name] = held


def loss_of(output: Any, batch: Any, loss_fn: LossFn | None) -> torch.Tensor | None:
    """The scalar that is trained: what `loss_fn` returns, else the model's output or its "loss"; None where there is none. Raises CaptureError for
    a `loss_fn` that returns no scalar."""
    if loss_fn is not None:
        loss = loss_fn(output, batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise CaptureError(f"loss_fn must return a scalar tensor; it returned {found}")
        return loss
    if isinstance(output, torch.Tensor):
        return output if output.numel() == 1 and output.is_floating_point() else None
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return found if isinstance(found, torch.Tensor) and found.numel() == 1 else None


def _flatten(batch: Batch) -> tuple[tuple[str, ...], tuple[torch.Tensor, ...], Any, dict[int, Any]]:
    """(paths of the tensors, the tensors, tree, leaves by index that are no tensors)."""
    if isinstance(batch, Mapping):
        batch = dict(batch)
    if not isinstance(batch, (dict, tuple)):
        raise CaptureError(
            f"a batch is a dict (keyword arguments) or a tuple (positional arguments), not {type(batch).__name__}: write ({type(batch).__name__.lower()},)"
        )
    leaves, treedef = pytree.tree_flatten_with_path(batch)
    paths, tensors, plain = [], [], {}
    for i, (path, leaf) in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            paths.append(".".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path))
            tensors.append(leaf)
        else:
            plain[i] = leaf
    if not tensors:
        raise CaptureError("the batch holds no tensor: give an example of the global batch, such as {'input_ids': tokens, 'labels': tokens}")
    return tuple(paths), tuple(tensors), treedef, plain


def _rows(paths: tuple[str, ...], tensors: tuple[torch.Tensor, ...]) -> tuple[str, ...]:
    """Warnings about the rows of the batch, which lie in dim 0 of its tensors. Raises where these differ."""
    sizes = {path: t.shape[0] for path, t in zip(paths, tensors, strict=True) if t.dim()}
    distinct = sorted({n for n in sizes.values() if n != 1})
    if len(distinct) > 1:
        listed = ", ".join(f"{path}: {n}" for path, n in sizes.items())
        raise CaptureError(f"dim 0 of every batch tensor must be the number of rows (or 1), but the sizes differ ({listed}): give all tensors the same rows")
    if not distinct:
        return (
            "the batch has one row, so what depends on the rows cannot be told apart: data parallelism and micro-batches need an example of at least 2 rows",
        )
    return ()


@contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    """The model in training or evaluation mode; modules that differ on purpose stay as they are where the model is in that mode."""
    flags = {module: module.training for module in model.modules()}
    try:
        if model.training != training:
            model.train(training)
        yield
    finally:
        for module, flag in flags.items():
            module.training = flag


def _export(wrapper: _Wrapper, example: tuple[torch.Tensor, ...]) -> tuple[torch.export.ExportedProgram, frozenset[str]]:
    """The program, and the attributes that the model assigned and that are no buffers."""
    state = torch.get_rng_state()
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # torch logs what fails; the errors below say it
    try:
        said = io.StringIO()  # torch prints the graph so far where it fails
        with warnings.catch_warnings(record=True) as warned, torch.enable_grad(), redirect_stderr(said):
            warnings.simplefilter("ignore")
            warnings.filterwarnings("always", message=".*assigned during export")
            try:
                with nothing_dropped():
                    program = torch.export.export(wrapper, example, strict=False)
            except Drawn:  # perhaps by what was imported on the way
                with nothing_dropped():
                    program = torch.export.export(wrapper, example, strict=False)
        sys.stderr.write(said.getvalue())
        return _static(program), frozenset(name for warning in warned for name in re.findall(r"self\.([\w.]+)", str(warning.message)))
    except CaptureError:
        raise
    except Exception as error:
        place = _user_line(error)
        at = f"{place}: " if place else ""
        if isinstance(error, Refused):
            raise CaptureError(f"{at}{error}") from error
        if "DataDependent" in type(error).__name__ or "data-dependent" in str(error) or "Dynamic control flow" in str(error):
            raise CaptureError(
                f"{at}control flow or a size depends on data, which a plan cannot follow: use torch.where or a mask instead ({_first_line(error)})"
            ) from error
        if "fake tensor in the exported program constant's list" in str(error):
            raise CaptureError("the model reads or writes `.data` of a tensor, which an export cannot follow: use x.detach(), or torch.no_grad()") from error
        raise CaptureError(f"{at}the model cannot be captured: {type(error).__name__}: {_first_line(error)}") from error
    finally:
        logging.disable(before)
        torch.set_rng_state(state)


def _static(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Raise CaptureError, naming the user's line, where a size is known only once the data is."""
    for node in program.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
            if any(isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) for size in sizes):
                raise CaptureError(
                    f"{source_of(node.stack_trace) or node.name}: a size depends on data, which a plan cannot follow: "
                    f"use torch.where or a mask instead of {node.target}"
                )
    return program


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _user_line(error: BaseException) -> str:
    """File and line of the innermost frame of the model's code."""
    seen: BaseException | None = error
    place = ""
    while seen is not None:
        for frame in traceback.extract_tb(seen.__traceback__):
            if "/torch/" not in frame.filename and not frame.filename.startswith("<") and frame.filename not in _NOT_THE_USERS:
                place = f"{frame.filename}:{frame.lineno}, in {frame.name}"
        if place:
            return place
        seen = seen.__cause__ or seen.__context__
    return place


def _aliases(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Every parameter and buffer name -> all names of that tensor, in the model's order."""
    groups: dict[int, list[str]] = {}
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            groups.setdefault(id(tensor), []).append(name)
    return {name: tuple(group) for group in groups.values() for name in group}


def _trainable(model: nn.Module) -> frozenset[str]:
    return frozenset(name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad)


def _wide_loss(graph: Graph) -> str | None:
    """The loss before it was rounded to 16 bits: it is added up over ranks and micro-batches, and scaled."""
    op = graph.ops[graph.producer[graph.loss]] if graph.loss is not None and graph.loss in graph.producer else None
    if op is not None and op.instr.target == "aten.to.dtype" and graph.values[op.operands[0]].spec.dtype == "float32":
        return op.operands[0]
    return graph.loss


def _means_over_rows(graph: Graph) -> frozenset[str]:
    """Names of means that reduce the batch factor."""
    found = []
    for op in graph.ops:
        if op.instr.target not in ("aten.mean.default", "aten.mean.dim"):
            continue
        dims = graph.values[op.operands[0]].dims
        over = op.instr.args[1] if len(op.instr.args) > 1 else ()
        reduced = [dims[int(d)] for d in over] if isinstance(over, tuple) and over else dims  # type: ignore[arg-type]
        if any(graph.batch_factor in dim for dim in reduced):
            found.append(op.name)
    return frozenset(found)


def build(name: str, trace: Trace, has_loss: bool, training: bool, notes: tuple[str, ...]) -> Graph:
    """The graph of a canonical trace."""
    values, ops = _values_and_ops(trace)
    loss, outputs = (trace.outputs[0], trace.outputs[1:]) if has_loss else (None, trace.outputs)
    keep = tuple(dict.fromkeys(outputs))
    exported = (*trace.outputs, *(value for _, value in trace.buffer_updates))
    ops, blocks = partition(values, ops, exported, trace.buffer_updates)
    batch_inputs = tuple(v.name for v in values.values() if v.kind == "input")
    values, ops, sizes, batch_factor = annotate(values, ops, batch_inputs)
    if notes:
        batch_factor = None
    rest = (f"loss {loss}", f"outputs {keep}", f"updates {trace.buffer_updates}", f"training {training}")
    return Graph(
        name=name,
        values=values,
        ops=ops,
        blocks=blocks,
        factor_sizes=sizes,
        batch_factor=batch_factor,
        loss=loss,
        outputs=keep,
        buffer_updates=trace.buffer_updates,
        fingerprint=fingerprint(values, ops, rest),
        constants=trace.constants,
        training=training,
        warnings=(*notes, *trace.warnings, *unknown_ops(ops, values)),
    )


def _values_and_ops(trace: Trace) -> tuple[dict[str, Value], tuple[Op, ...]]:
    values: dict[str, Value] = {}
    for name, leaf in trace.leaves.items():
        values[name] = Value(name, leaf.spec, leaf.kind, ((),) * len(leaf.spec.shape), leaf.requires_grad, leaf.fqn, leaf.aliases)
    ops: list[Op] = []
    for step in trace.steps:
        instr = step.instr
        operands = uses(instr)
        grads = tuple(values[n].requires_grad for n in operands)
        specs = tuple(values[n].spec for n in operands)
        carries = any(grads) and instr.target != "aten.detach.default"
        kept, extra = saved(instr, grads, specs) if carries else ((), 0)
        for i, out in enumerate(instr.outputs):
            if out.spec is not None:
                grad = carries and _differentiable(out.spec) and not (instr.target == "runtime.batch_norm" and i > 0)
                values[out.name] = Value(out.name, out.spec, "activation", ((),) * len(out.spec.shape), grad)
        cost = flops(instr.target, specs, tuple(o.spec for o in instr.outputs if o.spec is not None), instr.args)
        ops.append(Op(instr, (), (), step.module, step.source, cost, kept, extra, draws(instr)))
    return values, tuple(ops)


def _differentiable(spec: TensorSpec) -> bool:
    dtype = dtype_of(spec.dtype)
    return dtype.is_floating_point or dtype.is_complex

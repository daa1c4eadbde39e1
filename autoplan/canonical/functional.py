"""In-place operators, views of them and buffer writes -> pure operators.

Values that share memory form a set with one base. A write to a value computes its new content, carries it up to the base through the
inverse of every view between them, and makes every other value of the set stale; a stale value is recomputed from the base by the same
views when it is read again. Autograd sees the same function. A write through `detach`, or to a parameter, is refused: it would
change values behind autograd's back.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch

from autoplan.canonical.trace import Rewriter, Step, Trace
from autoplan.errors import CaptureError
from runtime.call import resolve
from runtime.instr import Arg, Dtype, Instr, Output, Ref, TensorSpec, uses

_BATCH_NORM = "aten.batch_norm.default"
# fmt: off
_RESHAPES = frozenset((
    "aten.view.default", "aten.reshape.default", "aten.flatten.using_ints", "aten.unflatten.int", "aten.squeeze.dim", "aten.squeeze.default",
    "aten.squeeze.dims", "aten.unsqueeze.default", "aten._unsafe_view.default", "aten.view_as.default",
))
_SAME = frozenset((
    "aten.alias.default", "aten.contiguous.default", "aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten.to.other",
    "aten.lift_fresh.default",
))
# fmt: on


def functionalize(trace: Trace) -> Trace:
    """`trace` without writes; what buffers hold at its end becomes `buffer_updates`. Raises CaptureError."""
    if not any(_writes(step.instr) for step in trace.steps):
        return trace
    return _Functionalizer(trace).run()


def _writes(instr: Instr) -> bool:
    if instr.target == _BATCH_NORM:
        return bool(instr.args[5]) and isinstance(instr.args[3], Ref)
    return _mutable(instr.target)


def _mutable(target: str) -> bool:
    if not target.startswith("aten."):
        op = resolve(target)
        return isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable
    return (target.split(".")[1].endswith("_") and not target.split(".")[1].endswith("__")) or resolve(target)._schema.is_mutable  # type: ignore[attr-defined]


class _Functionalizer:
    def __init__(self, trace: Trace) -> None:
        self.rewriter = Rewriter(trace)
        self.parent: dict[str, tuple[str, Step, int]] = {}  # value -> what it is a view of, the step that views, which output
        self.version: dict[str, int] = {}  # base -> number of writes to it
        self.seen: dict[str, int] = {}  # value -> version of its base that it was computed at

    def run(self) -> Trace:
        rewriter = self.rewriter
        for step in rewriter.trace.steps:
            for name in uses(step.instr):
                self.refresh(name, step)
            if step.instr.target == _BATCH_NORM and _writes(step.instr):
                self.batch_norm(step)
            elif step.instr.target == "aten.detach_.default":
                self.detach(step)
            elif _mutable(step.instr.target):
                self.write(step)
            else:
                rewriter.keep(step)
                self.follow(step)
        for name in rewriter.trace.outputs:
            self.refresh(name, rewriter.trace.steps[-1])
        for name, leaf in rewriter.trace.leaves.items():
            if self.version.get(name):
                if leaf.kind == "buffer":
                    rewriter.buffer_updates.append((name, rewriter.now(name)))
                elif leaf.kind == "input":
                    rewriter.warnings.append(f"the model writes to its input {leaf.fqn!r}; the plan leaves the batch as it is")
        return rewriter.finish()

    def base(self, name: str) -> str:
        while name in self.parent:
            name = self.parent[name][0]
        return name

    def follow(self, step: Step) -> None:
        """Note which outputs of `step` share memory with its first operand."""
        operands = uses(step.instr)
        if not operands:
            return
        storages = self.rewriter.trace.storages
        for i, out in enumerate(step.instr.outputs):
            if out.name in storages and storages[out.name] == storages.get(operands[0]):
                self.parent[out.name] = (operands[0], step, i)
                self.seen[out.name] = self.version.get(self.base(out.name), 0)

    def refresh(self, name: str, at: Step) -> None:
        """Recompute `name` if its base was written since."""
        base = self.base(name)
        now = self.version.get(base, 0)
        if name == base or self.seen.get(name, 0) == now:
            return
        parent, step, index = self.parent[name]
        self.refresh(parent, at)
        args, kwargs = self.rewriter.args(step), self.rewriter.kwargs(step)
        outputs = tuple(Output(self.rewriter.fresh(f"{out.name}_now"), out.spec) for out in step.instr.outputs)
        self.rewriter.specs.update((o.name, o.spec) for o in outputs if o.spec is not None)
        self.rewriter.steps.append(replace(step, instr=replace(step.instr, outputs=outputs, args=args, kwargs=kwargs)))
        self.rewriter.rename(name, outputs[index].name)
        self.seen[name] = now

    def detach(self, step: Step) -> None:
        """`x.detach_()` changes nothing but where gradients go from here."""
        old = step.instr.args[0]
        assert isinstance(old, Ref)
        value = self.rewriter.emit(step, "aten.detach.default", self.rewriter.args(step), spec=step.instr.outputs[0].spec)
        self.rewriter.rename(old.name, value)
        self.rewriter.rename(step.instr.name, value)

    def write(self, step: Step) -> None:
        operands = uses(step.instr)
        target = self._pure(step)
        if not operands or not isinstance(step.instr.args[0], Ref):
            raise CaptureError(f"{step.source or step.module}: {step.instr.target} writes to more than one tensor, which is not supported")
        name = step.instr.args[0].name
        spec = self.rewriter.specs[name]
        args = self.rewriter.args(step)
        if target == "copy":
            value = self._cast(step, args[1], spec)
        elif target == "zero":
            value = self.rewriter.emit(step, "aten.zeros_like.default", (args[0],), spec=spec)
        else:
            value = self.rewriter.emit(step, target, args, self.rewriter.kwargs(step))
            if self.rewriter.specs[value] != spec:
                value = self._cast(step, Ref(value), spec)
        self.store(step, name, value)
        self.rewriter.rename(step.instr.name, value)
        self.parent[step.instr.name] = (name, replace(step, instr=Instr(step.instr.outputs, "aten.alias.default", (Ref(name),))), 0)
        self.seen[step.instr.name] = self.version[self.base(name)]

    def _pure(self, step: Step) -> str:
        namespace, name, overload = step.instr.target.split(".")
        if namespace == "aten" and name == "copy_":
            return "copy"
        if namespace == "aten" and name == "zero_":
            return "zero"
        packet = getattr(getattr(torch.ops, namespace), name[:-1], None) if name.endswith("_") else None
        if (
            packet is None
            or overload not in packet.overloads()
            or name in ("unsqueeze_", "squeeze_", "transpose_", "t_", "resize_", "set_", "as_strided_", "detach_")
        ):
            raise CaptureError(f"{step.source or step.module}: {step.instr.target} writes in a way that has no pure form: use the form without the underscore")
        return f"{namespace}.{name[:-1]}.{overload}"

    def _cast(self, step: Step, source: Arg, spec: TensorSpec) -> str:
        """`source` with the dtype and shape of `spec`, as `copy_` writes it."""
        rewriter = self.rewriter
        if not isinstance(source, Ref):
            raise CaptureError(f"{step.source or step.module}: {step.instr.target} copies something that is no tensor")
        name = source.name
        if rewriter.specs[name].dtype != spec.dtype:
            name = rewriter.emit(step, "aten.to.dtype", (Ref(name), Dtype(spec.dtype)), spec=TensorSpec(rewriter.specs[name].shape, spec.dtype))
        if rewriter.specs[name].shape != spec.shape:
            name = rewriter.emit(step, "aten.expand.default", (Ref(name), spec.shape), spec=spec)
        return name

    def store(self, step: Step, name: str, value: str) -> None:
        """Make `value` the content of `name` and carry it to the base."""
        base = self.base(name)
        leaf = self.rewriter.trace.leaves.get(base)
        if leaf is not None and leaf.kind == "parameter":
            raise CaptureError(f"{step.source or step.module}: the model writes to its parameter {leaf.fqn!r} in its forward pass; keep such state in a buffer")
        chain = [name]
        while chain[-1] in self.parent:
            chain.append(self.parent[chain[-1]][0])
        self.version[base] = self.version.get(base, 0) + 1
        for below, above in pairwise(chain):
            self.rewriter.rename(below, value)
            self.seen[below] = self.version[base]
            _, view, index = self.parent[below]
            value = self._scatter(step, view, index, above, value)
        self.rewriter.rename(base, value)
        self.seen[base] = self.version[base]

    def _scatter(self, step: Step, view: Step, index: int, above: str, value: str) -> str:
        """The content of `above` after its view (output `index` of `view`) was overwritten by `value`."""
        rewriter, target, args = self.rewriter, view.instr.target, view.instr.args
        old = Ref(rewriter.now(above))
        spec = rewriter.specs[above]
        rank = len(spec.shape)
        dim = args[1] % rank if len(args) > 1 and isinstance(args[1], int) and not isinstance(args[1], bool) and rank else 0
        if target in _SAME:
            return value
        if target in _RESHAPES:
            return rewriter.emit(step, "aten.reshape.default", (Ref(value), spec.shape), spec=spec)
        if target == "aten.t.default" and rank == 2:
            return rewriter.emit(step, "aten.transpose.int", (Ref(value), 0, 1), spec=spec)
        if target == "aten.transpose.int":
            return rewriter.emit(step, "aten.transpose.int", (Ref(value), *args[1:]), spec=spec)
        if target == "aten.permute.default":
            order = [int(d) % rank for d in args[1]]  # type: ignore[union-attr,arg-type]
            return rewriter.emit(step, "aten.permute.default", (Ref(value), tuple(order.index(d) for d in range(rank))), spec=spec)
        if target == "aten.slice.Tensor":
            return rewriter.emit(step, "aten.slice_scatter.default", (old, Ref(value), *args[1:]), spec=spec)
        if target == "aten.narrow.default":
            start = int(args[2]) % spec.shape[dim]  # type: ignore[arg-type]
            return rewriter.emit(step, "aten.slice_scatter.default", (old, Ref(value), dim, start, start + int(args[3])), spec=spec)  # type: ignore[arg-type]
        if target == "aten.select.int":
            return rewriter.emit(step, "aten.select_scatter.default", (old, Ref(value), *args[1:]), spec=spec)
        if target in ("aten.split.Tensor", "aten.chunk.default", "aten.split_with_sizes.default"):
            dim = int(args[2]) % rank if len(args) > 2 else 0  # type: ignore[arg-type]
            sizes = [out.spec.shape[dim] for out in view.instr.outputs if out.spec is not None]
            start = sum(sizes[:index])
            return rewriter.emit(step, "aten.slice_scatter.default", (old, Ref(value), dim, start, start + sizes[index]), spec=spec)
        if target == "aten.unbind.int":
            return rewriter.emit(step, "aten.select_scatter.default", (old, Ref(value), dim, index), spec=spec)
        raise CaptureError(f"{step.source or step.module}: a write through {target} is not supported: write to a copy instead")

    def batch_norm(self, step: Step) -> None:
        """Training batch norm writes its running statistics: they become outputs."""
        x, weight, bias, mean, var, _, momentum, eps, *_ = self.rewriter.args(step)
        assert isinstance(mean, Ref) and isinstance(var, Ref)
        old_mean, old_var = step.instr.args[3], step.instr.args[4]
        assert isinstance(old_mean, Ref) and isinstance(old_var, Ref)
        specs = (self.rewriter.specs[mean.name], self.rewriter.specs[var.name])
        names = (self.rewriter.fresh(f"{step.instr.name}__mean"), self.rewriter.fresh(f"{step.instr.name}__var"))
        self.rewriter.specs.update(zip(names, specs, strict=True))
        outputs = (step.instr.outputs[0], Output(names[0], specs[0]), Output(names[1], specs[1]))
        instr = Instr(outputs, "runtime.batch_norm", (x, weight, bias, mean, var, momentum, eps), (), True)
        self.rewriter.steps.append(replace(step, instr=instr))
        self.store(step, old_mean.name, names[0])
        self.store(step, old_var.name, names[1])

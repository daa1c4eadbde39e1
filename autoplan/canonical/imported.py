"""Exported program -> trace. Regions under no_grad and autocast are written out as detach and casts.

no_grad: what the region reads is detached, so nothing in it requires a gradient. autocast: each operator's floating
operands are cast as torch's policy says (autocast.py); casts of parameters are shared within the outermost region, as autocast's cache does.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.export.exported_program import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.multiprocessing.reductions import StorageWeakRef

from autoplan.canonical.autocast import compute_dtype
from autoplan.canonical.trace import Leaf, Step, Trace, substitute
from autoplan.errors import CaptureError
from runtime.call import dtype_name, dtype_of, encode, spec_of
from runtime.instr import Arg, Dtype, Instr, Output, Ref, TensorSpec, uses


@dataclass(frozen=True, slots=True)
class _Region:
    """What surrounds a node: gradients off, or a low precision dtype of a device kind."""

    no_grad: bool = False
    autocast: str | None = None
    device: str = "cpu"


def import_program(
    program: ExportedProgram,
    input_paths: tuple[str, ...],
    aliases: Mapping[str, tuple[str, ...]],
    trainable: frozenset[str],
    prefix: str,
    assigned: frozenset[str] = frozenset(),
) -> Trace:
    """The program's steps and leaves.

    `input_paths` are the paths of the inputs in the batch, in order. `aliases` maps every parameter and buffer name to all names of that
    tensor; `trainable` holds the names that require a gradient. `prefix` is cut from module paths and parameter names. `assigned`: attributes that
    the model assigns and that are no buffers.
    """
    leaves: dict[str, Leaf] = {}
    constants: dict[str, torch.Tensor] = {}
    storages: dict[str, int] = {}
    names: dict[torch.fx.Node, str] = {}
    taken = {node.name for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule) for node in part.graph.nodes}
    paths = iter(input_paths)
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    tied: dict[str, str] = {}  # first name of a tied tensor -> its leaf
    for node in program.graph.nodes:
        if node.op != "placeholder":
            continue
        found, value = specs[node.name], node.meta.get("val")
        if found.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            fqn = (found.target or "").removeprefix(prefix)
            first = aliases.get(fqn, (fqn,))[0]
            if first in tied:
                names[node] = tied[first]
                continue
        path = next(paths) if found.kind == InputKind.USER_INPUT else ""
        if not isinstance(value, torch.Tensor):
            if found.kind == InputKind.USER_INPUT and node.users:
                raise CaptureError(f"input {path!r} is a {type(value).__name__}, not a tensor: give it as a plain Python value")
            continue
        if found.kind == InputKind.USER_INPUT:
            name = _unique("in_" + re.sub(r"\W", "_", path), taken)
        else:
            name = _unique(re.sub(f"^([a-z]_){prefix[:-1]}_", r"\1", node.name), taken - {node.name})
        names[node] = name
        storages[name] = _storage(value)
        spec = spec_of(value)
        if found.kind == InputKind.USER_INPUT:
            leaves[name] = Leaf("input", spec, fqn=path)
        elif found.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            fqn = (found.target or "").removeprefix(prefix)
            kind = "parameter" if found.kind == InputKind.PARAMETER else "buffer"
            same = aliases.get(fqn, (fqn,))
            leaves[name] = Leaf(kind, spec, fqn in trainable, same[0], same)
            tied[same[0]] = name
        elif found.kind == InputKind.CONSTANT_TENSOR:
            if found.target in assigned and node.users:
                raise CaptureError(
                    f"the model assigns its attribute {(found.target or '').removeprefix(prefix)!r} and reads it in a later step: register it as a buffer"
                )
            data = program.constants[found.target or ""]
            if not isinstance(data, torch.Tensor) or data.is_meta:
                raise CaptureError(
                    f"a tensor that the model holds outside its parameters and buffers ({found.target}) is on the meta device: register it as a buffer"
                )
            constants[name] = data.detach().cpu().clone()
            leaves[name] = Leaf("constant", spec)
        else:
            raise CaptureError(f"the model takes an input of kind {found.kind.name.lower()}, which a plan cannot hold")
    importer = _Importer(names, leaves, storages, taken, prefix)
    results = importer.graph(program.graph_module, _Region(), "", "")
    outputs = tuple(name for name in results if name is not None)
    return Trace(leaves, tuple(importer.steps), outputs, (), constants, storages)


def _unique(stem: str, taken: set[str]) -> str:
    name, i = stem, 0
    while name in taken:
        i += 1
        name = f"{stem}_{i}"
    taken.add(name)
    return name


def _storage(value: torch.Tensor) -> int:
    return StorageWeakRef(value.untyped_storage()).cdata


def _fake(node: torch.fx.Node) -> Any:
    return node.meta.get("val")


def source_of(stack: str | None) -> str:
    """The innermost line of `stack` (a formatted stack) that lies outside torch: "file.py:12, in forward"."""
    place = ""
    for path, line, function in re.findall(r'File "([^"]+)", line (\d+), in (\S+)', stack or ""):
        if "/torch/" not in path:
            place = f"{path.rsplit('/', 1)[-1]}:{line}, in {function}"
    return place


class _Importer:
    """Walks the graph and its regions, collecting steps."""

    def __init__(self, names: dict[torch.fx.Node, str], leaves: Mapping[str, Leaf], storages: dict[str, int], taken: set[str], prefix: str) -> None:
        self.names, self.storages, self.taken, self.prefix, self.leaves = names, storages, taken, prefix, frozenset(leaves)
        self.defined = set(leaves)
        self.specs = {name: leaf.spec for name, leaf in leaves.items()}
        self.grads = {name for name, leaf in leaves.items() if leaf.requires_grad}  # values that a gradient may reach
        self.steps: list[Step] = []
        self.parts: dict[torch.fx.Node, list[str | None]] = {}  # results of nodes that return several values
        self.casts: dict[tuple[str, str], str] = {}

    def graph(self, module: torch.fx.GraphModule, region: _Region, path: str, source: str) -> list[str | None]:
        """Import the body of `module`; placeholders are named already. The names of its outputs, None for what is no tensor."""
        for node in module.graph.nodes:
            if node.op == "output":
                return [self._result(arg) for arg in _leaves(node.args[0])]
            if node.op == "call_function":
                self.node(module, node, region, path, source)
            elif node.op == "get_attr" and isinstance(_fake(node), torch.Tensor):
                raise CaptureError(f"the model holds a tensor {node.target!r} that is neither parameter, buffer nor input: register it as a buffer")
        raise AssertionError("an exported graph ends with its outputs")

    def _result(self, arg: Any) -> str | None:
        if not isinstance(arg, torch.fx.Node):
            return None
        return self.names.get(arg)

    def node(self, module: torch.fx.GraphModule, node: torch.fx.Node, region: _Region, path: str, source: str) -> None:
        stack = list(node.meta.get("nn_module_stack", {}).values())
        path = re.sub(r"@\d+", "", stack[-1][0]) if stack else path
        path = path.removeprefix(self.prefix) if path + "." != self.prefix else ""
        source = source_of(node.meta.get("stack_trace")) or source
        if node.target is operator.getitem:
            parent, index = node.args
            part = self.parts[parent][index] if isinstance(parent, torch.fx.Node) and isinstance(index, int) else None
            if part is not None:
                self.names[node] = part
            return
        name = str(node.target)
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            self._region(module, node, region, path, source)
            return
        if not isinstance(node.target, torch._ops.OpOverload):
            if any(isinstance(v, torch.Tensor) for v in _leaves(_fake(node))) or any(
                isinstance(v, (torch.SymInt, torch.SymFloat, torch.SymBool)) for v in [_fake(node)]
            ):
                called = getattr(node.target, "__name__", name)
                if called in ("_add_batch_dim", "_remove_batch_dim", "_wrap_for_grad", "_unwrap_for_grad", "_make_dual", "_unpack_dual"):
                    raise CaptureError(f"{source or 'the model'}: torch.func.vmap, grad and jvp cannot be part of a plan: write the batched form ({called})")
                raise CaptureError(f"{source or 'the model'}: a size or value that depends on data ({called}) cannot be part of a plan")
            return
        if _fake(node) is None:
            return  # assertions on metadata and sizes: the input specs are checked instead
        self._operator(node, name, region, path, source)

    def _region(self, module: torch.fx.GraphModule, node: torch.fx.Node, region: _Region, path: str, source: str) -> None:
        kind = str(node.target)
        args: tuple[Any, ...] = node.args
        if kind == "wrap_with_set_grad_enabled":
            enabled, body, operands = args[0], args[1], args[2:]
            inner = replace(region, no_grad=not enabled)
        elif kind == "wrap_with_autocast":
            device, dtype, enabled, _, body, *operands = args
            low = None if not enabled else dtype_name(dtype or torch.get_autocast_dtype(device))
            inner = replace(region, autocast=low, device=device)
        else:
            raise CaptureError(f"{source or 'the model'}: control flow or a call of kind {kind!r} cannot be part of a plan: write it in plain tensor operators")
        child = getattr(module, body.target)
        for place, operand in zip((n for n in child.graph.nodes if n.op == "placeholder"), operands, strict=True):
            if isinstance(operand, torch.fx.Node) and operand in self.names:
                self.names[place] = self.names[operand]
        results = self.graph(child, inner, path, source)
        if region.autocast is None:
            self.casts.clear()
        self.parts[node] = results

    def _operator(self, node: torch.fx.Node, target: str, region: _Region, path: str, source: str) -> None:
        try:
            args = tuple(encode(a, self.names.__getitem__) for a in node.args)
            kwargs = tuple((k, encode(a, self.names.__getitem__)) for k, a in node.kwargs.items())
        except (ValueError, KeyError) as error:
            raise CaptureError(f"{source or path or 'the model'}: {target} takes something that cannot be kept in a plan: {error}") from error
        value = _fake(node)
        several = isinstance(value, (tuple, list))
        values = list(value) if several else [value]
        if any(not isinstance(v, torch.Tensor) and v is not None for v in values):
            raise CaptureError(f"{source or path or 'the model'}: {target} makes a Python value out of data: a plan cannot depend on it")
        instr = Instr((), target, args, kwargs, several)
        if region.autocast is not None:
            instr = self._autocast(instr, region, path, source)
        if region.no_grad:
            instr = self._detached(instr, path, source)
        if several:
            names = [_unique(f"{node.name}__{i}", self.taken) for i in range(len(values))]
        else:
            names = [node.name if node.name not in self.defined else _unique(node.name, self.taken)]
        self.defined.update(names)
        outputs = tuple(Output(n, None if v is None else spec_of(v)) for n, v in zip(names, values, strict=True))
        for name, v in zip(names, values, strict=True):
            if v is not None:
                self.specs[name] = spec_of(v)
                self.storages[name] = _storage(v)
        if several:
            self.parts[node] = [n if v is not None else None for n, v in zip(names, values, strict=True)]
        else:
            self.names[node] = names[0]
        if target != "aten.detach.default" and any(name in self.grads for name in uses(instr)):
            self.grads.update(n for n in names if n in self.specs and dtype_of(self.specs[n].dtype).is_floating_point)
            if target.split(".")[1].endswith("_") and isinstance(instr.args[0], Ref):
                self.grads.add(instr.args[0].name)
        self.steps.append(Step(replace(instr, outputs=outputs), path, source))

    def _detached(self, instr: Instr, path: str, source: str) -> Instr:
        """The call on detached operands, where an operand may carry a gradient."""
        changed: dict[str, str] = {}
        for name in uses(instr):
            if name in changed or name not in self.grads:
                continue
            changed[name] = self._emit("aten.detach.default", (Ref(name),), self.specs[name], path, source, self.storages[name])
        return _renamed(instr, changed)

    def _autocast(self, instr: Instr, region: _Region, path: str, source: str) -> Instr:
        floats = [n for n in dict.fromkeys(uses(instr)) if dtype_of(self.specs[n].dtype).is_floating_point and self.specs[n].dtype != "float64"]
        assert region.autocast is not None
        dtype = compute_dtype(instr.target, region.device, region.autocast, [self.specs[n].dtype for n in floats])
        if dtype is None:
            return instr
        changed: dict[str, str] = {}
        for name in floats:
            if self.specs[name].dtype == dtype:
                continue
            key = (name, dtype)
            cached = name in self.leaves and dtype == region.autocast
            if not cached or key not in self.casts:
                spec = TensorSpec(self.specs[name].shape, dtype)
                made = self._emit("aten.to.dtype", (Ref(name), Dtype(dtype)), spec, path, source, 0)
                if name in self.grads:
                    self.grads.add(made)
                if cached:
                    self.casts[key] = made
            changed[name] = self.casts[key] if cached else made
        return _renamed(instr, changed)

    def _emit(self, target: str, args: tuple[Arg, ...], spec: TensorSpec, path: str, source: str, storage: int) -> str:
        name = _unique(target.split(".")[1], self.taken)
        self.defined.add(name)
        self.specs[name] = spec
        self.storages[name] = storage or -len(self.taken)
        self.steps.append(Step(Instr((Output(name, spec),), target, args), path, source))
        return name


def _renamed(instr: Instr, names: Mapping[str, str]) -> Instr:
    return replace(instr, args=substitute(instr.args, names), kwargs=tuple((k, substitute(a, names)) for k, a in instr.kwargs))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value

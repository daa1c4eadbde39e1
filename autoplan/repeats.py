"""Repeated layers: a model with hundreds of equal layers is traced with three of them, the graph of the others is written down.

Tracing costs 0.3 s a layer. A run of layers in an nn.ModuleList or nn.Sequential is shortened where everything says that all do the same:

    equal       class, plain attributes, training flags, shapes, dtypes and `requires_grad` of all parameters and buffers; no hooks, nothing shared.
                Attributes that hold the layer's own number are replaced by a stand-in that refuses to be used while the short model is traced.
    in a loop   the list is read once, by a `for` over the whole of it. The loop's number may pick from a list of equal entries
                (`config.layer_types[i]`); any other use of it, a counter, `break`, `continue` or `return` in the body rules the loop out.
    a chain     in the short graph the second layer reads of the first, and the third of the second, the same values at the same
                places, and nothing else reads what lies between (autoplan/replicate.py).

Where one of these is in doubt the whole model is traced, as it is where the short trace fails.
"""

from __future__ import annotations

import ast
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import nn

from autoplan.graph import Graph
from autoplan.replicate import Run, lengthened

_KEPT = 3  # layers of a run that are traced: the first, one between equals, the last
_LEAST = 5  # layers of a run that is shortened
_INTERNAL = frozenset(
    {
        "_parameters",
        "_buffers",
        "_modules",
        "_non_persistent_buffers_set",
        "_is_full_backward_hook",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
        "_backward_pre_hooks",
        "_backward_hooks",
    }
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")


class _Used(Exception):
    """The number of a layer was used."""


def _refuse(*_: object) -> NoReturn:
    raise _Used


def _class(_: object) -> type:
    """What isinstance asks for: an answer for the export's own look through all attributes, for tensors and the like, alone."""
    if f"{os.sep}torch{os.sep}_export{os.sep}" in sys._getframe(1).f_code.co_filename:
        return _Number
    raise _Used


_OPERATIONS = (
    *("bool", "int", "float", "complex", "index", "hash", "str", "repr", "format", "len", "iter", "getitem", "contains", "call", "getattr"),
    *("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert", "round", "divmod", "rdivmod"),
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "pow", "rpow"),
    *("and", "rand", "or", "ror", "xor", "rxor"),
)


class _Number:
    """Stands in for the number of a layer: may be passed on, and asked whether it is None; anything else raises."""

    __slots__ = ()
    __class__ = property(_class)  # type: ignore[assignment]


for _name in _OPERATIONS:
    setattr(_Number, f"__{_name}__", _refuse)


@dataclass(frozen=True)
class _List:
    """A list of layers: its path, the keys of all items, those that are kept, and the runs of equal ones."""

    module: nn.Module
    path: str
    keys: tuple[str, ...]
    kept: tuple[str, ...]
    runs: tuple[Run, ...]
    numbers: tuple[tuple[nn.Module, str], ...]  # (module, attribute) of kept layers that hold the layer's number


def repeated(model: nn.Module, trace: Callable[[], Graph]) -> Graph | None:
    """The graph of `model`, from `trace()` of a short form of it; None where no layers repeat or there is doubt that they do."""
    lists = _lists(model)
    if not lists:
        return None
    try:
        with _shortened(lists) as watched:
            graph = trace()
    except Exception:  # the whole model is traced then, and says itself what is wrong with it
        return None
    if not all(watch.is_one_loop for watch in watched):
        return None
    for found in lists:
        for run in found.runs:
            longer = lengthened(graph, run)
            if longer is None:
                return None
            graph = longer
    return graph


# -- which layers are equal -----------------------------------------------------------------------------------------------------


def _lists(model: nn.Module) -> tuple[_List, ...]:
    users: dict[int, int] = {}
    for _, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        users[id(tensor)] = users.get(id(tensor), 0) + 1
    seen: dict[int, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        seen[id(module)] = seen.get(id(module), 0) + 1
    found: list[_List] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(other.path + ".") for other in found)
        if type(module) in (nn.ModuleList, nn.Sequential) and len(module._modules) >= _LEAST and not inside:
            once = all(seen[id(m)] == 1 for m in module.modules()) and all(users[id(t)] == 1 for t in (*module.parameters(), *module.buffers()))
            listed = _list(path, module) if once else None
            if listed is not None:
                found.append(listed)
    return tuple(found)


def _list(path: str, module: nn.Module) -> _List | None:
    keys = tuple(module._modules)
    items = [item for item in module._modules.values() if item is not None]
    if len(items) != len(keys) or keys != tuple(map(str, range(len(keys)))):
        return None
    numbers = _numbers(items)
    texts = [_state(item, numbers) for item in items]
    runs: list[Run] = []
    kept: list[str] = []
    start = 0
    while start < len(items):
        stop = start + 1
        while stop < len(items) and texts[start] is not None and texts[stop] == texts[start]:
            stop += 1
        if stop - start >= _LEAST:
            runs.append(Run(path, keys[start:stop], _KEPT))
            kept += keys[start : start + _KEPT]
        else:
            kept += keys[start:stop]
        start = stop
    if not runs:
        return None
    held = tuple((sub, name) for key in kept for at, sub in module.get_submodule(key).named_modules() for where, name in numbers if where == at)
    return _List(module, path, keys, tuple(kept), tuple(runs), held)


def _numbers(items: list[nn.Module]) -> frozenset[tuple[str, str]]:
    """(submodule, attribute) that hold in every layer that layer's own number."""
    found: set[tuple[str, str]] | None = None
    for position, item in enumerate(items):
        own = {(at, name) for at, sub in item.named_modules() for name, value in sub.__dict__.items() if type(value) is int and value == position}
        found = own if found is None else found & own
    return frozenset(found or ())


def _state(item: nn.Module, numbers: frozenset[tuple[str, str]]) -> tuple | None:
    """Everything about a layer that its forward pass may depend on; None where that is not known."""
    found: list[object] = []
    for at, sub in item.named_modules():
        if any(getattr(sub, hooks, None) for hooks in (*_HOOKS, "_backward_hooks", "_backward_pre_hooks")):
            return None
        found += [at, type(sub)]
        for kind, held in (("parameter", sub._parameters), ("buffer", sub._buffers)):
            for name, tensor in held.items():
                if tensor is not None and kind == "buffer" and tensor.device.type != "meta" and name in sub._non_persistent_buffers_set:
                    found.append(
                        (name, tensor.detach().cpu().numpy().tobytes() if tensor.numel() <= 1 << 16 and tensor.dtype != torch.bfloat16 else id(tensor))
                    )
                found.append((kind, name, None if tensor is None else (type(tensor), tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tensor.device)))
        for name, value in sub.__dict__.items():
            if name not in _INTERNAL and name not in _HOOKS and (at, name) not in numbers:
                plain = _plain(value)
                if plain is None:
                    return None
                found.append((name, plain))
    return tuple(found)


def _plain(value: Any) -> tuple | None:
    """A value to compare an attribute by: its own for plain data, its identity for objects that are no containers."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.Size, torch.device)):
        return (type(value), value)
    if isinstance(value, (list, tuple)):
        parts = [_plain(item) for item in value]
        return None if None in parts else (type(value), *parts)
    if isinstance(value, (set, frozenset)):
        return _plain(sorted(value, key=repr))
    if isinstance(value, Mapping) and type(value).__module__ in ("builtins", "collections"):
        return _plain([item for pair in value.items() for item in pair])
    if isinstance(value, torch.Tensor):
        return None
    return (type(value), id(value))  # a config or function that all layers share


# -- the short model ------------------------------------------------------------------------------------------------------------


class _Watch:
    """How the forward pass reads one list."""

    def __init__(self, listed: _List) -> None:
        self.listed = listed
        self.reads = 0
        self.is_plain = True

    @property
    def is_one_loop(self) -> bool:
        return self.reads == 1 and self.is_plain

    def loop(self, frame: FrameType | None) -> None:
        self.reads += 1
        self.is_plain &= frame is not None and _is_plain_loop(frame, self.listed)

    def other(self) -> None:
        self.is_plain = False


@contextmanager
def _shortened(lists: tuple[_List, ...]) -> Iterator[list[_Watch]]:
    watches = [_Watch(listed) for listed in lists]
    before = [(listed.module, listed.module.__class__, listed.module._modules) for listed in lists]
    numbers = [(sub, name, sub.__dict__[name]) for listed in lists for sub, name in listed.numbers]
    try:
        for watch in watches:
            module = watch.listed.module
            module._modules = {key: module._modules[key] for key in watch.listed.kept}
            module.__class__ = _watched(type(module), watch)
        for sub, name, _ in numbers:
            sub.__dict__[name] = _Number()
        yield watches
    finally:
        for module, cls, modules in before:
            module.__class__, module._modules = cls, modules
        for sub, name, value in numbers:
            sub.__dict__[name] = value


def _watched(cls: type, watch: _Watch) -> type:
    """A class like `cls` whose objects tell `watch` how they are read."""

    class Watched(cls):
        def __iter__(self) -> Iterator[nn.Module]:
            watch.loop(sys._getframe(1))
            return iter(self._modules.values())

        def __len__(self) -> int:
            watch.other()
            return len(self._modules)

        def __getitem__(self, index: Any) -> Any:
            whole = isinstance(index, slice) and index.step is None and not index.start and (index.stop is None or index.stop >= len(watch.listed.keys))
            if not whole:
                watch.other()
                return super().__getitem__(index)
            watch.loop(sys._getframe(1))
            return list(self._modules.values())

    Watched.__name__, Watched.__qualname__, Watched.__module__ = cls.__name__, cls.__qualname__, cls.__module__
    return Watched


def _is_plain_loop(frame: FrameType, listed: _List) -> bool:
    """Whether the statement that reads a list is a `for` over all of it whose body does the same for every item."""
    try:
        lines, first = inspect.getsourcelines(frame.f_code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return False
    at = frame.f_lineno - first + 1
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For) and node.iter.lineno <= at <= (node.iter.end_lineno or 0)]
    if len(loops) != 1:
        return False
    (loop,) = loops
    over, target = loop.iter, loop.target
    number = ""
    if isinstance(over, ast.Call):
        if not (isinstance(over.func, ast.Name) and over.func.id == "enumerate" and len(over.args) == 1 and not over.keywords):
            return False
        if not (isinstance(target, ast.Tuple) and len(target.elts) == 2 and all(isinstance(e, ast.Name) for e in target.elts)):
            return False
        number, over, target = target.elts[0].id, over.args[0], target.elts[1]  # type: ignore[attr-defined]
    if not isinstance(target, ast.Name) or not isinstance(over, (ast.Attribute, ast.Name, ast.Subscript)):
        return False
    body = [node for statement in loop.body for node in ast.walk(statement)]
    stops = (ast.Break, ast.Continue, ast.Return, ast.AugAssign, ast.NamedExpr, ast.Global, ast.Nonlocal, ast.Yield, ast.YieldFrom)
    if any(isinstance(node, stops) or _counts(node) for node in body):
        return False
    picks = [node for node in body if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Name) and node.slice.id == number]
    uses = [node for node in body if isinstance(node, ast.Name) and node.id == number]
    return len(picks) == len(uses) and all(_picks_equal(node.value, frame, listed) for node in picks)


def _counts(node: ast.AST) -> bool:
    """Whether a statement makes a name from that name and constants alone."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.BinOp):
        return False
    names = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
    return any(isinstance(target, ast.Name) and names <= {target.id} for target in node.targets)


def _picks_equal(node: ast.expr, frame: FrameType, listed: _List) -> bool:
    """Whether `node`, names and attributes alone, is a list with equal entries for all layers of every run."""
    chain: list[str] = []
    while isinstance(node, ast.Attribute):
        chain.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in frame.f_locals:
        return False
    value = frame.f_locals[node.id]
    for name in reversed(chain):
        value = getattr(value, name, None)
    if not isinstance(value, (list, tuple)) or len(value) < len(listed.keys):
        return False
    if not all(isinstance(item, (str, int, float, type(None))) for item in value):
        return False
    texts = [repr(value[int(key)]) for key in listed.keys]
    moved = [texts[position] for position in range(len(listed.kept))] == [texts[int(key)] for key in listed.kept]
    return moved and all(len({texts[int(key)] for key in run.keys}) == 1 for run in listed.runs)

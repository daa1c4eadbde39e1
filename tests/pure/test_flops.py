"""FLOPs are what torch's own counter counts, on whole and on local shapes; what is saved is what autograd keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from autoplan.capture_check import leaves_of
from autoplan.flops import flops
from autoplan.frontend import capture
from autoplan.graph import Graph, Op
from autoplan.saved import saved
from runtime.call import run, spec_of
from runtime.instr import TensorSpec
from tests.pure.captured import CPU
from tests.zoo import ZOO

torch.set_num_threads(1)


def steps(name: str) -> Iterator[tuple[Graph, Op, dict[str, Any]]]:
    """Every distinct operator of a model with the values that it reads, its operands as leaves of their own."""
    model, batch = ZOO[name]()
    graph = capture(model, batch, check=False)
    env: dict[str, Any] = {n: t.detach() for n, t in leaves_of(graph, model, list(batch.values())).items()} | dict(graph.constants)
    seen: set[tuple[Any, ...]] = set()
    for op in graph.ops:
        with torch.no_grad():
            run(op.instr, env, CPU)
        key = (op.instr.target, tuple(graph.values[n].spec for n in op.operands), repr([a for a in op.instr.args if not hasattr(a, "name")]))
        if key not in seen:
            seen.add(key)
            yield graph, op, env


@pytest.mark.parametrize("name", list(ZOO))
def test_flops_equal_the_counter(name: str) -> None:
    counted = 0
    for _, op, env in steps(name):
        if op.instr.target == "runtime.experts":
            continue
        inner = {n: env[n].to("meta") for n in op.operands}
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            run(op.instr, dict(inner), torch.device("meta")) if op.instr.target.startswith("aten") else run(op.instr, {n: env[n] for n in op.operands}, CPU)
        assert op.flops == counter.get_total_flops(), op
        counted += op.flops > 0
    assert counted


def test_flops_of_local_shapes_follow_them() -> None:
    x, w = TensorSpec((8, 20, 64), "float32"), TensorSpec((136, 64), "float32")
    whole = flops("aten.linear.default", (x, w), (TensorSpec((8, 20, 136), "float32"),))
    half = flops("aten.linear.default", (x, TensorSpec((68, 64), "float32")), (TensorSpec((8, 20, 68), "float32"),))
    assert whole == 2 * half == 2 * 8 * 20 * 64 * 136


@pytest.mark.parametrize(
    ("target", "call"),
    [
        ("aten.convolution.default", lambda: (torch.ones(2, 4, 9, 9), torch.ones(6, 2, 3, 3), None, [2, 2], [1, 1], [1, 1], False, [0, 0], 2)),
        ("aten.conv2d.default", lambda: (torch.ones(2, 4, 9, 9), torch.ones(6, 2, 3, 3), None, [2, 2], [1, 1], [1, 1], 2)),
        ("aten.conv1d.default", lambda: (torch.ones(2, 4, 9), torch.ones(6, 4, 3))),
        ("aten.conv_transpose2d.input", lambda: (torch.ones(2, 4, 5, 5), torch.ones(4, 6, 3, 3), None, [2, 2])),
        ("aten.baddbmm.default", lambda: (torch.ones(2, 3, 5), torch.ones(2, 3, 4), torch.ones(2, 4, 5))),
        ("aten.matmul.default", lambda: (torch.ones(2, 7, 3, 4), torch.ones(7, 4, 5))),
        ("aten.addmm.default", lambda: (torch.ones(5), torch.ones(3, 4), torch.ones(4, 5))),
    ],
)
def test_flops_of_products_and_convolutions(target: str, call: Any) -> None:
    args = call()
    namespace, name, overload = target.split(".")
    with FlopCounterMode(display=False) as counter:
        out = getattr(getattr(getattr(torch.ops, namespace), name), overload)(*args)
    operands = [spec_of(a) for a in args if isinstance(a, torch.Tensor)]
    assert flops(target, operands, [spec_of(out)], args) == counter.get_total_flops()


@pytest.mark.parametrize("name", list(ZOO))
def test_saved_is_what_autograd_keeps_on_the_cpu(name: str) -> None:
    compared = 0
    for graph, op, env in steps(name):
        grads = tuple(graph.values[n].requires_grad for n in op.operands)
        if not any(grads) or op.instr.target in ("aten.detach.default", "runtime.experts"):
            continue
        leaves: dict[str, Any] = {}
        for operand, grad in zip(op.operands, grads, strict=True):
            leaves[operand] = env[operand].detach().clone(memory_format=torch.contiguous_format).requires_grad_(grad)
        kept: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor, kept: dict[int, torch.Tensor] = kept) -> torch.Tensor:
            kept[StorageWeakRef(tensor.untyped_storage()).cdata] = tensor
            return tensor

        local = dict(leaves)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            run(op.instr, local, CPU)
        where = {StorageWeakRef(t.untyped_storage()).cdata: n for n, t in reversed(local.items()) if isinstance(t, torch.Tensor)}
        names = {where[m] for m in kept if m in where}
        extra = sum(t.untyped_storage().nbytes() for m, t in kept.items() if m not in where)
        found, bytes_besides = saved(op.instr, grads, tuple(graph.values[n].spec for n in op.operands))
        alias = {n: where[StorageWeakRef(local[n].untyped_storage()).cdata] for n in found}
        assert {alias[n] for n in found} == names, (op.instr.target, found, names)
        assert abs(bytes_besides - extra) <= 64 + 0.02 * extra, (op.instr.target, bytes_besides, extra)
        assert (op.saved, op.saved_extra_bytes) == (found, bytes_besides)
        compared += 1
    assert compared

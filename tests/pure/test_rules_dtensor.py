"""DTensor's own sharding rules as an oracle: operands split as a loop reads them come out as the loop writes them, with nothing sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from autoplan.graph import Loop
from autoplan.layout import Split
from runtime.call import resolve
from tests.pure.test_rules import graph_of, ids, x

CASES: list[tuple[str, tuple[Any, ...]]] = [
    ("aten.mm.default", (x(4, 6), x(6, 8))),
    ("aten.bmm.default", (x(2, 4, 6), x(2, 6, 8))),
    ("aten.addmm.default", (x(8), x(4, 6), x(6, 8))),
    ("aten.add.Tensor", (x(4, 6), x(6))),
    ("aten.mul.Tensor", (x(4, 6), x(4, 6))),
    ("aten.gelu.default", (x(4, 6),)),
    ("aten.where.self", (x(4, 6) > 0, x(4, 6), x(4, 6))),
    ("aten.sum.dim_IntList", (x(4, 6, 8), [1])),
    ("aten.sum.default", (x(4, 6),)),
    ("aten._softmax.default", (x(4, 6, 8), -1, False)),
    ("aten._log_softmax.default", (x(4, 6, 8), 1, False)),
    ("aten.native_layer_norm.default", (x(4, 6, 8), [8], x(8), x(8), 1e-5)),
    ("aten.transpose.int", (x(4, 6, 8), 0, 2)),
    ("aten.permute.default", (x(4, 6, 8), [2, 0, 1])),
    ("aten.unsqueeze.default", (x(4, 6), 1)),
    ("aten.cat.default", ([x(4, 6), x(4, 6)], 1)),
    ("aten.stack.default", ([x(4, 6), x(4, 6)], 0)),
    ("aten.gather.default", (x(4, 6), 1, ids(4, 6))),
    ("aten.topk.default", (x(4, 6), 2)),
    ("aten.embedding.default", (x(12, 8), ids(4, 6))),
    ("aten.amax.default", (x(4, 6), [1])),
    ("aten.select.int", (x(4, 6), 1, 0)),
]


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Two ranks of which one is real: sharding rules are computed, data is not exchanged."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def _distributed(args: Any, loop: Loop, mesh: DeviceMesh) -> Any:
    reads = iter(loop.reads)

    def walk(arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            where = next(reads)
            local = arg if where is None else arg.chunk(2, where.dim)[0].contiguous()
            return DTensor.from_local(local, mesh, [Replicate() if where is None else Shard(where.dim)], run_check=False)
        return [walk(item) for item in arg] if isinstance(arg, list) else arg

    return [walk(arg) for arg in args]


def _expected(where: Split | None, loop: Loop) -> Placement:
    return Shard(where.dim) if where is not None else Partial() if loop.kind == "sum" else Replicate()


@pytest.mark.parametrize(("target", "args"), CASES, ids=[target for target, _ in CASES])
def test_dtensor_agrees_with_every_plain_loop(mesh: DeviceMesh, target: str, args: tuple[Any, ...]) -> None:
    plain = [loop for loop in graph_of(target, *args).ops[0].loops if not loop.lowering]
    assert plain
    for loop in plain:
        with CommDebugMode() as comms, torch.no_grad():
            found = resolve(target)(*_distributed(args, loop, mesh))
        results = [found] if isinstance(found, DTensor) else list(found)
        assert [r.placements[0] for r in results] == [_expected(where, loop) for where in loop.writes], loop.label
        assert comms.get_total_counts() == 0, loop.label

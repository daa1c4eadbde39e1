"""Selective recomputation over gloo: of a product that ranks complete, the sum is kept; neither is made again."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from runtime.compile import compile_block
from runtime.instr import Instr, Output, Ref, TensorSpec
from runtime.mesh import Mesh, build_mesh
from runtime.program import BlockCode
from runtime.selective import contexts, keeps
from tests.dist.launch import run_ranks

ROWS, WIDE, NARROW = 6, 8, 4


def _made(name: str, columns: int, target: str, *args: Any, rows: int = ROWS, **kwargs: Any) -> Instr:
    return Instr((Output(name, TensorSpec((rows, columns), "float64")),), target, args, tuple(kwargs.items()))


def block(num_ranks: int) -> BlockCode:
    """A product divided along its contraction, summed whole and in parts of rows, and a product of each."""
    return BlockCode(
        "b",
        ("x",),
        ("w", "v", "u"),
        (
            _made("h", WIDE, "aten.tanh.default", Ref("x")),
            _made("y", NARROW, "aten.linear.default", Ref("h"), Ref("w")),
            _made("s", NARROW, "runtime.all_reduce", Ref("y"), axis="tp"),
            _made("part", NARROW, "runtime.reduce_scatter", Ref("y"), 0, 1, ROWS, 1, rows=ROWS // num_ranks, axis="tp"),
            _made("a", NARROW, "aten.gelu.default", Ref("s")),
            _made("z", NARROW, "aten.linear.default", Ref("a"), Ref("v")),
            _made("q", NARROW, "aten.linear.default", Ref("part"), Ref("u"), rows=ROWS // num_ranks),
        ),
        ("z", "q"),
        "selective",
    )


def _inputs(index: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(index)
    shapes = ((ROWS, WIDE), (NARROW, WIDE), (NARROW, NARROW), (NARROW, NARROW))
    return [torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes]


def _bytes(results: Any) -> int:
    def size(one: Any) -> int:
        if isinstance(one, torch.Tensor):
            return one.untyped_storage().nbytes()
        return sum(map(size, one)) if isinstance(one, (tuple, list)) else 0

    return size(results.made)


def _step(mesh: Mesh, code: BlockCode, *, is_checkpointed: bool) -> tuple[list[torch.Tensor], int, tuple[int, int]]:
    """Outputs and gradients; bytes kept after the forward pass; collectives of both passes."""
    recorder = mesh.axis("tp").recorder
    recorder.clear()
    inputs, held = _inputs(mesh.axis("tp").index), []

    def context_fn() -> Any:
        held.append(contexts())
        return held[-1]

    compiled = compile_block(code, mesh)
    outputs = checkpoint(compiled, *inputs, use_reentrant=False, early_stop=False, context_fn=context_fn) if is_checkpointed else compiled(*inputs)
    num_bytes, forward = _bytes(held[0][0].results) if held else 0, sum(t.count for t in recorder.traffic())
    with recorder.action("B", "backward"):
        grads = torch.autograd.grad(torch.stack([out.square().sum() for out in outputs]).sum(), inputs)
    return [*(out.detach() for out in outputs), *grads], num_bytes, (forward, sum(t.count for t in recorder.traffic()) - forward)


def _both() -> tuple[float, int, tuple[int, int], tuple[int, int]]:
    mesh = build_mesh((("tp", dist.get_world_size()),), timeout_s=30.0)
    code = block(dist.get_world_size())
    wanted, _, plainly = _step(mesh, code, is_checkpointed=False)
    found, num_bytes, moved = _step(mesh, code, is_checkpointed=True)
    return max((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True)), num_bytes, moved, plainly


def test_a_block_keeps_its_products_and_of_those_that_are_summed_the_sums() -> None:
    found = keeps(block(2))
    assert (found.kept, found.summed, found.sums) == ({"y", "z", "q"}, {"y"}, {"s", "part"})


def test_sums_are_kept_and_no_collective_runs_twice() -> None:
    parts = NARROW * 8 * ROWS // 2
    for difference, num_bytes, moved, plainly in run_ranks(_both, 2):
        assert difference == 0.0
        assert num_bytes == 2 * parts + parts + 2 * parts + parts  # s, part, z, q; not y
        assert moved == plainly == (2, 1)

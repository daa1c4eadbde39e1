"""Attention over a divided sequence against torch's own on the whole one, on gloo ranks in fp64: results, gradients, and what is sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runtime.mesh import Axis, build_mesh
from runtime.random import RandomState, use_state
from runtime.record import Traffic
from runtime.sharded.stochastic import attention
from runtime.sharded_ops import ring_attention, self_attention_ring
from tests.dist.launch import run_ranks

BATCH, HEADS, SEQ, DIM = 2, 4, 12, 6
RINGS = {"ring": ring_attention, "self": self_attention_ring}


@dataclass(frozen=True)
class Case:
    ring: str
    key_heads: int = HEADS
    is_causal: bool = False
    mask: str = ""  # "padding", "bias", "rows" that see nothing
    dropout_p: float = 0.0
    scale: float | None = None
    exact: bool = True


CASES = [
    Case(ring, **options)
    for ring in RINGS
    for options in (
        {},
        {"is_causal": True},
        {"key_heads": 2, "is_causal": True, "scale": 0.3},
        {"key_heads": 1, "mask": "padding"},
        {"mask": "bias"},
        {"mask": "rows"},
        {"key_heads": 2, "is_causal": True, "dropout_p": 0.25},
        {"mask": "padding", "dropout_p": 0.5},
    )
]


def _mask(kind: str) -> torch.Tensor | None:
    generator = torch.Generator().manual_seed(5)
    if kind == "padding":
        return torch.arange(SEQ).lt(torch.tensor([7, SEQ]).view(-1, 1, 1, 1))
    if kind == "bias":
        return torch.randn(1, HEADS, SEQ, SEQ, generator=generator, dtype=torch.float64)
    if kind == "rows":
        return (torch.rand(BATCH, 1, SEQ, SEQ, generator=generator) < 0.5).index_fill(2, torch.tensor([3, 10]), False)
    return None


def _run(cases: list[Case]) -> list[tuple[Case, dict[str, float], tuple[Traffic, ...], int]]:
    """For each case the relative distance of the output and the gradients, the traffic, and the saved bytes."""
    axis = build_mesh((("cp", dist.get_world_size()),), timeout_s=60.0).axis("cp")
    return [_one(case, axis) for case in cases]


def _one(case: Case, axis: Axis) -> tuple[Case, dict[str, float], tuple[Traffic, ...], int]:
    def make(heads: int, seed: int) -> torch.Tensor:
        return torch.randn(BATCH, heads, SEQ, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    q, k, v, grad = make(HEADS, 0), make(case.key_heads, 1), make(case.key_heads, 2), make(HEADS, 3)
    mask = _mask(case.mask)
    size, part = SEQ // axis.size, slice(SEQ // axis.size * axis.index, SEQ // axis.size * (axis.index + 1))
    state = RandomState(3, 1, 0, exact=case.exact)
    common: tuple[Any, ...] = (case.dropout_p, case.is_causal, case.scale, case.key_heads != HEADS, "op")
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    with use_state(state):
        true = attention(*whole, mask, *common, rows=(0, 1, 1))
    true.backward(grad)
    local = [x[:, :, part].clone().requires_grad_() for x in (q, k, v)]
    axis.recorder.clear()
    saved: dict[int, int] = {}
    with use_state(state), torch.autograd.graph.saved_tensors_hooks(lambda t: saved.update({t.untyped_storage().data_ptr(): t.nbytes}) or t, lambda t: t):
        own = mask if mask is None or mask.shape[2] == 1 else mask[:, :, part]
        out = RINGS[case.ring](*local, own, *common, axis=axis, axes=(axis,), windows=((2, 1, SEQ, 1),), rows=(0, 1, 1))
    with axis.recorder.action("B", "backward"):
        out.backward(grad[:, :, part])
    found = {"out": (out.detach(), true.detach()[:, :, part])}
    found |= {name: (own.grad, dense.grad[:, :, part]) for name, own, dense in zip("qkv", local, whole, strict=True)}  # type: ignore[dict-item]
    errors = {name: ((a - b).norm() / b.norm()).item() for name, (a, b) in found.items()}
    assert size * axis.size == SEQ
    return case, errors, axis.recorder.traffic(), sum(saved.values())


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_attention_over_a_divided_sequence_is_the_dense_one(num_ranks: int) -> None:
    for found in run_ranks(_run, num_ranks, CASES, timeout_s=120):
        for case, errors, sent, saved in found:
            assert max(errors.values()) < 1e-10, f"{case}: {errors}"
            whole = BATCH * case.key_heads * SEQ * DIM * 8  # bytes of all keys; of all values alike
            block = whole // num_ranks
            hops = num_ranks - 1
            if case.ring == "ring":  # forward 2 (P-1)/P, backward 4 (P-1)/P
                assert sent == (
                    Traffic("send", "cp", "backward", 4 * hops * block, 2 * hops),
                    Traffic("send", "cp", "forward", 2 * hops * block, hops),
                ), case
                masks = 0 if case.mask == "" else _mask(case.mask).nbytes  # type: ignore[union-attr]
                assert saved <= (2 * HEADS + 2 * case.key_heads) * BATCH * SEQ // num_ranks * DIM * 8 + BATCH * HEADS * SEQ // num_ranks * 8 + masks
            else:  # forward 2 (P-1)/P; backward 2 (P-1)/P and two all-reduces of 2 (P-1)/P
                assert sent == (
                    Traffic("all_reduce", "cp", "backward", 2 * whole, 2),
                    Traffic("send", "cp", "backward", 2 * hops * block, 2 * hops),
                    Traffic("send", "cp", "forward", 2 * hops * block, 2 * hops),
                ), case


def _refusals() -> list[str]:
    axis = build_mesh((("cp", dist.get_world_size()),), timeout_s=60.0).axis("cp")
    q = torch.zeros(1, 2, 4, 3, dtype=torch.float64)
    asked: list[dict[str, Any]] = [
        {"mask": torch.zeros(1, 1, 4, 8, requires_grad=True)},
        {"mask": torch.zeros(1, 1, 4, 6)},
        {"dropout_p": 0.5},
        {"is_causal": True, "q": torch.zeros(1, 2, 3, 3, dtype=torch.float64)},
    ]
    told = []
    for options in asked:
        with pytest.raises(ValueError) as error:
            ring_attention(options.pop("q", q), q, q, **options, axis=axis)
        told.append(str(error.value))
    return told


def test_what_a_divided_sequence_cannot_do_is_refused_before_anything_is_sent() -> None:
    for told in run_ranks(_refusals, 2):
        for text, words in zip(told, ("learned mask", "6 keys does not fit 2 blocks of 4", "RandomState", "found 3 and 4"), strict=True):
            assert words in text

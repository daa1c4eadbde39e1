"""A small model in plain torch, and its program written by hand for any mesh: the executor's test bench.

    h0 = embed[ids];  h_i+1 = h_i + down_i relu(up_i (h_i gain_i) + bias_i);  logits = (h_n + h0) embed^T
    loss = sum of the cross entropy over valid labels / number of valid labels

It has what breaks pipelines: a parameter tied between the first and the last stage, a skip over all stages, a frozen
parameter, a parameter that is never used, unevenly ignored labels, and micro-batches of different sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from runtime.instr import Arg, Dtype, Instr, Output, Ref, TensorSpec
from runtime.program import BlockCode, Body, Chunk, Feed, MicroBatch, Program, StageCode, Stored, Transfer

VOCAB, HIDDEN, INNER, SEQ = 11, 6, 8, 3


class Layer(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(HIDDEN, dtype=dtype) + 0.5)
        self.up = nn.Parameter(torch.randn(INNER, HIDDEN, dtype=dtype) * 0.3)
        self.bias = nn.Parameter(torch.randn(INNER, dtype=dtype) * 0.3)
        self.down = nn.Parameter(torch.randn(HIDDEN, INNER, dtype=dtype) * 0.3)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + F.linear(torch.relu(F.linear(h * self.gain, self.up, self.bias)), self.down)


class Model(nn.Module):
    def __init__(self, num_layers: int, *, dtype: torch.dtype = torch.float64, num_frozen: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Parameter(torch.randn(VOCAB, HIDDEN, dtype=dtype) * 0.5)
        self.layers = nn.ModuleList(Layer(dtype) for _ in range(num_layers))
        self.unused = nn.Parameter(torch.ones(3, dtype=dtype))
        if num_frozen:
            self.embed.requires_grad_(False)
        for layer in list(self.layers)[:num_frozen]:
            layer.requires_grad_(False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = h0 = self.embed[ids]
        for layer in self.layers:
            h = layer(h)
        logits = F.linear(h + h0, self.embed)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def make_batch(num_rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (num_rows, SEQ), generator=generator)
    labels = torch.randint(0, VOCAB, (num_rows, SEQ), generator=generator)
    labels[0], labels[1, :2], labels[-1, 0] = -100, -100, -100
    return {"ids": ids, "labels": labels}


@dataclass(frozen=True)
class Setup:
    """Which program: degrees, ZeRO stage, schedule, sizes. `num_micro_batches` is a data rank's."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    zero: int = 0
    zero_group: int | None = None
    schedule: str = "1f1b"
    num_micro_batches: int = 2
    num_rows: int = 8
    num_layers: int = 4
    num_frozen: int = 0
    recompute: Literal["none", "selective", "full"] = "none"
    dtype: str = "float64"
    stage_ranks: tuple[int, ...] = ()
    compression: str = ""
    delay: int = 0
    pieces: bool = False  # what tensor ranks hold alike is sent in pieces

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.tp

    @property
    def stages(self) -> tuple[int, ...]:
        return self.stage_ranks or tuple(range(self.pp))


def _call(name: str, spec: TensorSpec, target: str, *args: Arg, **kwargs: Arg) -> Instr:
    return Instr((Output(name, spec),), target, args, tuple(kwargs.items()))


def _split(total: int, parts: int, start: int = 0) -> tuple[MicroBatch, ...]:
    """Consecutive rows, the first parts one longer where it does not divide."""
    rows = [total // parts + (i < total % parts) for i in range(parts)]
    return tuple(MicroBatch(start + sum(rows[:i]), start + sum(rows[: i + 1])) for i in range(parts))


def build(setup: Setup, pp_index: int) -> Program:
    """The program of one "pp" coordinate."""
    s = setup
    num_stages = len(s.stages)
    micro_batches = tuple(_split(r.stop - r.start, s.num_micro_batches, r.start) for r in _split(s.num_rows, s.dp))
    all_rows = sorted({m.stop - m.start for own in micro_batches for m in own})
    ids = Feed("ids", "ids", TensorSpec((s.num_rows, SEQ), "int64"), 0)
    labels = Feed("labels", "labels", TensorSpec((s.num_rows, SEQ), "int64"), 0)
    rows = micro_batches[0][-1].stop
    preamble = BlockCode(
        "preamble",
        ("labels",),
        (),
        (
            _call("valid", TensorSpec((rows, SEQ), "bool"), "aten.ne.Scalar", Ref("labels"), -100),
            _call("own_count", TensorSpec((), "int64"), "aten.sum.default", Ref("valid"), dtype=Dtype("int64")),
            _call("count", TensorSpec((), "int64"), "runtime.all_reduce", Ref("own_count"), axis="dp"),
        ),
        ("count",),
    )
    stages = tuple(_stage(s, i, all_rows, ids, labels) for i in range(num_stages) if s.stages[i] == pp_index)
    has_loss = any(stage.loss for stage in stages)
    return Program(
        (("pp", s.pp), ("dp", s.dp), ("tp", s.tp)),
        num_stages,
        s.stages,
        stages,
        s.schedule,
        micro_batches,
        preamble if has_loss else None,
        (labels,) if has_loss else (),
        tuple(own[-1].stop - own[0].start for own in micro_batches),
        s.zero,
        s.zero_group,
        s.num_rows,
        compression=s.compression,
        delay=s.delay,
    )


def _stage(s: Setup, index: int, all_rows: list[int], ids: Feed, labels: Feed) -> StageCode:
    num_stages = len(s.stages)
    first, last = index == 0, index == num_stages - 1
    per_stage = _split(s.num_layers, num_stages)
    layers = range(per_stage[index].start, per_stage[index].stop)
    both = tuple(sorted({0, num_stages - 1}))
    stored: list[Stored] = []
    if first or last:
        stored.append(_param(s, "embed", (VOCAB, HIDDEN), (), both, grad=not s.num_frozen))
    for i in layers:
        grad = i >= s.num_frozen
        stored += [
            _param(s, f"layers.{i}.gain", (HIDDEN,), (), (index,), grad=grad, tp_partial=True),
            _param(s, f"layers.{i}.up", (INNER, HIDDEN), (Chunk("tp", 0, 1, INNER, 1),), (index,), grad=grad),
            _param(s, f"layers.{i}.bias", (INNER,), (Chunk("tp", 0, 1, INNER, 1),), (index,), grad=grad),
            _param(s, f"layers.{i}.down", (HIDDEN, INNER), (Chunk("tp", 1, 1, INNER, 1),), (index,), grad=grad),
        ]
    if first:
        stored.append(_param(s, "unused", (3,), (), (index,), grad=True))
    bodies = []
    for rows in all_rows:
        spec = TensorSpec((rows, SEQ, HIDDEN), s.dtype)
        receives, sends = [], []
        cut = next((Chunk("tp", dim, 1, size, 1) for dim, size in enumerate(spec.shape) if size % s.tp == 0), None) if s.pieces else None
        h0_cut = cut if s.stages[0] != s.stages[-1] else None
        trains = [s.num_frozen <= layers.start - 1 if s.num_frozen else True]
        if not first:
            receives.append(Transfer(f"h{layers.start}", index - 1, index, spec, trains[0], cut))
        if not last:
            sends.append(Transfer(f"h{layers.stop}", index, index + 1, spec, not s.num_frozen or s.num_frozen <= layers.stop - 1, cut))
        if last and num_stages > 2:
            receives.append(Transfer("h0", 0, index, spec, not s.num_frozen, h0_cut))
        if first and num_stages > 2:
            sends.append(Transfer("h0", 0, num_stages - 1, spec, not s.num_frozen, h0_cut))
        if num_stages == 2:
            (receives if last else sends).append(Transfer("h0", 0, 1, spec, not s.num_frozen, h0_cut))
        blocks = [_embed_block(spec)] if first else []
        blocks += [_layer_block(s, i, spec) for i in layers]
        if last:
            blocks.append(_head_block(f"h{s.num_layers}", spec))
        bodies.append(Body(rows, tuple(blocks), tuple(receives), tuple(sends)))
    feeds = ((ids,) if first else ()) + ((labels,) if last else ())
    return StageCode(index, tuple(stored), feeds, tuple(bodies), "loss" if last else None, ("dp",) if last else (), (), ("logits",) if last else ())


def _param(s: Setup, fqn: str, shape: tuple[int, ...], chunks: tuple[Chunk, ...], stages: tuple[int, ...], *, grad: bool, tp_partial: bool = False) -> Stored:
    return Stored(fqn, fqn, (), "parameter", TensorSpec(shape, s.dtype), chunks, grad, ("tp", "dp") if tp_partial else ("dp",), stages)


def _embed_block(hidden: TensorSpec) -> BlockCode:
    return BlockCode("embed", ("ids",), ("embed",), (_call("h0", hidden, "aten.embedding.default", Ref("embed"), Ref("ids")),), ("h0",))


def _layer_block(s: Setup, i: int, hidden: TensorSpec) -> BlockCode:
    h, p = f"h{i}", f"layers.{i}."
    inner = TensorSpec((*hidden.shape[:-1], INNER // s.tp), hidden.dtype)
    return BlockCode(
        f"layers.{i}",
        (h,),
        (p + "gain", p + "up", p + "bias", p + "down"),
        (
            _call(f"v{i}", hidden, "runtime.vary", Ref(h), axis="tp"),
            _call(f"g{i}", hidden, "aten.mul.Tensor", Ref(f"v{i}"), Ref(p + "gain")),
            _call(f"u{i}", inner, "aten.linear.default", Ref(f"g{i}"), Ref(p + "up"), Ref(p + "bias")),
            _call(f"r{i}", inner, "aten.relu.default", Ref(f"u{i}")),
            _call(f"d{i}", hidden, "aten.linear.default", Ref(f"r{i}"), Ref(p + "down")),
            _call(f"a{i}", hidden, "runtime.all_reduce", Ref(f"d{i}"), axis="tp"),
            _call(f"h{i + 1}", hidden, "aten.add.Tensor", Ref(h), Ref(f"a{i}")),
        ),
        (f"h{i + 1}",),
        s.recompute,
    )


def _head_block(h: str, hidden: TensorSpec) -> BlockCode:
    rows, dtype = hidden.shape[0], hidden.dtype
    return BlockCode(
        "head",
        (h, "h0", "labels", "count"),
        ("embed",),
        (
            _call("hs", hidden, "aten.add.Tensor", Ref(h), Ref("h0")),
            _call("logits", TensorSpec((rows, SEQ, VOCAB), dtype), "aten.linear.default", Ref("hs"), Ref("embed")),
            _call("flat", TensorSpec((rows * SEQ, VOCAB), dtype), "aten.view.default", Ref("logits"), (-1, VOCAB)),
            _call("flat_labels", TensorSpec((rows * SEQ,), "int64"), "aten.view.default", Ref("labels"), (-1,)),
            _call("sum", TensorSpec((), dtype), "aten.cross_entropy_loss.default", Ref("flat"), Ref("flat_labels"), None, 2, -100),
            _call("loss", TensorSpec((), dtype), "aten.div.Tensor", Ref("sum"), Ref("count")),
        ),
        ("logits", "loss"),
    )

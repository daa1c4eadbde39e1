"""A program as text: everything that a class of ranks runs in a step, readable, and back (`parse(text(p)) == p`).

One statement a line; nested ones are indented. Names are %name, arguments Python-like literals, "#" starts a comment. Comments
tell what follows from the statements: the collectives of the backward pass, the schedule, FSDP2's groups, the deferred sums.

    program 1
    axes pp=2 dp=2 tp=1
    stages 2 ranks=0,1 schedule=1f1b zero=3 zero_group=none rows=8
    micro_batches 0:2 2:4 | 4:6 6:8
    stage 0 loss=none loss_partial=() ...
      parameter %w "layers.0.up" float32[8, 6] trainable stages=0 partial=dp chunks=tp(0, 1, 8, 1) aliases=()
      feed %ids "ids" int64[8, 3] batch_dim=0
      body rows=2
        receive %h float32[2, 3, 6] 0 -> 1 grad
        block "layers.0" recompute=none
          in %h
          stored %w
          %y: float32[2, 3, 6] = aten.linear.default(%h, %w)
          out %y
        send %y float32[2, 3, 6] 1 -> 2 grad
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from runtime.flow import Flow, flow
from runtime.instr import Arg, Dtype, Instr, Other, Ref, TensorSpec
from runtime.instr_traffic import backward_uses, forward_uses, gradient_passes
from runtime.program import BlockCode, Chunk, Feed, MicroBatch, Program, Spread, StageCode, Stored, Transfer
from runtime.schedule import schedule
from runtime.stripes import reduces_itself
from runtime.traffic import body_specs, fsdp_groups, is_split_backward, sharding

_PLAIN = re.compile(r"[A-Za-z0-9_.\-/]+")


def text(program: Program) -> str:
    """The program as text."""
    return "\n".join(_program(program)) + "\n"


# -- values -------------------------------------------------------------------------------------------------------------


def name(value: str) -> str:
    return f"%{value}" if _PLAIN.fullmatch(value) else f"%{json.dumps(value)}"


def names(values: tuple[str, ...]) -> str:
    return " ".join(name(value) for value in values)


def spec(value: TensorSpec | None) -> str:
    return "-" if value is None else f"{value.dtype}[{', '.join(map(str, value.shape))}]"


def arg(value: Arg) -> str:
    if isinstance(value, Ref):
        return name(value.name)
    if isinstance(value, Dtype):
        return f"@dtype:{value.name}"
    if isinstance(value, Other):
        return f"@{value.kind}:{value.text}"
    if isinstance(value, tuple):
        return f"({', '.join(map(arg, value))}{',' if len(value) == 1 else ''})"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def words(values: tuple[str, ...] | tuple[int, ...]) -> str:
    """A list inside a field; () where there is none."""
    return ",".join(map(str, values)) or "()"


def _optional(value: object) -> str:
    return "none" if value is None else str(value)


# -- statements ---------------------------------------------------------------------------------------------------------


def _program(p: Program) -> Iterator[str]:
    yield "program 1"
    yield "axes " + " ".join(f"{axis}={size}" for axis, size in p.axes)
    stages = f"stages {p.num_stages} ranks={words(p.stage_ranks)} schedule={p.schedule} zero={p.zero}"
    mode = f"{f' compression={json.dumps(p.compression)}' if p.compression else ''}{f' delay={p.delay}' if p.delay else ''}"
    yield f"{stages} zero_group={_optional(p.zero_group)} rows={p.global_rows}{mode}"
    if p.sync != "allreduce" or p.workers:
        yield f"sync {p.sync} servers={words(p.servers)} workers={words(p.workers)} staleness={_optional(p.staleness)}"
    yield f"micro_batches {_micro_batches(p.micro_batches)}"
    for mesh in p.meshes:
        yield f"mesh {mesh.first} " + " ".join(f"{axis}={size}" for axis, size in mesh.axes)
        yield f"  micro_batches {_micro_batches(mesh.micro_batches)}"
    yield f"preamble rows={words(p.preamble_rows)}"
    yield from (f"  {_feed(feed)}" for feed in p.preamble_feeds)
    if p.preamble is not None:
        yield from (f"  {line}" for line in _block(p.preamble, None, {}, dict(p.axes)))
    own = {stage.index for stage in p.stages}
    for rank, actions in enumerate(schedule(p.schedule, p.stage_ranks, p.num_micro_batches)):
        if own & {action.stage for action in actions}:
            yield f"# actions of pp {rank}: {' '.join(map(str, actions))}"
    for stage in p.stages:
        yield from _stage(p, stage)


def _stage(p: Program, s: StageCode) -> Iterator[str]:
    loss = "none" if s.loss is None else name(s.loss)
    yield f"stage {s.index} loss={loss} loss_partial={words(s.loss_partial)}"
    yield from (f"  {_stored(stored)}" for stored in s.stored)
    yield from (f"  {_feed(feed)}" for feed in s.feeds)
    yield from (f"  update {name(buffer)} {name(value)}" for buffer, value in s.updates)
    yield from (f"  predict {name(value)}" for value in s.predictions)
    yield from (f"  # {line}" for line in _once_a_step(p, s))
    for body in s.bodies:
        yield f"  body rows={body.rows}"
        found = flow(s, body)
        specs = body_specs(s, body, dict(p.axes))
        yield from (f"    receive {_transfer(t)}" for t in body.receives)
        for block in body.blocks:
            yield from (f"    {line}" for line in _block(block, found, specs, dict(p.axes)))
        yield from (f"    send {_transfer(t)}" for t in body.sends)


def _once_a_step(p: Program, s: StageCode) -> Iterator[str]:
    is_sharded = sharding(p) > 1
    for group in fsdp_groups(p, s) if is_sharded else ():
        owner = "the stage" if group.block is None else group.block
        often = p.zero == 3 and not is_split_backward(p)
        passes = "the first forward" if not often else "each forward and backward" if group.has_backward else "each forward"
        yield f"fsdp {owner}: all_gather over dp, {group.weight_bytes} bytes, before {passes}"
        if group.grad_bytes and not reduces_itself(p):
            when = "the last backward" if p.zero == 1 or is_split_backward(p) else "each backward"
            yield f"fsdp {owner}: reduce_scatter over dp, {group.grad_bytes} bytes, after {when}"
    arrives = flow(s, s.bodies[0]).arrives
    sizes = dict(p.axes)
    for stored in s.stored:
        if stored.kind != "parameter" or not stored.requires_grad:
            continue
        axes = [a for a in stored.partial if sizes.get(a, 1) > 1 and not (is_sharded and a == "dp")] if stored.name in arrives else []
        if axes:
            yield f"once a step: gradient of {name(stored.name)} summed over {', '.join(axes)}"
        if len(stored.stages) > 1:
            yield f"once a step: gradient of {name(stored.name)} summed over stages {words(stored.stages)}"


def _stored(s: Stored) -> str:
    chunks = " ".join(map(_chunk, s.chunks))
    aliases = f" aliases={json.dumps(list(s.aliases), separators=(',', ':'))}" if s.aliases else ""
    trainable = f"{f' master={s.master}' if s.master else ''}{' trainable' if s.requires_grad else ''}"
    return f"{s.kind} {name(s.name)} {json.dumps(s.fqn)} {spec(s.spec)}{trainable} stages={words(s.stages)} partial={words(s.partial)}{aliases}" + (
        f" chunks {chunks}" if chunks else ""
    )


def _chunk(c: Chunk) -> str:
    return f"{c.axis}({c.dim}, {c.outer}, {c.size}, {c.inner})"


def _feed(feed: Feed) -> str:
    return f"feed {name(feed.name)} {json.dumps(feed.path)} {spec(feed.spec)} batch_dim={_optional(feed.batch_dim)}"


def _micro_batches(dealt: tuple[tuple[MicroBatch, ...], ...]) -> str:
    return " | ".join(" ".join(f"{m.start}:{m.stop}" for m in own) for own in dealt)


def _transfer(t: Transfer) -> str:
    pieces = f" pieces {_chunk(t.pieces)}" if t.pieces is not None else ""
    return f"{name(t.value)} {spec(t.spec)} {t.src} -> {t.dst}{' grad' if t.grad else ''}{pieces}{_spread(t.spread) if t.spread is not None else ''}"


def _spread(s: Spread) -> str:
    divided = " ".join(f"{axis}={factor}" for axis, factor in s.divided)
    return f" spread={words(s.sizes)} partial={words(s.partial)} vary={words(s.vary)} divided {divided}".rstrip()


def _block(block: BlockCode, found: Flow | None, specs: Mapping[str, TensorSpec], sizes: Mapping[str, int]) -> Iterator[str]:
    yield f"block {json.dumps(block.name)} recompute={block.recompute}"
    yield f"  in {names(block.inputs)}".rstrip()
    yield f"  stored {names(block.stored)}".rstrip()
    for instr in block.instrs:
        yield f"  {_instr(instr)}{_comment(instr, found, specs, sizes)}"
    yield f"  out {names(block.outputs)}".rstrip()


def _instr(i: Instr) -> str:
    outputs = ", ".join(f"{name(o.name)}: {spec(o.spec)}" for o in i.outputs)
    values = [*map(arg, i.args), *(f"{key}={arg(value)}" for key, value in i.kwargs)]
    return f"{outputs} {'=*' if i.is_sequence else '='} {i.target}({', '.join(values)})"


def _comment(i: Instr, found: Flow | None, specs: Mapping[str, TensorSpec], sizes: Mapping[str, int]) -> str:
    if not i.target.startswith("runtime."):
        return ""
    uses = [("forward", use) for use in forward_uses(i, {**specs, **{o.name: o.spec for o in i.outputs if o.spec}}, sizes)]
    if found is not None and gradient_passes(i, found):
        uses += [("backward", use) for use in backward_uses(i, specs, sizes, found.needs)]
    told = ", ".join(f"{phase} {use.kind} over {use.axis} {use.num_bytes} bytes" for phase, use in uses)
    return f"  # {told}" if told else ""

"""Stages from choices: block choices, boundaries and a way of saving memory become the loads of the replay.

A recomputed block keeps what enters it instead of what its operators save, runs its forward pass again before its
backward pass, and holds what it saves for that moment alone. Recomputed selectively (runtime/selective.py) it also keeps the results
of its products, or their sums, and does not repeat them.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autoplan.choose import Chosen, Outline
from autoplan.datasums import element_bytes
from autoplan.exchanges import exchanges
from autoplan.gridprices import weight_parts
from autoplan.holding import held_pairs, num_stages_held
from autoplan.layout import WHOLE, Split
from autoplan.load import BUCKET_BYTES, Pass, Send, StageLoad, Traffic
from autoplan.localcontext import LocalContext, resting_bytes
from autoplan.price import LocalGraph, cut, itemsize
from autoplan.problem import BlockPoint, Use
from autoplan.replay import Step
from autoplan.schemes import ROLES, feature_axes, row_axes
from autoplan.transit import AXIS, gather_s, is_gathered, pieces_dim
from costmodel.memory import Widths
from runtime.quantiser import CODECS
from runtime.stripes import layout


@dataclass(frozen=True)
class BlockLoad:
    """One block of a pattern under a choice, with and without recomputation. `data` are the passes' collectives on the data axis and on
    contexts, `deferred` the gradients (axis, bytes) that contexts sum once a step."""

    point: BlockPoint
    enter_bytes: int
    leave_bytes: int
    recompute: str  # "none", "selective", "full"
    data: tuple[Traffic, ...]
    data_s: tuple[float, float]  # forward, backward
    deferred: tuple[tuple[str, int], ...] = ()
    compressed_bytes: int = 0  # of all columns of its gradients, where they are compressed

    @property
    def recomputed(self) -> bool:
        return self.recompute != "none"

    @property
    def forward(self) -> Pass:
        return Pass(self.point.forward_s - self.point.forward_move_s, self.point.forward_move_s + self.data_s[0])

    @property
    def backward(self) -> Pass:
        return Pass(self.point.backward_s - self.point.backward_move_s, self.point.backward_move_s + self.data_s[1])

    @property
    def again(self) -> Pass:
        """What is run again before the backward pass."""
        if self.recompute == "none":
            return Pass()
        if self.recompute == "full":
            return self.forward
        return Pass(self.forward.compute_s - self.point.kept_s, self.forward.collective_s - self.point.kept_move_s)

    @property
    def repeated_uses(self) -> Counter[Use]:
        """Collectives of the forward pass that run again."""
        if self.recompute == "none":
            return Counter()
        once = Counter(self.point.kept_uses if self.recompute == "selective" else ())
        return Counter(use for use in self.point.uses if use.phase == "forward") - once

    @property
    def slot_s(self) -> float:
        return self.forward.seconds + self.backward.seconds + self.again.seconds

    @property
    def saved_bytes(self) -> int:
        if self.recompute == "none":
            return self.point.saved_bytes
        return self.enter_bytes + (self.point.kept_bytes if self.recompute == "selective" else 0)

    @property
    def transient_bytes(self) -> int:
        return {"none": 0, "selective": self.point.repeated_bytes, "full": self.point.saved_bytes}[self.recompute]

    @property
    def flops(self) -> int:
        """Of both passes, recomputation included."""
        again = {"none": 0, "selective": self.point.flops - self.point.kept_flops, "full": self.point.flops}[self.recompute]
        return 3 * self.point.flops + again


class Work:
    """All blocks of a model under one choice. `recompute` says how its layers are recomputed, all alike; `with_modes`, each by itself."""

    def __init__(self, outline: Outline, local: LocalGraph, chosen: Chosen, recompute: str, step: Step) -> None:
        self.outline = outline
        self.step, self.axes = step, step.axes
        self.feature_axis = (*(name for name, _ in feature_axes(step.axes)), "tp")[0]
        self.local = local
        self.contexts = tuple(context for context in local.contexts if isinstance(context, LocalContext))
        self.chosen = chosen
        self.recompute = recompute
        self.modes: tuple[str, ...] = tuple(self._way(block.pattern, recompute) for block in outline.graph.blocks)
        self._priced: dict[str, BlockLoad] = {}
        self._alike: dict[tuple[tuple[str, str], ...], StageLoad] = {}  # (pattern, way) of a stage's blocks -> what they add up to

    def with_modes(self, modes: tuple[str, ...]) -> Work:
        """The same choice, each block of the graph recomputed as `modes` says, where its pattern may be."""
        other = copy(self)
        other.modes = tuple(self._way(block.pattern, way) for block, way in zip(self.outline.graph.blocks, modes, strict=True))
        other.__dict__.pop("blocks", None)
        return other

    def _way(self, pattern: str, way: str) -> str:
        return way if self.outline.is_recomputed(pattern) else "none"

    def load(self, pattern: str, way: str) -> BlockLoad:
        """A block of a pattern, recomputed so."""
        if pattern not in self._priced:
            self._priced[pattern] = self._block(pattern)
        return replace(self._priced[pattern], recompute=self._way(pattern, way))

    def _block(self, pattern: str) -> BlockLoad:
        enters, leaves = self.outline.boundary_of(self.outline.examples[pattern], self.chosen.boundary)
        kept = {name: layout for name, layout in enters.items() if self.outline.graph.values[name].requires_grad}
        size = lambda items: sum(self._bytes(name, layout) for name, layout in items)  # noqa: E731
        indices = self.outline.indices(self.outline.graph.blocks[self.outline.examples[pattern]])
        given = self.outline.batch.preamble_outputs
        found = exchanges(self.local, indices, given, self.axes)
        moved, data_s, point = found.traffic, (found.forward_s, found.backward_s), self.chosen.point(pattern)
        deferred = tuple((context.name, resting_bytes(context, self.local, point.rests)) for context in self.contexts)
        sent = self._compressed_bytes(point, self.step.degree("dp"))
        return BlockLoad(point, size(kept.items()), size(leaves), "none", moved, data_s, deferred, sent)

    def _compressed_bytes(self, point: BlockPoint, num_ranks: int) -> int:
        compression, graph = self.step.sums.compression, self.outline.graph
        if not compression or num_ranks == 1:
            return 0
        rests = {name: rest for name, rest in point.rests.items() if graph.values[name].requires_grad}
        shapes = [cut(graph.values[name].spec.shape, rest, self.local.degree) for name, rest in rests.items()]
        widths = [max(4, itemsize(graph.at_rest(name))) for name in rests]
        return layout(CODECS[compression], shapes, widths, num_ranks, zero=self.step.zero).total_bytes

    def _bytes(self, name: str, layout: object) -> int:
        return self.local.num_bytes(name) // (self.local.degree if isinstance(layout, Split) else 1)

    def boundary_bytes(self, name: str) -> int:
        """Bytes on one rank of a value between blocks."""
        return self._bytes(name, self.outline.layout(name, self.chosen.boundary))

    def in_pieces(self, name: str, dst: int) -> Send:
        """A value that goes to another pipeline rank, in pieces where it can be."""
        num_bytes, grad = self.boundary_bytes(name), self.outline.graph.values[name].requires_grad
        ranks = self.local.degree if self.feature_axis == AXIS and self.outline.layout(name, self.chosen.boundary) == WHOLE and grad else 1
        divides = pieces_dim(self.local.shape(name), ranks) is not None
        return Send(dst, num_bytes // ranks, grad, num_bytes) if divides else Send(dst, num_bytes, grad)

    @cached_property
    def blocks(self) -> tuple[BlockLoad, ...]:
        """The blocks that take part in a step, in order."""
        graph = self.outline.graph
        known: dict[tuple[str, str], BlockLoad] = {}
        for number in self.outline.blocks:
            pattern, way = graph.blocks[number].pattern, self.modes[number]
            if (pattern, way) not in known:
                known[pattern, way] = self.load(pattern, way)
        return tuple(known[graph.blocks[number].pattern, self.modes[number]] for number in self.outline.blocks)

    def tail_per_byte_s(self, seconds: float) -> np.ndarray:
        """Seconds of each block's share of what follows the last backward."""
        return np.array([seconds * block.point.trained_bytes for block in self.blocks])

    def fits(self, step: Step, width: Widths, limit_bytes: int) -> list[np.ndarray]:
        """fits[j][a, b]: stage j can hold blocks [a, b) (rankmemory.stage_memory, never below it), in an equal share of its rank's memory
        where the rank has several stages."""
        saved, put_off = _spans([b.saved_bytes for b in self.blocks]), self._put_off(step)
        rest = self._resting(step, width) + max(b.transient_bytes for b in self.blocks)
        share = limit_bytes / num_stages_held(step.stage_ranks)  # of each stage of a rank that has several
        known: dict[tuple[tuple[int, int], ...], np.ndarray] = {}
        found = []
        for counts in held_pairs(step.schedule, step.stage_ranks, step.num_micro_batches):
            if counts not in known:
                known[counts] = np.all([rest + num_saved * saved + num_put_off * put_off <= share for num_saved, num_put_off in counts], axis=0)
            found.append(known[counts])
        return found

    def again_s(self, ladders: Mapping[str, tuple[BlockLoad, ...]], step: Step, width: Widths, limit_bytes: int) -> list[np.ndarray]:
        """again_s[j][a, b]: seconds of a micro-batch that stage j with blocks [a, b) runs again so that it fits, each block as far up its pattern's ladder
        as it must be (autoplan/raising.py); infinity where it cannot. Memory is weighed as by `fits`."""
        patterns = [self.outline.graph.blocks[number].pattern for number in self.outline.blocks]
        rungs = [[ladders[p][min(level, len(ladders[p]) - 1)] for p in patterns] for level in range(max(map(len, ladders.values())))]
        saved = [_spans([b.saved_bytes for b in blocks]) for blocks in rungs]
        again = [_spans([b.again.seconds for b in blocks]) for blocks in rungs]
        transient = [max(b.transient_bytes for b in blocks) for blocks in rungs]
        number = np.maximum(1.0, _spans([int(len(ladders[p]) > 1) for p in patterns]))
        rest, put_off = self._resting(step, width), self._put_off(step)
        share = limit_bytes / num_stages_held(step.stage_ranks)
        found = []
        for counts in held_pairs(step.schedule, step.stage_ranks, step.num_micro_batches):
            slowest = np.zeros_like(rest)
            for num_saved, num_put_off in counts:
                fixed = rest + num_put_off * put_off - share
                seconds = np.where(fixed + num_saved * saved[0] <= 0.0, 0.0, np.inf)
                for level in range(1, len(rungs)):
                    over = fixed + num_saved * saved[level - 1] + transient[level]
                    part = np.ceil(over * number / np.maximum(num_saved * (saved[level - 1] - saved[level]), 1e-30)) / number
                    mixed = again[level - 1] + np.clip(part, 0.0, 1.0) * (again[level] - again[level - 1])
                    seconds = np.minimum(seconds, np.where(part <= 1.0, mixed, np.inf))
                slowest = np.maximum(slowest, seconds)
            found.append(slowest)
        return found

    def _put_off(self, step: Step) -> np.ndarray:
        spans = _spans([b.point.put_off_bytes for b in self.blocks])
        return spans if step.is_split else 0 * spans

    def _resting(self, step: Step, width: Widths) -> np.ndarray:
        """Bytes of blocks [a, b), one stage, but for what their micro-batches hold and make again."""
        trained = _spans([b.point.trained_elements for b in self.blocks])
        frozen = _spans([b.point.parameter_elements - b.point.trained_elements for b in self.blocks])
        n, zero = step.shards, (min(step.zero, 1) if step.is_split else step.zero) if step.shards > 1 else 0
        shard = width.parameter / n if zero in (1, 2) and width.master == 0 else 0
        states = (
            width.parameter / (n if zero == 3 else 1)
            + width.gradient / (n if zero >= 2 else 1)
            + (width.master + width.optimizer) / (n if zero >= 1 else 1)
            + shard
            + element_bytes(step.sums, width, step.zero, step.degree("dp"))
        )
        largest = max(b.point.parameter_elements for b in self.blocks) * width.parameter if zero == 3 else 0
        bucket = BUCKET_BYTES * (step.degree("dp") if step.sync == "ps" else 1) if zero == 0 and step.degree("dp") > 1 else 0
        received = 2 * max(b.leave_bytes for b in self.blocks) if step.degree("pp") > 1 else 0
        fixed = largest + bucket + received + self.buffer_bytes(0, len(self.outline.graph.blocks))
        wires = 2 * _spans([b.compressed_bytes for b in self.blocks])
        return wires + trained * states + frozen * (width.parameter / (n if zero == 3 else 1) + shard + width.master / n) + fixed

    def buffer_bytes(self, start: int, stop: int) -> int:
        """Bytes of buffers and constants that graph blocks [start, stop) read."""
        found = self.outline.buffers.items()
        return sum(self.local.num_bytes(name) for name, blocks in found if any(start <= number < stop for number in blocks))

    def ways(self, starts: tuple[int, ...], stage_ranks: tuple[int, ...]) -> Iterator[tuple[StageLoad, ...]]:
        """`stage_loads` with values in pieces where that is faster by itself; then, where there are some, with all values whole."""
        loads = self.stage_loads(starts, stage_ranks)
        yield loads
        if any(send.gathered_bytes for load in loads for send in load.sends):
            yield self._loads(starts, stage_ranks, self._sends(starts, stage_ranks, gathers=False))

    def stage_loads(self, starts: tuple[int, ...], stage_ranks: tuple[int, ...]) -> tuple[StageLoad, ...]:
        """Loads of the stages that begin at graph blocks `starts` (the last entry is the end), stage s on rank `stage_ranks[s]`."""
        return self._loads(starts, stage_ranks, self._sends(starts, stage_ranks, gathers=True))

    def _loads(self, starts: tuple[int, ...], stage_ranks: tuple[int, ...], sends: Mapping[int, tuple[Send, ...]]) -> tuple[StageLoad, ...]:
        ranks = {starts[j]: rank for j, rank in enumerate(stage_ranks)}
        return tuple(self._stage(j, a, b, ranks, sends) for j, (a, b) in enumerate(itertools.pairwise(starts)))

    def _stage(self, index: int, start: int, stop: int, rank_of_start: Mapping[int, int], sends: Mapping[int, tuple[Send, ...]]) -> StageLoad:
        graph, numbers = self.outline.graph, self.outline.blocks
        within = slice(bisect_left(numbers, start), bisect_left(numbers, stop))
        alike = tuple((graph.blocks[n].pattern, self.modes[n]) for n in numbers[within])
        if alike not in self._alike:
            self._alike[alike] = self._of_blocks(self.blocks[within])
        found, extra = self._alike[alike], self._repeated(start, stop)
        forward, backward, traffic = found.forward, found.backward, found.traffic
        entering = (send for own in sends.values() for send in own if send.dst == index)
        gathers = [("forward", send) for send in entering] + [("backward", send) for send in sends.get(index, ()) if send.grad]
        for phase, send in gathers:
            if send.gathered_bytes:
                moved = Pass(0.0, gather_s(self.local.pricer, self.step, send.gathered_bytes))
                forward, backward = (forward.plus(moved), backward) if phase == "forward" else (forward, backward.plus(moved))
                traffic = (*traffic, Traffic("all_gather", AXIS, phase, send.gathered_bytes))
        return replace(
            found,
            index=index,
            first_block=graph.blocks[start].name,
            last_block=graph.blocks[stop - 1].name,
            forward=forward,
            backward=backward,
            sends=sends.get(index, ()),
            parameter_elements=found.parameter_elements - extra[0],
            trained_elements=found.trained_elements - extra[1],
            buffer_bytes=self.buffer_bytes(start, stop),
            traffic=traffic,
            tied_bytes=self._tied_bytes(start, stop, rank_of_start),
        )

    def _of_blocks(self, blocks: Sequence[BlockLoad]) -> StageLoad:
        """The load of a stage of such blocks, but for what depends on which they are."""
        forward, backward, recompute = Pass(), Pass(), Pass()
        traffic: list[Traffic] = []
        deferred: list[tuple[str, int]] = []
        for block in blocks:
            p = block.point
            forward, backward, recompute = forward.plus(block.forward), backward.plus(block.backward), recompute.plus(block.again)
            traffic += block.data
            traffic += [replace(use, phase="backward") for use in block.data if use.phase == "forward" and block.recomputed]
            deferred += block.deferred
            for use in p.uses:
                if use.phase == "reduce":
                    deferred.append((use.axis or self.feature_axis, use.num_bytes))
                else:
                    traffic.append(Traffic(use.kind, use.axis or self.feature_axis, use.phase, use.num_bytes))
            traffic += [Traffic(use.kind, use.axis or self.feature_axis, "backward", use.num_bytes) for use in block.repeated_uses.elements()]
            summed = p.trained_bytes if self.outline.graph.precision is None else 4 * p.trained_elements  # gradients of masters are fp32
            deferred += [(name, summed) for name, _ in row_axes(self.axes) if ROLES[name] == "rows"]
        parameter_bytes = sum(b.point.parameter_bytes for b in blocks)
        parameter_elements = sum(b.point.parameter_elements for b in blocks)
        return StageLoad(
            index=0,
            first_block="",
            last_block="",
            forward=forward,
            backward=backward,
            recompute=recompute,
            sends=(),
            parameter_elements=parameter_elements,
            trained_elements=sum(b.point.trained_elements for b in blocks),
            parameter_width=max(1, parameter_bytes // max(1, parameter_elements)),
            units=tuple(b.point.parameter_elements for b in blocks if b.point.parameter_elements),
            buffer_bytes=0,
            saved_bytes=sum(b.saved_bytes for b in blocks),
            transient_bytes=max(b.transient_bytes for b in blocks) if blocks else 0,
            flops=sum(b.flops for b in blocks),
            traffic=tuple(traffic),
            deferred=tuple(deferred),
            compressed_bytes=sum(b.compressed_bytes for b in blocks),
            num_trained=sum(self.outline.graph.values[name].requires_grad for b in blocks for name in b.point.rests),
            tied_bytes=0,
            weights_s=sum(b.point.weights_s for b in blocks),
            put_off_bytes=sum(b.point.put_off_bytes for b in blocks),
        )

    def _sends(self, starts: tuple[int, ...], stage_ranks: tuple[int, ...], *, gathers: bool) -> Mapping[int, tuple[Send, ...]]:
        """Stage -> what it sends to other stages. `gathers`: in pieces where that is faster by itself."""
        graph = self.outline.graph
        stage_of = {n: j for j, (a, b) in enumerate(itertools.pairwise(starts)) for n in range(a, b)}
        entering: dict[int, list[tuple[int, Send]]] = {}
        for name, readers in self.outline.crossing.items():
            home = stage_of[self.outline.block_of[graph.producer[name]]]
            reading = [j for j in dict.fromkeys(stage_of[r] for r in readers) if j != home]
            for dst in reading:
                earlier = (j for j in reading if j < dst and stage_ranks[j] == stage_ranks[dst])
                src = home if stage_ranks[home] == stage_ranks[dst] else min(earlier, default=home)  # which hands it on
                alike = Send(dst, self.boundary_bytes(name), graph.values[name].requires_grad)
                entering.setdefault(dst, []).append((src, alike if stage_ranks[src] == stage_ranks[dst] else self.in_pieces(name, dst)))
        found: dict[int, list[Send]] = {}
        for sends in entering.values():
            in_pieces = gathers and is_gathered(self.local.pricer, self.step, sends)
            for src, send in sends:
                found.setdefault(src, []).append(send if in_pieces else Send(send.dst, send.received_bytes, send.grad))
        return {stage: tuple(sends) for stage, sends in found.items()}

    def _local_elements(self, name: str) -> int:
        value = self.outline.graph.values[name]
        number = self.outline.tied[name][0]
        rest = self.chosen.point(self.outline.graph.blocks[number].pattern).rests.get(name)
        count = 1
        for size in value.spec.shape:
            count *= size
        return count // weight_parts(self.local, name) // (self.local.degree if isinstance(rest, Split) else 1)

    def _repeated(self, start: int, stop: int) -> tuple[int, int]:
        """Elements that blocks [start, stop) count more than once because several of them use a parameter."""
        total = trained = 0
        for name, blocks in self.outline.tied.items():
            again = sum(start <= n < stop for n in blocks) - 1
            if again > 0:
                total += again * self._local_elements(name)
                trained += again * self._local_elements(name) * self.outline.graph.values[name].requires_grad
        return total, trained

    def _tied_bytes(self, start: int, stop: int, rank_of_start: Mapping[int, int]) -> int:
        """Bytes of the gradients of blocks [start, stop) that are summed with those of other ranks."""

        def rank(number: int) -> int:
            return rank_of_start[max(s for s in rank_of_start if s <= number)]

        total = 0
        for name, blocks in self.outline.tied.items():
            is_shared = any(start <= n < stop for n in blocks) and len({rank(n) for n in blocks}) > 1
            if is_shared and self.outline.graph.values[name].requires_grad:
                total += self._local_elements(name) * 4
        return total


def _spans(values: Sequence[float]) -> np.ndarray:
    ends = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=float))])
    return ends[None, :] - ends[:, None]

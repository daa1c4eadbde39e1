"""The problem of one block: which option each operator takes, what it costs, and what a choice adds up to.

For one block, p ranks on the tensor axis, `rows` of the batch on a rank and fixed layouts at the block's boundary.

    x[o]       the option of operator o (autoplan.graph.options without those that divide the batch factor)
    S(v)       the layout in which value v lies: what x of its producer writes; for a value from outside, its
               boundary layout; inputs, buffers and constants rest WHOLE
    D(v)       the set of layouts in which v is read, by operators and by the block's boundary
    rest(w)    of a parameter: Split s if every read of it is s, else WHOLE

A choice costs, for m micro-batches a step,

    time     = m * (sum over o of op[o, x[o]] + sum over v, d in D(v) of move[v, S(v), d]) + sum over w of deferred[w]
    P        = sum over w of bytes(w) / (p if rest(w) is Split else 1)
    A        = sum over saved (v, divided) of bytes(v) / (p if divided else 1) + sum over o of extra[o, x[o]]

Recomputed selectively, a block runs its forward pass again but for what operators keep (`Kept`). Of a kept result that lies PARTIAL its sums are kept,
each form in which it is read once, and not made again (runtime/selective.py).

`move` is the forward and backward collective of one conversion: one for all readers of v in the same layout. A parameter
that rests WHOLE and is only read VARY has its gradient reduced once a step (`deferred`), otherwise with every micro-batch.
No rank repeats another one's work: of an operator with at least 1 % of the block's FLOPs, only options that divide them are
choices, where there are any. A saved value counts once for each form (divided or not) that some operator keeps; what rests anyway is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autoplan.graph import Option
from autoplan.layout import PARTIAL, VARY, WHOLE, Kind, Layout, Split
from costmodel.opkey import CollectiveKind


@dataclass(frozen=True, slots=True)
class Use:
    """A collective of the tensor axis in one pass of one micro-batch (or, phase "reduce", of a step)."""

    kind: CollectiveKind
    phase: str
    num_bytes: int
    axis: str = ""  # of the mesh; "": the axis that the problem is about


@dataclass(frozen=True, slots=True)
class Kept:
    """What selective recomputation keeps of an operator instead of repeating it: results, with bytes; of its forward pass the seconds, FLOPs and
    collectives that are not repeated."""

    results: tuple[tuple[str, int], ...] = ()
    seconds: float = 0.0
    flops: int = 0
    uses: tuple[Use, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """One option of an operator, priced. `saved` lists (storage, whether it is divided) that the backward pass needs."""

    option: Option
    forward_s: float
    backward_s: float
    saved: tuple[tuple[str, bool], ...]
    extra_bytes: int
    flops: int  # of the forward pass, on this rank
    uses: tuple[Use, ...] = ()  # collectives that the operator itself issues
    weights_s: float = 0.0  # of the backward pass, what a split one puts off, with (tensor, bytes) that stay until then
    put_off: tuple[tuple[str, int], ...] = ()
    kept: Kept = Kept()

    def writes_sum(self, name: str, outputs: tuple[str, ...]) -> bool:
        """Whether a result is to be completed by a sum."""
        return name in outputs and self.option.writes[outputs.index(name)] == PARTIAL

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class Item:
    """One operator of the block."""

    name: str
    operands: tuple[str, ...]
    outputs: tuple[str, ...]
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """One change of layout: collectives of both passes and their seconds. `kept_bytes`: of its result, where recomputation keeps it."""

    forward: Kind | None
    backward: Kind | None
    forward_s: float
    backward_s: float
    num_bytes: int
    kept_bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter of the block. `rest` is its fixed layout, None where the problem chooses; `deferred_s` the seconds of
    its gradient's reduction over the tensor axis."""

    name: str
    num_bytes: int
    num_elements: int
    rest: Layout | None
    requires_grad: bool
    deferred_s: float


@dataclass(frozen=True)
class BlockProblem:
    """See the module's text. `sources` are the layouts of values from outside (parameters are in `weights`),
    `wanted` what the boundary reads of values made inside, `moves` every conversion that can occur; `sums` are kept results that may lie PARTIAL,
    with their bytes."""

    name: str
    degree: int
    items: tuple[Item, ...]
    sources: Mapping[str, Layout]
    wanted: tuple[tuple[str, Layout], ...]
    weights: Mapping[str, Weight]
    moves: Mapping[tuple[str, Layout, Layout], Move]
    saved_bytes: Mapping[str, int]  # storage -> bytes when not divided
    sums: Mapping[str, int] = field(default_factory=dict)
    keeps_sums: bool = False  # whether they are what is saved

    def sum_bytes(self, name: str, layout: Layout) -> int:
        """Bytes of a sum as it is read."""
        return self.sums[name] // (self.degree if isinstance(layout, Split) else 1)


def repeating(problem: BlockProblem, recompute: str) -> BlockProblem:
    """The problem with what is run again before the backward pass in that pass' seconds: the forward pass, its collectives included. Recomputed
    "selective"ly without the operators whose results are kept; these results are then all that counts as saved."""
    if recompute == "none":
        return problem

    def again(item: Item, choice: Choice) -> Choice:
        if recompute == "full":
            return replace(choice, backward_s=choice.backward_s + choice.forward_s)
        kept = sum(size for name, size in choice.kept.results if not (name in problem.sums and choice.writes_sum(name, item.outputs)))
        return replace(choice, backward_s=choice.backward_s + choice.forward_s - choice.kept.seconds, saved=(), extra_bytes=kept)

    def moved(name: str, src: Layout, dst: Layout, move: Move) -> Move:
        if recompute == "selective" and src == PARTIAL and name in problem.sums:
            return replace(move, kept_bytes=problem.sum_bytes(name, dst))
        return replace(move, backward_s=move.backward_s + move.forward_s)

    items = tuple(replace(item, choices=tuple(again(item, choice) for choice in item.choices)) for item in problem.items)
    return replace(problem, items=items, moves={key: moved(*key, move) for key, move in problem.moves.items()}, keeps_sums=recompute == "selective")


@dataclass(frozen=True)
class BlockPoint:
    """A choice for one block, added up. Seconds and collectives are of one micro-batch, `step_s` of a step."""

    labels: tuple[str, ...]  # of each item
    rests: Mapping[str, Layout]  # of the parameters
    forward_s: float
    backward_s: float
    forward_move_s: float  # of it, changes of layout
    backward_move_s: float
    step_s: float
    parameter_bytes: int
    parameter_elements: int
    trained_bytes: int
    trained_elements: int
    saved_bytes: int
    flops: int
    uses: tuple[Use, ...]
    weights_s: float = 0.0  # of `backward_s`, what a split backward pass puts off
    put_off_bytes: int = 0  # and what stays until then
    kept_s: float = 0.0  # of `forward_s`, what selective recomputation does not repeat
    kept_flops: int = 0
    kept_bytes: int = 0  # what it keeps for that
    repeated_bytes: int = 0  # of `saved_bytes`, what it makes again
    kept_move_s: float = 0.0  # of `forward_move_s`, what it does not repeat
    kept_uses: tuple[Use, ...] = ()  # and of `uses`

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


def evaluate(problem: BlockProblem, picks: tuple[int, ...]) -> BlockPoint | None:
    """What the choice `picks` (an index into each item's choices) adds up to; None where some read cannot be had."""
    chosen = [item.choices[pick] for item, pick in zip(problem.items, picks, strict=True)]
    lies: dict[str, Layout] = dict(problem.sources)
    reads: dict[str, dict[Layout, None]] = {}
    forward_s = backward_s = forward_move_s = backward_move_s = 0.0
    extra = flops = 0
    uses: list[Use] = []
    saved: dict[tuple[str, bool], None] = {}
    put_off: dict[str, int] = {}
    kept: dict[str, int] = {}
    kept_uses: list[Use] = []
    kept_move_s = 0.0
    for item, choice in zip(problem.items, chosen, strict=True):
        for name, layout in zip(item.operands, choice.option.reads, strict=True):
            reads.setdefault(name, {})[layout] = None
        lies.update(zip(item.outputs, choice.option.writes, strict=True))
        forward_s += choice.forward_s
        backward_s += choice.backward_s
        extra += choice.extra_bytes
        flops += choice.flops
        saved.update((key, None) for key in choice.saved)
        uses.extend(choice.uses)
        put_off.update(choice.put_off)
        kept.update(choice.kept.results)
        kept_uses.extend(choice.kept.uses)
    for name, layout in problem.wanted:
        reads.setdefault(name, {})[layout] = None
    step_s = 0.0
    sizes = [0, 0, 0, 0]
    rests: dict[str, Layout] = {}
    summed = [name for name in kept if name in problem.sums and lies[name] == PARTIAL]
    for name, layouts in reads.items():
        weight = problem.weights.get(name)
        if weight is not None:
            rest = _rest(layouts)
            if weight.rest is not None and rest != weight.rest:
                return None
            rests[name] = rest
            parts = problem.degree if isinstance(rest, Split) else 1
            trained = int(weight.requires_grad)
            for i, amount in enumerate((weight.num_bytes, weight.num_elements, weight.num_bytes * trained, weight.num_elements * trained)):
                sizes[i] += amount // parts
            if rest == WHOLE and tuple(layouts) == (VARY,):
                step_s += weight.deferred_s
                uses.append(Use("all_reduce", "reduce", weight.num_bytes))
                continue
            lies[name] = rest
        for layout in layouts:
            if lies[name] == layout:
                continue
            move = problem.moves.get((name, lies[name], layout))
            if move is None:
                return None
            forward_move_s += move.forward_s
            backward_move_s += move.backward_s
            uses.extend(_uses(move))
            if name in summed:
                kept_move_s += move.forward_s
                kept_uses.extend(use for use in _uses(move) if use.phase == "forward")
    sizes_saved = {(root, divided): problem.saved_bytes[root] // (problem.degree if divided else 1) for root, divided in saved}
    # what is kept lies as it was made, or as it was summed: a copy of it in another layout is made again
    made: dict[str, tuple[Layout, ...]] = {
        name: (lies.get(name, WHOLE),) for name in kept
    }  # in a cube they are another block's (autoplan/cubeprices.py), without a choice
    made.update((name, tuple(reads.get(name, ()))) for name in summed)
    kept_forms = {(name, isinstance(layout, Split)) for name, layouts in made.items() for layout in layouts if layout != PARTIAL}
    sums = {(name, isinstance(layout, Split), layout == PARTIAL): problem.sum_bytes(name, layout) for name in summed for layout in made[name]}
    kept_bytes = sum(size for name, size in kept.items() if name not in summed) + sum(sums.values())
    saved_bytes = sum(sizes_saved.values()) + (sum(sums.values()) if problem.keeps_sums else 0)
    return BlockPoint(
        labels=tuple(choice.option.label for choice in chosen),
        rests=rests,
        forward_s=forward_s + forward_move_s,
        backward_s=backward_s + backward_move_s,
        forward_move_s=forward_move_s,
        backward_move_s=backward_move_s,
        step_s=step_s,
        parameter_bytes=sizes[0],
        parameter_elements=sizes[1],
        trained_bytes=sizes[2],
        trained_elements=sizes[3],
        saved_bytes=saved_bytes + extra,
        flops=flops,
        uses=tuple(uses),
        weights_s=sum(choice.weights_s for choice in chosen),
        put_off_bytes=sum(put_off.values()),
        kept_s=sum(choice.kept.seconds for choice in chosen),
        kept_flops=sum(choice.kept.flops for choice in chosen),
        kept_bytes=kept_bytes,
        repeated_bytes=extra + sum(size for form, size in sizes_saved.items() if form not in kept_forms),
        kept_move_s=kept_move_s,
        kept_uses=tuple(kept_uses),
    )


def _uses(move: Move) -> tuple[Use, ...]:
    found: list[Use] = []
    if move.forward is not None and move.forward != "slice":
        found.append(Use(move.forward, "forward", move.num_bytes))
    if move.backward is not None and move.backward != "slice":
        found.append(Use(move.backward, "backward", move.num_bytes))
    return tuple(found)


def _rest(layouts: Mapping[Layout, None]) -> Layout:
    only = next(iter(layouts))
    return only if len(layouts) == 1 and isinstance(only, Split) else WHOLE


@dataclass(frozen=True, slots=True)
class Price:
    """How the parts of a choice weigh against each other: seconds = m * time + deferred + per_parameter_byte_s * P + per_saved_byte_s * A."""

    num_micro_batches: int = 1
    per_parameter_byte_s: float = 0.0
    per_saved_byte_s: float = 0.0

    def of(self, point: BlockPoint) -> float:
        return (
            self.num_micro_batches * point.seconds
            + point.step_s
            + self.per_parameter_byte_s * point.parameter_bytes
            + self.per_saved_byte_s * point.saved_bytes
        )


@dataclass(frozen=True, slots=True)
class Budget:
    """A memory limit: parameter_factor * P + saved_factor * A <= limit_bytes."""

    limit_bytes: float
    parameter_factor: float = 1.0
    saved_factor: float = 1.0

    def used_bytes(self, point: BlockPoint) -> float:
        return self.parameter_factor * point.parameter_bytes + self.saved_factor * point.saved_bytes

    def holds(self, point: BlockPoint) -> bool:
        return self.used_bytes(point) <= self.limit_bytes

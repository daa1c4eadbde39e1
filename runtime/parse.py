"""Text back to a program: the inverse of runtime/text.py. Comments are skipped."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from runtime.instr import Arg, Dtype, Instr, Other, Output, Ref, TensorSpec
from runtime.program import BlockCode, Body, Chunk, Feed, MicroBatch, Program, Spread, StageCode, StageMesh, Stored, Transfer

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<comment>\#.*)
    | (?P<name>%(?:"(?:[^"\\]|\\.)*"|[A-Za-z0-9_.\-/]+))
    | (?P<string>"(?:[^"\\]|\\.)*")
    | (?P<at>@\w+:[\w.:]+)
    | (?P<arrow>->)
    | (?P<sequence>=\*)
    | (?P<word>[A-Za-z_][A-Za-z0-9_.]*|-?\d[\w.+\-]*|-inf|-)
    | (?P<sign>[()\[\],:=|])
    )""",
    re.VERBOSE,
)


class ProgramTextError(ValueError):
    """A text that is no program; names the line."""


def parse(text: str) -> Program:
    """The program that a text describes. Raises ProgramTextError."""
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        tokens = _tokens(line, number)
        if tokens:
            lines.append(_Line(number, line, tokens))
    return _Parser(lines).program()


@dataclass(eq=False)
class _Line:
    """The tokens of a line, read from left to right."""

    number: int
    source: str
    tokens: list[tuple[str, str]]
    at: int = 0

    def fail(self, wanted: str) -> ProgramTextError:
        found = self.tokens[self.at][1] if self.at < len(self.tokens) else "the end"
        return ProgramTextError(f"line {self.number}: expected {wanted}, found {found!r} in: {self.source.strip()}")

    def peek(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else ""

    def peek_kind(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def take(self, kind: str) -> str:
        if self.peek_kind() != kind:
            raise self.fail(kind)
        self.at += 1
        return self.tokens[self.at - 1][1]

    def accept(self, value: str) -> bool:
        if self.peek() == value and self.peek_kind() != "string":
            self.at += 1
            return True
        return False

    def expect(self, *values: str) -> None:
        for value in values:
            if not self.accept(value):
                raise self.fail(repr(value))

    def end(self) -> None:
        if self.at < len(self.tokens):
            raise self.fail("the end of the line")

    def integer(self) -> int:
        word = self.take("word")
        try:
            return int(word)
        except ValueError:
            self.at -= 1
            raise self.fail("an integer") from None

    def name(self) -> str:
        value = self.take("name")[1:]
        return json.loads(value) if value.startswith('"') else value

    def names(self) -> tuple[str, ...]:
        out = []
        while self.peek_kind() == "name":
            out.append(self.name())
        return tuple(out)

    def string(self) -> str:
        return json.loads(self.take("string"))

    def field(self, key: str) -> None:
        self.expect(key, "=")

    def words(self) -> tuple[str, ...]:
        if self.accept("("):
            self.expect(")")
            return ()
        out = [self.take("word")]
        while self.accept(","):
            out.append(self.take("word"))
        return tuple(out)

    def optional(self) -> int | None:
        return None if self.accept("none") else self.integer()

    def spec(self) -> TensorSpec | None:
        dtype = self.take("word")
        if dtype == "-":
            return None
        shape = []
        self.expect("[")
        while not self.accept("]"):
            shape.append(self.integer())
            self.accept(",")
        return TensorSpec(tuple(shape), dtype)

    def dense_spec(self) -> TensorSpec:
        spec = self.spec()
        if spec is None:
            raise self.fail("dtype and shape")
        return spec

    def chunk(self) -> Chunk:
        axis, where = self.take("word"), self.arg()
        if not isinstance(where, tuple) or len(where) != 4:
            raise self.fail("(dim, outer, size, inner)")
        return Chunk(axis, *where)  # type: ignore[arg-type]

    def arg(self) -> Arg:
        kind = self.peek_kind()
        if kind == "name":
            return Ref(self.name())
        if kind == "string":
            return self.string()
        if kind == "at":
            what, _, value = self.take("at")[1:].partition(":")
            return Dtype(value) if what == "dtype" else Other(what, value)
        if self.accept("("):
            items = []
            while not self.accept(")"):
                items.append(self.arg())
                self.accept(",")
            return tuple(items)
        word = self.take("word")
        literals: dict[str, Arg] = {"None": None, "True": True, "False": False}
        if word in literals:
            return literals[word]
        try:
            return int(word)
        except ValueError:
            try:
                return float(word)
            except ValueError:
                self.at -= 1
                raise self.fail("an argument") from None


def _tokens(line: str, number: int) -> list[tuple[str, str]]:
    tokens, at, line = [], 0, line.rstrip()
    while at < len(line):
        found = _TOKEN.match(line, at)
        if found is None:
            raise ProgramTextError(f"line {number}: cannot be read from {line[at:].strip()!r} on")
        at = found.end()
        kind = found.lastgroup or ""
        if kind != "comment":
            tokens.append((kind, found[kind]))
    return tokens


class _Parser:
    """Statements in order."""

    def __init__(self, lines: list[_Line]) -> None:
        self.lines = lines
        self.at = 0

    def line(self, first: str) -> _Line:
        """The next line, which has to begin with this word; the word is read."""
        if self.at >= len(self.lines):
            raise ProgramTextError(f"the text ends where {first!r} should follow")
        line = self.lines[self.at]
        line.expect(first)
        self.at += 1
        return line

    def begins(self, *words: str) -> bool:
        return self.at < len(self.lines) and self.lines[self.at].peek() in words

    def program(self) -> Program:
        self.line("program").expect("1")
        axes = self.sizes(self.line("axes"))
        line = self.line("stages")
        num_stages = line.integer()
        line.field("ranks")
        stage_ranks = tuple(map(int, line.words()))
        line.field("schedule")
        # A schedule's name may begin with a digit; the token takes all of it.
        schedule = line.take("word")
        line.field("zero")
        zero = line.integer()
        line.field("zero_group")
        zero_group = line.optional()
        line.field("rows")
        rows, compression, delay = line.integer(), "", 0
        if line.accept("compression"):
            line.expect("=")
            compression = line.string()
        if line.accept("delay"):
            line.expect("=")
            delay = line.integer()
        sync, servers, workers, staleness = self.sync()
        micro_batches, meshes = self.micro_batches(), []
        while self.begins("mesh"):
            line = self.line("mesh")
            first, own = line.integer(), self.sizes(line)
            meshes.append(StageMesh(first, own, self.micro_batches()))
        line = self.line("preamble")
        line.field("rows")
        preamble_rows = tuple(map(int, line.words()))
        feeds = self.feeds()
        preamble = self.block() if self.begins("block") else None
        stages = []
        while self.begins("stage"):
            stages.append(self.stage())
        if self.at < len(self.lines):
            raise self.lines[self.at].fail("a stage")
        return Program(
            axes, num_stages, stage_ranks, tuple(stages), schedule, micro_batches, preamble, feeds, preamble_rows, zero, zero_group, rows,
            sync, servers, staleness, compression, delay, tuple(meshes), workers,
        )  # fmt: skip

    def sizes(self, line: _Line) -> tuple[tuple[str, int], ...]:
        """Names with numbers up to the end of a line: "dp=2 tp=4"."""
        found = []
        while line.peek():
            axis = line.take("word")
            line.expect("=")
            found.append((axis, line.integer()))
        return tuple(found)

    def micro_batches(self) -> tuple[tuple[MicroBatch, ...], ...]:
        line, dealt, own = self.line("micro_batches"), [], []
        while line.peek():
            if line.accept("|"):
                dealt.append(tuple(own))
                own = []
                continue
            start = line.integer()
            line.expect(":")
            own.append(MicroBatch(start, line.integer()))
        return (*dealt, tuple(own))

    def sync(self) -> tuple[str, tuple[int, ...], tuple[int, ...], int | None]:
        """Who sums gradients, the servers, the workers and the bound of staleness; the line is left out for all_reduce."""
        if not self.begins("sync"):
            return "allreduce", (), (), None
        line = self.line("sync")
        kind = line.take("word")
        line.field("servers")
        servers = tuple(map(int, line.words()))
        line.field("workers")
        workers = tuple(map(int, line.words()))
        line.field("staleness")
        return kind, servers, workers, line.optional()

    def stage(self) -> StageCode:
        line = self.line("stage")
        index = line.integer()
        line.field("loss")
        loss = None if line.accept("none") else line.name()
        line.field("loss_partial")
        loss_partial = line.words()
        stored = []
        while self.begins("parameter", "buffer", "constant"):
            stored.append(self.stored())
        feeds = self.feeds()
        updates, predictions, bodies = [], [], []
        while self.begins("update"):
            line = self.line("update")
            updates.append((line.name(), line.name()))
        while self.begins("predict"):
            predictions.append(self.line("predict").name())
        while self.begins("body"):
            bodies.append(self.body())
        return StageCode(index, tuple(stored), feeds, tuple(bodies), loss, loss_partial, tuple(updates), tuple(predictions))

    def stored(self) -> Stored:
        line = self.lines[self.at]
        kind = line.take("word")
        self.at += 1
        name, fqn, spec = line.name(), line.string(), line.dense_spec()
        master = ""
        if line.accept("master"):
            line.expect("=")
            master = line.take("word")
        trainable = line.accept("trainable")
        line.field("stages")
        stages = tuple(map(int, line.words()))
        line.field("partial")
        partial = line.words()
        aliases, chunks = [], []
        if line.accept("aliases"):
            line.expect("=", "[")
            while not line.accept("]"):
                aliases.append(line.string())
                line.accept(",")
        if line.accept("chunks"):
            while line.peek():
                chunks.append(line.chunk())
        return Stored(name, fqn, tuple(aliases), kind, spec, tuple(chunks), trainable, partial, stages, master)  # type: ignore[arg-type]

    def feeds(self) -> tuple[Feed, ...]:
        out = []
        while self.begins("feed"):
            line = self.line("feed")
            name, path, spec = line.name(), line.string(), line.dense_spec()
            line.field("batch_dim")
            out.append(Feed(name, path, spec, line.optional()))
        return tuple(out)

    def body(self) -> Body:
        line = self.line("body")
        line.field("rows")
        rows, blocks = line.integer(), []
        receives = self.transfers("receive")
        while self.begins("block"):
            blocks.append(self.block())
        return Body(rows, tuple(blocks), receives, self.transfers("send"))

    def transfers(self, word: str) -> tuple[Transfer, ...]:
        out = []
        while self.begins(word):
            line = self.line(word)
            value, spec, src = line.name(), line.dense_spec(), line.integer()
            line.expect("->")
            dst, grad = line.integer(), line.accept("grad")
            pieces = line.chunk() if line.accept("pieces") else None
            out.append(Transfer(value, src, dst, spec, grad, pieces, self.spread(line) if line.accept("spread") else None))
        return tuple(out)

    def spread(self, line: _Line) -> Spread:
        line.expect("=")
        sizes = tuple(map(int, line.words()))
        line.field("partial")
        partial = line.words()
        line.field("vary")
        vary = line.words()
        line.expect("divided")
        return Spread(sizes, self.sizes(line), partial, vary)

    def block(self) -> BlockCode:
        line = self.line("block")
        name = line.string()
        line.field("recompute")
        recompute = line.take("word")
        inputs, stored, instrs = self.line("in").names(), self.line("stored").names(), []
        while self.at < len(self.lines) and self.lines[self.at].peek_kind() == "name":
            instrs.append(self.instr())
        return BlockCode(name, inputs, stored, tuple(instrs), self.line("out").names(), recompute)  # type: ignore[arg-type]

    def instr(self) -> Instr:
        line = self.lines[self.at]
        self.at += 1
        outputs = []
        while True:
            name = line.name()
            line.expect(":")
            outputs.append(Output(name, line.spec()))
            if not line.accept(","):
                break
        is_sequence = line.accept("=*")
        if not is_sequence:
            line.expect("=")
        target, args, kwargs = line.take("word"), [], []
        line.expect("(")
        while not line.accept(")"):
            if line.peek_kind() == "word" and line.at + 1 < len(line.tokens) and line.tokens[line.at + 1][1] == "=":
                key = line.take("word")
                line.expect("=")
                kwargs.append((key, line.arg()))
            else:
                args.append(line.arg())
            line.accept(",")
        line.end()
        return Instr(tuple(outputs), target, tuple(args), tuple(kwargs), is_sequence)

"""Graphs written by hand: small, with every loop spelled out."""

from __future__ import annotations

import math

from autoplan.graph import Block, Graph, Loop, Op, Value
from autoplan.layout import Split
from costmodel.opkey import Collective, OpKey, OpTime
from runtime.instr import Instr, Output, Ref, TensorSpec


class Builder:
    """Collects values and ops; factor 0 is the batch."""

    def __init__(self, batch: int = 8) -> None:
        self.values: dict[str, Value] = {}
        self.ops: list[Op] = []
        self.sizes = [batch]
        self.blocks: list[Block] = []

    def factor(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1

    def value(self, name: str, kind: str, factors: tuple[int, ...], grad: bool = True, dtype: str = "float32") -> str:
        spec = TensorSpec(tuple(self.sizes[f] for f in factors), dtype)
        self.values[name] = Value(name, spec, kind, tuple((f,) for f in factors), grad, fqn=name, aliases=(name,))  # type: ignore[arg-type]
        return name

    def op(
        self,
        out: str,
        target: str,
        operands: list[str],
        factors: tuple[int, ...],
        loops: list[tuple[int, str]],
        saved: tuple[str, ...] = (),
        linear_in=(),
        flops: int = 0,
        grad: bool = True,
    ) -> str:
        """`loops` are (factor, kind): it lies wherever the factor lies."""
        self.value(out, "activation", factors, grad)
        made = []
        for position, (factor, kind) in enumerate(loops):
            reads = tuple(self._where(name, factor) for name in operands)
            made.append(Loop(f"l{position}", factor, kind, reads, (self._where(out, factor),)))  # type: ignore[arg-type]
        instr = Instr((Output(out, self.values[out].spec),), target, tuple(Ref(n) for n in operands))
        self.ops.append(Op(instr, tuple(made), linear_in, "m", "", flops, saved))
        return out

    def _where(self, name: str, factor: int) -> Split | None:
        for d, dims in enumerate(self.values[name].dims):
            if factor in dims:
                return Split(d, 0)
        return None

    def linear(self, out: str, x: str, w: str, saved: bool = True) -> str:
        xs, ws = self.values[x].dims, self.values[w].dims
        factors = (*(d[0] for d in xs[:-1]), ws[0][0])
        loops = [(f, "map") for f in factors] + [(ws[1][0], "sum")]
        flops = 2 * self.sizes[ws[0][0]]
        for d in xs:
            flops *= self.sizes[d[0]]
        return self.op(out, "aten.linear.default", [x, w], factors, loops, (x,) if saved else (), ((0,), (1,)), flops)

    def elementwise(self, out: str, operands: list[str], saved: tuple[str, ...] = (), linear: bool = False) -> str:
        widest = max(operands, key=lambda n: len(self.values[n].dims))
        factors = tuple(d[0] for d in self.values[widest].dims)
        sets = (tuple(range(len(operands))),) if linear else ()
        return self.op(out, "aten.add.Tensor" if linear else "aten.gelu.default", operands, factors, [(f, "map") for f in factors], saved, sets)

    def norm(self, out: str, x: str, w: str) -> str:
        factors = tuple(d[0] for d in self.values[x].dims)
        return self.op(out, "aten.rms_norm.default", [x, w], factors, [(f, "map") for f in factors[:-1]], (x,))

    def block(self, name: str, start: int, pattern: str, layer: bool = False) -> None:
        self.blocks.append(Block(name, start, len(self.ops), pattern, layer))

    def graph(self, loss: str | None = None, outputs: tuple[str, ...] = ()) -> Graph:
        return Graph("handmade", self.values, tuple(self.ops), tuple(self.blocks), tuple(self.sizes), 0, loss, outputs, (), "fp")


def moved_bytes(key: OpKey) -> int:
    """Bytes that an operator reads and writes, four an element."""
    return sum(4 * math.prod(shape) for shape, _ in (*key.operands, *key.outputs))


class FlatPrices:
    """10 TFLOP/s, 1 TB/s memory, 100 GB/s links with 5 us latency."""

    source = "analytic"

    def __init__(self, limit_bytes: int = 80 << 30) -> None:
        self.limit_bytes = limit_bytes

    def op(self, key: OpKey, device: int = 0) -> OpTime:
        forward = max(key.flops / 1e13, moved_bytes(key) / 1e12) + 2e-6
        return OpTime(forward, forward, forward if len(key.operands) > 1 and key.flops else 0.0)

    def collective(self, collective: Collective) -> float:
        p = collective.group.size
        factor = 2 if collective.kind == "all_reduce" else 1
        if collective.kind == "send":
            return 5e-6 + collective.num_bytes / 1e11
        return factor * (5e-6 + collective.num_bytes * (p - 1) / p / 1e11)

    def optimizer_s(self, num_elements: int, optimizer: str, num_bytes_per_element: float, device: int = 0) -> float:
        return num_elements * num_bytes_per_element / 1e12

    def memory_limit_bytes(self, device: int = 0) -> int:
        return self.limit_bytes

    def peak_flops_per_s(self, dtype: str, device: int = 0) -> float:
        return 1e13

    def assumptions(self) -> tuple[str, ...]:
        return ("made up",)


def transformer(layers: int = 4, batch: int = 8, seq: int = 128, hidden: int = 256, heads: int = 8, inner: int = 1024, vocab: int = 1000) -> Graph:
    """Embedding, pre-norm blocks (attention as one op over heads, then an MLP), norm, head, loss."""
    b = Builder(batch)
    s, h, v = b.factor(seq), b.factor(hidden), b.factor(vocab)
    ids = b.value("ids", "input", (0, s), grad=False, dtype="int64")
    labels = b.value("labels", "input", (0, s), grad=False, dtype="int64")
    b.value("emb", "parameter", (v, h))
    x = b.op("x0", "aten.embedding.default", ["emb", ids], (0, s, h), [(0, "map"), (s, "map"), (h, "map"), (v, "sum")], ())
    b.block("prologue", 0, "prologue")
    for i in range(layers):
        start = len(b.ops)
        n, f = b.factor(heads), b.factor(inner)
        d = b.factor(hidden // heads)
        b.value(f"n1.{i}", "parameter", (h,))
        b.value(f"n2.{i}", "parameter", (h,))
        for w in "qkv":
            b.values[f"w{w}.{i}"] = Value(f"w{w}.{i}", TensorSpec((hidden, hidden), "float32"), "parameter", ((n, d), (h,)), True, f"w{w}.{i}", (f"w{w}.{i}",))
        b.values[f"wo.{i}"] = Value(f"wo.{i}", TensorSpec((hidden, hidden), "float32"), "parameter", ((h,), (n, d)), True, f"wo.{i}", (f"wo.{i}",))
        b.value(f"up.{i}", "parameter", (f, h))
        b.value(f"down.{i}", "parameter", (h, f))
        normed = b.norm(f"a{i}", x, f"n1.{i}")
        flops = 2 * batch * seq * hidden * hidden
        projected = []
        for w in "qkv":
            name = f"{w}{i}"
            b.values[name] = Value(name, TensorSpec((batch, seq, hidden), "float32"), "activation", ((0,), (s,), (n, d)), True)
            loops = tuple(
                Loop(f"l{x}", k, kind, r, o)
                for x, k, kind, r, o in (
                    (0, 0, "map", (Split(0), None), (Split(0),)),
                    (1, s, "map", (Split(1), None), (Split(1),)),
                    (2, n, "map", (None, Split(0)), (Split(2),)),
                    (3, h, "sum", (Split(2), Split(1)), (None,)),
                )
            )
            instr = Instr((Output(name, b.values[name].spec),), "aten.linear.default", (Ref(normed), Ref(f"w{w}.{i}")))
            b.ops.append(Op(instr, loops, ((0,), (1,)), "attn", "", flops, (normed,)))
            projected.append(name)
        name = f"attn{i}"
        b.values[name] = Value(name, TensorSpec((batch, seq, hidden), "float32"), "activation", ((0,), (s,), (n, d)), True)
        loops = tuple(Loop(f"l{w.dim}", k, "map", (w,) * 3, (w,)) for k, w in ((0, Split(0)), (n, Split(2))))
        instr = Instr((Output(name, b.values[name].spec),), "aten.attention.default", tuple(Ref(n_) for n_ in projected))
        b.ops.append(Op(instr, loops, (), "attn", "", 4 * batch * seq * seq * hidden, (*projected, name)))
        out = f"o{i}"
        b.values[out] = Value(out, TensorSpec((batch, seq, hidden), "float32"), "activation", ((0,), (s,), (h,)), True)
        loops = tuple(
            Loop(f"l{x}", k, kind, r, o)
            for x, k, kind, r, o in (
                (0, 0, "map", (Split(0), None), (Split(0),)),
                (1, s, "map", (Split(1), None), (Split(1),)),
                (2, h, "map", (None, Split(0)), (Split(2),)),
                (3, n, "sum", (Split(2), Split(1)), (None,)),
            )
        )
        b.ops.append(
            Op(Instr((Output(out, b.values[out].spec),), "aten.linear.default", (Ref(name), Ref(f"wo.{i}"))), loops, ((0,), (1,)), "attn", "", flops, (name,))
        )
        x = b.elementwise(f"r{i}", [x, out], linear=True)
        y = b.norm(f"m{i}", x, f"n2.{i}")
        y = b.linear(f"u{i}", y, f"up.{i}")
        y = b.elementwise(f"g{i}", [y], (y,))
        y = b.linear(f"w{i}", y, f"down.{i}")
        x = b.elementwise(f"s{i}", [x, y], linear=True)
        b.block(f"layers.{i}", start, "layer", layer=True)
    start = len(b.ops)
    b.value("nf", "parameter", (h,))
    b.value("head", "parameter", (v, h))
    x = b.norm("xf", x, "nf")
    logits = b.linear("logits", x, "head")
    b.op("loss", "aten.nll.default", [logits, labels], (), [(0, "sum"), (s, "sum")], (logits,))
    b.block("epilogue", start, "epilogue")
    return b.graph(loss="loss", outputs=())

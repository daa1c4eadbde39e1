"""A second opinion: the formulas of Isaev et al. 2023 (Calculon, SC23) price a plan by its degrees alone. Nothing of the product's prices is used.

A layer is a list of products and of operators that move bytes. Each takes the longer of

    flops / (peak * e(flops))    and    bytes / (bandwidth * e(bytes))          e: efficiency, larger for larger operators

forwards; a product's backward is two of its kind, and recomputation runs forwards again (of the attention core alone: "selective").
With f, b, a seconds of a layer (forward, backward, again), L layers of the fullest rank of p, v stages on it, m micro-batches of r rows:

    all layers    m L (f + b + a)          and after the passes each parameter is read and written by the optimizer
    bubble        (p - 1) L / v (f + b + a + what tensor ranks send)
    tensor        2 all-reduces of the layer's rows forwards, 2 backwards, again as often as it is recomputed; under sequence parallelism a
                  gather and a reduce-scatter each, and the operators between products run on a part of the rows
    pipeline      2 m v transfers of a micro-batch's rows (divided by the tensor ranks, under sequence parallelism)
    data          the gradients of L layers, all-reduced (or reduce-scattered, and parameters gathered: ZeRO): one layer's beside the last
                  backward pass of the next; what is longer shows, and the last layer's shows whole

    collective of s bytes over g ranks:  k (g - 1) / g * s / (bandwidth * efficiency) + latency      k = 2 of an all-reduce, else 1

A group is on the node's own network if it fits there with the groups inside of it (tensor, then data, then pipeline), else on the one between
nodes, at one device's bandwidth. That is the original's view ("flat"). Where k ranks of a group are on one node, rings go through k of its adapters
and each carries a k-th of the bytes ("rails"), which is what libraries do: the second price that is told.
Layers alone are counted, no embedding and no head; attention forms its scores without writing them, as both plans' kernel does.

The original knows no ZeRO-2 and -3. They are priced here by the same rule as its gradients: gathers of a layer's parameters beside the pass of
the layer before (forwards and backwards, every micro-batch: ZeRO-3), reductions in every micro-batch (ZeRO-2 and -3). A split backward pass
(zb, zbv) counts as 1F1B and as two stages a rank, which is no faster. Context parallelism and grids of tensor axes cannot be said.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoplan.plan import Plan, ways_by_pattern
from autoplan.space import RECOMPUTES


@dataclass(frozen=True)
class Layers:
    """A transformer's layers: `gated`: the MLP has three products."""

    num: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    gated: bool
    seq: int


@dataclass(frozen=True)
class Network:
    """One direction, of one device."""

    bytes_per_s: float
    efficiency: float
    latency_s: float

    def sends_s(self, num_bytes: float, size: int, rounds: int = 1) -> float:
        return 0.0 if size == 1 else rounds * (size - 1) / size * num_bytes / (self.bytes_per_s * self.efficiency) + self.latency_s

    def wider(self, num: int) -> Network:
        return replace(self, bytes_per_s=self.bytes_per_s * num)

    def send_s(self, num_bytes: float) -> float:
        return num_bytes / (self.bytes_per_s * self.efficiency) + self.latency_s


@dataclass(frozen=True)
class System:
    """A device and its networks: the node's own, which `per_node` devices share, and that between nodes."""

    flops_per_s: float
    vector_flops_per_s: float
    bytes_per_s: float
    inner: Network
    outer: Network
    per_node: int = 8

    def product_s(self, flops: float, num_bytes: float) -> float:
        return max(flops / (self.flops_per_s * _step(flops, _FLOPS)), self._moves_s(num_bytes))

    def other_s(self, flops: float, num_bytes: float) -> float:
        return max(flops / self.vector_flops_per_s, self._moves_s(num_bytes))

    def _moves_s(self, num_bytes: float) -> float:
        return num_bytes / (self.bytes_per_s * _step(num_bytes, _BYTES))


_FLOPS = ((128e9, 0.99), (16e9, 0.8), (4e9, 0.7), (1e9, 0.5), (0.0, 0.25))  # efficiency of a product of at least so many
_BYTES = ((100e6, 0.9), (10e6, 0.85), (1e6, 0.6), (0.0, 0.4))  # and of memory


def _step(amount: float, table: tuple[tuple[float, float], ...]) -> float:
    return next(efficiency for least, efficiency in table if amount >= least)


SYSTEMS = {
    "a100-sxm-80gb": System(312e12, 78e12, 2039e9, Network(300e9, 0.65, 1e-5), Network(25e9, 0.9, 2e-5)),
    "h100-sxm-80gb": System(989e12, 134e12, 3350e9, Network(450e9, 0.65, 1e-5), Network(50e9, 0.9, 2e-5)),
    "h100-sxm-96gb": System(989e12, 134e12, 2400e9, Network(450e9, 0.65, 1e-5), Network(50e9, 0.9, 2e-5)),
}


@dataclass(frozen=True)
class Degrees:
    """What the formulas read of a plan."""

    tp: int
    pp: int
    dp: int
    rows: int
    num_micro_batches: int
    chunks: int
    zero: int
    recompute: str
    sequence_parallel: bool

    @classmethod
    def of(cls, plan: Plan) -> Degrees | None:
        """None where the formulas cannot say it. They know one way of recomputing: of several, the one that runs most again."""
        if plan.degree("cp") > 1 or plan.degree("ep") > 1 or sum(size > 1 for name, size in plan.axes if name not in ("pp", "dp")) > 1:
            return None
        layers = max(plan.blocks, key=lambda block: len(block.blocks))
        divided = any(layout.startswith("split") for layout in layers.boundary.values())
        chunks = 1 if plan.schedule in ("1f1b", "gpipe", "zb") else plan.num_chunks
        return cls(
            plan.degree("tp"), plan.degree("pp"), plan.degree("dp"), plan.micro_batch_size, plan.num_micro_batches, chunks, plan.zero,
            max(ways_by_pattern(plan)[layers.pattern], key=RECOMPUTES.index), divided,
        )  # fmt: skip


@dataclass(frozen=True)
class Priced:
    """Seconds of a step, by what they are spent on."""

    layers_s: float
    again_s: float
    bubble_s: float
    tensor_s: float
    pipeline_s: float
    data_s: float
    optimizer_s: float

    @property
    def step_s(self) -> float:
        return self.layers_s + self.again_s + self.bubble_s + self.tensor_s + self.pipeline_s + self.data_s + self.optimizer_s


def step(layers: Layers, degrees: Degrees, system: System, adapters: str) -> Priced:
    """The module's formulas. `adapters`: "flat" or "rails"."""
    d, m, dp = degrees, degrees.num_micro_batches, degrees.dp
    tensor = system.inner if d.tp <= system.per_node else system.outer
    data = system.inner if d.tp * dp <= system.per_node else system.outer
    if adapters == "rails":
        tensor = tensor.wider(system.per_node) if tensor is system.outer else tensor
        data = data.wider(max(1, system.per_node // d.tp)) if data is system.outer else data
    pipeline = system.inner if d.tp * dp * d.pp <= system.per_node else system.outer

    forward_s, core_s, backward_s, num_elements = _layer(layers, d, system)
    again_s = {"none": 0.0, "selective": core_s, "full": forward_s}[d.recompute]
    sent = 2 * d.rows * layers.seq * layers.hidden
    once_s = tensor.sends_s(sent, d.tp, 2) if not d.sequence_parallel else 2 * tensor.sends_s(sent, d.tp)
    tensor_s = (6 if d.recompute == "full" else 4) * once_s

    own = -(-layers.num // d.pp)
    layer_s = forward_s + backward_s + again_s
    bubble_s = (d.pp - 1) * own / d.chunks * (layer_s + tensor_s)
    sends = 2 * m * d.chunks if d.pp > 1 else 0
    pipeline_s = sends * pipeline.send_s(sent / (d.tp if d.sequence_parallel else 1))

    moved_s = data.sends_s(2 * num_elements, dp)
    beside = (forward_s + 2 * once_s, backward_s + again_s + tensor_s - 2 * once_s)
    times = {
        0: ((0, 0.0), (1, data.sends_s(2 * num_elements, dp, 2))),
        1: ((1, moved_s), (1, moved_s)),
        2: ((1, moved_s), (m, moved_s)),
        3: ((m, moved_s), (m, 2 * moved_s)),
    }[d.zero]  # beside forward and backward passes: how often, and seconds of a layer
    data_s = sum(_shown(each_s, compute_s, num * own) for (num, each_s), compute_s in zip(times, beside, strict=True))
    optimizer_s = own * system.other_s(0.0, num_elements / (dp if d.zero else 1) * 2 * (4 + 8 + 2))
    return Priced(m * own * (forward_s + backward_s), m * own * again_s, bubble_s, m * own * tensor_s, pipeline_s, data_s, optimizer_s)


def _shown(moved_s: float, beside_s: float, num: int) -> float:
    """Of moving something for each of `num` layers beside the next one's compute."""
    return moved_s + (num - 1) * max(0.0, moved_s - beside_s) if num else 0.0


def _layer(layers: Layers, d: Degrees, system: System) -> tuple[float, float, float, float]:
    """Seconds of a layer's forward, of its attention core, and of its backward; its parameters on a rank."""
    tokens, part = d.rows * layers.seq, 1.0 / d.tp
    wide, narrow = layers.hidden, layers.hidden * layers.kv_heads / layers.heads
    products = [(wide, (wide + 2 * narrow) * part), (wide * part, wide)]
    products += [(wide, (2 if layers.gated else 1) * layers.inner * part), (layers.inner * part, wide)]
    forward_s = backward_s = 0.0
    for inner, outer in products:
        once_s = system.product_s(2 * tokens * inner * outer, 2 * (tokens * (inner + outer) + inner * outer))
        forward_s, backward_s = forward_s + once_s, backward_s + 2 * once_s
    core_flops = 2 * 2 * tokens * layers.seq * wide * part / 2  # causal: half of the scores
    core_s = system.product_s(core_flops, 2 * tokens * (2 * wide + 2 * narrow) * part)
    rows = tokens * (part if d.sequence_parallel else 1.0)
    # two norms and two residual sums on rows; the activation and rotations inside, which the tensor ranks divide
    other_s = sum(system.other_s(8 * rows * wide, 2 * rows * wide * moved) for moved in (2, 2, 3, 3))
    other_s += system.other_s(8 * tokens * layers.inner * part, 2 * tokens * layers.inner * part * (3 if layers.gated else 2))
    num_elements = sum(inner * outer for inner, outer in products)
    return forward_s + core_s + other_s, core_s, backward_s + 2 * core_s + other_s, num_elements

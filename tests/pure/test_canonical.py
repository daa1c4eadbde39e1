"""The passes of the canonical form: each changes what it says, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autoplan.batchaxis import micro_batch_blocker
from autoplan.canonical.attention import is_causal_mask
from autoplan.frontend import capture
from autoplan.graph import Graph
from tests.pure.captured import assert_captures, differences, targets
from tests.zoo import ZOO

torch.set_num_threads(1)
SDPA = "aten.scaled_dot_product_attention.default"
ROWS, CLASSES = 6, 5


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Head(nn.Module):
    """(rows, ...) -> logits (rows, classes, ...) -> loss by `criterion`."""

    def __init__(self, criterion: Any) -> None:
        super().__init__()
        self.criterion = criterion
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, CLASSES, dtype=torch.float64))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.criterion(x * self.scale.view(1, -1, *(1,) * (x.dim() - 2)), y)


LABELS = torch.tensor([0, -100, 4, 2, -100, 1])
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.1, 3.0], dtype=torch.float64)


@pytest.mark.parametrize(
    "options",
    [{}, {"weight": WEIGHT}, {"label_smoothing": 0.2}, {"weight": WEIGHT, "label_smoothing": 0.2}, {"ignore_index": 2}, {"weight": WEIGHT, "ignore_index": 2}],
    ids=lambda options: "-".join(options) or "plain",
)
def test_mean_cross_entropy_is_sum_over_count(options: Any) -> None:
    labels = LABELS if "ignore_index" not in options else LABELS.clamp(min=0)
    others = [{"x": seeded(ROWS, CLASSES, seed=3), "y": torch.where(labels < 0, 3, labels)}, {"x": seeded(ROWS, CLASSES, seed=3), "y": labels.flip(0)}]
    graph = assert_captures(Head(nn.CrossEntropyLoss(**options)), {"x": seeded(ROWS, CLASSES), "y": labels}, others=others)
    (loss,) = (op for op in graph.ops if op.instr.target == "aten.cross_entropy_loss.default")
    assert loss.instr.args[3] == 2
    assert graph.ops[-1].instr.target == "aten.div.Tensor"


def test_without_a_valid_label_the_loss_is_nan_as_in_eager_mode() -> None:
    model = Head(nn.CrossEntropyLoss())
    graph = capture(model, {"x": seeded(ROWS, CLASSES), "y": LABELS})
    errors = differences(graph, model, {"x": seeded(ROWS, CLASSES), "y": torch.full_like(LABELS, -100)})
    assert errors["loss"] == 0.0


def test_cross_entropy_over_places_and_with_probabilities() -> None:
    places = torch.randint(0, CLASSES, (ROWS, 3), generator=torch.Generator().manual_seed(2))
    assert_captures(Head(nn.CrossEntropyLoss()), {"x": seeded(ROWS, CLASSES, 3), "y": places.masked_fill(places == 1, -100)})
    graph = assert_captures(Head(nn.CrossEntropyLoss()), {"x": seeded(ROWS, CLASSES, 3), "y": seeded(ROWS, CLASSES, 3).softmax(1)})
    (scale,) = (op for op in graph.ops if op.instr.target == "runtime.scale_by_count")
    assert scale.instr.args[1] == ROWS * 3


@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_negative_log_likelihood(weight: Any) -> None:
    def criterion(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.nll_loss(x.log_softmax(1), y, weight)

    assert_captures(Head(criterion), {"x": seeded(ROWS, CLASSES), "y": LABELS})


@pytest.mark.parametrize(
    "criterion",
    [
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        lambda x, y: F.huber_loss(x, y, delta=0.3),
        lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="mean"),
        lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
        lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid(), pos_weight=WEIGHT),
        lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
        lambda x, y: F.mse_loss(x, y, reduction="sum"),
        lambda x, y: (x - y).pow(2).mean(),
        lambda x, y: (x - y).pow(2).mean(0).sum(),
        lambda x, y: (x - y).abs().mean((0, 1)),
        lambda x, y: (x.T * y.T).mean(-1).sum(),
        lambda x, y: (x.mean(1) * y[:, 0]).sum(),
    ],
)
def test_mean_losses_are_sum_over_count(criterion: Any) -> None:
    graph = assert_captures(Head(criterion), {"x": seeded(ROWS, CLASSES), "y": seeded(ROWS, CLASSES, seed=5)})
    for op in graph.ops:
        if op.instr.target == "aten.mean.dim":
            assert op.instr.args[1] == (1,), "a mean that leaves the rows alone stays"
        assert op.instr.target != "aten.mean.default"


def test_losses_in_half_precision_are_summed_in_float32() -> None:
    model = Head(nn.CrossEntropyLoss()).half()
    graph = capture(model, {"x": 40000 * seeded(ROWS, CLASSES).half(), "y": torch.zeros(ROWS, dtype=torch.int64)}, check=False)
    (loss,) = (op for op in graph.ops if op.instr.target == "aten.cross_entropy_loss.default")
    assert graph.values[loss.outputs[0]].spec.dtype == "float32"
    assert graph.loss is not None and graph.values[graph.loss].spec.dtype == "float16"


class Attention(nn.Module):
    """Self-attention of 4 query heads over `kv` key heads with a mask made by `mask(scores shape)`."""

    def __init__(self, kv: int, mask: Any, repeat: str = "expand") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = nn.Linear(8, 4 * 6), nn.Linear(8, kv * 6), nn.Linear(8, kv * 6)
        self.bias = nn.Parameter(torch.zeros(()))
        self.kv, self.mask, self.repeat = kv, mask, repeat

    def widen(self, x: torch.Tensor) -> torch.Tensor:
        b, h, s, d = x.shape
        if self.repeat == "interleave":
            return x.repeat_interleave(4 // h, 1)
        return x[:, :, None].expand(b, h, 4 // h, s, d).reshape(b, 4, s, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = (p(x).view(b, s, -1, 6).transpose(1, 2) for p in (self.q, self.k, self.v))
        if self.kv != 4:
            k, v = self.widen(k), self.widen(v)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(self, x)).pow(2).sum()


def attention_of(graph: Graph) -> dict[str, Any]:
    (op,) = (op for op in graph.ops if op.instr.target == SDPA)
    names = dict(zip(("q", "k", "v", "mask", "p", "causal"), op.instr.args, strict=True)) | dict(op.instr.kwargs)
    return names


def lower(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()


def additive(visible: torch.Tensor, dtype: torch.dtype, low: float) -> torch.Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, low)


LOWEST = torch.finfo(torch.float64).min


@pytest.mark.parametrize(
    ("mask", "causal", "kept"),
    [
        (lambda self, x: lower(x), True, False),
        (lambda self, x: lower(x)[None, None].expand(x.shape[0], 1, -1, -1), True, False),
        (lambda self, x: additive(lower(x), x.dtype, LOWEST), True, False),
        (lambda self, x: additive(lower(x), x.dtype, float("-inf")).expand(x.shape[0], 4, -1, -1), True, False),
        (lambda self, x: additive(lower(x), x.dtype, -1.0), False, True),
        (lambda self, x: lower(x) & ~lower(x).tril(-3), False, True),
        (lambda self, x: lower(x).T, False, True),
        (lambda self, x: torch.ones_like(lower(x)), False, False),
        (lambda self, x: torch.zeros_like(lower(x), dtype=x.dtype), False, False),
        (lambda self, x: lower(x) & (x[:, None, None, :, 0] > -9), False, True),
        (lambda self, x: additive(lower(x), x.dtype, LOWEST) + self.bias, False, True),
        (lambda self, x: None, False, False),
    ],
)
def test_masks_are_folded_exactly_where_they_say_causal_or_nothing(mask: Any, causal: bool, kept: bool) -> None:
    graph = assert_captures(Attention(4, mask).double(), (seeded(ROWS, 7, 8),))
    call = attention_of(graph)
    assert (call["causal"], call["mask"] is not None) == (causal, kept)


def test_a_causal_mask_is_told_from_its_neighbours() -> None:
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    assert is_causal_mask(mask) and is_causal_mask(mask[None].expand(3, 5, 5)) and is_causal_mask(torch.ones(3, 5, dtype=torch.bool).tril())
    for i in range(5):
        for j in range(5):
            wrong = mask.clone()
            wrong[i, j] = not wrong[i, j]
            assert not is_causal_mask(wrong)
    assert not is_causal_mask(torch.stack([mask, mask.T]))


@pytest.mark.parametrize(("kv", "repeat"), [(2, "expand"), (2, "interleave"), (1, "expand")])
def test_repeated_heads_go_in_once(kv: int, repeat: str) -> None:
    graph = assert_captures(Attention(kv, lambda self, x: lower(x), repeat).double(), (seeded(ROWS, 7, 8),))
    assert attention_of(graph)["enable_gqa"] is True
    (op,) = (op for op in graph.ops if op.instr.target == SDPA)
    assert graph.values[op.operands[1]].spec.shape == (ROWS, kv, 7, 6)
    assert not any("repeat" in t or "expand" in t for t in targets(graph))


def test_heads_repeated_in_another_order_stay() -> None:
    def tiled(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(1, 4 // x.shape[1], 1, 1)

    model = Attention(2, lambda self, x: lower(x)).double()
    model.widen = tiled.__get__(model)
    assert attention_of(assert_captures(model, (seeded(ROWS, 7, 8),)))["enable_gqa"] is False


def test_constants_carry_no_batch_dim_and_equal_ones_are_kept_once() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(seeded(9, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            places = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
            again = torch.arange(x.shape[1], device=x.device)[None].repeat(x.shape[0], 1)
            return (self.table[places] * x).sum() + (self.table[again].cos() * (places % 3)[..., None]).sum()

    graph = assert_captures(Net(), (seeded(ROWS, 7, 3),))
    shapes = sorted(tuple(c.shape) for c in graph.constants.values())
    assert all(ROWS not in shape for shape in shapes)
    assert len(shapes) == 2, "the places, and the places modulo 3"


def test_a_mask_for_a_huge_batch_costs_one_mask() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4, 1, 2, device="meta"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows, places = torch.arange(x.shape[0], device=x.device), torch.arange(x.shape[1], device=x.device)
            grid = places.expand(x.shape[0], -1)
            mask = grid[rows[:, None, None, None], places[None, None, None, :]] <= grid[rows[:, None, None, None], places[None, None, :, None]]
            q = (x[:, None, :, None] * self.w).float()
            return F.scaled_dot_product_attention(q, q, q, mask.expand(x.shape[0], 1, -1, -1)).sum()

    graph = capture(Net(), (torch.empty(1 << 16, 1024, device="meta"),))
    assert attention_of(graph)["causal"] is True and not graph.constants


def test_padding_masks_read_whole_dims_as_views() -> None:
    graph = capture(*ZOO["bert"](), check=False)
    assert not any(t.startswith("aten.index") for t in targets(graph))


def test_biases_stand_apart_from_products() -> None:
    graph = capture(*ZOO["gpt2"](), check=False)
    assert "aten.addmm.default" not in targets(graph)
    assert all(len(op.operands) == 2 for op in graph.ops if op.instr.target in ("aten.linear.default", "aten.mm.default"))


def test_nothing_is_left_that_does_nothing() -> None:
    for name in ("llama", "t5", "resnet50"):
        graph = capture(*ZOO[name](), check=False)
        idle = {
            "aten.alias.default",
            "aten.contiguous.default",
            "aten.clone.default",
            "aten.dropout.default",
            "aten.view.default",
            "aten._assert_tensor_metadata.default",
        }
        assert not idle & set(targets(graph))
        used = {n for op in graph.ops for n in op.operands} | {graph.loss, *graph.outputs} | {v for _, v in graph.buffer_updates}
        assert all(used & set(op.outputs) for op in graph.ops)
        for op in graph.ops:
            if op.instr.target in ("aten.to.dtype", "aten.reshape.default", "aten.expand.default"):
                assert graph.values[op.operands[0]].spec != graph.values[op.outputs[0]].spec


@pytest.mark.parametrize("track", [True, False])
def test_batch_norm_in_training_is_one_pure_operator(track: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=track), nn.ReLU(inplace=True)).double()
    graph = assert_captures(model, (seeded(ROWS, 4),), lambda out, _: out.pow(3).sum())
    (op,) = (op for op in graph.ops if op.instr.target == "runtime.batch_norm")
    assert op.instr.is_sequence and len(op.instr.outputs) == 3 and len(op.outputs) == (3 if track else 1)


@pytest.mark.parametrize("places", [torch.tensor([2, -1, 0, -3]), torch.tensor([[1, 0], [2, 2], [-1, -2], [0, 1]])])
def test_one_element_of_every_row_is_a_gather_whose_rows_may_be_divided(places: torch.Tensor) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 10)

        def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            rows = torch.arange(x.shape[0]).view(-1, *(1,) * (places.dim() - 1))
            return self.linear(x)[rows, places].square().sum()

    graph = capture(Model().double(), {"x": seeded(4, 3, 6), "places": places})
    made = {op.instr.target for op in graph.ops}
    assert "aten.gather.default" in made and "aten.index.Tensor" not in made
    assert micro_batch_blocker(graph) is None


def test_a_mask_that_is_repeated_for_every_image_is_kept_once() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            windows = self.linear(x).reshape(-1, 2, 6)  # (4 images, 3 windows)
            steps = torch.arange(3.0)[:, None, None] + torch.arange(2.0)[:, None] * torch.arange(6.0)
            return (windows * steps.expand(x.shape[0], 3, 2, 6).reshape(-1, 2, 6)).square().sum()

    graph = capture(Model(), {"x": torch.randn(4, 3, 2, 6)})
    assert [tuple(data.shape) for data in graph.constants.values()] == [(3, 2, 6)]
    assert micro_batch_blocker(graph) is None

"""Tensor parallelism on one axis (1D) as Shoeybi et al. 2019 and Korthikanti et al. 2022 lay it out: embedding and loss divided by vocabulary, columns
and rows with biases, sequences divided between them or not; it equals the plain model and sums or gathers as often as they say. fp64 on 4 ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from runtime.record import Traffic
from tests.dist.launch import run_ranks
from tests.dist.parity import Case, Outcome, run_cases

ROWS, LENGTH, WIDTH, CLASSES, RANKS = 4, 8, 32, 64, 4
STREAM, LABELS = ROWS * LENGTH * WIDTH * 8, ROWS * LENGTH * 8  # bytes of the residual stream, and of a figure for every label


class Layer(nn.Module):
    """A transformer layer between an embedding and a smoothed loss of labels of which some are ignored."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.table, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return F.cross_entropy(self.head(self.norm3(x)).flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def layer() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    labels = torch.randint(0, CLASSES, (ROWS, LENGTH)).masked_fill(torch.rand(ROWS, LENGTH) < 0.3, -100)
    return Layer(), {"ids": torch.randint(0, CLASSES, (ROWS, LENGTH)), "labels": labels}


COLUMNS = {f"{name}_product": "o.0" for name in ("linear", "linear_1", "linear_2")} | {f"{name}_product": "o" for name in ("linear_4", "linear_6")}
BIASES = {"linear": "d2.0", "linear_1": "d2.0", "linear_2": "d2.0", "linear_4": "d2", "linear_6": "d2"}
HEADS = {f"{name}{i}": "d2" for name in ("unflatten", "transpose") for i in ("", "_1", "_2")} | {"transpose_3": "d1", "flatten": "d2"}
ATTENTION = {**HEADS, "scaled_dot_product_attention": "b1", "linear_3_product": "i.0"}
FORWARD = {**COLUMNS, **BIASES, **ATTENTION, "gelu": "d2", "linear_5_product": "i"}
VOCABULARY = {"embedding": "v", "flatten_1": "d2", "cross_entropy_loss_1": "v"}
SEQUENCE = {f"layer_norm{i}": "b1" for i in ("", "_1", "_2")} | dict.fromkeys(("linear_3", "add", "linear_5", "add_1"), "d1")
SUMMED = Case("layer", plan=dict(tp=RANKS), labels={**FORWARD, **VOCABULARY}, dtype="float64")
GATHERED = Case("layer", plan=dict(tp=RANKS), labels={**FORWARD, **VOCABULARY, **SEQUENCE}, dtype="float64")


def on_four() -> list[Outcome]:
    return run_cases([SUMMED, GATHERED], {"layer": layer})


@pytest.mark.timeout(300)
def test_columns_rows_and_vocabulary_equal_the_plain_model_with_two_sums_a_layer_and_pass_or_their_parts() -> None:
    summed, gathered = run_ranks(on_four, RANKS, timeout_s=250)[0]
    for outcome in (summed, gathered):
        assert outcome.missing == () and max(outcome.errors()) <= 1e-10, outcome
        assert all(held.sent == held.planned_sent for held in outcome.held)
        # all that is divided is a quarter; norms and the biases of rows are whole
        kept_whole = 8 * (6 * WIDTH + 2 * WIDTH)
        assert {held.parameter_bytes for held in outcome.held} == {(outcome.dense_bytes - kept_whole) // RANKS + kept_whole}
    sums, parts = ({(use.kind, use.phase): use for use in outcome.held[0].sent if use.axis == "tp"} for outcome in (summed, gathered))
    assert sums == {
        ("all_reduce", "forward"): Traffic("all_reduce", "tp", "forward", (2 + 1) * STREAM + 4 * LABELS, 2 + 1 + 4),  # the layer's, the embedding's, the loss's
        ("all_reduce", "backward"): Traffic("all_reduce", "tp", "backward", (2 + 1) * STREAM, 2 + 1),  # the layer's, and before the head
    }
    once = {key: use for key, use in parts.items() if key[0] != "all_reduce"}
    assert once == {(kind, phase): Traffic(kind, "tp", phase, 3 * STREAM, 3) for kind in ("all_gather", "reduce_scatter") for phase in ("forward", "backward")}
    assert parts["all_reduce", "forward"] == Traffic("all_reduce", "tp", "forward", 4 * LABELS, 4)
    assert parts["all_reduce", "reduce"].num_bytes == kept_whole, "gradients of norms and of rows' biases, once a step"

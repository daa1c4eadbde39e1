"""Every division that is offered in the models of the zoo is right: each distinct operator, each loop and linear group, both passes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from autoplan.frontend import capture
from autoplan.graph import Graph
from autoplan.shardsim import ProofRow, prove_batch_axis, prove_graph
from tests.zoo import ZOO, Built, bert, gpt2, llama

torch.set_num_threads(1)

WITH_DROPOUT: dict[str, Callable[[], Built]] = {
    "gpt2-dropout": lambda: gpt2(resid_pdrop=0.1, embd_pdrop=0.2, attn_pdrop=0.3),
    "bert-dropout": lambda: bert(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.3),
    "llama-dropout": lambda: llama(attention_dropout=0.2),
}


@pytest.fixture(scope="module", params=[*ZOO, *WITH_DROPOUT])
def graph(request) -> Graph:
    model, batch = (ZOO | WITH_DROPOUT)[request.param]()
    return capture(model, batch, check=False)


def faults(rows: tuple[ProofRow, ...]) -> str:
    return "\n".join(f"{row.op} = {row.target}, {row.option} on {row.degree} ranks: {row.proof.reason}" for row in rows if not row.proof.ok)


def test_every_division_offered_in_a_model_is_right(graph):
    rows = prove_graph(graph)
    assert not faults(rows)
    assert any(row.target in ("aten.linear.default", "aten.conv2d.default") for row in rows) and any(row.option.startswith("partial") for row in rows)


def test_the_batch_divides_into_unequal_shares(graph):
    rows = prove_batch_axis(graph, (5, 2, 1))
    assert not faults(rows) and len(rows) > 5

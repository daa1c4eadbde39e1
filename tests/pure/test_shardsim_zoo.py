"""Every division that is offered in the models of the zoo is right: each distinct operator, each loop and linear group, both passes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from autoplan.capture import capture
from autoplan.shardsim import prove_graph
from tests.zoo import ZOO, Built, bert, gpt2, llama

torch.set_num_threads(1)

WITH_DROPOUT: dict[str, Callable[[], Built]] = {
    "gpt2-dropout": lambda: gpt2(resid_pdrop=0.1, embd_pdrop=0.2, attn_pdrop=0.3),
    "bert-dropout": lambda: bert(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.3),
    "llama-dropout": lambda: llama(attention_dropout=0.2),
}


@pytest.mark.parametrize("name", [*ZOO, *WITH_DROPOUT])
def test_every_division_offered_in_a_model_is_right(name):
    model, batch = (ZOO | WITH_DROPOUT)[name]()
    graph = capture(model, batch, check=False)
    rows = prove_graph(graph)
    wrong = [f"{row.op} = {row.target}, {row.option} on {row.degree} ranks: {row.proof.reason}" for row in rows if not row.proof.ok]
    assert not wrong, "\n".join(wrong)
    assert any(row.target in ("aten.linear.default", "aten.conv2d.default") for row in rows) and any(row.option.startswith("partial") for row in rows)

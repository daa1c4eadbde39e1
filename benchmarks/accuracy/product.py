"""A run through the product itself: model on meta, capture, fixed plan, forecast.

The model is transformers' GPT-2 or Llama with the row's sizes; the plan is what find_plan returns when every degree is fixed, so
the layout inside a stage is the planner's choice. The prices are those of the row's cluster, calibration and stack.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from autoplan import AutoplanError, Constraints, capture, find_plan
from autoplan.forecast import Forecast
from autoplan.graph import Graph
from autoplan.lower import lower
from autoplan.simulate import forecast as simulated
from benchmarks.accuracy.block import padded_vocab
from benchmarks.accuracy.record import Model, Run, UnsupportedRowError
from costmodel.analytic import AnalyticPrices
from costmodel.calibration import Calibration

PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def forecast(run: Run, calibration: Calibration) -> Forecast:
    """The product's forecast. UnsupportedRowError for what its planner does not offer."""
    for wrong, what in (
        (run.cp > 1, "context parallelism"),
        (run.vpp > 1, "interleaved schedules"),
        (run.recompute not in ("none", "full"), f"recomputation '{run.recompute}'"),
        (run.gemm_dtype == "float8", "8-bit products"),
        (not run.model.head, "a model without a head"),
    ):
        if wrong:
            raise UnsupportedRowError(f"this path does not translate {what}")
    graph = captured(run.model, padded_vocab(run.model, run.tp), run.global_batch)
    layers = tuple(stage.layers for stage in run.stages)
    constraints = Constraints(
        dp=run.dp,
        tp=run.tp,
        pp=run.pp,
        zero=run.zero,
        zero_group=run.zero_group if run.zero and run.zero_group < run.dp else None,
        micro_batch_size=run.micro_batch,
        schedule="1f1b" if run.pp > 1 else None,
        stage_layers=layers if run.pp > 1 else None,
        recompute=run.recompute,
        sequence_parallel=run.sequence_parallel if run.tp > 1 else None,
    )
    try:
        prices = AnalyticPrices(run.cluster, calibration, run.stack)
        plan = find_plan(graph, None, run.cluster, constraints, precision=PRECISIONS[run.dtype], prices=prices)
        if not run.cluster.mixed:
            return plan.forecast
        # the row deals rows evenly, whatever its devices; replicas and stages lie in the order of the groups
        even = replace(plan, shares=(), axes=(("pp", run.pp), ("dp", run.dp), ("tp", run.tp)), micro_batch_size=run.micro_batch)
        return simulated(lower(even, graph), even, graph, prices)
    except AutoplanError as error:
        raise UnsupportedRowError(f"the planner refuses: {error}") from error


@lru_cache(maxsize=8)
def captured(model: Model, vocab: int, batch: int) -> Graph:
    """The captured graph of one training step; nothing is allocated."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        if model.gated:
            made: torch.nn.Module = LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=vocab,
                    hidden_size=model.hidden,
                    intermediate_size=model.ffn,
                    num_hidden_layers=model.layers,
                    num_attention_heads=model.heads,
                    num_key_value_heads=model.kv_heads,
                    max_position_embeddings=model.seq,
                    use_cache=False,
                )
            )
        else:
            made = GPT2LMHeadModel(
                GPT2Config(
                    vocab_size=vocab, n_positions=model.seq, n_embd=model.hidden, n_layer=model.layers, n_head=model.heads, n_inner=model.ffn, use_cache=False
                )
            )
        tokens = torch.zeros(batch, model.seq, dtype=torch.long)
    return capture(made, {"input_ids": tokens, "labels": tokens.clone()})

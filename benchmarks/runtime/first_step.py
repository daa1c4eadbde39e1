"""How long a job of four ranks waits for its first step: a Llama of transformers with 32 small blocks.

    python benchmarks/runtime/first_step.py

For each plan: the seconds of `parallelize` (capture, search, lowering, tensors placed), of the first step (process groups connected, blocks
compiled, caches cold) and of the third, each the slowest rank's.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import autoplan
from autoplan.launch import run_ranks
from benchmarks.runtime.compare import join

RANKS, BLOCKS, SEQ = 4, 32, 32
PLANS: dict[str, dict[str, Any]] = {
    "dp 4, ZeRO-3": dict(dp=4, zero=3),
    "tp 2 x pp 2": dict(dp=1, tp=2, pp=2),
    "dp 2 x pp 2": dict(dp=2, tp=1, pp=2),
    "as searched": {},
}


def waits(constraints: dict[str, Any]) -> list[float]:
    """Seconds of parallelize, of the first step and of the third."""
    join(RANKS)
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=176, num_attention_heads=4, num_key_value_heads=2, vocab_size=256)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=BLOCKS, use_cache=False, **sizes))
    ids = torch.randint(0, 256, (8, SEQ))
    batch = {"input_ids": ids, "labels": ids.clone()}
    dist.barrier()
    found = [time.perf_counter()]
    pm = autoplan.parallelize(model, batch, cluster=f"cpu:1x{RANKS}", constraints=autoplan.Constraints(**constraints))
    optimizer = pm.optimizer(torch.optim.AdamW, lr=1e-3)
    found.append(time.perf_counter())
    for _ in range(3):
        pm.forward_backward(batch)
        optimizer.step()
        optimizer.zero_grad()
        found.append(time.perf_counter())
    return [found[1] - found[0], found[2] - found[1], found[4] - found[3]]


def main() -> None:
    for name, constraints in PLANS.items():
        ranks = run_ranks(waits, RANKS, constraints, timeout_s=600)
        prepared, first, third = (max(rank[i] for rank in ranks) for i in range(3))
        print(f"{name:14s} parallelize {prepared:.1f} s, first step {first:.2f} s, third {third:.2f} s", flush=True)


if __name__ == "__main__":
    main()

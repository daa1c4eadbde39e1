"""Where dividing the sequence wins: tensor, context and ZeRO data parallelism of a long-sequence decoder at the product's own prices.

    python benchmarks/tensor/context.py [--cluster h100-sxm-80gb:4x8] [--rows 2] [--seqs 8192 32768 131072] [--layers 32]

Each row is the best plan of the whole space with the degree of "cp" fixed; `free` leaves it to the search. `--experts` does the same for "ep" and a
Mixtral-like decoder.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
import transformers
from torch import nn

import autoplan
from autoplan.graph import Graph


class Block(nn.Module):
    """A decoder layer with grouped-query attention, causal by position alone: no mask of s x s is ever made."""

    def __init__(self, hidden: int, heads: int, key_heads: int, ffn: int) -> None:
        super().__init__()
        self.heads, self.key_heads, self.dim = heads, key_heads, hidden // heads
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.q, self.k, self.v = (nn.Linear(hidden, n * self.dim, bias=False) for n in (heads, key_heads, key_heads))
        self.o = nn.Linear(hidden, hidden, bias=False)
        self.gate, self.up, self.down = nn.Linear(hidden, ffn, bias=False), nn.Linear(hidden, ffn, bias=False), nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        rows, length, _ = y.shape
        q = self.q(y).view(rows, length, self.heads, self.dim).transpose(1, 2)
        k, v = (part(y).view(rows, length, self.key_heads, self.dim).transpose(1, 2) for part in (self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(rows, length, -1))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """The sizes of Llama-3-8B, without its rotary tables."""

    def __init__(self, layers: int, hidden: int = 4096, heads: int = 32, key_heads: int = 8, ffn: int = 14336, vocab: int = 32064) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Block(hidden, heads, key_heads, ffn) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, vocab, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def decoder(layers: int, rows: int, length: int) -> Graph:
    with torch.device("meta"):
        model, batch = Decoder(layers), {name: torch.empty(rows, length, dtype=torch.int64) for name in ("ids", "labels")}
    return autoplan.capture(model, batch, precision="bf16")


def experts(layers: int, rows: int, length: int) -> Graph:
    config = transformers.MixtralConfig(num_hidden_layers=layers, use_cache=False, max_position_embeddings=length)
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config).train()
        batch = {name: torch.empty(rows, length, dtype=torch.int64) for name in ("input_ids", "labels")}
    return autoplan.capture(model, batch, precision="bf16")


def told(graph: Graph, cluster: str, **fixed: int) -> str:
    start_s = time.process_time()
    try:
        plan = autoplan.find_plan(graph, cluster=cluster, constraints=autoplan.Constraints(**fixed), precision="bf16")
    except autoplan.InfeasibleError as error:
        return f"- | - | {str(error).splitlines()[0][:100]} | {time.process_time() - start_s:.0f}"
    mesh = " x ".join(f"{name} {size}" for name, size in plan.axes if size > 1) + (f" ({plan.context})" if plan.context else "")
    more = f", ZeRO {plan.zero}" + (", recomputed" if any(block.recompute == "full" for block in plan.blocks) else "")
    step, memory = plan.forecast.step_time_s, plan.forecast.peak_memory_bytes / 2**30
    return f"{step:.2f} s | {memory:.1f} GiB | {mesh}{more}, {plan.num_micro_batches} micro-batches | {time.process_time() - start_s:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", default="h100-sxm-80gb:4x8")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--seqs", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--degrees", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--experts", action="store_true")
    args = parser.parse_args()
    axis = "ep" if args.experts else "cp"
    print(f"| positions | {axis} | step | memory | plan | search, CPU s |\n|---|---|---|---|---|---|")
    for length in args.seqs:
        graph = (experts if args.experts else decoder)(args.layers, args.rows, length)
        for degree in args.degrees:
            print(f"| {length} | {degree} | {told(graph, args.cluster, **{axis: degree})} |", flush=True)
        print(f"| {length} | free | {told(graph, args.cluster)} |", flush=True)


if __name__ == "__main__":
    main()

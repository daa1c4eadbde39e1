"""The decoder-only transformers of the rows, as training stacks write them: fused attention, few kernels, no biases (they fuse into the products).

    GPT    LayerNorm, GELU or ReLU, learned positions, tied head, one projection for q, k and v; dropout
    Llama  RMSNorm, SwiGLU, rotary positions, a head of its own; keys and values may have fewer heads

Tensors are [batch, sequence, features]. Sources: Radford et al. 2019; Touvron et al. 2023; Shoeybi et al. 2019 for the order of operators.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.accuracy.record import Model

DROPOUT = 0.1  # of GPT


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, m: Model) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim, self.is_gpt = m.heads, m.kv_heads, m.hidden // m.heads, not m.gated
        self.q = nn.Linear(m.hidden, m.heads * self.dim, bias=False) if m.kv_heads != m.heads else None
        self.kv = nn.Linear(m.hidden, (2 if self.q is not None else 3) * m.kv_heads * self.dim, bias=False)
        self.out = nn.Linear(m.heads * self.dim, m.hidden, bias=False)
        if m.gated:
            angles = torch.outer(torch.arange(m.seq, dtype=torch.float32), 10000 ** (-torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim))
            self.register_buffer("cos", torch.cat((angles.cos(), angles.cos()), -1), persistent=False)
            self.register_buffer("sin", torch.cat((-angles.sin(), angles.sin()), -1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        found = self.kv(x).view(rows, length, -1, self.kv_heads, self.dim).unbind(2)
        whole = found if self.q is None else (self.q(x).view(rows, length, self.heads, self.dim), *found)
        q, k, v = (t.transpose(1, 2) for t in whole)
        if self.is_gpt:
            q, k, v = q.clone(), k.clone(), v.clone()  # in the order in which the kernel reads
        else:
            q, k = (t * self.cos + t.roll(self.dim // 2, -1) * self.sin for t in (q, k))
        dropout = DROPOUT if self.is_gpt else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=self.kv_heads != self.heads)
        return self.out(y.transpose(1, 2).reshape(rows, length, self.heads * self.dim))


class Layer(nn.Module):
    """Attention and feed-forward, each after a norm and beside a residual."""

    def __init__(self, m: Model) -> None:
        super().__init__()
        norm = nn.RMSNorm if m.gated else nn.LayerNorm
        self.before, self.attention, self.between = norm(m.hidden), Attention(m), norm(m.hidden)
        self.gate = nn.Linear(m.hidden, m.ffn, bias=False) if m.gated else None
        self.up, self.down = nn.Linear(m.hidden, m.ffn, bias=False), nn.Linear(m.ffn, m.hidden, bias=False)
        self.relu = m.relu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate is not None:
            x = x + self.attention(self.before(x))
            y = self.between(x)
            return x + self.down(F.silu(self.gate(y)) * self.up(y))
        x = x + F.dropout(self.attention(self.before(x)), DROPOUT)
        wide = self.up(self.between(x))
        return x + F.dropout(self.down(F.relu(wide) if self.relu else F.gelu(wide, approximate="tanh")), DROPOUT)


class Decoder(nn.Module):
    """The whole model; its loss is the mean cross-entropy over the vocabulary, or over the features where it has no head."""

    def __init__(self, m: Model, vocab: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, m.hidden)
        self.positions = None if m.gated else nn.Embedding(m.seq, m.hidden)
        self.layers = nn.ModuleList(Layer(m) for _ in range(m.layers))
        self.norm = (nn.RMSNorm if m.gated else nn.LayerNorm)(m.hidden)
        self.head = nn.Linear(m.hidden, vocab, bias=False) if m.head else None
        if self.head is not None and not m.gated:
            self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        logits = x if self.head is None else self.head(x)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

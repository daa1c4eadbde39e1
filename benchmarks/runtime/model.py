"""A small decoder of the Llama kind in plain torch, and its parts for a pipeline written by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, WIDTH, HEADS, FFN, SEQ = 512, 256, 4, 704, 128


class Layer(nn.Module):
    """x (rows, SEQ, WIDTH) -> the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(WIDTH, FFN, bias=False), nn.Linear(WIDTH, FFN, bias=False), nn.Linear(FFN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (proj(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for proj in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """Token ids and labels (rows, SEQ) -> mean cross entropy."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(Layer() for _ in range(num_layers))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class Part(nn.Module):
    """Stage `index` of `num_parts` of a decoder: embedding with the first layers, or layers, or the last ones with the head (logits)."""

    def __init__(self, model: Decoder, index: int, num_parts: int) -> None:
        super().__init__()
        each = len(model.layers) // num_parts
        self.layers = model.layers[index * each : (index + 1) * each]
        self.embed = model.embed if index == 0 else nn.Identity()
        self.end = nn.Sequential(model.norm, model.head) if index == num_parts - 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.end(x)


def built(num_layers: int, num_rows: int) -> tuple[Decoder, dict[str, torch.Tensor]]:
    """The model with the same weights on every rank, and the global batch."""
    torch.manual_seed(0)
    ids = torch.randint(0, VOCAB, (num_rows, SEQ))
    return Decoder(num_layers), {"ids": ids, "labels": ids.roll(-1, 1)}

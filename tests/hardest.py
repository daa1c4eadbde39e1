"""Inputs that join two kinds of tests/hard.py and tests/harder.py each: one tensor in several places, and something unusual about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.hard import VOCAB, WIDTH, Residual, Words, _seeded, _tokens
from tests.zoo import Built
from tests.zoo import mixtral as zoo_mixtral


class OneNorm(nn.Module):
    """A norm, and a gain of no dimension, that every layer and the head use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.gain = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH), nn.Parameter(torch.tensor(1.2))
        self.layers, self.head = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + self.gain * torch.tanh(layer(self.norm(x)))
        return F.cross_entropy(self.head(self.norm(x) * self.gain).flatten(0, 1), labels.flatten())


class Steps(nn.Module):
    """One counter that two blocks advance, and read before and after."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(Residual() for _ in range(3)), nn.Linear(WIDTH, VOCAB)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](self.embed(ids))
        self.count.add_(1)
        x = self.layers[1](x) * (1 + 0.1 * self.count)
        self.count.mul_(2).add_(1)
        x = self.layers[2](x) * (1 - 0.05 * self.count)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class DetachedTie(Words):
    """The head trains, and the embedding reads the same weight without a gradient."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = F.embedding(ids, self.head.weight.detach()) + self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class TwoPrecisions(nn.Module):
    """Layers in bfloat16 between norms, an embedding and a head in float32: all of them train."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.norms, self.layers = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2)), nn.ModuleList(nn.Linear(WIDTH, WIDTH).bfloat16() for _ in range(2))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x).bfloat16()).float()
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class SmoothedExperts(nn.Module):
    """Experts whose loss is smoothed, with ignored labels, and adds a term over the valid positions alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.model(input_ids=input_ids, use_cache=False).logits[:, :-1]
        y = labels[:, 1:]
        entropy = F.cross_entropy(x.flatten(0, 1), y.flatten(), label_smoothing=0.1)
        return entropy + 1e-2 * (x.logsumexp(-1).square() * (y != -100)).sum() / (y != -100).sum()


class TwoWays(nn.Module):
    """A linear map as it is and transposed, in blocks of their own, and a bias that two maps share."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a, self.b, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.b.bias = self.a.bias

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.a(self.embed(ids)))
        x = x + F.gelu(self.b(x))
        x = x + F.linear(x, self.a.weight.t(), self.a.bias)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Carried(nn.Module):
    """A value of the first layer, and a mask of it, that every later layer reads; its gradient comes from all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(Residual() for _ in range(4)), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        first = x = self.layers[0](self.embed(ids))
        positive = first > 0
        for layer in self.layers[1:]:
            x = torch.where(positive, layer(x), x) + first.detach() * 0.1 + first * 0.2
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Dropped(nn.Module):
    """A block with dropout that the model runs twice, with one without between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.other, self.drop = nn.Embedding(VOCAB, WIDTH), Residual(), Residual(), nn.Dropout(0.3)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.layer(self.embed(ids)))
        x = self.drop(self.layer(self.other(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def words_of(make: Callable[[], nn.Module]) -> Callable[[], Built]:
    return lambda: (_seeded(make), _tokens())


def smoothed_experts() -> Built:
    model, batch = zoo_mixtral()
    held: Any = SmoothedExperts(model)
    return held.train(), batch


HARDEST: dict[str, Callable[[], Built]] = {
    "norm of all layers": words_of(OneNorm),
    "counter of two blocks": words_of(Steps),
    "tied and detached": words_of(lambda: DetachedTie([Residual(), Residual()])),
    "bf16 between float32": words_of(TwoPrecisions),
    "map both ways": words_of(TwoWays),
    "carried to the end": words_of(Carried),
}

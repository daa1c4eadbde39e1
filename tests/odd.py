"""Models whose steps are written in unusual ways: assigned buffers, recurrent layers, numbers beside losses, writes where a mask says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.hard import VOCAB, WIDTH, Residual, _seeded, _tokens, _vectors
from tests.zoo import Built


class Assigned(nn.Module):
    """A part below the root that assigns its buffer, in two calls, and a queue of what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("queue", torch.zeros(16, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        with torch.no_grad():
            self.queue = torch.cat([self.queue[len(y) :], y])
        return torch.tanh(y - self.mean) + self.queue.mean(0)


class TwiceAssigned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.part, self.head = Residual(), Assigned(), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.part(self.part(self.first(x)))), labels)


class Recurrent(nn.Module):
    """Two recurrent layers, one with the steps first, and a cell that is stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.long, self.both, self.cell = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True), nn.GRU(WIDTH, WIDTH // 2, bidirectional=True), nn.GRUCell(WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.both(self.long(self.embed(ids))[0].transpose(0, 1))[0]
        state, states = torch.zeros_like(x[0]), []
        for step in x:
            state = self.cell(step, state)
            states.append(state)
        return F.cross_entropy(self.head(torch.stack(states, 1)).flatten(0, 1), labels.flatten())


class NumbersBeside(nn.Module):
    """A loss that begins with 0, to which numbers are added, and one that is taken from 1."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(Residual() for _ in range(3)), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, beside, terms = self.embed(ids), 0.0, []
        for layer in self.layers:
            y = layer(x)
            beside = beside + y.square().mean()
            terms.append(1 - F.cosine_similarity(x, y, dim=-1).mean())
            x = y
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + 0.01 * beside + torch.stack(terms).mean() - 0.5 + sum(terms)


class Masked(nn.Module):
    """Numbers written where a mask says, of all dimensions and of rows, and under inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Residual(), Residual(), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        y = self.first(x).clone()
        y[y < 0] = 0.0
        y[labels == 1] = 0.5
        with torch.inference_mode():
            teacher = self.second(x)
        return F.cross_entropy(self.head(self.second(y) + teacher.clone()), labels)


class Paired(nn.Module):
    """Two inputs one after the other in one pass, compared afterwards: the rows are taken apart again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Residual(), Residual(), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        y = self.head(self.second(self.first(torch.cat((x, x.flip(1))))))
        one, other = y.chunk(2)
        return F.mse_loss(one, other) + F.cross_entropy(one, labels)


class OnlyWeights(nn.Module):
    """The loss is of the weights alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first.weight)).square().mean()


def words_of(make: Callable[[], nn.Module]) -> Callable[[], Built]:
    return lambda: (_seeded(make), _tokens())


def vectors_of(make: Callable[[], nn.Module]) -> Callable[[], Built]:
    return lambda: (_seeded(make), _vectors())


ODD: dict[str, Callable[[], Any]] = {
    "assigned twice": vectors_of(TwiceAssigned),
    "recurrent": words_of(Recurrent),
    "numbers beside": words_of(NumbersBeside),
    "masked": vectors_of(Masked),
    "paired": vectors_of(Paired),
    "only weights": vectors_of(OnlyWeights),
}

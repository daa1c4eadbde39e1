"""Models that are no chain, with their modules pinned to ranks by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tests.zoo import Built, _seeded

ROWS = 8


class MatrixFactorisation(nn.Module):
    """Embeddings of users and items, a layer on the users' side, their product."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item, self.fc = nn.Embedding(50, 16), nn.Embedding(60, 16), nn.Linear(16, 16)

    def forward(self, users: torch.Tensor, items: torch.Tensor, ratings: torch.Tensor) -> torch.Tensor:
        return ((self.fc(self.user(users)) * self.item(items)).sum(1) - ratings).square().mean()


class TwoTowers(nn.Module):
    """Two stacks that know nothing of each other until the end."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 16))
        self.right = nn.Sequential(nn.Linear(20, 28), nn.Tanh(), nn.Linear(28, 16))
        self.head = nn.Linear(16, 5)

    def forward(self, a: torch.Tensor, b: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.left(a) * self.right(b)), labels)


class Fan(nn.Module):
    """One value with nine readers: eight branches and their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(12, 16)
        self.branches = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.stem(x))
        total = h
        for branch in self.branches:
            total = total + torch.tanh(branch(h))
        return nn.functional.cross_entropy(self.head(total), labels)


def _draw(seed: int = 5) -> Callable[..., torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator)


def _ids(high: int) -> torch.Tensor:
    return torch.randint(high, (ROWS,), generator=torch.Generator().manual_seed(high))


def factorisation() -> Built:
    return _seeded(MatrixFactorisation), {"users": _ids(50), "items": _ids(60), "ratings": _draw()(ROWS)}


def towers() -> Built:
    draw = _draw()
    return _seeded(TwoTowers), {"a": draw(ROWS, 12), "b": draw(ROWS, 20), "labels": _ids(5)}


def fan() -> Built:
    return _seeded(Fan), {"x": _draw()(ROWS, 12), "labels": _ids(5)}


PLACED: Mapping[str, Callable[[], Any]] = {"factorisation": factorisation, "towers": towers, "fan": fan}

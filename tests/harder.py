"""More inputs of the kinds of tests/hard.py: sharing, losses, partial modes, padding, shapes of parameters, operators of whole modules."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from tests.hard import SEQ, VOCAB, WIDTH, Residual, Stack, Words, _generator, _seeded, _tokens, _vectors, plain
from tests.hard import Layer as Bodied
from tests.zoo import Built


class Shares(nn.Module):
    """One layer that is used three times, and an embedding that is read at the start, in the middle and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.other = nn.Embedding(VOCAB, WIDTH), Residual(), Residual()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.embed(ids))
        x = self.other(self.layer(x)) + self.embed(ids.roll(1, 1))
        return F.cross_entropy((self.layer(x) @ self.embed.weight.t()).flatten(0, 1), labels.flatten())


def two_losses(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Two means over other valid positions, one of them smoothed, with another ignored label."""
    other = torch.where(y % 3 == 0, -1, y)
    return F.cross_entropy(x, y, label_smoothing=0.1) + 0.5 * F.cross_entropy(x * 0.5, other.clamp(min=-1), ignore_index=-1)


def divergence(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.kl_div(F.log_softmax(x, -1), F.one_hot(y.clamp(min=0), VOCAB).to(x.dtype) * 0.9 + 0.1 / VOCAB, reduction="batchmean")


def masked_square(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    valid = (y != -100).to(x.dtype)[:, None]
    return (F.mse_loss(x, x.detach() * 0.5, reduction="none") * valid).sum() / (valid.sum() * x.shape[-1])


def smooth_mean(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.smooth_l1_loss(x, torch.ones_like(x)) + F.binary_cross_entropy_with_logits(x, (x.detach() > 0).to(x.dtype))


def with_loss(loss: Callable[..., torch.Tensor]) -> Callable[[], Built]:
    return lambda: (_seeded(lambda: Words([Residual(), Residual()], loss=loss)), _tokens())


class Penalised(Words):
    """The loss has a term of the weights alone."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().forward(ids, labels) + 1e-2 * sum(p.square().sum() for p in self.layers.parameters())


class Padded(nn.Module):
    """An embedding with a padding word, whose row never trains."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(VOCAB, WIDTH, padding_idx=3), Residual(), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.layer(self.embed(ids))).flatten(0, 1), labels.flatten())


class Frozen(nn.Module):
    """BatchNorm in evaluation mode inside a model in training."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.b(self.norm(self.a(x)))[:, :3], labels)


class Encoders(nn.Module):
    """torch's own transformer layers, with a mask of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 3, 24, dropout=0.0, batch_first=True, norm_first=i == 1) for i in range(2))
        self.attend, self.head = nn.MultiheadAttention(WIDTH, 4, batch_first=True), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        x = x + self.attend(x, x, x, need_weights=False)[0]
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Scalars(nn.Module):
    """Parameters of no dimension, of one entry, and of more than two dimensions, in an einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift, self.cube = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(1)), nn.Parameter(torch.randn(3, 4, WIDTH) * 0.3)
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(12, WIDTH)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.a(x)) * self.gain + x * self.shift
        h = torch.einsum("bw,hdw->bhd", h, self.cube).flatten(1)
        return F.cross_entropy(self.b(h)[:, :3] * self.gain, labels)


class Counts(nn.Module):
    """Running sums, a sort and a gather along the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.a(self.embed(ids)).cumsum(1) / torch.arange(1, SEQ + 1)[None, :, None]
        order = x.detach()[..., 0].argsort(1)
        x = x.gather(1, order[..., None].expand_as(x)).logcumsumexp(1)
        return F.cross_entropy(self.head(x.flip(1)).flatten(0, 1), labels.flatten())


class Pieces(nn.Module):
    """Chunk, stack, roll, pad, repeat and strided slices of what was computed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        p, q, r = self.a(x).chunk(3, 1)
        h = torch.stack((p, q * 2, r.roll(1, 1)), 1).transpose(1, 2).reshape(x.shape)
        h = F.pad(h[:, ::2], (0, WIDTH // 2), value=0.5) + (h[:, 1:] + h[:, :-1]).repeat(1, 2)[:, :WIDTH]
        return F.cross_entropy(self.b(h)[:, :3], labels)


def words_of(make: type[nn.Module]) -> Callable[[], Built]:
    return lambda: (_seeded(make), _tokens())


def vectors_of(make: type[nn.Module]) -> Callable[[], Built]:
    return lambda: (_seeded(make), _vectors())


def both_modes() -> Built:
    """A batch with a tensor that every row shares, and one of floats that weigh the rows."""
    batch = _vectors() | {"scale": torch.rand(1, WIDTH, generator=_generator()), "weights": torch.rand(8, generator=_generator())}

    class Weighed(Stack):
        def forward(self, x: torch.Tensor, labels: torch.Tensor, scale: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            x = x * scale
            for layer in self.layers:
                x = layer(x)
            return (F.cross_entropy(x[:, :3], labels, reduction="none") * weights).sum() / weights.sum()

    return _seeded(lambda: Weighed(Bodied(plain), Bodied(plain))), batch


HARDER: dict[str, Callable[[], Built]] = {
    "shared layer": words_of(Shares),
    "two losses": with_loss(two_losses),
    "divergence": with_loss(divergence),
    "masked square": with_loss(masked_square),
    "smooth and binary": with_loss(smooth_mean),
    "penalty on weights": lambda: (_seeded(lambda: Penalised([Residual(), Residual()])), _tokens()),
    "padding word": words_of(Padded),
    "batch norm that rests": vectors_of(Frozen),
    "torch's encoder": words_of(Encoders),
    "scalars and cubes": vectors_of(Scalars),
    "running sums": words_of(Counts),
    "pieces": vectors_of(Pieces),
    "rows that weigh": both_modes,
}

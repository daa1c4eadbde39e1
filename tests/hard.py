"""Models with the constructs that break other systems: tiny, seeded, their batches with unevenly ignored labels and odd sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo import Built

ROWS, SEQ, VOCAB, WIDTH = 8, 6, 13, 12  # 13 words: a vocabulary that no axis divides


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def _tokens(rows: int = ROWS) -> dict[str, torch.Tensor]:
    """The labels of rows 4 to 7 are all ignored, those of rows 0 to 3 in part: micro-batches hold 4 of 6, 6 of 6, ... or none."""
    ids = torch.randint(0, VOCAB, (rows, SEQ), generator=_generator())
    labels = ids.roll(1, 1)
    labels[rows // 2 :] = -100
    labels[0, 1:3] = -100
    labels[2, :5] = -100
    return {"ids": ids, "labels": labels}


def _vectors(width: int = WIDTH, rows: int = ROWS) -> dict[str, torch.Tensor]:
    x = torch.randn(rows, width, generator=_generator())
    return {"x": x, "labels": torch.arange(rows) % 3}


def _images(size: int = 8) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(ROWS, 3, size, size, generator=_generator()), "labels": torch.arange(ROWS) % 3}


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return build().train()


class Residual(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    def __init__(self, num_heads: int, width: int) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.out = num_heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.num_heads, width // self.num_heads).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, width))


class Words(nn.Module):
    """Embedding, layers, head. `tied`: the head is the embedding."""

    def __init__(
        self, layers: list[nn.Module], *, tied: bool = False, width: int = WIDTH, loss: Callable[..., torch.Tensor] = F.cross_entropy, **options: Any
    ) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(VOCAB, width), nn.ModuleList(layers), nn.Linear(width, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.loss, self.options = loss, options

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.loss(self.head(x).flatten(0, 1), labels.flatten(), **self.options)


class Stack(nn.Module):
    """x through `layers`, then cross entropy of the first three columns. A layer takes and gives one tensor, or a tuple of them."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(*x) if isinstance(x, tuple) else layer(x)
        return F.cross_entropy(x.flatten(1)[:, :3], labels)


class Layer(nn.Module):
    """A layer of one linear map and what `body(linear, x, ...)` does with it."""

    def __init__(self, body: Callable[..., Any], width: int = WIDTH) -> None:
        super().__init__()
        self.linear, self.body = nn.Linear(width, width), body

    def forward(self, *x: torch.Tensor) -> Any:
        return self.body(self.linear, *x)


def words(num_layers: int = 2, **options: Any) -> Callable[[], Built]:
    return lambda: (_seeded(lambda: Words([Residual() for _ in range(num_layers)], **options)), _tokens())


def layers(*bodies: Callable[..., Any]) -> Callable[[], Built]:
    return lambda: (_seeded(lambda: Stack(*(Layer(body) for body in bodies))), _vectors())


def weighted() -> Built:
    model = _seeded(lambda: Words([Residual(), Residual()]))
    model.register_buffer("weight", torch.linspace(0.5, 2.0, VOCAB))
    model.loss = lambda x, y: F.cross_entropy(x, y, weight=model.weight, label_smoothing=0.1)  # type: ignore[assignment]
    return model, _tokens()


def weighted_by_a_chain() -> Built:
    """Weights of classes made from two buffers, one of which the model reads as well, and one that is in no state."""
    model = _seeded(lambda: Words([Residual(), Residual()]))
    model.register_buffer("rarity", torch.linspace(0.5, 2.0, VOCAB))
    model.register_buffer("power", torch.tensor(0.5), persistent=False)
    model.loss = lambda x, y: F.cross_entropy(x + model.rarity.log(), y, weight=model.rarity.pow(model.power))  # type: ignore[assignment]
    return model, _tokens()


def own_mean() -> Built:
    """The mean over valid labels, spelled by hand."""

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        valid = y != -100
        each = -F.log_softmax(x, -1).gather(1, y.clamp(min=0)[:, None])[:, 0]
        return (each * valid).sum() / valid.sum()

    return _seeded(lambda: Words([Residual(), Residual()], loss=loss)), _tokens()


def one_tensor_twice() -> Built:
    ids = _tokens()["ids"]
    return _seeded(lambda: Words([Residual(), Residual()])), {"ids": ids, "labels": ids}


def heads(num_heads: int, width: int) -> Callable[[], Built]:
    return lambda: (_seeded(lambda: Words([Attention(num_heads, width), Attention(num_heads, width)], width=width)), _tokens())


class Normed(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm(self.conv(x)), inplace=True)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([Normed(3), Normed(6), Normed(6)]), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Skips(nn.Module):
    """Four layers; what the first makes is read again by the last, and what the second makes by the third."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)])

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        first = torch.tanh(self.layers[0](x))
        second = torch.tanh(self.layers[1](first))
        third = torch.tanh(self.layers[2](torch.cat((second, torch.sin(second)), 1)))
        return F.cross_entropy(self.layers[3](torch.cat((third, first), 1))[:, :3], labels)


def frozen(*where: int, num_layers: int = 4) -> Callable[[], Built]:
    """Words whose layers `where` do not train; -1 is the embedding, `num_layers` the head."""

    def build() -> Built:
        model = _seeded(lambda: Words([Residual() for _ in range(num_layers)]))
        for i in where:
            part = model.embed if i == -1 else model.head if i == num_layers else model.layers[i]  # type: ignore[union-attr,index]
            part.requires_grad_(False)  # type: ignore[union-attr]
        return model, _tokens()

    return build


class Adapted(nn.Module):
    """A frozen linear map in `dtype` with a low-rank float32 adapter beside it."""

    def __init__(self, dtype: torch.dtype, width: int = WIDTH) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).to(dtype).requires_grad_(False)
        self.a, self.b = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.base(x.to(self.base.weight.dtype)).to(x.dtype) + self.b(self.a(x))


def adapted(dtype: torch.dtype) -> Callable[[], Built]:
    def build() -> Built:
        model = _seeded(lambda: Words([Adapted(dtype) for _ in range(3)]))
        model.embed.requires_grad_(False)  # type: ignore[union-attr]
        return model, _tokens()

    return build


class Chosen(nn.Module):
    """Of its parameters one is never used, one only where a flag says so, and one only in an output beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Residual(), Residual()])
        self.never, self.sometimes, self.beside = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.flag = False

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        if self.flag:
            x = self.sometimes(x)
        return {"loss": F.cross_entropy(x[:, :3], labels), "beside": self.beside(x)}


class Counting(nn.Module):
    """A buffer that counts steps and one that follows a mean that does not depend on the batch; both are read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Residual(), Residual()])
        self.count: torch.Tensor
        self.mean: torch.Tensor
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("mean", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.count.add_(1.0)
        self.mean.mul_(0.5).add_(self.count * 0.25)
        for layer in self.layers:
            x = layer(x) * self.mean
        return F.cross_entropy(x[:, :3], labels)


class Follows(Counting):
    """A buffer that follows the batch's own mean."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        self.mean.mul_(0.5).add_(x.detach().mean(0) * 0.5)
        return F.cross_entropy(x[:, :3] * self.mean[:3], labels)


# Bodies of layers: what in-place operators and views do where a stage may end.
def plain(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(linear(x))


def alias_written(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    a = linear(x)
    b = a * 2
    a.add_(1)
    return b + a


def pair_of_aliases(linear: nn.Linear, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    a = linear(x)
    return a, a.view(-1, 3, 4)


def writes_into_pair(linear: nn.Linear, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    b[:, 1].mul_(3.0)
    return linear(a) + b.reshape(a.shape)


def relu_first(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(F.relu_(x * 1.0)) + F.relu(x + 1.0, inplace=True)


def gives_transposed(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(x).view(-1, 3, 4).transpose(1, 2)


def takes_transposed(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(linear(x.reshape(x.shape[0], -1)))


def gives_expanded(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(x)[:, None, :1].expand(-1, 12, 1)


def without_grad(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = linear(x).abs().mean(1, keepdim=True)
    return torch.tanh(linear(x)) * scale


def in_bf16(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x)
    return torch.tanh(y.float())


def with_index(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(linear(x)) * torch.arange(x.shape[1]) / x.shape[1]


def by_shape(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(linear(x)) if linear.weight.shape[0] == x.shape[1] and x.shape[0] > 1 else x


def side_value(linear: nn.Linear, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Beside its result, integers that a later layer indexes with: an input of a stage that has no gradient."""
    return torch.tanh(linear(x)), x.argmax(1)


def takes_side_value(linear: nn.Linear, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    return linear(x) + x[torch.arange(x.shape[0]), place][:, None]


def unused_side_value(linear: nn.Linear, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    return linear(x)


HARD: dict[str, Callable[[], Built]] = {
    "tied": words(3, tied=True),
    "words": words(),
    "summed": words(reduction="sum"),
    "weighted": weighted,
    "weighted by a chain": weighted_by_a_chain,
    "own mean": own_mean,
    "one tensor twice": one_tensor_twice,
    "6 heads": heads(6, 24),
    "batch norm": lambda: (_seeded(Images), _images()),
    "skips": lambda: (_seeded(Skips), _vectors()),
    "frozen prefix": frozen(-1, 0, 1),
    "frozen middle": frozen(1, 2),
    "frozen suffix": frozen(2, 3, 4),
    "only the head": frozen(-1, 0, 1, 2, 3),
    "adapters": adapted(torch.float32),
    "adapters on bf16": adapted(torch.bfloat16),
    "unused": lambda: (_seeded(Chosen), _vectors()),
    "buffers": lambda: (_seeded(Counting), _vectors()),
    "buffer follows": lambda: (_seeded(Follows), _vectors()),
    "alias written": layers(plain, alias_written, plain),
    "aliases cross": layers(plain, pair_of_aliases, writes_into_pair, plain),
    "relu in place first": layers(plain, relu_first, relu_first, plain),
    "transposed crosses": layers(gives_transposed, takes_transposed, gives_transposed, takes_transposed),
    "expanded crosses": layers(gives_expanded, takes_transposed, plain),
    "no grad inside": layers(plain, without_grad, plain),
    "bf16 autocast inside": layers(plain, in_bf16, in_bf16, plain),
    "index inside": layers(plain, with_index, by_shape),
    "integers cross": layers(plain, side_value, takes_side_value, plain),
    "unused crosses": layers(plain, side_value, unused_side_value, plain),
}

"""A model whose repeated layers are written down gives the graph of the model whose layers are all traced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autoplan.frontend as frontend
from autoplan import capture
from autoplan.graph import Graph
from autoplan.modelsource import BatchSizes, from_config, presets
from runtime.instr import Ref

DIM, LAYERS = 8, 7


class Layer(nn.Module):
    def __init__(self, number: int, *, scale: float = 1.0) -> None:
        super().__init__()
        self.number, self.scale = number, scale
        self.up, self.down = nn.Linear(DIM, 16), nn.Linear(16, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x))) * self.scale


class UsesItsNumber(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / (self.number + 1)


class AsksForItsNumber(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if self.number != 5 else x * 2)


class Model(nn.Module):
    def __init__(self, make: Callable[[int], nn.Module] = Layer) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, DIM), nn.Linear(DIM, 3)
        self.layers = nn.ModuleList(make(i) for i in range(LAYERS))
        self.kinds = ["a"] * LAYERS

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.body(self.embed(x))), labels)


class Numbered(Model):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x) if self.kinds[i] == "a" else layer(x * 2)
        return x


class Special(Model):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x) if i != 4 else layer(x * 2)
        return x


class Counting(Model):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        count = 0
        for layer in self.layers:
            x = layer(x) if count != 4 else layer(x * 2)
            count = count + 1
        return x


class Stopping(Model):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        left = list(range(5))
        for layer in self.layers:
            if not left:
                break
            left.pop()
            x = layer(x)
        return x


class Deep(Model):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x / len(self.layers)


class Some(Model):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:4]:
            x = layer(x)
        return x


class Twice(Model):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Skipping(Model):
    """Every layer reads what the last two made."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        before = x
        for layer in self.layers:
            before, x = x, layer(x + before)
        return x


class Gathering(Model):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        seen = [x]
        for layer in self.layers:
            x = layer(x)
            seen.append(x)
        return torch.stack(seen).sum(0)


class InSequence(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*self.layers)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def frozen() -> Model:
    model = Model()
    model.layers[6].requires_grad_(False)
    return model


def with_kinds() -> Model:
    model = Numbered()
    model.kinds[5] = "b"
    return model


def tied() -> Model:
    model = Model()
    model.layers[5].up.weight = model.layers[2].up.weight  # type: ignore[union-attr]
    return model


def _doubled(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def hooked() -> Model:
    model = Model()
    model.layers[5].register_forward_hook(_doubled)
    return model


def dropping() -> Model:
    return Model(lambda i: nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.5)))


def in_training_but_one() -> Model:
    model = dropping()
    model.layers[6].eval()
    return model


REPEATED = {"plain": Model, "numbered": Numbered, "sequential": InSequence, "dropout": dropping}
IN_DOUBT = {
    "the loop asks for its number": Special,
    "one kind differs": with_kinds,
    "the loop counts": Counting,
    "the loop stops early": Stopping,
    "the depth is used": Deep,
    "only some layers": Some,
    "all layers twice": Twice,
    "a layer reads the one before the last": Skipping,
    "all results are gathered": Gathering,
    "a layer uses its number": lambda: Model(UsesItsNumber),
    "a layer asks for its number": lambda: Model(AsksForItsNumber),
    "tied": tied,
}
IN_PART = {
    "frozen": frozen,
    "hooked": hooked,
    "a setting differs": lambda: Model(lambda i: Layer(i, scale=2.0 if i == 5 else 1.0)),
    "eval": in_training_but_one,
}


def both(model: nn.Module, batch: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Graph, Graph, bool]:
    """The graph as `capture` makes it, that of all layers traced, and whether layers were written down."""
    used: list[bool] = []
    real = frontend.repeated

    def watched(*args: Any) -> Graph | None:
        graph = real(*args)
        used.append(graph is not None)
        return graph

    monkeypatch.setattr(frontend, "repeated", watched)
    short = capture(model, batch)
    monkeypatch.setattr(frontend, "repeated", lambda *_: None)
    return short, capture(model, batch), used[0]


def structure(graph: Graph) -> list[Any]:
    """Everything but the fingerprint, values and factors numbered in the order in which they occur."""
    names: dict[str, int] = {}
    factors: dict[int, int] = {}

    def name(old: str) -> int:
        return names.setdefault(old, len(names))

    def dims(value: str) -> tuple:
        return tuple(tuple((factors.setdefault(f, len(factors)), graph.factor_sizes[f]) for f in dim) for dim in graph.values[value].dims)

    def arg(a: Any, own: str) -> Any:
        if isinstance(a, Ref):
            return name(a.name)
        if isinstance(a, tuple):
            return tuple(arg(item, own) for item in a)
        return repr(a).replace(own, "own name")

    found: list[Any] = [(name(v.name), dims(v.name), replace(v, name="", dims=())) for v in graph.values.values() if v.kind != "activation"]
    for op in graph.ops:
        instr = op.instr
        found.append([(name(out.name), out.spec, dims(out.name), graph.values[out.name].requires_grad) for out in instr.outputs if out.spec is not None])
        found.append((instr.target, [arg(a, op.name) for a in instr.args], [(k, arg(a, op.name)) for k, a in instr.kwargs]))
        found.append([replace(loop, factor=factors[loop.factor]) if loop.factor in factors else loop for loop in op.loops])
        found.append((op.linear_in, op.module, op.source, op.flops, [name(s) for s in op.saved], op.saved_extra_bytes, op.random))
    return [*found, graph.blocks, [name(o) for o in graph.outputs], graph.loss and name(graph.loss), graph.warnings, sorted(map(name, graph.constants))]


def example() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(4, 4), "labels": torch.tensor([0, 1, 2, 0])}


@pytest.mark.parametrize("name", [*REPEATED, *IN_DOUBT, *IN_PART])
def test_the_graph_is_that_of_all_layers_traced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    short, long, used = both((REPEATED | IN_DOUBT | IN_PART)[name](), example(), monkeypatch)
    assert structure(short) == structure(long)
    assert used == (name in REPEATED or name in IN_PART)


@pytest.mark.parametrize("name", ["llama3-8b", "gpt2", "qwen3-8b", "mixtral-8x7b", "bert-large", "t5-large", "vit-large"])
def test_layers_of_known_architectures_are_written_down(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    preset = presets()[name]
    cls = getattr(transformers, preset.model)
    config = cls.config_class(**preset.config)
    for field in ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"):
        if hasattr(config, field):
            setattr(config, field, 6)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1] * 6
    source = from_config(name, cls, config, BatchSizes(4, 128 if preset.seq else None))
    short, long, used = both(source.model, source.batch, monkeypatch)
    assert used
    assert structure(short) == structure(long)


def test_the_model_is_as_it_was_afterwards() -> None:
    model = Model()
    before = (type(model.layers), list(model.layers), [layer.number for layer in model.layers])  # type: ignore[union-attr]
    capture(model, example())
    assert (type(model.layers), list(model.layers), [layer.number for layer in model.layers]) == before  # type: ignore[union-attr]


def test_many_layers_cost_little_more_than_few(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = Layer.forward
    monkeypatch.setattr(Layer, "forward", lambda self, x: calls.append(1) or real(self, x))
    with torch.device("meta"):
        model, batch = Model(), example()
    graph = capture(model, batch)
    assert len(calls) == 3
    assert sum(block.layer for block in graph.blocks) == LAYERS

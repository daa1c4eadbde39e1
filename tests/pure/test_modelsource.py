"""MODEL arguments become models on the meta device, or one clear message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from autoplan.errors import UsageError
from autoplan.modelsource import OWN, BatchSizes, load, presets


@pytest.mark.parametrize("name, billions", [("llama3-8b", 8.030), ("gpt3-175b", 174.6), ("gpt-1t", 1008.0), ("mixtral-8x7b", 46.70)])
def test_a_preset_has_its_published_size_and_allocates_nothing(name: str, billions: float) -> None:
    source = load(name, BatchSizes(global_batch=6, seq=128))
    assert sum(p.numel() for p in source.model.parameters()) / 1e9 == pytest.approx(billions, rel=1e-3)
    assert all(p.is_meta for p in source.model.parameters())
    assert source.model.training
    assert isinstance(source.batch, dict)
    assert {key: tuple(t.shape) for key, t in source.batch.items()} == {"input_ids": (6, 128), "labels": (6, 128)}
    assert source.batch["input_ids"] is not source.batch["labels"]


def test_every_preset_that_is_no_giant_builds() -> None:
    for name in ("gpt2", "bert-large", "t5-large", "vit-large", *OWN):
        source = load(name, BatchSizes(global_batch=5))
        assert isinstance(source.batch, dict)
        assert all(t.shape[0] == 5 and t.is_meta for t in source.batch.values())
    assert all(preset.about for preset in presets().values())


def test_a_misspelt_preset_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="llama3-8b"):
        load("lama3-8b")


def test_a_local_config_is_read_from_file_or_folder(tmp_path: Path) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 50}))
    for spec in (f"hf:{tmp_path}", f"hf:{tmp_path / 'config.json'}"):
        source = load(spec, BatchSizes(seq=16))
        assert type(source.model).__name__ == "LlamaForCausalLM"
        assert source.config.num_hidden_layers == 2


@pytest.mark.parametrize("content", [None, "{", '{"model_type": "no-such-model"}'])
def test_an_unreadable_config_is_one_clear_message(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError, match="hf:"):
        load(f"hf:{tmp_path}")


def test_learned_positions_bound_the_sequence() -> None:
    with pytest.raises(UsageError, match="--seq 1024 or less"):
        load("gpt2", BatchSizes(seq=4096))
    with pytest.raises(UsageError, match="no sequence"):
        load("resnet50", BatchSizes(seq=4096))


FACTORY = """
import torch
def build():
    return torch.nn.Linear(3, 2), (torch.arange(12.).view(4, 3),)
def sized(global_batch=2, seq=3):
    return torch.nn.Linear(seq, 2), {"x": torch.zeros(global_batch, seq)}
def wrong():
    return torch.nn.Linear(3, 2)
def broken():
    raise KeyError("weights")
"""


def test_a_factory_gets_the_sizes_it_asks_for_and_its_batch_is_resized_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(FACTORY)
    sized = load(f"{path}:sized", BatchSizes(global_batch=7, seq=5)).batch
    assert isinstance(sized, dict)
    assert tuple(sized["x"].shape) == (7, 5)
    resized = load(f"{path}:build", BatchSizes(global_batch=6)).batch
    assert isinstance(resized, tuple)
    rows = torch.arange(12.0).view(4, 3)
    assert torch.equal(resized[0], torch.cat([rows, rows[:2]]))


@pytest.mark.parametrize("name, message", [("wrong", "must return"), ("broken", "KeyError"), ("missing", "no function"), ("build", "takes no `seq`")])
def test_a_bad_factory_is_one_clear_message(tmp_path: Path, name: str, message: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(FACTORY)
    with pytest.raises(UsageError, match=message):
        load(f"{path}:{name}", BatchSizes(seq=5 if name == "build" else None))

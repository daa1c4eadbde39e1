"""What users bring: weights on disk for a model without any, adapters, hooks, wrappers, checkpointing, quantised weights, other data."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import autoplan
from tests.dist.launch import run_ranks
from tests.dist.parity import loss_of, relative_errors
from tests.hard import HARD
from tests.plans import manual_plan, random_splits
from tests.zoo import ZOO

FP32 = 1e-5


def parallel(model: nn.Module, batch: Any, how: dict[str, Any], **options: Any) -> autoplan.ParallelModel:
    graph = autoplan.capture(model, batch)
    splits = random_splits(graph, how["tp"], 1) if how.get("tp", 1) > 1 else None
    return autoplan.parallelize(model, batch, plan=manual_plan(graph, splits=splits, **how), **options)


def assert_equal(pm: autoplan.ParallelModel, plain: nn.Module, batch: Any, case: Any) -> None:
    loss, true = pm.forward_backward(batch), loss_of(plain, batch)
    true.backward()
    grads = pm.full_grads()
    assert abs(loss.item() - true.item()) <= FP32 * abs(true.item()), case
    if dist.get_rank() == 0:
        wanted = {name: p.grad for name, p in plain.named_parameters(remove_duplicate=False) if p.grad is not None}
        assert grads.keys() == wanted.keys(), case
        assert relative_errors(grads, wanted)[0] <= FP32, (case, relative_errors(grads, wanted))


def loaded_from_meta(folder: str) -> None:
    torch.set_num_threads(1)
    plain, batch = ZOO["llama"]()
    for how in (dict(tp=2), dict(dp=2, zero=3), dict(pp=2)):
        with torch.device("meta"):
            empty, _ = ZOO["llama"]()
        pm = parallel(empty, batch, how)
        with pytest.raises(autoplan.UsageError, match="came from the meta device and have no values yet"):
            pm.forward_backward(batch)
        pm.load_full_state_dict(folder)
        assert all(p.is_meta for p in empty.parameters())
        true = copy.deepcopy(plain)
        assert_equal(pm, true, batch, how)


def compiled() -> None:
    torch.set_num_threads(1)
    for name, how in (("words", dict(tp=2, num_micro_batches=2)), ("tied", dict(dp=2, zero=3, recompute="full"))):
        model, batch = HARD[name]()
        plain = copy.deepcopy(model)
        assert_equal(parallel(model, batch, how, compile_backend="aot_eager"), plain, batch, (name, how))
    model, batch = HARD["words"]()
    with pytest.raises(autoplan.UsageError, match="'zb' splits the backward pass"):
        parallel(model, batch, dict(pp=2, num_micro_batches=2, schedule="zb"), compile_backend="aot_eager")


def wrapped() -> None:
    model, batch = HARD["words"]()
    with pytest.raises(autoplan.CaptureError, match="the model is wrapped by DistributedDataParallel: give the plain module"):
        autoplan.parallelize(nn.parallel.DistributedDataParallel(model), batch)
    model, batch = HARD["words"]()
    with pytest.raises(autoplan.CaptureError, match=r"is wrapped by FSDP.*: give the plain module"):
        autoplan.parallelize(fully_shard(model), batch)
    model, batch = HARD["words"]()
    parallelize_module(model.head, init_device_mesh("cpu", (2,)), ColwiseParallel())  # type: ignore[arg-type]
    with pytest.raises(autoplan.CaptureError, match=r"parameter 'head.weight' is distributed already"):
        autoplan.parallelize(model, batch)


def different_data() -> None:
    torch.set_num_threads(1)
    model, batch = HARD["words"]()
    pm = parallel(model, batch, dict(tp=2), check_data=True)
    pm.forward_backward(batch)
    other = {"ids": batch["ids"].clone(), "labels": batch["labels"]}
    other["ids"][0, 0] += 1 if dist.get_rank() else 0
    with pytest.raises(autoplan.RunError, match="ranks 0 and 1 have different data in ids"):
        pm.forward_backward(other)
    model, batch = HARD["words"]()
    pm = parallel(model, batch, dict(dp=2), check_data=True)
    pm.forward_backward(pm.shard(batch))  # replicas differ on purpose


def one_batch_refused() -> str:
    torch.set_num_threads(1)
    model, batch = HARD["words"]()
    pm = parallel(model, batch, dict(dp=2))
    with pytest.raises(autoplan.UsageError, match="equally many rows"):  # all alike: nobody is harmed
        pm.forward_backward({"ids": batch["ids"], "labels": batch["labels"][:5]})
    pm.forward_backward(batch)
    with pytest.raises((autoplan.UsageError, autoplan.RunError)) as caught:
        pm.forward_backward({"ids": batch["ids"], "labels": batch["labels"][: 8 - 3 * dist.get_rank()]})
    return str(caught.value)


def everything(folder: str) -> str:
    loaded_from_meta(folder)
    compiled()
    wrapped()
    different_data()
    return one_batch_refused()


@pytest.mark.slow
@pytest.mark.timeout(590)
def test_two_ranks(tmp_path: Path) -> None:
    plain, _ = ZOO["llama"]()
    state = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    names = sorted(state)
    save_file({name: state[name] for name in names[::2]}, tmp_path / "a.safetensors")
    save_file({name: state[name] for name in names[1::2]}, tmp_path / "b.safetensors")
    first, second = run_ranks(everything, 2, str(tmp_path), timeout_s=560)
    assert "rank 1 refused its batch in call" in first and "equally many rows" in first
    assert "equally many rows" in second

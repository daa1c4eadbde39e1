"""One GPU: the plan's results are the plain model's there too."""

from __future__ import annotations

import copy

import pytest
import torch

import autoplan
from tests.dist.parity import loss_of, relative_errors
from tests.zoo import ZOO

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none")]


@pytest.mark.parametrize("name", ["mlp", "gpt2", "llama", "resnet50"])
def test_loss_and_gradients_equal_the_plain_model_on_the_gpu(name: str) -> None:
    model, batch = ZOO[name]()
    model = model.to("cuda", torch.float64)
    batch = {key: value.to("cuda", torch.float64) if value.is_floating_point() else value.to("cuda") for key, value in batch.items()}
    plain = copy.deepcopy(model)
    pm = autoplan.parallelize(model, batch)
    loss, true = pm.forward_backward(batch), loss_of(plain, batch)
    true.backward()
    assert loss.item() == pytest.approx(true.item(), rel=1e-6)
    found = {key: grad.cpu() for key, grad in pm.full_grads().items()}
    assert relative_errors(found, {key: p.grad.cpu() for key, p in plain.named_parameters(remove_duplicate=False) if p.grad is not None})[0] <= 1e-6


def test_bf16_trains_on_the_gpu_with_fp32_masters() -> None:
    model, batch = ZOO["llama"]()
    batch = {key: value.to("cuda") for key, value in batch.items()}
    pm = autoplan.parallelize(model.to("cuda"), batch, precision="bf16")
    opt = pm.optimizer(torch.optim.AdamW, lr=1e-3)
    losses = []
    for _ in range(10):
        losses.append(pm.forward_backward(batch).item())
        opt.step()
        opt.zero_grad()
    assert losses[-1] < losses[0]
    assert all(parameter.dtype == torch.float32 for parameter in pm.parameters())

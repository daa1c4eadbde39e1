"""With masks by element a model with dropout trains the same under every plan: loss and every gradient of one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autoplan
import autoplan.parallelmodel
from autoplan.frontend import capture
from runtime.executor import Executor
from tests.dist.launch import run_ranks
from tests.plans import manual_plan, random_splits
from tests.zoo import gpt2

Grads = dict[str, torch.Tensor]
ALONE: list[dict[str, Any]] = [{}, dict(num_micro_batches=4, recompute="full"), dict(num_micro_batches=2, recompute="selective")]
DIVIDED: list[dict[str, Any]] = [dict(dp=2, tp=2, num_micro_batches=2), dict(tp=4), dict(dp=2, pp=2, num_micro_batches=2, recompute="full")]
DIVIDED += [dict(dp=2, pp=2, num_micro_batches=2, recompute="selective"), dict(tp=4, recompute="selective")]
DIVIDED += [dict(tp=2, pp=2, stage_meshes=((("dp", 1), ("tp", 2)), (("dp", 2), ("tp", 1))), num_micro_batches=2)]
DIVIDED += [dict(cp=4, recompute="full"), dict(cp=2, tp=2, context="heads")]  # the sequence, inside attention too


def _two_steps(plans: list[dict[str, Any]], by_element: bool, length: int = 20) -> list[tuple[list[float], Grads]]:
    """Losses of two steps (whose masks differ, at equal weights) and the gradients of the last, under each plan, on rank 0."""
    torch.set_num_threads(1)
    autoplan.parallelmodel.Executor = functools.partial(Executor, random_by_element=by_element)  # type: ignore[misc,assignment]
    found = []
    for options in plans:
        model, batch = gpt2(resid_pdrop=0.1, embd_pdrop=0.2, attn_pdrop=0.3)
        batch = {name: x[:, :length].contiguous() for name, x in batch.items()}
        graph = capture(model, batch, check=False)
        splits = random_splits(graph, options["tp"], 3) if "tp" in options else None
        pm = autoplan.parallelize(model, batch, plan=manual_plan(graph, splits=splits, **options), seed=11)
        losses = [pm.forward_backward(batch).item()]
        for parameter in pm.parameters():
            parameter.grad = None
        losses.append(pm.forward_backward(batch).item())
        found.append((losses, {key: grad.detach().clone() for key, grad in pm.full_grads().items()}))
    return found if dist.get_rank() == 0 else []


def _assert_equal(found: tuple[list[float], Grads], wanted: tuple[list[float], Grads], options: dict[str, Any]) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=1e-6), options
    assert found[1].keys() == wanted[1].keys()
    least = 1e-4 * torch.stack([grad.norm() for grad in wanted[1].values()]).norm().item()
    for name, grad in wanted[1].items():
        error = (found[1][name] - grad).norm().item() / max(grad.norm().item(), least)
        assert error < 1e-5, f"{options}: the gradient of {name} differs by {error}"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_dropout_by_element_is_that_of_one_process_under_every_plan():
    whole, *pieces = run_ranks(_two_steps, 1, ALONE, True, timeout_s=280)[0]
    assert whole[0][0] != pytest.approx(whole[0][1], rel=1e-4), "each step draws its own masks"
    for options, found in zip(ALONE[1:], pieces, strict=True):
        _assert_equal(found, whole, options)
    for options, found in zip(DIVIDED, run_ranks(_two_steps, 4, DIVIDED, True, timeout_s=280)[0], strict=True):
        _assert_equal(found, whole, options)


def test_dropout_by_coordinates_is_repeated_in_a_recomputation():
    plans = [dict(tp=2), dict(tp=2, recompute="full"), dict(tp=2, recompute="selective")]
    plain, *again = run_ranks(_two_steps, 2, plans, False, timeout_s=280)[0]
    for options, found in zip(plans[1:], again, strict=True):
        _assert_equal(found, plain, options)

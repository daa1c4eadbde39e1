"""Precisions and optimizers against one process: bf16 and fp16 with fp32 masters, skipped steps, whole-tensor optimizers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autoplan
from autoplan.frontend import capture
from autoplan.optimizers import ELEMENTWISE
from autoplan.precision import COMPUTE, cast_batch
from runtime.module import Holder
from runtime.scaling import INTERVAL, LossScale
from runtime.storage import Storage
from runtime.traffic import traffic
from tests.dist.launch import run_ranks
from tests.dist.parity import loss_of, relative_errors
from tests.plans import manual_plan, random_splits
from tests.zoo import ZOO

TOLERANCE = {"bf16": 2e-2, "fp16": 1e-2, None: 1e-5}
SGD = dict(lr=0.05, momentum=0.9)


class Reference:
    """The plain model in one process: fp32 masters, computed with as a copy in the precision's dtype."""

    def __init__(self, model: nn.Module, precision: str | None) -> None:
        self.masters = copy.deepcopy(model)
        self.model = copy.deepcopy(model).to(COMPUTE[precision] if precision else torch.float32)
        self.precision = precision

    def forward_backward(self, batch: Any, factor: float = 1.0) -> torch.Tensor:
        """The loss; the masters' gradients are those of the loss times `factor`."""
        masters, copies = dict(self.masters.named_parameters()), dict(self.model.named_parameters())
        with torch.no_grad():
            for name, parameter in copies.items():
                parameter.copy_(masters[name])
        loss = loss_of(self.model, cast_batch(batch, self.precision))
        (loss.float() * factor).backward()
        for name, parameter in copies.items():
            assert parameter.grad is not None
            masters[name].grad = parameter.grad.float()
            parameter.grad = None
        return loss.detach()

    @property
    def grads(self) -> dict[str, torch.Tensor]:
        return {name: p.grad.clone() for name, p in self.masters.named_parameters(remove_duplicate=False) if p.grad is not None}


def parallel(model: nn.Module, batch: Any, precision: str | None, how: Mapping[str, Any]) -> autoplan.ParallelModel:
    """`how`: keyword arguments of `manual_plan`, or {"constraints": ...} to search."""
    if "constraints" in how:
        return autoplan.parallelize(model, batch, constraints=autoplan.Constraints(**how["constraints"]), precision=precision)
    graph = capture(model, batch, precision=precision, check=False)
    splits = random_splits(graph, how["tp"], 3) if how.get("tp", 1) > 1 else None
    return autoplan.parallelize(model, batch, plan=manual_plan(graph, splits=splits, precision=precision, **how))


def compare(name: str, precision: str | None, how: Mapping[str, Any], optimizer: str = "SGD", options: Mapping[str, Any] = SGD) -> None:
    """Two steps under a plan and in one process: loss, gradients, weights, and what is sent as the program says."""
    case = f"{name} {precision} {how} {optimizer}"
    model, batch = ZOO[name]()
    plain, start = Reference(model, precision), copy.deepcopy(model.state_dict())
    pm = parallel(model, batch, precision, how)
    make = getattr(torch.optim, optimizer)
    opt, true_opt = pm.optimizer(make, **options), make(plain.masters.parameters(), **options)
    for _ in range(2):
        loss, true_loss = pm.forward_backward(batch), plain.forward_backward(batch)
        assert abs(loss.item() - true_loss.item()) <= TOLERANCE[precision] * abs(true_loss.item()), case
        assert all(p.dtype == torch.float32 and (p.grad is None or p.grad.dtype == torch.float32) for p in pm.parameters()), case
        mesh = pm.executor.mesh
        assert mesh.recorder.traffic() == traffic(pm.executor.program, {axis: mesh.axis(axis).index for axis in mesh.axes}), case
        check(pm.full_grads(), plain.grads, TOLERANCE[precision], case)
        for each in (opt, true_opt):
            each.step()
            each.zero_grad()
    weights, true = pm.full_state_dict(), plain.masters.state_dict()
    if precision is None:
        check(weights, true, 1e-5, case)
    else:  # how far they moved: beside the weights themselves any error is small
        check({k: w - start[k] for k, w in weights.items()}, {k: w - start[k] for k, w in true.items()}, 2 * TOLERANCE[precision], case)


def check(found: Mapping[str, torch.Tensor], true: Mapping[str, torch.Tensor], tolerance: float, case: str) -> None:
    if dist.get_rank() == 0:
        assert found.keys() == true.keys(), case
        error, worst = relative_errors(found, true)
        assert error <= tolerance, (case, worst, error)


def reduced_precisions() -> None:
    torch.set_num_threads(1)
    compare("llama", "bf16", dict(constraints=dict(tp=2)))
    compare("llama", "bf16", dict(pp=2, num_micro_batches=2, recompute="full"))
    compare("mlp", "bf16", dict(dp=2, num_micro_batches=2))
    for zero in (1, 2, 3):
        compare("mlp", "bf16", dict(dp=2, zero=zero, num_micro_batches=2))
    held_as_forecast()
    scaled()
    bad_steps()


def held_as_forecast() -> None:
    """Masters, working copies, gradients and optimizer state take the bytes that the plan's forecast says."""
    copies: list[int] = []
    reshard = Storage.reshard

    def counted(self: Storage) -> None:
        copies.append(sum(m.copies.num_bytes for m in self.module.modules() if isinstance(m, Holder)))
        reshard(self)

    Storage.reshard = counted  # type: ignore[method-assign]
    for zero in (0, 3):
        model, batch = ZOO["mlp"]()
        pm = parallel(model, batch, "bf16", dict(constraints=dict(dp=2, zero=zero)))
        opt = pm.optimizer(torch.optim.AdamW)
        copies.clear()
        pm.forward_backward(batch)
        opt.step()
        residents = pm.executor.trainable
        masters = sum(r.local().nbytes for r in residents)
        gradients = sum(r.local(r.tensor.grad).nbytes for r in residents)
        states = sum(r.local(s).nbytes for r in residents for s in opt.state[r.tensor].values() if s.dim())
        memory = pm.plan.forecast.stages[0].memory
        assert (memory.parameters, memory.gradients, memory.optimizer) == (copies[0], gradients, masters + states), (zero, memory, copies, masters, states)
    Storage.reshard = reshard  # type: ignore[method-assign]


def scaled() -> None:
    """fp16: where gradients do not fit all ranks skip and halve the scale; other steps are those of one process."""
    model, batch = ZOO["mlp"]()
    batch["x"] = batch["x"] * 300  # gradients times 2^16 do not fit
    plain = Reference(model, "fp16")
    pm = parallel(model, batch, "fp16", dict(dp=2, zero=2, num_micro_batches=2))
    opt, true_opt = pm.optimizer(torch.optim.SGD, lr=1e-3), torch.optim.SGD(plain.masters.parameters(), lr=1e-3)
    skipped = []
    for _ in range(8):
        factor = pm.loss_scale
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # finding the scale is no fault
            pm.forward_backward(batch)
        skipped.append(pm.step_was_skipped)
        assert pm.loss_scale == (factor / 2 if skipped[-1] else factor)
        if not skipped[-1]:
            plain.forward_backward(batch, 256.0)
            for parameter in plain.masters.parameters():
                assert parameter.grad is not None
                parameter.grad /= 256.0
            check(pm.full_grads(), plain.grads, TOLERANCE["fp16"], "fp16")
            true_opt.step()
        opt.step()
        opt.zero_grad()
    assert skipped[0] and not skipped[-1], skipped
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, skipped)
    assert everyone[0] == everyone[1]
    check(pm.full_state_dict(), plain.masters.state_dict(), TOLERANCE["fp16"], "fp16")


class Edge(nn.Module):
    """Its loss is finite where the gradient of the first entries of `p` is not."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.tensor([0.0] * 4 + [1.0] * 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sqrt((x * self.p).abs()).mean()


def bad_steps() -> None:
    model, batch = ZOO["mlp"]()
    pm = parallel(model, batch, None, dict(dp=2, num_micro_batches=2))
    opt = pm.optimizer(torch.optim.AdamW)
    pm.forward_backward(batch)
    kept, weights = pm.full_grads(), pm.full_state_dict()
    broken = {**batch, "x": batch["x"].clone()}
    broken["x"][7] = float("nan")  # a row of the last rank alone
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss = pm.forward_backward(broken)
    assert loss.isnan() and pm.step_was_skipped
    assert [w for w in caught if "was skipped on all ranks: loss nan" in str(w.message)] or dist.get_rank()
    check(pm.full_grads(), kept, 0.0, "earlier gradients stay")
    opt.zero_grad()
    pm.forward_backward(broken)
    opt.step()
    check(pm.full_state_dict(), weights, 0.0, "weights stay")
    assert not opt.state
    pm.forward_backward(batch)
    assert not pm.step_was_skipped

    pm = parallel(Edge(), {"x": torch.rand(8, 8)}, None, dict(dp=2, zero=3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.isfinite(pm.forward_backward({"x": torch.rand(8, 8)}))
    assert pm.step_was_skipped and all(p.grad is None for p in pm.parameters())
    assert [w for w in caught if "not finite: p" in str(w.message)] or dist.get_rank()


def test_reduced_precisions_scaling_and_bad_steps_are_as_in_one_process() -> None:
    run_ranks(reduced_precisions, 2, timeout_s=400)


def optimizers(folder: str) -> None:
    torch.set_num_threads(1)
    for name, options in (("Adam", dict(lr=0.01)), ("AdamW", dict(lr=0.01)), ("SGD", SGD), ("Adagrad", dict(lr=0.01))):
        compare("mlp", None, dict(dp=2, zero=3), name, options)
    for name in sorted(set(ELEMENTWISE) - {"Adam", "AdamW", "SGD", "Adagrad"}):
        compare("mlp", None, dict(dp=2, zero=3), name, dict(lr=0.01))
    hooked()
    for how in (dict(dp=2, zero=2), dict(tp=2), dict(pp=2)):
        compare("mlp", None, how, "Adafactor", dict(lr=0.01))
    for how in (dict(tp=2), dict(dp=2, zero=1)):
        closures(how)
    for how in (dict(tp=2), dict(dp=2, zero=3), dict(pp=2)):
        groups(how, folder)
    model, batch = ZOO["mlp"]()
    with pytest.raises(autoplan.UnsupportedOpError, match="LBFGS may look at all parameters at once"):
        parallel(model, batch, None, dict(pp=2)).optimizer(torch.optim.LBFGS)
    pm = parallel(model, batch, None, dict(tp=2))
    pm.forward_backward(batch)
    with pytest.raises(autoplan.UnsupportedOpError, match=r"make it with pm\.optimizer\(Adafactor"):
        torch.optim.Adafactor(pm.parameters()).step()


def hooked() -> None:
    """Under ZeRO an optimizer's hooks run once a step and see the parameters themselves; groups and state are theirs between steps."""
    model, batch = ZOO["mlp"]()
    pm = parallel(model, batch, None, dict(dp=2, zero=3))
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # torch puts its hooks into a class when one is made first
    opt = pm.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    seen: list[Any] = []
    opt.register_step_pre_hook(lambda opt, *_: seen.append(opt.param_groups[0]["params"]))
    opt.register_step_post_hook(lambda opt, *_: seen.append(opt.param_groups[0]["params"]))
    for _ in range(2):
        opt.zero_grad()
        assert float(opt.step(lambda: pm.forward_backward(batch))) > 0
    own = list(pm.parameters())
    assert len(seen) == 4 and all(len(params) == len(own) and all(a is b for a, b in zip(params, own, strict=True)) for params in seen)
    assert opt.state.keys() == set(own) and all(type(opt.state[p]["momentum_buffer"]) is type(p.data) for p in own)


def closures(how: Mapping[str, Any]) -> None:
    """LBFGS with its closure."""
    model, batch = ZOO["mlp"]()
    plain = copy.deepcopy(model)
    pm = parallel(model, batch, None, how)
    lbfgs, true_lbfgs = pm.optimizer(torch.optim.LBFGS, max_iter=3), torch.optim.LBFGS(plain.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        return pm.forward_backward(batch)

    def true_closure() -> torch.Tensor:
        true_lbfgs.zero_grad()
        loss = loss_of(plain, batch)
        loss.backward()
        return loss

    assert abs(float(lbfgs.step(closure)) - float(true_lbfgs.step(true_closure))) <= 1e-5
    check(pm.full_state_dict(), plain.state_dict(), 1e-4, f"LBFGS {how}")


def groups(how: Mapping[str, Any], folder: str) -> None:
    """Muon and AdamW on parameters chosen by name, a learning rate schedule, and a checkpoint between."""
    model, batch = ZOO["mlp"]()
    plain = copy.deepcopy(model)
    pm = parallel(model, batch, None, how)

    def made(source: Any, make: Any) -> list[torch.optim.Optimizer]:
        named = list(source.named_parameters())
        rest = [{"params": [p for n, p in named if n.endswith("bias")], "lr": 0.02}]
        return [make(torch.optim.Muon, [p for n, p in named if n.endswith("weight")], lr=0.1), make(torch.optim.AdamW, rest)]

    own, true = made(pm, pm.optimizer), made(plain, lambda cls, params, **options: cls(params, **options))
    schedules = [torch.optim.lr_scheduler.StepLR(opt, 1, 0.5) for opt in (*own, *true)]
    for opt in (*own, *true):
        opt.zero_grad()
    for step in range(3):
        pm.forward_backward(batch)
        loss_of(plain, batch).backward()
        for opt in (*own, *true):
            opt.step()
            opt.zero_grad()
        for schedule in schedules:
            schedule.step()
        if step == 1:
            path = str(Path(folder) / "-".join(how))
            pm.save(path, own[0])
            for state in own[0].state.values():
                state["momentum_buffer"].zero_()
            pm.load(path, own[0])
    check(pm.full_state_dict(), plain.state_dict(), 2e-2, f"Muon {how}")  # Muon itself computes in bf16


def test_optimizers_update_as_in_one_process_or_are_refused_by_name(tmp_path: Path) -> None:
    run_ranks(optimizers, 2, str(tmp_path), timeout_s=400)


def test_a_scale_grows_after_many_finite_steps_and_shrinks_after_one_that_is_not() -> None:
    scale = LossScale(8.0)
    for _ in range(INTERVAL - 1):
        scale = scale.after(is_finite=True)
    assert scale.factor == 8.0
    assert scale.after(is_finite=True) == LossScale(16.0) and scale.after(is_finite=False) == LossScale(4.0)


def test_a_plan_says_its_precision_and_another_one_is_refused() -> None:
    model, batch = ZOO["mlp"]()
    plan = autoplan.find_plan(model, batch, "cpu:1x1", precision="bf16")
    assert all(p.dtype == torch.float32 for p in model.parameters())
    found = autoplan.parallelize(model, batch, plan=plan).forward_backward(batch)
    assert found.item() == pytest.approx(Reference(model, "bf16").forward_backward(batch).item(), rel=5e-3)  # theirs is rounded to bf16
    with pytest.raises(autoplan.StalePlanError, match="the plan computes in bf16, asked for is fp16"):
        autoplan.parallelize(model, batch, plan=plan, precision="fp16")
    with pytest.raises(autoplan.UsageError, match="'fp7' is not known"):
        autoplan.parallelize(model, batch, precision="fp7")

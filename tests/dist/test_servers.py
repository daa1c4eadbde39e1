"""Parameter servers: the weights of all_reduce bit for bit, the bytes of the closed form, and one error where a server fails."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autoplan
from autoplan.frontend import capture
from autoplan.lower import lower
from runtime.executor import Executor
from runtime.mesh import build_mesh
from runtime.traffic import traffic
from tests.dist.launch import run_ranks
from tests.dist.parity import loss_of, relative_errors
from tests.plans import manual_plan, random_splits
from tests.zoo import ZOO


class Exact(nn.Module):
    """Sums over rows and ranks are exact in fp64, in any order: all numbers lie on a grid of eighths, and stay small."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)

        def grid(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randint(-8, 9, shape, generator=generator).double() / 8)

        self.first, self.second, self.third, self.bias = grid(64, 24), grid(176, 64), grid(12, 176), grid(64)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(torch.nn.functional.linear(x, self.first, self.bias))
        return (torch.nn.functional.linear(torch.relu(torch.nn.functional.linear(hidden, self.second)), self.third) * target).sum() / 1024


def make_batch(rows: int = 8) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(-8, 9, (rows, 24), generator=generator).double() / 8
    return {"x": x, "target": torch.randint(-4, 5, (rows, 12), generator=generator).double() / 4}


def make(batch: dict[str, torch.Tensor], **plan: Any) -> autoplan.ParallelModel:
    model = Exact()
    graph = capture(model, batch)
    splits = random_splits(graph, plan["tp"], 1) if plan.get("tp", 1) > 1 else None
    return autoplan.parallelize(model, batch, plan=manual_plan(graph, splits=splits, **plan))


def to_grid(parameters: Any) -> None:
    """Back to eighths: else every step would need more bits than the one before."""
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_((parameter * 8).round() / 8)


def train(pm: autoplan.ParallelModel, batch: dict[str, torch.Tensor], steps: int = 3, opt: Any = None) -> tuple[Any, list[float]]:
    opt = opt or pm.optimizer(torch.optim.SGD, lr=4.0, momentum=0.5)
    losses = []
    for _ in range(steps):
        losses.append(pm.forward_backward(batch).item())
        pm.forward_backward(batch)  # accumulated
        opt.step()
        opt.zero_grad()
        to_grid(pm.parameters())
    return opt, losses


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def equals_all_reduce(folder: str, cases: list[dict[str, Any]]) -> list[str]:
    """What differs, by case."""
    torch.set_num_threads(1)
    batch, wrong = make_batch(), []

    def check(what: str, truth: bool) -> None:
        if not truth:
            wrong.append(f"{case}: {what}")

    for number, case in enumerate(cases):
        plain_case = {key: value for key, value in case.items() if key not in ("sync", "servers", "workers")}
        served, plain = make(batch, **case), make(batch, **plain_case)
        check("loss", served.forward_backward(batch).item() == plain.forward_backward(batch).item())
        check("gradients", same(served.full_grads(), plain.full_grads()))
        check("clipped norm", served.clip_grad_norm_(0.5).item() == pytest.approx(plain.clip_grad_norm_(0.5).item(), rel=1e-12))
        for pm in (served, plain):
            for parameter in pm.parameters():
                parameter.grad = None
        opt, losses = train(served, batch)
        plain_opt, plain_losses = train(plain, batch)
        check("losses", losses == plain_losses)
        check("weights", same(served.full_state_dict(), plain.full_state_dict()))
        check("evaluation", served.evaluate(batch).item() == plain.evaluate(batch).item())
        replicas: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(replicas, [p.detach() for p in served.parameters()])
        mesh = served.executor.mesh
        check("replicas", all(torch.equal(a, b) for rank in mesh.axis("dp").ranks for a, b in zip(replicas[rank], replicas[mesh.rank], strict=True)))
        served.forward_backward(batch)
        opt.step()
        planned = traffic(served.executor.program, {name: mesh.axis(name).index for name, _ in served.plan.axes})
        check(f"traffic {mesh.recorder.traffic()} planned {planned}", mesh.recorder.traffic() == planned)
        opt.zero_grad()
        plain.forward_backward(batch)
        plain_opt.step()
        plain_opt.zero_grad()
        to_grid([*served.parameters(), *plain.parameters()])
        served.save(f"{folder}/{number}", opt)
        later = make(batch, **plain_case)
        later_opt = later.optimizer(torch.optim.SGD, lr=1.0, momentum=0.5)
        later.load(f"{folder}/{number}", later_opt)
        again = make(batch, **case)
        again_opt = again.optimizer(torch.optim.SGD, lr=1.0, momentum=0.5)
        again.load(f"{folder}/{number}", again_opt)
        for pm, its in ((later, later_opt), (again, again_opt), (plain, plain_opt)):
            train(pm, batch, 1, its)
        check("after a checkpoint", same(later.full_state_dict(), plain.full_state_dict()) and same(again.full_state_dict(), plain.full_state_dict()))
    return wrong


def closed_form(servers: tuple[int, ...], workers: tuple[int, ...] = ()) -> tuple[dict[str, int], int]:
    """Bytes by kind that this rank recorded in a step with AdamW, and the bytes of the model."""
    torch.set_num_threads(1)
    batch = make_batch()
    pm = make(batch, dp=4, sync="ps", servers=servers, workers=workers)
    with pytest.raises(autoplan.UnsupportedOpError, match=r"make it with pm.optimizer\(torch.optim.SGD"):
        wrong = torch.optim.SGD(pm.parameters(), lr=0.1)
        pm.forward_backward(batch)
        wrong.step()
    with pytest.raises(autoplan.UnsupportedOpError, match="Muon"):
        pm.optimizer(torch.optim.Muon, lr=0.1)
    pm.forward_backward(batch)
    pm.optimizer(torch.optim.AdamW, lr=0.1).step()
    moved = {use.kind: use.num_bytes for use in pm.executor.mesh.recorder.traffic() if use.axis == "dp"}
    return moved, sum(p.numel() * p.element_size() for p in pm.parameters())


def test_servers_give_the_weights_of_all_reduce_on_two_ranks(tmp_path):
    cases = [
        dict(dp=2, sync="ps"),
        dict(dp=2, sync="ps", servers=(1,), num_micro_batches=2),
        dict(tp=2, sync="ps"),
        dict(dp=2, sync="ps", servers=(0,), workers=(1,), num_micro_batches=2),
    ]
    assert run_ranks(equals_all_reduce, 2, str(tmp_path), cases, timeout_s=250)[0] == []


def four_ranks(folder: str) -> Any:
    cases = [
        dict(dp=2, tp=2, sync="ps"),
        dict(dp=2, pp=2, sync="ps", servers=(0,), num_micro_batches=2),
        dict(dp=4, sync="ps", servers=(1, 3)),
        dict(dp=2, tp=2, sync="ps", servers=(1,), workers=(0,)),
        dict(dp=2, pp=2, sync="ps", servers=(0,), workers=(1,), num_micro_batches=2),
        dict(dp=4, sync="ps", servers=(0, 3), workers=(1, 2)),
        dict(dp=4, sync="ps", servers=(0, 2), workers=(1, 2, 3), num_micro_batches=2),
    ]
    apart = {places: closed_form(*places) for places in (((3,), (0, 1, 2)), ((0, 2), (1, 3)))}
    return equals_all_reduce(folder, cases), {servers: closed_form(servers) for servers in ((), (2,), (0, 3))}, apart, serves_alone()


def test_servers_of_tensor_and_pipeline_coordinates_and_the_bytes_of_the_closed_form(tmp_path):
    ranks = run_ranks(four_ranks, 4, str(tmp_path), timeout_s=250)
    assert ranks[0][0] == []
    for servers in ((), (2,), (0, 3)):
        serving = servers or (0, 1, 2, 3)
        for rank, (_, found, *_) in enumerate(ranks):
            moved, whole = found[servers]
            assert (moved["push"], moved["pull"]) == (whole, whole)
            if rank in serving:
                assert moved["push_in"] == moved["pull_out"] == pytest.approx(4 * whole / len(serving), rel=0.03)
            else:
                assert "push_in" not in moved and "pull_out" not in moved
        assert sum(found[servers][0].get("push_in", 0) for _, found, *_ in ranks) == 4 * whole

    for (servers, workers), _ in ranks[0][2].items():
        moved, whole = zip(*(apart[servers, workers] for _, _, apart, _ in ranks), strict=True)
        for rank, own in enumerate(moved):
            assert (own.get("push"), own.get("pull")) == ((whole[0],) * 2 if rank in workers else (None, None))
            if rank in servers:
                assert own["push_in"] == own["pull_out"] == pytest.approx(len(workers) * whole[0] / len(servers), rel=0.05)
        assert sum(own.get("push_in", 0) for own in moved) == len(workers) * whole[0]
    assert ranks[0][3] == []


def serves_alone() -> list[str]:
    """What is wrong where data rank 0 serves and the others compute, against the plain model: of labels that are counted beforehand, evaluation,
    predictions of rows, a share of one's own, and what a rank that only serves keeps."""
    wrong: list[str] = []
    model, batch = ZOO["mlp"]()
    model, batch = model.double(), {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    batch["labels"][: len(batch["labels"]) // 2] = -100  # the first worker has none that count
    plain = copy.deepcopy(model)
    pm = autoplan.parallelize(model, batch, plan=manual_plan(capture(model, batch), dp=4, sync="ps", servers=(0,), workers=(1, 2, 3)))
    opt, true_opt = pm.optimizer(torch.optim.AdamW, lr=0.01), torch.optim.AdamW(plain.parameters(), lr=0.01)
    for own in (batch, pm.shard(batch), batch):
        loss, true_loss = pm.forward_backward(own), loss_of(plain, batch)
        true_loss.backward()
        grads = pm.full_grads()
        if dist.get_rank() == 0:
            error, name = relative_errors(grads, {n: p.grad for n, p in plain.named_parameters() if p.grad is not None})
            wrong += [f"gradient of {name}: {error}"] if error > 1e-10 else []
        wrong += [f"loss {loss.item()}"] if abs(loss.item() - true_loss.item()) > 1e-10 else []
        opt.step()
        true_opt.step()
        opt.zero_grad()
        true_opt.zero_grad()
    held = sum(v.numel() for state in opt.state.values() for v in state.values() if isinstance(v, torch.Tensor) and v.dim())
    expected = 2 * sum(p.numel() for p in plain.parameters()) if dist.get_rank() == 0 else 0
    wrong += [f"{held} elements of optimizer state, not {expected}"] if held != expected else []
    wrong += ["flops"] if dist.get_rank() == 0 and any(e.kind in ("forward", "backward") and e.name[0] in "FB" for e in pm.timeline.events) else []
    weights = pm.full_state_dict()
    if dist.get_rank() == 0:
        error, name = relative_errors(weights, plain.state_dict())
        wrong += [f"weight {name}: {error}"] if error > 1e-10 else []
    with torch.no_grad():
        wrong += ["evaluation"] if abs(pm.evaluate(batch).item() - loss_of(plain.eval(), batch).item()) > 1e-10 else []
    wrong += ["places"] if (pm.data_size, pm.data_rank) != (3, max(0, dist.get_rank() - 1)) else []
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, wrong)
    return [f"rank {rank}: {text}" for rank, own in enumerate(everyone) for text in own]


def test_one_worker_is_plain_sgd():
    batch, model = make_batch(), Exact()
    pm = make(batch, sync="ps")
    train(pm, batch)
    opt = torch.optim.SGD(model.parameters(), lr=4.0, momentum=0.5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for _ in range(3):
        (model(**batch) * 2).backward()
        opt.step()
        to_grid(model.parameters())
        opt.zero_grad()
    assert same(pm.full_state_dict(), model.state_dict())
    assert not any(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def fails(how: str) -> tuple[str, float]:
    """The error of this rank where the server, rank 2, is gone, or computes nothing and is gone or asleep, and the seconds that it took."""
    torch.set_num_threads(1)
    batch, model = make_batch(), Exact()
    graph = capture(model, batch)
    plan = manual_plan(graph, dp=3, sync="ps", servers=(2,), workers=() if how == "dead" else (0, 1))
    tensors = {**dict(model.named_parameters()), **graph.constants}
    mesh = build_mesh(plan.axes, timeout_s=8)
    executor = Executor(lower(plan, graph)[0], mesh, lambda name: tensors[name].detach())
    executor.step(batch)
    dist.barrier()
    if mesh.rank == 2:
        if how != "slow":
            return "", 0.0  # its process ends
        time.sleep(18)
    start_s = time.monotonic()
    try:
        executor.step(batch)
    except Exception as error:
        return str(error), time.monotonic() - start_s
    return "", 0.0


@pytest.mark.slow
def test_a_slow_server_is_named_on_every_rank():
    texts = [text for text, _ in run_ranks(fails, 3, "slow", timeout_s=250)]
    assert "push" in texts[0] and "to the server on rank 2 failed after 8" in texts[0]
    assert texts[1] == texts[0] or "to the server on rank 2 failed after 8" in texts[1]
    assert texts[2] in (texts[0], texts[1])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dead", "dead and apart"])
def test_a_dead_server_is_named_on_every_rank_that_is_left(how: str):
    (first, first_s), (second, second_s), _ = run_ranks(fails, 3, how, timeout_s=250)
    assert "to the server on rank 2 failed" in first and "to the server on rank 2 failed" in second
    assert max(first_s, second_s) < 30

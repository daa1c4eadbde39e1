"""Capture gives the model's own loss, gradients and buffers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autoplan.frontend import capture
from tests.pure.captured import X, assert_captures, in_double, linear, net, targets
from tests.zoo import ZOO

torch.set_num_threads(1)


@pytest.mark.parametrize("name", list(ZOO))
def test_loss_and_gradients_are_the_models_own_in_both_precisions(name: str) -> None:
    model, batch = ZOO[name]()
    assert_captures(model, batch, tolerance=2e-6, check=False)
    if name.startswith("mixtral"):
        model.config._experts_implementation = "eager"  # torch's grouped product knows no float64
    other = {k: v.roll(1, 0).flip(-1) if v.dim() > 1 else v.roll(1, 0) for k, v in batch.items()}
    model, batch = in_double(model, batch)
    other = in_double(nn.Identity(), other)[1]
    if name == "t5":  # eager T5 fills its masks with the lowest float32 in any precision of the weights
        other = batch
    assert_captures(model, batch, others=[other], tolerance=1e-10)


def test_a_model_on_meta_gives_the_same_graph_as_one_with_data() -> None:
    model, batch = ZOO["llama"]()
    graph = capture(model, batch)
    abstract = capture(model.to("meta"), batch)
    assert abstract.fingerprint == graph.fingerprint
    assert [op.instr for op in abstract.ops] == [op.instr for op in graph.ops]
    assert abstract.values == graph.values


def test_a_capture_inside_of_the_meta_devices_context_is_the_one_outside() -> None:
    model, batch = ZOO["mixtral"]()
    model, batch = model.to("meta"), {name: tensor.to("meta") for name, tensor in batch.items()}
    with torch.device("meta"):
        inside = capture(model, batch)
    assert inside == capture(model, batch)


def test_a_tensor_passed_twice_is_two_inputs() -> None:
    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.a(x) * y).sum()

    assert_captures(net(forward, a=linear()), {"x": X, "y": X}, others=[{"x": X, "y": X * 2}])


def test_nested_batches_and_plain_values_are_followed() -> None:
    def forward(self: Any, pair: Any, scale: float, flag: bool) -> torch.Tensor:
        return (self.a(pair["left"]) * pair["right"][0]).sum() * scale if flag else pair["left"].sum()

    batch = {"pair": {"left": X, "right": [X * 2]}, "scale": 0.5, "flag": True}
    graph = assert_captures(net(forward, a=linear()), batch)
    assert [v.fqn for v in graph.inputs()] == ["pair.left", "pair.right.0"]


def test_a_tuple_is_positional_and_a_loss_function_sees_output_and_batch() -> None:
    def loss_fn(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.mse_loss(output, batch[1])

    graph = assert_captures(nn.Sequential(linear(), nn.Tanh(), linear(4, 3)).double(), (X,), lambda out, batch: out.pow(2).mean())
    assert [v.fqn for v in graph.parameters()] == ["0.weight", "0.bias", "2.weight", "2.bias"]

    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.a(x)

    assert_captures(net(forward, a=linear()), (X, X.flip(0)), loss_fn)


def test_a_region_without_gradients_gives_none() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            frozen = self.a(x).tanh()
        return (self.b(x) * frozen).sum() + self.a(x).pow(2).sum()

    graph = assert_captures(net(forward, a=linear(), b=linear()), (X,))
    assert "aten.detach.default" in targets(graph)


def test_autocast_inside_the_model_is_written_out_as_casts() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.b(self.a(x)).softmax(-1) @ x.T
            z = F.mse_loss(y.float(), y.float() * 0.5) + torch.cat([y.float(), y], 1).sum()
        return y.float().sum() + z + self.a(x).sum()

    model = net(forward, a=linear(), b=linear()).float()
    assert_captures(model, (X.float(),), tolerance=2e-2)
    graph = capture(model, (X.float(),))
    assert sum(op.instr.target == "aten.to.dtype" and op.operands == ("p_a_weight",) for op in graph.ops) == 1


@pytest.mark.parametrize(
    "write",
    [
        lambda y: y.mul_(2),
        lambda y: y[:, 0].mul_(2),
        lambda y: y[1:3].add_(1),
        lambda y: y.view(2, 12)[0].mul_(3),
        lambda y: y.t()[1].zero_(),
        lambda y: y.unsqueeze(1)[:, :, 2].sub_(1),
        lambda y: y.masked_fill_(y > 0.3, 0.0),
        lambda y: y[:, ::2].mul_(2),
        lambda y: y.permute(1, 0)[2:].exp_(),
        lambda y: y.index_put_((torch.tensor([0, 2]), torch.tensor([1, 1])), torch.tensor([5.0, 6.0], dtype=y.dtype)),
        lambda y: y.__setitem__((slice(None), 0), 5.0),
        lambda y: y.view(-1).view(3, 8)[:, 4:].neg_(),
    ],
)
def test_writes_in_place_become_pure(write: Any) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x).clone()
        before, view = y * 3, y[:2]
        write(y)
        return (before.sum() + (self.b(y) * y.cos()).sum() + view.pow(2).sum()).sum()

    graph = assert_captures(net(forward, a=linear(), b=linear()), (X,), others=[(X * 3,)])
    assert not any(t.split(".")[1].endswith("_") for t in targets(graph))


def test_parts_of_a_buffer_are_written() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        left, right = self.state.chunk(2)
        left.mul_(2)
        self.state.unbind(0)[3].copy_(torch.ones(()))
        right.add_(left)
        return (self.a(x) * self.state).sum()

    assert_captures(net(forward, a=linear(), state=torch.arange(4.0)), (X,))


def test_a_residual_written_in_place_is_seen_by_all_its_names() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        a = self.a(x)
        b = a * 2
        a.add_(1)
        return (b + a).pow(2).sum()

    assert_captures(net(forward, a=linear()), (X,))


def test_buffers_are_updated_once_and_read_in_order() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x) + self.average
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        self.count += 1
        return (y * self.average).sum()

    graph = assert_captures(net(forward, a=linear(), average=torch.ones(4), count=torch.zeros((), dtype=torch.int64)), (X,))
    assert sorted(graph.values[b].fqn for b, _ in graph.buffer_updates) == ["average", "count"]


def test_batch_norm_used_twice_updates_its_statistics_twice() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return (self.bn(self.bn(self.a(x)) * 2) * x).sum()

    graph = assert_captures(net(forward, a=linear(), bn=nn.BatchNorm1d(4)), (X,))
    assert {graph.values[b].fqn for b, _ in graph.buffer_updates} == {"bn.running_mean", "bn.running_var", "bn.num_batches_tracked"}
    model = net(forward, a=linear(), bn=nn.BatchNorm1d(4))
    assert not capture(model, (X,), training=False).buffer_updates
    assert model.training and model.bn.training


def test_a_frozen_batch_norm_stays_frozen() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.bn(self.a(x)).pow(2).sum()

    model = net(forward, a=linear(), bn=nn.BatchNorm1d(4))
    model.bn.eval()
    assert not assert_captures(model, (X,)).buffer_updates


def test_tied_and_frozen_parameters_are_known() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(x.argmax(-1))).tanh()).logsumexp(-1).sum()

    model = net(forward, embed=nn.Embedding(5, 4), body=linear(), head=nn.Linear(4, 5, bias=False))
    model.head.weight = model.embed.weight
    model.body.requires_grad_(False)
    graph = assert_captures(model, (X,))
    by_name = {v.fqn: v for v in graph.parameters()}
    assert by_name["embed.weight"].aliases == ("embed.weight", "head.weight")
    assert by_name["embed.weight"].requires_grad and not by_name["body.weight"].requires_grad


def test_unused_parameters_have_no_gradient() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.a(x).sum()

    graph = assert_captures(net(forward, a=linear(), unused=linear()), (X,))
    assert "unused.weight" in {v.fqn for v in graph.parameters()}


def test_gradients_stop_at_detach_and_integers() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        return (y.detach() * self.b(x)).sum() + self.c(y.argmax(-1)).sum()

    graph = assert_captures(net(forward, a=linear(), b=linear(), c=nn.Embedding(4, 3)), (X,))
    stopped = next(op for op in graph.ops if op.instr.target == "aten.detach.default")
    assert not graph.values[stopped.outputs[0]].requires_grad


def test_dropout_is_random_in_training_and_absent_in_evaluation() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(self.a(x), 0.3, self.training).view(6, 1, 1, 4)
        return F.scaled_dot_product_attention(y, y, y, dropout_p=0.1 if self.training else 0.0).sum() + F.dropout(x, 0.0).sum()

    model = net(forward, a=linear())
    graph = capture(model, (X,))
    drawn = [op for op in graph.ops if op.random]
    assert [op.instr.target for op in drawn] == ["runtime.dropout", "runtime.attention"]
    assert drawn[0].instr.args[1:] == (0.3, "dropout") and drawn[1].instr.args[4] == 0.1
    still = capture(model, (X,), training=False)
    assert not any(op.random for op in still.ops) and still.training is False


def test_random_numbers_are_not_frozen_into_constants() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return (self.a(x) * torch.rand(4, dtype=x.dtype)).sum()

    graph = capture(net(forward, a=linear()), (X,))
    assert [op.instr.target for op in graph.ops if op.random] == ["aten.rand.default"]
    assert not graph.constants


def test_capture_leaves_the_model_as_it_was() -> None:
    model, batch = ZOO["resnet50"]()
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    capture(model, batch)
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(b, buffers[n]) for n, b in model.named_buffers())
    assert all(p.grad is None for p in model.parameters())
    assert batch["images"].grad_fn is None


def test_one_row_has_no_batch_factor_and_says_so() -> None:
    graph = capture(nn.Linear(4, 4), (X[:1].float(),), lambda out, _: out.sum())
    assert graph.batch_factor is None
    assert "one row" in graph.warnings[0]


def test_without_a_loss_the_output_is_kept() -> None:
    graph = capture(nn.Linear(4, 3), (X.float(),), training=False)
    assert graph.loss is None and len(graph.outputs) == 1


def test_checkpointing_without_reentry_is_captured() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.a, x.tanh(), use_reentrant=False).pow(2).sum()

    assert_captures(net(forward, a=linear()), (X,))


def test_forward_hooks_are_part_of_the_model() -> None:
    model = nn.Sequential(linear(), linear()).double()
    model[0].register_forward_hook(lambda module, args, out: out * 3)
    assert_captures(model, (X,), lambda out, _: out.pow(2).sum())


def test_a_graph_is_the_same_in_every_process() -> None:
    code = (
        "import torch; from tests.zoo import ZOO; from autoplan.frontend import capture; torch.set_num_threads(1);"
        "g = capture(*ZOO['llama'](), check=False); print(g.fingerprint, [b.pattern for b in g.blocks], g.factor_sizes)"
    )
    root = Path(__file__).parents[2]
    runs = [subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120, check=True).stdout for _ in range(2)]
    assert runs[0] == runs[1] != ""

"""Images divided by rows or columns of positions train as one process does, and send what the closed form says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoplan.models import UNet, resnet50
from tests.dist.launch import run_ranks
from tests.dist.parity import Case, Outcome, run_cases

ROWS, CHANNELS, HEIGHT, WIDTH = 4, 3, 16, 12


class Windows(nn.Module):
    """One operator over positions between two pointwise convolutions, so that gradients pass through it."""

    def __init__(self, *between: nn.Module, channels: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv2d(CHANNELS, channels, 1)
        self.between = nn.Sequential(*between)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.between(self.first(x))).square().sum()


def _case(name: str, height: int = HEIGHT):
    def build():
        generator = torch.Generator().manual_seed(7)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return MODELS[name](), {"x": torch.randn(ROWS, CHANNELS, height, WIDTH, generator=generator)}

    return build


MODELS = {
    **{f"conv{k} stride {s}": lambda k=k, s=s: Windows(nn.Conv2d(4, 6, k, s, k // 2)) for k in (1, 3, 5) for s in (1, 2)},
    "conv7 stride 2": lambda: Windows(nn.Conv2d(4, 6, 7, 2, 3, bias=False)),
    "dilated, grouped": lambda: Windows(nn.Conv2d(4, 6, 3, 1, 2, dilation=2, groups=2)),
    "no padding": lambda: Windows(nn.Conv2d(4, 6, 3)),
    "transposed": lambda: Windows(nn.ConvTranspose2d(4, 4, 3, 2, 1, 1), nn.ConvTranspose2d(4, 4, 4, 2, 1), nn.ConvTranspose2d(4, 2, 2, 2)),
    "pools": lambda: Windows(nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(3, 1, 1), nn.BatchNorm2d(4), nn.AvgPool2d(2)),
    "norms": lambda: Windows(nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3, 1, 1), nn.BatchNorm2d(4), nn.Upsample(scale_factor=2), nn.Conv2d(4, 4, 5, 2, 2)),
}


def _resnet():
    generator = torch.Generator().manual_seed(7)
    batch = {"images": torch.randn(ROWS, 3, 64, 32, generator=generator), "labels": torch.randint(0, 12, (ROWS,), generator=generator)}
    torch.manual_seed(3)
    return resnet50(width=4, num_classes=12), batch


def _unet():
    generator = torch.Generator().manual_seed(7)
    batch = {"x": torch.randn(ROWS, 3, 32, 16, generator=generator), "target": torch.randn(ROWS, 4, 32, 16, generator=generator)}
    torch.manual_seed(3)
    return UNet(3, 4, width=4, depth=2, num_groups=2), batch


BUILD = {**{name: _case(name) for name in MODELS}, **{f"{name}, height 13": _case(name, 13) for name in MODELS}, "resnet50": _resnet, "unet": _unet}


def _run(cases: list[Case]) -> list[Outcome]:
    return run_cases(cases, BUILD)


def _assert_exact(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        assert max(outcome.errors()) < 1e-10, f"{outcome.case}: {outcome.errors()} {outcome.grad_name} {outcome.weight_name}"
        assert not outcome.missing, outcome.case
        for held in outcome.held:
            assert held.sent == held.planned_sent, f"{outcome.case}: sent {held.sent}, listed {held.planned_sent}"


def _rows_sent(outcome: Outcome) -> list[int]:
    """Bytes that each rank sent to neighbours in the forward pass."""
    return [sum(t.num_bytes for t in held.sent if t.kind == "send" and t.axis == "tp" and t.phase == "forward") for held in outcome.held]


@pytest.mark.timeout(400)
def test_images_on_four_ranks_train_as_on_one():
    cases = [Case(name, dict(tp=4), domain=2, dtype="float64") for name in MODELS]
    cases += [Case("pools", dict(tp=2, dp=2), domain=2, dtype="float64"), Case("norms", dict(tp=2, dp=2), domain=3, dtype="float64")]
    cases += [Case("conv5 stride 2", dict(tp=4), domain=3, dtype="float64")]
    cases += [Case("resnet50", dict(tp=4), domain=2, dtype="float64"), Case("unet", dict(tp=2, dp=2), domain=2, dtype="float64")]
    cases += [Case("unet", dict(tp=2, pp=2, recompute="full"), domain=2, dtype="float64")]
    outcomes = run_ranks(_run, 4, cases, timeout_s=380)[0]
    _assert_exact(outcomes)
    by_name = {str(o.case.model): o for o in outcomes[: len(MODELS)]}
    row = ROWS * WIDTH * 4 * 8  # bytes of one row of positions with four channels
    assert _rows_sent(by_name["conv1 stride 1"]) == [0, 0, 0, 0]
    assert _rows_sent(by_name["conv3 stride 1"]) == [row, 2 * row, 2 * row, row], "floor(k / 2) rows to each neighbour"
    assert _rows_sent(by_name["conv5 stride 1"]) == [2 * row, 4 * row, 4 * row, 2 * row]
    assert _rows_sent(by_name["conv3 stride 2"]) == [row, row, row, 0], "a stride of 2 needs nothing from below"


def test_a_height_that_does_not_divide_stays_whole_and_right():
    cases = [Case(f"{name}, height 13", dict(tp=2), domain=2, dtype="float64") for name in ("conv3 stride 1", "conv5 stride 2", "pools")]
    outcomes = run_ranks(_run, 2, cases, timeout_s=280)[0]
    _assert_exact(outcomes)
    assert all(_rows_sent(outcome) == [0, 0] for outcome in outcomes)

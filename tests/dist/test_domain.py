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


class Residual(nn.Module):
    """Two convolutions beside a path of their stride."""

    def __init__(self, channels: int, wider: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(channels, wider, 3, 2, 1, bias=False), nn.Conv2d(wider, wider, 3, 1, 1, bias=False)
        self.beside = nn.Conv2d(channels, wider, 1, 2, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(wider) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(y)) + self.norms[2](self.beside(x)))


class OddResNet(nn.Module):
    """A stem, two stages and a head: heights 45, 23, 12, 6, 3 (or 51, 26, 13, 7, 4), each an odd step from the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(CHANNELS, 4, 7, 2, 3, bias=False), nn.BatchNorm2d(4)
        self.stages = nn.Sequential(Residual(4, 6), Residual(6, 8))
        self.head = nn.Linear(8, 5)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.norm(self.stem(images))), 3, 2, 1)
        return nn.functional.cross_entropy(self.head(self.stages(x).mean((2, 3))), labels)


class OddUNet(nn.Module):
    """Heights n, (n + 1) / 2, (n + 3) / 4 and back: transposed convolutions that make 2 n - 1 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, 1, 1) for a, b in ((CHANNELS, 4), (4, 6), (6, 8)))
        self.norms = nn.ModuleList((nn.BatchNorm2d(4), nn.GroupNorm(2, 6), nn.BatchNorm2d(8)))
        self.back = nn.ModuleList((nn.ConvTranspose2d(8, 6, 3, 2, 1), nn.ConvTranspose2d(6, 4, 3, 2, 1)))
        self.up = nn.ModuleList((nn.Conv2d(12, 6, 3, 1, 1), nn.Conv2d(8, 4, 3, 1, 1)))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        skips = []
        for number, (conv, norm) in enumerate(zip(self.down, self.norms, strict=True)):
            x = torch.relu(norm(conv(x)))
            skips.append(x)
            x = nn.functional.max_pool2d(x, 3, 2, 1) if number < 2 else x
        for back, conv, skip in zip(self.back, self.up, skips[1::-1], strict=True):
            x = torch.relu(conv(torch.cat([skip, back(x)], 1)))
        return nn.functional.mse_loss(x, target)


def _odd_resnet(height: int):
    def build():
        generator = torch.Generator().manual_seed(7)
        batch = {"images": torch.randn(ROWS, CHANNELS, height, 20, generator=generator), "labels": torch.randint(0, 5, (ROWS,), generator=generator)}
        torch.manual_seed(3)
        return OddResNet(), batch

    return build


def _odd_unet(height: int):
    def build():
        generator = torch.Generator().manual_seed(7)
        batch = {name: torch.randn(ROWS, n, height, 9, generator=generator) for name, n in (("x", CHANNELS), ("target", 4))}
        torch.manual_seed(3)
        return OddUNet(), batch

    return build


def _even_unet():
    generator = torch.Generator().manual_seed(7)
    batch = {"x": torch.randn(ROWS, 3, 20, 8, generator=generator), "target": torch.randn(ROWS, 4, 20, 8, generator=generator)}
    torch.manual_seed(3)
    return UNet(3, 4, width=4, depth=2, num_groups=2), batch


BUILD |= {f"odd resnet, height {n}": _odd_resnet(n) for n in (45, 51)} | {f"odd unet, height {n}": _odd_unet(n) for n in (13, 21, 29)}
BUILD |= {"unet, height 20": _even_unet}


ODD = [f"{name}, height 13" for name in MODELS] + ["odd resnet, height 51", "odd unet, height 29", "unet, height 20"]
FEW = ("conv1 stride 1", "conv3 stride 1", "conv5", "pools", "odd")  # the others: proved in tests/pure/test_domain.py, and run by hand


def _cases(num_ranks: int, odd: list[str]) -> list[Case]:
    return [Case(name, dict(tp=num_ranks), domain=2, dtype="float64") for name in odd]


def test_heights_that_do_not_divide_are_divided_all_the_same():
    asked = Case("odd unet, height 13", constraints={"tp": 3, "tensor": "domain"}, dtype="float64")
    outcomes = run_ranks(_run, 3, [*_cases(3, [name for name in ODD if name.startswith(FEW)]), asked], timeout_s=380)[0]
    _assert_exact(outcomes)
    by_name = {str(o.case.model): o for o in outcomes}
    row = ROWS * WIDTH * 4 * 8  # bytes of one row of positions with four channels
    assert _rows_sent(by_name["conv1 stride 1, height 13"]) == [0, 0, 0]
    assert _rows_sent(by_name["conv3 stride 1, height 13"]) == [row, 2 * row, row], "4, 4 and 5 rows, each end one to its neighbour"
    assert _rows_sent(by_name["conv5 stride 1, height 13"]) == [2 * row, 4 * row, 2 * row]
    assert all(sum(_rows_sent(outcome)) for name, outcome in by_name.items() if not name.startswith("conv1"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_heights_that_do_not_divide_on_other_numbers_of_ranks_and_axes(num_ranks: int):
    asked: list[tuple[str, dict, int]] = [("odd resnet, height 45", {"tp": num_ranks}, 2)]
    asked += [("odd unet, height 13", {"tp": num_ranks}, 3), ("odd unet, height 21", {"tp": num_ranks}, 2)]
    searched: list[tuple[str, dict]] = []
    if num_ranks == 4:
        asked += [("odd unet, height 13", {"tp": 2, "dp": 2, "zero": 3}, 2), ("odd unet, height 13", {"tp": 2, "pp": 2, "recompute": "full"}, 2)]
        asked += [("odd resnet, height 45", {"tp": 2, "pp": 2}, 2)]
        searched += [("odd unet, height 29", {"tp": 4}), ("odd resnet, height 51", {"tp": 2, "dp": 2})]
    cases = [*_cases(num_ranks, ODD), *(Case(name, plan, domain=dim, dtype="float64") for name, plan, dim in asked)]
    cases += [Case(name, constraints=constraints, dtype="float64") for name, constraints in searched]
    _assert_exact(run_ranks(_run, num_ranks, cases, timeout_s=800)[0])

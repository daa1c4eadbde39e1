"""Products on grids of any side, their ranks as threads: equal to the whole product, with the closed forms of wire, of what is kept, and of the peak."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from autoplan.lockstep import run_lockstep
from autoplan.peak import PeakMemory
from runtime.mesh import Axis
from runtime.record import Recorder
from runtime.sharded_ops import gathered_linear
from tests.gridproducts import GOLDEN, Found, Sizes, cube_product, plane_product

THIRDS = Sizes(36, 54, 72)  # divides by 9


def products(found: list[Found], sizes: Sizes) -> tuple[float, float, tuple[int, int, int]]:
    """Elements on the wire of all ranks, forward and backward; and MK, KN, MN."""
    assert max(max(one.errors) for one in found) <= 1e-10
    mk, kn, mn = sizes.m * sizes.k, sizes.k * sizes.n, sizes.m * sizes.n
    return sum(one.forward for one in found), sum(one.backward for one in found), (mk, kn, mn)


@pytest.mark.parametrize(("q", "sizes", "golden"), [(2, GOLDEN, 55296), (4, GOLDEN, 165888), (3, THIRDS, None)])
def test_a_plane_sends_three_times_both_operands_and_keeps_its_part(q: int, sizes: Sizes, golden: int | None) -> None:
    found = run_lockstep(lambda d, i, j: plane_product(d, i, j, sizes), 1, q, q)
    forward, backward, (mk, kn, _) = products(found, sizes)
    assert forward == pytest.approx((q - 1) * (mk + kn))
    assert backward == pytest.approx(2 * (q - 1) * (mk + kn)), "one such part for each gradient"
    assert golden is None or forward + backward == pytest.approx(golden)
    assert {one.kept for one in found} == {(mk + kn) // q**2}


@pytest.mark.parametrize(("d", "q", "sizes", "golden"), [(2, 2, GOLDEN, 116736), (4, 2, GOLDEN, None), (2, 3, THIRDS, None)])
def test_depth_sends_its_weights_more_often_and_their_gradients_once(d: int, q: int, sizes: Sizes, golden: int | None) -> None:
    found = run_lockstep(lambda d, i, j: plane_product(d, i, j, sizes), d, q, q)
    forward, backward, (mk, kn, _) = products(found, sizes)
    assert forward == pytest.approx((q - 1) * (mk + d * kn))
    assert backward == pytest.approx(2 * (q - 1) * (mk + d * kn) + 2 * (d - 1) * kn)
    assert golden is None or forward + backward == pytest.approx(golden)
    assert {one.kept for one in found} == {mk // (d * q**2) + kn // q**2}
    assert len({one.rows for one in found}) == d * q * q, "each rank has rows, or features, of its own"


@pytest.mark.parametrize(("d", "q"), [(2, 2), (4, 2)])
def test_without_the_sum_over_depth_the_gradient_of_the_weight_is_another_one(d: int, q: int) -> None:
    for one in run_lockstep(lambda d, i, j: plane_product(d, i, j, sums_depth=False), d, q, q):
        assert max(one.errors[:2]) <= 1e-10 and one.errors[2] > 1e-2


@pytest.mark.parametrize(("q", "sizes", "golden"), [(2, GOLDEN, (53248, 71680)), (3, THIRDS, None)])
def test_a_cube_that_gathers_again_keeps_a_part_and_sends_both_operands_once_more(q: int, sizes: Sizes, golden: tuple[int, int] | None) -> None:
    sent = []
    for keeps_gathered, fraction in ((True, q**2), (False, q**3)):
        found = run_lockstep(lambda i, j, k, keeps=keeps_gathered: cube_product(i, j, k, sizes, keeps_gathered=keeps), q, q, q)
        forward, backward, (mk, kn, mn) = products(found, sizes)
        again = 0 if keeps_gathered else mk + kn
        assert forward == pytest.approx((q - 1) * (mk + kn + mn))
        assert backward == pytest.approx((q - 1) * (mk + kn + mn + again))
        assert {one.kept for one in found} == {(mk + kn) // fraction}
        sent.append(forward + backward)
    assert golden is None or sent == pytest.approx(golden)


class Alone(dist.ProcessGroup):
    """A group of which one rank is there: its collectives leave their results as they were allocated, and sizes are all that counts."""

    def all_gather_single(self, output: torch.Tensor, *_: Any) -> None:  # type: ignore[override]
        output.zero_()

    reduce_scatter_single = _allgather_base = _reduce_scatter_base = all_gather_single  # type: ignore[assignment]


def peak_of_a_plane(q: int, side: int) -> tuple[int, int]:
    """Most bytes alive in both passes of a product of side x side operands on a rank of a q x q plane, and those of its own parts: operands,
    result, and the gradients of the three."""
    recorder = Recorder()
    i, j = (Axis(name, q, 0, tuple(range(q)), Alone(0, q), recorder, 30.0) for name in ("tpx", "tpy"))  # type: ignore[call-arg]
    x, weight, dy = (torch.zeros(side // q, side // q) for _ in range(3))
    with PeakMemory([x, weight, dy]) as memory:
        y = gathered_linear(x.requires_grad_(), weight.requires_grad_(), axes=(i, j), gathers=((1, 1, 1, side, 1), (0, 1, 1, side, 1)))
        y.backward(dy)
    assert y.shape == dy.shape
    return memory.peak_bytes, 6 * dy.nbytes


@pytest.mark.parametrize("q", [2, 4, 8])
def test_panels_keep_the_peak_of_a_plane_near_its_part_whatever_its_side(q: int) -> None:
    """A panel is as large as a rank's part, and four of the size are alive beside the six parts; an operand gathered whole is q of them."""
    peak, parts = peak_of_a_plane(q, 448)
    assert parts <= peak <= parts * (6 + 4) / 6

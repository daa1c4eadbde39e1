"""Links measured among gloo ranks."""

from __future__ import annotations

from pathlib import Path

from costmodel.links import KINDS, measure_contention, measure_links
from costmodel.profile import LinkFit, Profile
from tests.dist.launch import run_ranks


def _measure(path: str) -> tuple[tuple[LinkFit, ...], float]:
    profile = Profile(Path(path))
    return measure_links(profile, budget_s=1.0, sizes_bytes=(1 << 10, 1 << 18)), measure_contention(0.3)


def test_every_rank_gets_the_same_positive_fits_and_the_profile_keeps_them(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    results = run_ranks(_measure, 2, str(path))
    assert results[0] == results[1]
    fits, contention = results[0]
    assert [(fit.kind, fit.size, fit.world) for fit in fits] == [(kind, 2, 2) for kind in KINDS]
    assert all(0 < fit.seconds(1 << 18) < 1 for fit in fits)
    assert 1.0 <= contention < 8
    assert Profile(path).links() == tuple(sorted(fits, key=lambda fit: fit.kind))

"""Links measured among gloo ranks."""

from __future__ import annotations

from pathlib import Path

from costmodel.cluster import Sharing
from costmodel.links import KINDS, measure_links, measure_sharing
from costmodel.profile import LinkFit, Profile
from tests.dist.launch import run_ranks


def _measure(path: str) -> tuple[tuple[LinkFit, ...], Sharing]:
    profile = Profile(Path(path))
    return measure_links(profile, budget_s=1.0, sizes_bytes=(1 << 10, 1 << 18)), measure_sharing(0.6)


def test_every_rank_gets_the_same_positive_fits_and_the_profile_keeps_them(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    results = run_ranks(_measure, 2, str(path))
    assert results[0] == results[1]
    fits, sharing = results[0]
    assert [(fit.kind, fit.size, fit.world) for fit in fits] == [(kind, 2, 2) for kind in KINDS]
    assert all(0 < fit.seconds(1 << 18) < 1 for fit in fits)
    assert all(1.0 <= factor < 30 for factor in (sharing.compute, sharing.memory, sharing.optimizer))
    assert Profile(path).links() == tuple(sorted(fits, key=lambda fit: fit.kind))

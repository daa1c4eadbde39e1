"""A data rank's own rows of a global batch, and the check that ranks were given the same data."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autoplan.errors import RunError
from autoplan.shapes import num_rows
from runtime.mesh import Mesh


@dataclass(frozen=True)
class Share:
    """A data rank's own rows of a global batch of `total` rows: rows [start, start + its own) of it."""

    batch: Any
    start: int
    total: int


def share_of(batch: Any, shares: tuple[int, ...], data_rank: int) -> Share:
    """The rows of `batch` that `data_rank` takes, where rank r takes `shares[r]` of them in order."""
    total, start = num_rows(batch), sum(shares[:data_rank])

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == total:
            return leaf[start : start + shares[data_rank]]
        return leaf

    return Share(pytree.tree_map(cut, batch), start, total)


def check_data(batch: Any, mesh: Mesh, *, is_share: bool) -> None:
    """Raise RunError, on every rank, where ranks that should have the same data do not: those of one replica where `batch` is a share,
    all ranks where it is the global batch. Compares a checksum (CRC-32) of every tensor through the job's store."""
    own = {".".join(map(str, path)): _checksum(leaf) for path, leaf in _leaves(batch)}
    group = mesh.axis("dp").index if is_share else -1
    first: dict[int, tuple[int, dict[str, int]]] = {}
    for rank, (place, sums) in enumerate(mesh.guard.exchange((group, own), "the check of the data", mesh.timeout_s)):
        other, expected = first.setdefault(place, (rank, sums))
        wrong = [name for name in sorted(expected.keys() | sums.keys()) if expected.get(name) != sums.get(name)]
        if wrong:
            whose = f"their replica {place} is one" if place >= 0 else "each was given the global batch"
            raise RunError(f"ranks {other} and {rank} have different data in {', '.join(wrong[:5])}, but {whose}: seed and shuffle alike on both.")


def _leaves(batch: Any) -> list[tuple[tuple[Any, ...], torch.Tensor]]:
    found = pytree.tree_flatten_with_path(batch)[0]
    return [(tuple(getattr(k, "key", getattr(k, "idx", k)) for k in path), leaf) for path, leaf in found if isinstance(leaf, torch.Tensor)]


def _checksum(tensor: torch.Tensor) -> int:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy().tobytes(), zlib.crc32(repr((tuple(tensor.shape), tensor.dtype)).encode()))

"""How many of n positions each of p ranks holds, where p may not divide n.

Rank r has positions [r n // p, (r + 1) n // p): ceil(n / p) or one less, and no two neighbours' cuts are further from r n / p than one
position, so the pieces of n and of n s positions stay aligned. A tensor on a rank has room for `most(n, p)` = ceil(n / p) positions wherever
it is: the real ones first, then copies of the last real one. So shapes, programs and messages are the same on all ranks:

    operators whose positions are independent   run on all of them; what copies make is again a copy, and never read
    operators that join positions (a sum, a     run on the real ones (runtime/sharded/uneven.py), so that copies never count
    window, the statistics of a norm)
    gradients                                   are zero at copies

Several axes may divide one dimension: each divides the room that the one outside of it leaves.
"""

from __future__ import annotations

from collections.abc import Sequence


def start(size: int, num_parts: int, index: int) -> int:
    """The first position of part `index`; of `num_parts` the end of the last."""
    return index * size // num_parts


def count(size: int, num_parts: int, index: int) -> int:
    """Real positions of part `index`."""
    return start(size, num_parts, index + 1) - start(size, num_parts, index)


def most(size: int, num_parts: int) -> int:
    """Positions that every rank has room for."""
    return -(-size // num_parts)


def room(length: int, size: int, num_parts: int) -> int:
    """Length of a dimension [outer, size, inner] of `length` entries in all, once its middle is divided."""
    return length // size * most(size, num_parts)


def real(sizes: Sequence[int], num_parts: Sequence[int], indices: Sequence[int]) -> int:
    """Real positions where parts nest, outermost first: part `indices[i]` of `num_parts[i]` of `sizes[i]` positions, those that the part
    outside has room for."""
    left = sizes[0]
    for size, parts, index in zip(sizes, num_parts, indices, strict=True):
        left = min(max(left - start(size, parts, index), 0), count(size, parts, index))
    return left

"""Fourier transforms: the transformed dimensions stay whole, those beside them map.

Linear, but partial sums do not pass: their sums would be complex, which not every collective library can reduce.
"""

from __future__ import annotations

from autoplan.rules.signature import OPAQUE, Call, Signature, integers, labels


def transform(call: Call) -> Signature:
    """fft(x, n, dim) over one dimension, fftn(x, s, dim) over several; without `dim` over all, or over the last of `s`."""
    rank, given = call.rank("self"), call.args.get("dim")
    if given is None:
        lengths = call.args.get("s")
        over = set(range(rank)) if lengths is None else set(range(rank - len(integers(lengths)), rank))
    else:
        over = {d % rank for d in integers(given)}
    dims = tuple(OPAQUE if k in over else d for k, d in enumerate(labels(rank)))
    return Signature((dims,), (dims,))


RULES = {f"aten.fft_{name}{num}": transform for name in ("fft", "ifft", "rfft", "irfft") for num in ("", "2", "n")}

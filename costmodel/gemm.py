"""Matrix products on a device: C[b, m, n] = A[b, m, k] B[b, k, n].

A GPU covers C with tiles that its SMs take in waves. With tiles of x by y on S SMs, s-way split of k,

    waves     = ceil(b ceil(m/x) ceil(n/y) s / S)
    compute_s = (waves + DRAIN) * 2 x y (k/s + half_k) / (peak of one SM * ceiling * tile_share)
    memory_s  = (bytes of A, B, C + partial sums of a split) / bandwidth
    seconds   = max(compute_s, memory_s) + shortest kernel

and the library picks the best of the tiles and splits, as cuBLAS heuristics do. half_k is the prologue and epilogue
of a tile in units of k; DRAIN the time in which the device fills and empties, in waves. Small tiles reuse less and reach
`tile_share` of a large one. Dimensions that are no multiple of 8 elements lose the vector loads of tensor cores and pay
`UNALIGNED`. A CPU core has no waves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from costmodel.calibration import DeviceConstants
from costmodel.cluster import Device

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (128, 64, 0.78), (64, 128, 0.78), (64, 64, 0.6))
SPLITS = (1, 2, 4, 8)
UNALIGNED = 2.5
DRAIN = 0.5


@dataclass(frozen=True, slots=True)
class Gemm:
    """Sizes of a batch of products."""

    b: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        return 2 * self.b * self.m * self.n * self.k


@lru_cache(maxsize=65536)
def gemm_s(gemm: Gemm, dtype: str, item_bytes: int, device: Device, constants: DeviceConstants) -> float:
    """Seconds of a product, host launch not counted. Formulas: the module's text."""
    if gemm.flops == 0:
        return 0.0
    bandwidth = device.memory_bytes_per_s * constants.memory_efficiency
    moved = item_bytes * gemm.b * (gemm.m * gemm.k + gemm.k * gemm.n + gemm.m * gemm.n)
    rate = device.peak(dtype) * constants.gemm_ceiling * (constants.float8_share if dtype == "float8" else 1.0)
    if device.kind == "cpu":
        return max(gemm.flops * (1 + constants.gemm_half_k / gemm.k) / rate, moved / bandwidth)
    best = float("inf")
    sm_rate = rate / device.num_sms
    for x, y, share in TILES:
        tiles = gemm.b * -(-gemm.m // x) * -(-gemm.n // y)
        for split in SPLITS:
            if split > 1 and (tiles * split > 2 * device.num_sms or gemm.k // split < 256):
                break
            waves = -(-tiles * split // device.num_sms)
            compute_s = (waves + DRAIN) * 2 * x * y * (gemm.k / split + constants.gemm_half_k) / (sm_rate * share)
            partial = 0 if split == 1 else 8 * split * gemm.b * gemm.m * gemm.n
            best = min(best, max(compute_s, (moved + partial) / bandwidth))
    aligned = item_bytes == 4 or all(size % 8 == 0 for size in (gemm.k, gemm.n))
    return best * (1.0 if aligned else UNALIGNED) + constants.kernel_s

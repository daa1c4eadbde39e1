"""Measures collectives among the running processes, and fits base + bytes / bandwidth to them.

Run by every rank of a job (gloo or NCCL) at the same moment. Groups of every size that divides the job talk at once, as
they do in a training step, so a fit counts the cores and links that neighbours share.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from costmodel.cluster import Sharing
from costmodel.profile import LinkFit, Profile

# torch 2.13 renames the two; the old names warn there
_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
SIZES_BYTES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22)
_BETWEEN = 160  # size of the products between collectives: some tens of microseconds


def measure_links(profile: Profile | None = None, budget_s: float = 6.0, sizes_bytes: tuple[int, ...] = SIZES_BYTES) -> tuple[LinkFit, ...]:
    """Fits for all kinds and group sizes of this job, equal on every rank; kept in `profile` by rank 0.

    Takes about `budget_s` seconds. ValueError without a process group.
    """
    if not dist.is_initialized():
        raise ValueError("measure_links runs under several processes: initialize a process group first (torchrun does)")
    world = dist.get_world_size()
    group_sizes = [p for p in range(2, world + 1) if world % p == 0]
    cell_s = budget_s / max(1, len(group_sizes) * len(KINDS) * len(sizes_bytes))
    fits = []
    for p in group_sizes:
        groups = [dist.new_group(list(range(start, start + p))) for start in range(0, world, p)]
        group = groups[dist.get_rank() // p]
        for kind in KINDS:
            points = [(n, _collective_s(kind, n, group, p, cell_s)) for n in sizes_bytes]
            fits.append(fit(kind, p, world, points))
    if profile is not None and dist.get_rank() == 0:
        for found in fits:
            profile.put_link(found, dist.get_backend())
    return tuple(fits)


def measure_sharing(budget_s: float = 2.0) -> Sharing:
    """Factors by which this job's ranks slow each other: what each does while all do it, against one alone.

    1.0 on one device a rank. Equal on every rank. ValueError without a process group.
    """
    if not dist.is_initialized():
        raise ValueError("measure_sharing runs under several processes: initialize a process group first (torchrun does)")
    if torch.cuda.is_available():
        return Sharing(1.0, 1.0, 1.0)
    return Sharing(*(_together(work, budget_s / 3) for work in (_products(), _passes(), _updates())))


def _products() -> Callable[[], Any]:
    """Products with weights in turn, which a cache does not hold all."""
    x, out = torch.randn(256, 512), torch.empty(256, 512)
    weights = itertools.cycle([torch.randn(512, 512) for _ in range(8)])
    return lambda: torch.mm(x, next(weights), out=out)


def _passes() -> Callable[[], Any]:
    """Passes over tensors that no cache holds."""
    x, out = torch.zeros(1 << 22), torch.empty(1 << 22)
    return lambda: torch.add(x, 1.0, out=out)


def _updates() -> Callable[[], Any]:
    parameter = torch.nn.Parameter(torch.zeros(1 << 20))
    parameter.grad = torch.ones_like(parameter)
    return torch.optim.AdamW([parameter]).step


def _together(work: Callable[[], Any], budget_s: float) -> float:
    """Seconds of `work` while all ranks do it over those of rank 0 alone, at least 1: means over the ranks."""
    work()
    alone_s = torch.zeros(1)
    if dist.get_rank() == 0:
        alone_s[0] = _each_s(work, budget_s / 3)
    dist.broadcast(alone_s, 0)
    dist.barrier()
    together_s = torch.tensor([_each_s(work, budget_s * 2 / 3)])
    dist.all_reduce(together_s)
    return max(1.0, float(together_s / dist.get_world_size() / alone_s))


def _each_s(work: Callable[[], Any], budget_s: float) -> float:
    """Median seconds of one call."""
    end_s, samples = time.perf_counter() + budget_s, []
    while time.perf_counter() < end_s or not samples:
        start_s = time.perf_counter()
        work()
        samples.append(time.perf_counter() - start_s)
    return statistics.median(samples)


def fit(kind: str, size: int, world: int, points: Iterable[tuple[int, float]]) -> LinkFit:
    """Least squares of relative errors of base + n / bandwidth, neither of them negative."""
    points = sorted(points)
    w = [1 / (t * t) for _, t in points]
    s0, s1 = sum(w), sum(wi * n for wi, (n, _) in zip(w, points, strict=True))
    s2 = sum(wi * n * n for wi, (n, _) in zip(w, points, strict=True))
    r0, r1 = sum(wi * t for wi, (_, t) in zip(w, points, strict=True)), sum(wi * n * t for wi, (n, t) in zip(w, points, strict=True))
    determinant = s0 * s2 - s1 * s1
    base, slope = ((r0 * s2 - r1 * s1) / determinant, (s0 * r1 - s1 * r0) / determinant) if determinant > 0 else (points[0][1], 0.0)
    if base < 0:
        base, slope = 0.0, r1 / s2
    slope = max(slope, 1e-13)
    error = max(abs(base + slope * n - t) / t for n, t in points)
    return LinkFit(kind, size, world, base, 1 / slope, error)


def _collective_s(kind: str, num_bytes: int, group: Any, p: int, budget_s: float) -> float:
    """Median seconds of one collective; the slowest rank's. Between processes that share a host it stands between products, as in a step: a rank then
    waits for those that come later, and has to be woken."""
    run = _call(kind, num_bytes, group, p)
    on_host = dist.get_backend(group) != "nccl"
    device = "cpu" if on_host else "cuda"
    operand = torch.randn(_BETWEEN, _BETWEEN)
    result = torch.empty_like(operand)

    def work() -> None:
        if on_host:
            torch.mm(operand, operand, out=result)

    def samples(count: int, call: Callable[[], Any]) -> list[float]:
        found = []
        for _ in range(count):
            start = time.perf_counter()
            work()
            call()
            if not on_host:
                torch.cuda.synchronize()
            found.append(time.perf_counter() - start)
        return found

    samples(1, run)
    once = samples(1, run)
    planned = torch.tensor([budget_s / max(once[0], 1e-6)], device=device)
    dist.all_reduce(planned, dist.ReduceOp.MIN)
    count = max(5, min(30, int(planned)))
    both_s = statistics.median(samples(count, run))
    work_s = statistics.median(samples(count, lambda: None)) if on_host else 0.0
    slowest = torch.tensor([max(both_s - work_s, 1e-7)], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def _call(kind: str, num_bytes: int, group: Any, p: int) -> Callable[[], Any]:
    """One collective on float32 tensors, `num_bytes` as in costmodel.opkey.Collective."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    whole = torch.zeros(max(p, num_bytes // 4 // p * p), device=device)
    part = torch.zeros(whole.numel() // p, device=device)
    first = dist.get_global_rank(group, 0)
    last = dist.get_global_rank(group, p - 1)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if kind == "all_gather":
        return lambda: _gather(whole, part, group=group)
    if kind == "reduce_scatter":
        return lambda: _scatter(part, whole, group=group)
    if kind == "all_to_all":
        other = torch.zeros_like(whole)
        return lambda: dist.all_to_all_single(other, whole, group=group)
    if kind == "broadcast":
        return lambda: dist.broadcast(whole, first, group=group)
    rank, back = dist.get_rank(), torch.zeros(1, device=device)

    def ping() -> None:  # a message, and one number back so that the sender's clock sees it arrive
        if rank == first:
            dist.send(whole, last, group=group)
            dist.recv(back, last, group=group)
        elif rank == last:
            dist.recv(whole, first, group=group)
            dist.send(back, first, group=group)

    return ping

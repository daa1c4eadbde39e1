"""Ours against hand-written torch, in alternating pairs of steps in one process group.

    ratio of pair i    r_i = ours_s / theirs_s, each the slowest rank's; within a pair the order alternates
    estimate           exp(mean log r), with the normal 95 % interval of mean log r
    control            the same with ours against ours: it has to contain 1 and be narrower than 1.5 %

`--memory` compares instead the peak of what one step holds: parameters, gradients and optimizer state plus the largest sum of
what torch allocates during the step.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from autoplan.launch import run_ranks
from benchmarks.runtime.peers import CONSTRAINTS, Step, ours, theirs

WARM_UP = 5


def _together() -> None:
    if dist.is_initialized():
        dist.barrier()


def _timed(step: Step) -> tuple[float, float]:
    """(seconds, seconds of processor time) of one step."""
    _together()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - start_s, time.process_time() - start_cpu_s


def _pairs(first: Step, second: Step, num_pairs: int) -> list[list[float]]:
    """Rows of (first_s, second_s, first_cpu_s, second_cpu_s), the largest over the ranks."""
    for _ in range(WARM_UP):
        first()
        second()
    rows = []
    for i in range(num_pairs):
        found = {}
        for which in ((0, 1), (1, 0))[i % 2]:
            found[which] = _timed((first, second)[which])
        rows.append([found[0][0], found[1][0], found[0][1], found[1][1]])
    table = torch.tensor(rows, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(table, dist.ReduceOp.MAX)
    return table.tolist()


def _join(num_ranks: int) -> None:
    torch.set_num_threads(1)
    if num_ranks > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=600))


def _measure(peer: str, num_ranks: int, num_layers: int, num_rows: int, num_pairs: int) -> dict[str, Any]:
    _join(num_ranks)
    a, b = ours(peer, num_layers, num_rows), theirs(peer, num_layers, num_rows)
    first, other = a(), b()
    control = _pairs(a, a, max(num_pairs // 2, 2))
    return {"losses": [first, other], "pairs": _pairs(a, b, num_pairs), "control": control}


def _peak(peer: str, num_ranks: int, num_layers: int, num_rows: int, side: str) -> int:
    """Peak bytes of one step of one side on this rank."""
    _join(num_ranks)
    step = (ours if side == "ours" else theirs)(peer, num_layers, num_rows)
    for _ in range(2):
        step()
    gc.collect()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors()}
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    events.sort(key=lambda e: e.start_ns())
    held = peak = 0
    for event in events:
        held += event.nbytes()  # type: ignore[attr-defined]
        peak = max(peak, held)
    return sum(storages.values()) + peak


def _tensors() -> list[torch.Tensor]:
    found = []
    for thing in gc.get_objects():
        try:
            if isinstance(thing, torch.Tensor) and thing.device.type == "cpu":
                local: Any = thing.to_local() if hasattr(thing, "to_local") else thing  # type: ignore[attr-defined]
                found.append(local)
        except (ReferenceError, RuntimeError, AttributeError):
            continue
    return found


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """(estimate, lower, upper) of the ratio, 95 %."""
    logs = [math.log(r) for r in ratios]
    mean, half = statistics.fmean(logs), 1.96 * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", default=list(CONSTRAINTS), help=f"of {', '.join(CONSTRAINTS)}")
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("-o", help="write every pair to this JSON file")
    args = parser.parse_args()
    record = {}
    for peer in args.peers or CONSTRAINTS:
        ranks = math.prod(CONSTRAINTS[peer].get(axis, 1) for axis in ("dp", "tp", "pp"))
        if args.memory:
            peaks = [max(run_ranks(_peak, ranks, peer, ranks, args.layers, args.rows, side, timeout_s=600)) for side in ("ours", "theirs")]
            print(f"{peer:9s} peak {peaks[0] / 2**20:.1f} MiB against {peaks[1] / 2**20:.1f}: {peaks[0] / peaks[1]:.3f}", flush=True)
            record[peer] = peaks
            continue
        found = run_ranks(_measure, ranks, peer, ranks, args.layers, args.rows, args.pairs, timeout_s=3600)[-1]
        estimate, low, high = interval([row[0] / row[1] for row in found["pairs"]])
        _, same_low, same_high = interval([row[0] / row[1] for row in found["control"]])
        cpu, *_ = interval([row[2] / row[3] for row in found["pairs"]])
        ours_s = statistics.median(row[0] for row in found["pairs"])
        print(
            f"{peer:9s} {estimate:.3f} (95 %: {low:.3f} to {high:.3f}; ours against ours {same_low:.3f} to {same_high:.3f}; processor time {cpu:.3f}); "
            f"step {ours_s * 1e3:.0f} ms; losses {found['losses'][0]:.6f} {found['losses'][1]:.6f}",
            flush=True,
        )
        record[peer] = found
    if args.o:
        with open(args.o, "w", encoding="utf-8") as file:
            json.dump(record, file)


if __name__ == "__main__":
    main()

"""Ours against hand-written torch, step by step in one process group.

    round i       one step of theirs and two of ours (a, a'), all models resident, in an order that goes round; the seconds of a step are
                  the slowest rank's
    ratio         r_i = sqrt(a_i a'_i) / theirs_i; the control is a_i / a'_i, our step against itself
    estimate      exp of the Hodges-Lehmann estimator of log r: the median of the means of all pairs of rounds (Hodges and Lehmann 1963).
                  Its 95 % interval is that of Wilcoxon's signed-rank test (Hollander, Wolfe and Chicken 2014, section 3.3): it asks for
                  independent rounds of one symmetric distribution, but for no normal one, so that a round which other work on the machine
                  met does not widen it
    a result      counts where the control's interval contains 1 and is narrower than 1.5 %

`--memory` compares instead the peak of what one step holds: parameters, gradients and optimizer state plus the largest sum of
what torch allocates during the step. Ours twice: with a model that has weights, which its caller lets go of afterwards, and with one on the
meta device, whose weights each rank loads.
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
from torch._subclasses.fake_tensor import FakeTensor

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


ORDERS = ((0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0), (0, 2, 1), (1, 0, 2))  # of theirs, ours and ours again


def _rounds(mine: Step, other: Step, num_rounds: int) -> list[list[float]]:
    """Rows of (theirs_s, ours_s, ours again_s, and the same in processor time), the largest over the ranks."""
    steps = (other, mine, mine)
    for _ in range(WARM_UP):
        for step in steps:
            step()
    rows = []
    for i in range(num_rounds):
        found = [(0.0, 0.0)] * len(steps)
        for which in ORDERS[i % len(ORDERS)]:
            found[which] = _timed(steps[which])
        rows.append([seconds for seconds, _ in found] + [seconds for _, seconds in found])
    table = torch.tensor(rows, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(table, dist.ReduceOp.MAX)
    return table.tolist()


def join(num_ranks: int) -> None:
    """Enter the job with one thread, gloo between the ranks."""
    torch.set_num_threads(1)
    if num_ranks > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=600))


def _measure(peer: str, num_ranks: int, num_layers: int, num_rows: int, num_rounds: int) -> dict[str, Any]:
    join(num_ranks)
    a, b = ours(peer, num_layers, num_rows), theirs(peer, num_layers, num_rows)
    return {"losses": [a(), b()], "rounds": _rounds(a, b, num_rounds)}


def _peak(peer: str, num_ranks: int, num_layers: int, num_rows: int, side: str) -> int:
    """Peak bytes of one step of one side on this rank."""
    join(num_ranks)
    step = theirs(peer, num_layers, num_rows) if side == "theirs" else ours(peer, num_layers, num_rows, from_meta=side == "from meta")
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
            if isinstance(thing, torch.Tensor) and not isinstance(thing, FakeTensor) and thing.device.type == "cpu":
                local: Any = thing.to_local() if hasattr(thing, "to_local") else thing  # type: ignore[attr-defined]
                found.append(local)
        except (ReferenceError, RuntimeError, AttributeError):
            continue
    return found


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """(estimate, lower, upper) of the ratio, 95 %: see above."""
    logs = torch.tensor(ratios, dtype=torch.float64).log()
    n = len(ratios)
    first, second = torch.triu_indices(n, n)
    means = ((logs[first] + logs[second]) / 2).sort().values
    outside = round(len(means) / 2 - 1.96 * math.sqrt(n * (n + 1) * (2 * n + 1) / 24))  # means beyond either end of the interval
    outside = min(max(outside, 0), len(means) - 1)
    return tuple(math.exp(x) for x in (means.median(), means[outside], means[len(means) - 1 - outside]))  # type: ignore[return-value]


def line(peer: str, rounds: list[list[float]], losses: list[float]) -> str:
    """What one comparison found, in words."""
    ratio, low, high = interval([math.sqrt(row[1] * row[2]) / row[0] for row in rounds])
    _, same_low, same_high = interval([row[1] / row[2] for row in rounds])
    cpu, *_ = interval([math.sqrt(row[4] * row[5]) / row[3] for row in rounds])
    total = sum(row[1] + row[2] for row in rounds) / sum(2 * row[0] for row in rounds)
    counts = same_low <= 1 <= same_high and same_high - same_low < 0.015
    return (
        f"{peer:9s} {ratio:.3f} (95 %: {low:.3f} to {high:.3f}; ours against ours {same_low:.3f} to {same_high:.3f}{'' if counts else ', too wide'}; "
        f"of all seconds {total:.3f}; processor time {cpu:.3f}); step {statistics.median(row[1] for row in rounds) * 1e3:.0f} ms; "
        f"{len(rounds)} rounds; losses {losses[0]:.6f} {losses[1]:.6f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", default=list(CONSTRAINTS), help=f"of {', '.join(CONSTRAINTS)}")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("-o", help="write every round to this JSON file")
    args = parser.parse_args()
    record = {}
    for peer in args.peers or CONSTRAINTS:
        ranks = math.prod(CONSTRAINTS[peer].get(axis, 1) for axis in ("dp", "tp", "pp"))
        if args.memory:
            sides = ("ours", "from meta", "theirs")
            peaks = [max(run_ranks(_peak, ranks, peer, ranks, args.layers, args.rows, side, timeout_s=600)) for side in sides]
            mine, lean, other = (peak / 2**20 for peak in peaks)
            print(f"{peer:9s} peak {mine:.1f} MiB, {lean:.1f} from the meta device, against {other:.1f}: {mine / other:.3f}, {lean / other:.3f}", flush=True)
            record[peer] = peaks
            continue
        found = run_ranks(_measure, ranks, peer, ranks, args.layers, args.rows, args.rounds, timeout_s=3600)[-1]
        print(line(peer, found["rounds"], found["losses"]), flush=True)
        record[peer] = found
    if args.o:
        with open(args.o, "w", encoding="utf-8") as file:
            json.dump(record, file)


if __name__ == "__main__":
    main()

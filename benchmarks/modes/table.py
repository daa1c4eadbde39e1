"""Every training mode on one problem: seconds, bytes and loss, and the convergence curves.

    python benchmarks/modes/table.py [--ranks 4] [--batches 60] [--pause-ms 100] [--json results.json]

The problem: an MLP learns a random teacher from `--batches` global batches of 64 rows, on gloo ranks of this machine, of which the last
rests `--pause-ms` before every step of its own. All modes see the same number of rows. Asynchronous workers take 16 rows at a time
(from what is left, or under a bound equally many), at a learning rate divided by their number, since each of their pushes is an update.
`1-bit Adam` is plain Adam for a fifth of its updates. A mode that this release cannot plan is left out with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
ROWS, FEATURES, CLASSES, POINTS = 64, 32, 10, 6
MODES: dict[str, dict[str, Any]] = {
    "all-reduce": {},
    "parameter servers": dict(sync="ps"),
    "one server": dict(sync="ps", servers=(0,)),
    "servers apart": dict(sync="ps", servers=(0, 1), workers=(2, 3)),
    "async, bound 0": dict(sync="async", staleness=0),
    "async, bound 4": dict(sync="async", staleness=4),
    "async, no bound": dict(sync="async"),
    "8-bit": dict(compression="8bit"),
    "1-bit": dict(compression="1bit"),
    "delay 1": dict(delay=1),
    "all-reduce, Adam": {},
    "1-bit Adam": dict(compression="1bit-adam"),
}
RATES = {"SGD": 0.5, "Adam": 0.003}


@dataclass
class Row:
    """One mode. `losses`: held-out loss at equal distances, before the first batch included; `sent`: bytes of a rank's gradients and weights
    in one of its steps."""

    mode: str
    left_out: str = ""
    seconds: float = 0.0
    predicted_step_s: float = 0.0
    sent: dict[str, int] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    updates: int = 0
    max_ahead: int = 0
    mean_staleness: float = 0.0


def problem() -> tuple[Any, Any]:
    """The model, and a function from a number to rows of the teacher's problem."""
    import torch

    from autoplan.models import MLP

    torch.manual_seed(0)
    teacher = torch.nn.Sequential(torch.nn.Linear(FEATURES, 24), torch.nn.Tanh(), torch.nn.Linear(24, CLASSES))
    for parameter in teacher.parameters():
        parameter.detach_().mul_(3)

    def rows(number: int, count: int) -> dict[str, torch.Tensor]:
        x = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(number))
        with torch.no_grad():
            return {"x": x, "labels": teacher(x).argmax(-1)}

    return MLP((FEATURES, 256, 256, CLASSES)), rows


def measure(mode: str, batches: int, pause_s: float) -> Row:
    """One mode on this job's ranks."""
    import torch
    import torch.distributed as dist

    import autoplan

    model, rows = problem()
    optimizer = "Adam" if "Adam" in mode else "SGD"
    world, rank = dist.get_world_size(), dist.get_rank()
    try:
        constraints = autoplan.Constraints(dp=world, tp=1, pp=1, zero=0, **MODES[mode])
        pm = autoplan.parallelize(model, rows(0, ROWS), cluster=f"cpu:1x{world}", constraints=constraints, optimizer=optimizer.lower())
    except (autoplan.InfeasibleError, autoplan.UsageError) as error:
        return Row(mode, left_out=str(error))
    is_async, bound = pm.plan.sync == "async", MODES[mode].get("staleness")
    options = {"betas": (0.9, 0.95)} if optimizer == "Adam" else {}
    options |= {"warmup_steps": batches // 5} if pm.plan.compression == "1bit-adam" else {}
    opt = pm.optimizer(getattr(torch.optim, optimizer), lr=RATES[optimizer] / (world if is_async else 1), **options)
    held_out, row = rows(10**6, 512), Row(mode, predicted_step_s=pm.plan.forecast.step_time_s)
    row.losses.append(pm.evaluate(held_out).item())
    counter = dist.distributed_c10d._get_default_store()
    for point in range(POINTS):
        share = batches // POINTS
        dist.barrier()
        start_s = time.perf_counter()
        numbers = range(share) if not is_async else _numbers(counter, f"{mode}/{point}", share * world) if bound is None else range(rank, share * world, world)
        for batch in numbers:
            if rank == world - 1:
                time.sleep(pause_s)
            number = point * share * (world if is_async else 1) + batch
            pm.forward_backward(rows(number, ROWS // world if is_async else ROWS))
            opt.step()
            opt.zero_grad()
            moved = pm.executor.mesh.recorder.traffic()
        dist.barrier()
        row.seconds += time.perf_counter() - start_s
        row.losses.append(pm.evaluate(held_out).item())
    row.sent = {f"{use.kind}": use.num_bytes for use in moved if use.axis == "dp" and use.phase != "forward"}
    record = pm.finish()
    row.updates = batches if record is None else record.updates[0]
    if record is not None:
        row.max_ahead, row.mean_staleness = record.max_ahead, record.mean_staleness
    return row


def _numbers(counter: Any, key: str, count: int) -> Any:
    """Numbers below `count`, each to one worker, as they come for them."""
    while (number := counter.add(key, 1) - 1) < count:
        yield number


def work(output: Path, batches: int, pause_s: float) -> None:
    """Under torchrun."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found = []
    for mode in MODES:
        found.append(measure(mode, batches, pause_s))
        if dist.get_rank() == 0:
            print(found[-1], file=sys.stderr, flush=True)
            output.write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--pause-ms", type=float, default=100.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        output = options.json or Path(folder) / "results.json"
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks), __file__]
        words += ["--worker", str(output), str(options.batches), str(options.pause_ms / 1e3)]
        subprocess.run(words, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)})
        rows = [Row(**row) for row in json.loads(output.read_text())]
    print("| mode | seconds | bytes a step | updates | ahead, stale | loss, from the start to the end |\n|---|---|---|---|---|---|")
    for row in rows:
        if row.left_out:
            continue
        sent = ", ".join(f"{kind} {size:,}" for kind, size in row.sent.items())
        behind = f"{row.max_ahead}, {row.mean_staleness:.1f}" if row.mode.startswith("async") else ""
        print(f"| {row.mode} | {row.seconds:.2f} | {sent} | {row.updates} | {behind} | {' '.join(f'{loss:.3f}' for loss in row.losses)} |")
    for row in rows:
        if row.left_out:
            print(f"\nleft out: {row.mode} ({row.left_out})")


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[1] == "--worker":
        work(Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
    else:
        main()

"""Time won by compressed and late gradients on a throttled link, measured beside the product's own prediction.

    python benchmarks/modes/compression.py [--ranks 2] [--mbit 200] [--steps 4] [--width 1024]
    python benchmarks/modes/compression.py --passes        the constants of autoplan/datasums.py

Runs in a network namespace of its own, whose loopback `tc ... tbf` throttles (needs unshare, ip and tc; says so where they are
refused). Ranks are gloo processes that train an MLP; its passes sleep besides, as those of a larger model on a device of its own would take. Sums,
quantising and the optimizer are real. The prediction is the plan's forecast with those passes, the measured step the fastest of --steps (other work on the
machine only adds to it), both in seconds; and of quantising the seconds that it keeps a core busy: of a step, less those of the exact one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import autoplan
from autoplan.datasums import PASSES
from autoplan.models import MLP
from costmodel.cluster import Cluster
from costmodel.detect import detect
from runtime.quantiser import CODECS

FORWARD_S, BACKWARD_S = 0.2, 0.4
MODES: dict[str, dict[str, Any]] = {
    "exact": {},
    "8bit": {"compression": "8bit"},
    "1bit": {"compression": "1bit"},
    "exact, a step late": {"delay": 1},
    "1bit, a step late": {"compression": "1bit", "delay": 1},
}


def throttled_cluster(num_ranks: int, bytes_per_s: float) -> Cluster:
    """This machine's ranks on one link that all of them share."""
    found = detect(num_ranks)
    group = found.groups[0]
    tier = replace(group.tiers[-1], domain=num_ranks, shared_by=num_ranks, bandwidth_bytes_per_s=bytes_per_s, measured_bytes_per_s=bytes_per_s)
    return Cluster(f"{num_ranks} ranks on one throttled link", (replace(group, tiers=(tier,)),))


class Slow:
    """A body whose passes take FORWARD_S and BACKWARD_S longer, asleep."""

    def __init__(self, body: Any) -> None:
        self._body = body

    def __call__(self, inputs: Any) -> dict[str, torch.Tensor]:
        time.sleep(FORWARD_S)
        outputs = self._body(inputs)
        for value in outputs.values():
            if value.requires_grad:
                value.register_hook(lambda _: time.sleep(BACKWARD_S))
        return outputs


def predicted_s(plan: autoplan.Plan) -> float:
    """The forecast's step with the passes as slow as they are here."""
    events = [(e.name, e.kind, e.end_s - e.start_s) for e in plan.forecast.events if e.kind in ("reduce", "optimizer")]
    late_s = sum(s for name, _, s in events if name.endswith("of the step before"))
    return max(FORWARD_S + BACKWARD_S + sum(s for _, _, s in events) - late_s, late_s)


def beside_s(timeline: Any) -> float:
    """Seconds of rank 0's sums that lie under its passes in the measured timeline of the last step."""
    own = [e for e in timeline.events if e.rank == 0]
    sums = [(e.start_s, e.end_s) for e in own if e.stream == "dp" and e.kind == "reduce"]
    passes = [(e.start_s, e.end_s) for e in own if e.kind in ("forward", "backward")]
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in sums for b in passes)


def sent_bytes(plan: autoplan.Plan, world: int) -> float:
    """Bytes on the wire that one rank sends for its gradients."""
    share = {"all_reduce": 2.0, "all_to_all": 1 / world}
    return sum(use.num_bytes * share.get(use.kind, 1.0) for use in plan.collectives if use.axis == "dp" and use.phase == "reduce") * (world - 1) / world


def _rank(rank: int, world: int, folder: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=300))
    width = options.width
    batch = {"x": torch.randn(8, width), "labels": torch.randint(0, 8, (8,))}
    cluster = throttled_cluster(world, options.mbit * 1e6 / 8)
    exact_s = 0.0
    for name, mode in MODES.items():
        fixed = autoplan.Constraints(dp=world, tp=1, pp=1, zero=0, micro_batch_size=8 // world, **mode)
        pm = autoplan.parallelize(MLP((width, width, width, 8)), batch, cluster=cluster, constraints=fixed, optimizer="sgd")
        bodies = pm.executor.code.bodies
        bodies.update({key: Slow(body) for key, body in bodies.items()})
        optimizer = torch.optim.SGD(pm.parameters(), lr=1e-3)
        times, busy = [], []
        for _ in range(options.steps + 2):
            start_s, busy_s = time.perf_counter(), time.process_time()
            pm.forward_backward(batch)
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - start_s)
            busy.append(time.process_time() - busy_s)
        timeline = pm.timeline
        exact_s = exact_s or statistics.median(busy[2:])
        if rank == 0:
            row = {"mode": name, "step_s": round(min(times[2:]), 3), "predicted_s": round(predicted_s(pm.plan), 3)}
            quantising_s = sum(e.end_s - e.start_s for e in pm.plan.forecast.events if e.name.startswith("quantise"))
            row |= {"quantising_s": round(statistics.median(busy[2:]) - exact_s, 3), "predicted_quantising_s": round(quantising_s, 3)}
            print(json.dumps(row | {"beside_passes_s": round(beside_s(timeline), 3), "sent_bytes": round(sent_bytes(pm.plan, world))}), flush=True)
        pm.drain()
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


def passes() -> None:
    """Elementwise passes of both ends of a send, in units of an addition of two tensors."""
    torch.set_num_threads(1)

    spoil = torch.zeros(1 << 24)

    def cold_s(run: Any) -> float:
        """The median, with caches that hold other things, as after a pass of a model."""
        run()
        found = []
        for _ in range(15):
            spoil.add_(1)
            start_s = time.process_time()
            run()
            found.append(time.process_time() - start_s)
        return statistics.median(found)

    one, other = torch.randn(1 << 20), torch.randn(1 << 20)
    grad, values = torch.randn(1024, 1024), torch.randn(1024, 1024)
    for name, codec in CODECS.items():
        unit_s = cold_s(lambda: one + other)
        encoded = codec.encode(values)
        wire = codec.pack(encoded)
        send = cold_s(lambda c=codec: (values.add_(grad.t()), c.pack(c.encode(values)), values.sub_(c.decode(c.encode(values)))))
        send -= cold_s(lambda c=codec: c.encode(values))
        receive = cold_s(lambda c=codec, w=wire: c.decode(c.unpack(w, 1024, torch.float32)))
        print(f"{name}: {send / unit_s:.1f} to send, {receive / unit_s:.1f} to receive (in the product: {PASSES[name]}; unit {unit_s * 1e3:.2f} ms)")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mbit", type=float, default=200.0)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--passes", action="store_true")
    parser.add_argument("--inside", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.passes:
        passes()
        return
    if options.inside:
        spawn(_rank, (options.ranks, options.inside, options), nprocs=options.ranks)
        return
    tools = [tool for tool in ("unshare", "ip", "tc") if shutil.which(tool) is None]
    if tools:
        sys.exit(f"skipped: {', '.join(tools)} not found")
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        again = [sys.executable, str(Path(__file__).resolve()), "--inside", folder, *sys.argv[1:]]
        throttle = f'ip link set lo up && tc qdisc add dev lo root tbf rate {options.mbit:g}mbit burst 128kb latency 500ms && exec "$@"'
        done = subprocess.run(["unshare", "-rn", "bash", "-c", throttle, "bash", *again])
    if done.returncode:
        sys.exit(f"skipped or failed with exit code {done.returncode}: a network namespace with a throttled loopback may not be allowed here")


if __name__ == "__main__":
    main()

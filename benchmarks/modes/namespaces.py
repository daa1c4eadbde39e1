"""Several hosts on one machine: network namespaces joined by a switch, one link throttled, torchrun across them.

    sudo python benchmarks/modes/namespaces.py [--hosts 2] [--rates 10000,20]

For every rate of the throttled link (Mbit/s): a cluster file that states it, the plan that the search finds for it, and the
measured step time of that plan and of others, beside the predicted ones. The orders agree where predictions differ clearly.
Skips, with the reason, where namespaces are not allowed; takes everything away again, also when it is interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
PORT, SUBNET = 29541, "10.213.7"
CLEAR = 1.5  # predictions that differ by this factor have to be in the order of the measured times
PLANS: dict[str, dict[str, Any]] = {
    "data parallel": dict(tp=1, pp=1, zero=0),
    "parameter servers": dict(tp=1, pp=1, sync="ps"),
    "one server": dict(tp=1, pp=1, sync="ps", servers=(0,)),
    "a server apart": dict(tp=1, pp=1, sync="ps", servers=(0,)),  # of three hosts or more; the others compute
    "asynchronous": dict(tp=1, pp=1, sync="async", staleness=2),
    "pipeline": dict(dp=1, tp=1),
}


class Skip(Exception):
    """Namespaces cannot be had here; the text says why."""


def run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise Skip(f"`{' '.join(words)}` failed: {done.stderr.strip() or done.stdout.strip()}")


@contextmanager
def hosts(count: int) -> Iterator[list[str]]:
    """Namespaces 10.213.7.1 .. count joined by a bridge in a namespace of its own; the machine's own network is not touched."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise Skip(f"{tool} is not installed (iproute2)")
    if os.geteuid():
        raise Skip("network namespaces need root: run it with sudo")
    base = f"autoplan{os.getpid()}"
    switch, names = f"{base}-switch", [f"{base}-{i}" for i in range(count)]
    made: list[str] = []
    try:
        for name in (switch, *names):
            run("ip", "netns", "add", name)
            made.append(name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "bridge0", "up")
        for i, name in enumerate(names):
            run("ip", "-n", switch, "link", "add", f"port{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "-n", switch, "link", "set", f"port{i}", "master", "bridge0", "up")
            run("ip", "-n", name, "addr", "add", f"{SUBNET}.{i + 1}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in reversed(made):
            pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
            for pid in map(int, pids):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def throttle(names: list[str], rate_mbit: int) -> None:
    """Both directions of the last host's link."""
    last = len(names) - 1
    switch = names[0].rsplit("-", 1)[0] + "-switch"
    for namespace, device in ((names[last], "eth0"), (switch, f"port{last}")):
        run(
            "ip", "netns", "exec", namespace, "tc", "qdisc", "replace", "dev", device, "root", "tbf", "rate", f"{rate_mbit}mbit", "burst", "64kb",
            "latency", "200ms",
        )  # fmt: skip


def cluster_file(folder: Path, count: int, rate_mbit: int) -> Path:
    """Hosts of one rank each; with more than two, the last one is behind the slow link alone."""
    slow = f"{{name: throttled, domain: {count}, shared_by: 1, latency_us: 100, bandwidth_gb_per_s: {rate_mbit / 8e3:g}}}"
    group = "  - {{device: cpu, nodes: {}, devices_per_node: 1, tiers: [{}]}}\n"
    if count == 2:
        groups = group.format(2, slow)
    else:
        fast = "{name: veth, domain: %d, shared_by: 1, latency_us: 100, bandwidth_gb_per_s: 1}"
        groups = group.format(count - 1, fast % (count - 1)) + group.format(1, fast % 1) + f"fabric: {slow}\n".replace(f"domain: {count}, ", "")
    path = folder / f"hosts-{rate_mbit}.yaml"
    path.write_text(f"name: hosts-{rate_mbit}\ngroups:\n{groups}")
    return path


def launch(names: list[str], cluster: Path, output: Path, timeout_s: float) -> list[dict[str, Any]]:
    """torchrun with its c10d rendezvous, one agent a host; rank 0's table."""
    agents = []
    for i, name in enumerate(names):
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "TP_SOCKET_IFNAME": "eth0"}
        words = [
            "ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(names)), "--nproc-per-node", "1",
            "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{SUBNET}.1:{PORT}", "--rdzv-id", "hosts",
            "--rdzv-conf", f"is_host={int(i == 0)}",  # a host's name does not resolve to its address in a namespace
            "--local-addr", f"{SUBNET}.{i + 1}",
            __file__, "--worker", str(cluster), str(output),
        ]  # fmt: skip
        agents.append(subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        time.sleep(0.5 if i == 0 else 0.0)
    end_s = time.monotonic() + timeout_s
    try:
        for agent in agents:
            text, _ = agent.communicate(timeout=max(1.0, end_s - time.monotonic()))
            if agent.returncode:
                raise RuntimeError(f"torchrun failed:\n{text[-4000:]}")
    finally:
        for agent in agents:
            agent.terminate()  # what is left in the namespaces ends with them
    return json.loads(output.read_text())


def work(cluster: Path, output: Path, steps: int = 8, warmup: int = 3) -> None:
    """Under torchrun: predict and measure every plan. Of a plan's steps the first are left out (connections speed up), and of the others
    the fastest counts: other work on this machine only adds to it."""
    import torch
    import torch.distributed as dist

    import autoplan
    from autoplan.explain import short
    from autoplan.frontend import capture

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    num_hosts = dist.get_world_size()
    each = 16 * num_hosts * (num_hosts - 1)
    num_rows = 4096 // each * each
    torch.manual_seed(0)
    batch = {"x": torch.randn(num_rows, 416), "target": torch.randn(num_rows, 256)}
    graph = capture(make_model(num_hosts), batch)
    plans, rows = {}, []
    for name, fixed in {"found": {}, **PLANS}.items():
        if name == "a server apart":
            if num_hosts == 2:
                continue
            fixed = fixed | {"workers": tuple(range(1, num_hosts))}
        try:
            plans[name] = autoplan.find_plan(graph, None, str(cluster), autoplan.Constraints(**fixed), "sgd")
        except autoplan.InfeasibleError as error:
            if dist.get_rank() == 0:
                rows.append({"name": name, "refused": str(error)})
    for name, plan in plans.items():
        dist.barrier()
        pm = autoplan.parallelize(make_model(num_hosts), batch, plan=plan, optimizer="sgd")
        opt = pm.optimizer(torch.optim.SGD, lr=1e-3)
        seconds = []
        for _ in range(steps):
            if plan.sync != "async":
                dist.barrier()
            start_s = time.perf_counter()
            pm.forward_backward(batch)
            opt.step()
            opt.zero_grad()
            seconds.append(time.perf_counter() - start_s)
        pm.finish()
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, min(seconds[warmup:]))
        rows.append({"name": name, "plan": short(plan), "predicted_s": plan.forecast.step_time_s, "measured_s": max(told)})
    if dist.get_rank() == 0:
        output.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def make_model(num_hosts: int) -> Any:
    """A stack with a waist of 4 features between any two hosts, where a pipeline sends little; the weights are 1.4 MiB."""
    import itertools

    import torch
    from torch import nn

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = (416, *(512, 4) * (num_hosts - 1), 512, 256)
            self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.relu(layer(x))
            return torch.nn.functional.mse_loss(x, target)

    torch.manual_seed(0)
    return Stack()


def disorders(rows: list[dict[str, Any]]) -> list[str]:
    """Pairs whose predictions differ clearly and whose measured times are the other way round."""
    found = []
    timed = [row for row in rows if "refused" not in row]
    for a in timed:
        for b in timed:
            if a["predicted_s"] * CLEAR < b["predicted_s"] and a["measured_s"] > b["measured_s"]:
                found.append(f"{a['name']} should be faster than {b['name']}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2, choices=(2, 3, 4))
    parser.add_argument("--rates", default="10000,20", help="of the throttled link, Mbit/s")
    parser.add_argument("--json", type=Path, help="write the tables here")
    parser.add_argument("--timeout-s", type=float, default=400.0, help="for all plans at one rate")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` runs
    tables: dict[str, Any] = {}
    try:
        with tempfile.TemporaryDirectory() as folder, hosts(options.hosts) as names:
            for rate in map(int, options.rates.split(",")):
                throttle(names, rate)
                rows = launch(names, cluster_file(Path(folder), options.hosts, rate), Path(folder) / f"{rate}.json", options.timeout_s)
                tables[str(rate)] = rows
                print(f"\n{options.hosts} hosts, the last one behind {rate} Mbit/s")
                print(f"{'':20}{'predicted':>12}{'measured':>12}   plan")
                for row in rows:
                    if "refused" in row:
                        print(f"{row['name']:20}    refused: {row['refused']}")
                        continue
                    print(f"{row['name']:20}{row['predicted_s'] * 1e3:9.1f} ms{row['measured_s'] * 1e3:9.1f} ms   {row['plan']}")
                print("\n".join(f"order differs: {pair}" for pair in disorders(rows)) or "measured times are in the predicted order", flush=True)
    except Skip as reason:
        print(f"skipped: {reason}")
        return 0
    if options.json:
        options.json.write_text(json.dumps(tables, indent=1) + "\n")
    plans = [next(row["plan"] for row in rows if row["name"] == "found") for rows in tables.values()]
    print(f"\nthe plan {'changes' if len({*plans}) > 1 else 'does not change'} with the link: {' -> '.join(plans)}")
    return 1 if any(disorders(rows) for rows in tables.values()) else 0


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] == "--worker":
        work(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        sys.exit(main())

"""From plans to measured steps: jobs of every rank, and a pool of ranks that runs one plan after the other."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from autoplan.arrange import arranged
from autoplan.graph import Graph
from autoplan.lower import lower
from autoplan.pacing import SLACK_S, pace_of
from autoplan.plan import Plan
from autoplan.replicas import place_of
from costmodel.paced import PacedDevices, PacedPrices
from runtime.pacedjob import Found, Job, least_disturbed, run

_POLL_S = 0.3
_NETWORK = 0x40000000  # CLONE_NEWNET


@dataclass(frozen=True)
class Host:
    """A network namespace, whose device `device` has this address."""

    namespace: str
    device: str
    address: str

    def enter(self) -> None:
        """Let this thread, and those that it starts, live there. Raises OSError."""
        with open(f"/var/run/netns/{self.namespace}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NETWORK):
                raise OSError(ctypes.get_errno(), f"cannot enter network namespace {self.namespace}")
        os.environ["GLOO_SOCKET_IFNAME"] = self.device


@dataclass(frozen=True)
class Measured:
    """A plan beside its measurement."""

    plan: Plan
    step_s: float
    late_s: float
    ranks: tuple[Found, ...]

    @property
    def error(self) -> float:
        """Of the forecast, relative to what was measured."""
        return self.plan.forecast.step_time_s / self.step_s - 1


def jobs_of(plan: Plan, graph: Graph, devices: PacedDevices, batch: Any, slack_s: float = SLACK_S) -> list[Job]:
    """The job of every rank. With an infinite slack nothing sleeps, and the devices' own clocks tell what a step would take."""
    own, prices, found = arranged(graph, plan), PacedPrices(devices), []
    programs: dict[int, Any] = {}
    for rank in range(devices.num_devices):
        data_rank = place_of(plan.axes, "dp", rank)
        if data_rank not in programs:
            programs[data_rank] = lower(plan, graph, data_rank=data_rank)
        program = programs[data_rank][place_of(plan.axes, "pp", rank)]
        found.append(Job(program, pace_of(program, plan, own, prices, rank, slack_s), batch))
    return found


class Ranks:
    """Ranks of one gloo job on this machine, which live for many plans. Made by `ranks`."""

    def __init__(self, num_ranks: int, folder: Path, slack_s: float, timeout_s: float, hosts: Sequence[Host]) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["runtime.pacedjob", "autoplan.pacing"])  # type: ignore[attr-defined]
        self.folder, self.slack_s, self.timeout_s, self._number = folder, slack_s, timeout_s, 0
        meet, is_timed = f"tcp://{hosts[0].address if hosts else '127.0.0.1'}:{_free_port()}", slack_s < math.inf
        at = [hosts[rank * len(hosts) // num_ranks] if hosts else None for rank in range(num_ranks)]
        self.workers = [context.Process(target=_work, args=(rank, at, meet, str(folder), timeout_s, is_timed), daemon=True) for rank in range(num_ranks)]
        for worker in self.workers:
            worker.start()

    def measure(self, plan: Plan, jobs: Sequence[Job], num_steps: int = 1, most_steps: int = 5) -> Measured:
        """Run steps of a plan until `num_steps` were not disturbed, `most_steps` in all. Raises RuntimeError with the first error of a rank."""
        number, self._number = self._number, self._number + 1
        for rank, job in enumerate(jobs):
            _put(self.folder / f"job.{number}.{rank}", (job, num_steps, most_steps))
        paths = [self.folder / f"found.{number}.{rank}" for rank in range(len(jobs))]
        end_s = time.monotonic() + self.timeout_s
        while not all(path.exists() for path in paths):
            errors = sorted(self.folder.glob("error.*"), key=lambda path: path.stat().st_mtime_ns)
            if errors or time.monotonic() > end_s:
                raise RuntimeError(errors[0].read_text() if errors else f"no end after {self.timeout_s:g} s")
            time.sleep(_POLL_S)
        found = tuple(pickle.loads(path.read_bytes()) for path in paths)
        for path in paths:
            path.unlink()
        step = least_disturbed(found)
        return Measured(plan, step.seconds, step.late_s, found)

    def stop(self) -> None:
        (self.folder / "stop").touch()
        for worker in self.workers:
            worker.join(10)
            if worker.is_alive():
                worker.kill()


@contextlib.contextmanager
def ranks(num_ranks: int, slack_s: float = SLACK_S, timeout_s: float = 600.0, hosts: Sequence[Host] = ()) -> Iterator[Ranks]:
    """`num_ranks` processes that wait for plans, on as many `hosts` one after the other."""
    with tempfile.TemporaryDirectory(prefix="paced-") as folder:
        made = Ranks(num_ranks, Path(folder), slack_s, timeout_s, hosts)
        try:
            yield made
        finally:
            made.stop()


def _work(rank: int, at: Sequence[Host | None], meet: str, folder: str, timeout_s: float, is_timed: bool) -> None:
    torch.set_num_threads(1)
    host = at[rank]
    if host is not None:
        host.enter()
    if is_timed:
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))  # it computes next to nothing, and has to wake in time; before gloo starts its threads
    here = Path(folder)
    try:
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=len(at), timeout=timedelta(seconds=timeout_s))
        number = 0
        while True:
            job = here / f"job.{number}.{rank}"
            while not job.exists():
                if (here / "stop").exists() or not here.exists():
                    os._exit(0)
                time.sleep(_POLL_S)
            content, num_steps, most_steps = pickle.loads(job.read_bytes())
            job.unlink()
            _put(here / f"found.{number}.{rank}", run(content, num_steps, most_steps=most_steps, timeout_s=timeout_s))
            number += 1
    except BaseException:
        _put(here / f"error.{rank}", None, f"rank {rank}:\n{traceback.format_exc()}")
        os._exit(1)


def _put(path: Path, value: Any, text: str | None = None) -> None:
    part = path.with_name(f"part.{path.name}")
    part.write_bytes(pickle.dumps(value) if text is None else text.encode())
    part.rename(path)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

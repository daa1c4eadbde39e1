"""The profile: what was measured on this machine, kept in SQLite under the user's cache folder.

An entry belongs to an environment (device, torch version, threads) and carries the date on which it was measured. Several
processes may write at once. Delete the file to measure afresh.
"""

from __future__ import annotations

import json
import platform
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import platformdirs
import torch

from costmodel.opkey import OpKey, OpTime, Shape

_VERSION = 2  # of the way of measuring: entries of another version are not read
_WAIT_S = 30.0
_TABLES = """
create table if not exists ops (version int, device text, torch text, threads int, key text, forward_s real, backward_input_s real,
  backward_weight_s real, num_runs int, date text, primary key (version, device, torch, threads, key));
create table if not exists links (version int, device text, torch text, backend text, kind text, size int, world int, base_s real,
  bytes_per_s real, error real, date text, primary key (version, device, torch, backend, kind, size, world));
create table if not exists speeds (version int, device text, torch text, rank int, speed real, date text,
  primary key (version, device, torch, rank));
"""


@dataclass(frozen=True, slots=True)
class Environment:
    """What a measurement depends on besides its key."""

    device: str
    kind: str  # "cpu" or "cuda"
    torch: str
    threads: int


@dataclass(frozen=True, slots=True)
class LinkFit:
    """base_s + num_bytes / bytes_per_s, fitted to collectives of one kind among `size` of `world` ranks of a node.
    `error`: largest relative error of the fit over the measured sizes. `num_bytes` as in costmodel.opkey.Collective."""

    kind: str
    size: int
    world: int
    base_s: float
    bytes_per_s: float
    error: float

    def seconds(self, num_bytes: float) -> float:
        """Of one collective of `num_bytes`."""
        return self.base_s + num_bytes / self.bytes_per_s


def environment() -> Environment:
    """This process on the device that it would compute on."""
    if torch.cuda.is_available():
        return Environment(torch.cuda.get_device_name(), "cuda", torch.__version__, torch.get_num_threads())
    return Environment(_cpu_name(), "cpu", torch.__version__, torch.get_num_threads())


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if names:
            return names[0]
    return platform.processor() or platform.machine()


def key_text(key: OpKey) -> str:
    """A key as text; its flops do not name it."""
    return json.dumps([key.target, key.operands, key.outputs, key.args, key.grads])


def _tensors(found: list) -> tuple[tuple[Shape, str], ...]:
    return tuple((tuple(shape), dtype) for shape, dtype in found)


def default_path() -> Path:
    """The file that profiles are kept in, in the user's cache folder."""
    return Path(platformdirs.user_cache_dir("autoplan")) / "profile.sqlite"


class Profile:
    """The table of one environment. Reads are cached in memory; writes are transactions of their own."""

    def __init__(self, path: Path | None = None, env: Environment | None = None) -> None:
        self.path = path or default_path()
        self.env = env or environment()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._connect() as connection:
            connection.executescript(_TABLES)
        self._ops = dict(self._read_ops())
        self._links = {(fit.kind, fit.size, fit.world): fit for fit in self._read_links()}
        self._speeds = dict(self._read_speeds())

    def _connect(self) -> closing[sqlite3.Connection]:
        return closing(sqlite3.connect(self.path, timeout=_WAIT_S, isolation_level=None))

    @property
    def _place(self) -> tuple[int, str, str]:
        return _VERSION, self.env.device, self.env.torch

    def _read_ops(self) -> Iterator[tuple[str, OpTime]]:
        query = "select key, forward_s, backward_input_s, backward_weight_s from ops where version=? and device=? and torch=? and threads=?"
        with self._connect() as connection:
            for key, *seconds in connection.execute(query, (*self._place, self.env.threads)):
                yield key, OpTime(*seconds)

    def _read_links(self) -> Iterator[LinkFit]:
        query = "select kind, size, world, base_s, bytes_per_s, error from links where version=? and device=? and torch=?"
        with self._connect() as connection:
            for row in connection.execute(query, self._place):
                yield LinkFit(*row)

    def _read_speeds(self) -> Iterator[tuple[int, float]]:
        with self._connect() as connection:
            yield from connection.execute("select rank, speed from speeds where version=? and device=? and torch=?", self._place)

    def op(self, key: OpKey) -> OpTime | None:
        """Seconds of exactly this key, measured by one process alone; None where it was not measured."""
        return self._ops.get(key_text(key))

    def ops(self) -> Iterator[tuple[OpKey, OpTime]]:
        """Everything that was timed here; keys without their flops, which do not name them."""
        for text, seconds in self._ops.items():
            target, operands, outputs, args, grads = json.loads(text)
            yield OpKey(target, _tensors(operands), _tensors(outputs), args, tuple(grads), 0), seconds

    def link(self, kind: str, size: int, world: int) -> LinkFit | None:
        """The fit of a kind of collective among `size` of `world` ranks; None where it was not measured."""
        return self._links.get((kind, size, world))

    def links(self) -> tuple[LinkFit, ...]:
        return tuple(self._links[place] for place in sorted(self._links))

    def speed(self, rank: int) -> float | None:
        """Of a rank's device, as a share of the fastest's."""
        return self._speeds.get(rank)

    @property
    def num_ops(self) -> int:
        return len(self._ops)

    def put_op(self, key: OpKey, seconds: OpTime, num_runs: int) -> None:
        text = key_text(key)
        self._ops[text] = seconds
        row = (*self._place, self.env.threads, text, seconds.forward_s, seconds.backward_input_s, seconds.backward_weight_s, num_runs, date.today().isoformat())
        self._write("insert or replace into ops values (?,?,?,?,?,?,?,?,?,?)", row)

    def put_link(self, fit: LinkFit, backend: str) -> None:
        self._links[fit.kind, fit.size, fit.world] = fit
        row = (*self._place, backend, fit.kind, fit.size, fit.world, fit.base_s, fit.bytes_per_s, fit.error, date.today().isoformat())
        self._write("insert or replace into links values (?,?,?,?,?,?,?,?,?,?,?)", row)

    def put_speed(self, rank: int, speed: float) -> None:
        self._speeds[rank] = speed
        self._write("insert or replace into speeds values (?,?,?,?,?,?)", (*self._place, rank, speed, date.today().isoformat()))

    def _write(self, statement: str, row: tuple) -> None:
        end_s = time.monotonic() + _WAIT_S
        while True:
            try:
                with self._connect() as connection:
                    connection.execute(statement, row)
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > end_s:
                    raise
                time.sleep(0.05)

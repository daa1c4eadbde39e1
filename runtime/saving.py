"""Writing a checkpoint: what a rank writes, in the background or not, and the one moment at which the new one replaces the old.

    1  every rank gathers; the first rank of each stage keeps (background) or writes (else) dense tensors, FILE_BYTES at a time
    2  each writer ends with part-P.json, which names what it wrote; that file is there whole or not at all; a background writer that cannot
       write leaves failed.txt
    3  rank 0, once all parts are there, writes index.json and renames: PATH -> .PATH.old, .PATH.partial -> PATH, .PATH.old goes

A process that dies in 1 or 2 leaves PATH as it was. One that dies between the two renames leaves .PATH.old whole, which is what
a reader of PATH then takes (`existing`).
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from runtime.errors import CheckpointError

FILE_BYTES = 2**31
_POLL_S = 0.05
_FAILED = "failed.txt"


def scratch_of(path: Path) -> Path:
    """Where the next checkpoint of this name is written."""
    return path.with_name(f".{path.name}.partial")


def existing(path: Path) -> Path:
    """The folder that holds the checkpoint called `path`: itself, or the one before where a replacement was cut short."""
    old = path.with_name(f".{path.name}.old")
    return old if not path.exists() and (old / "index.json").exists() else path


@dataclass(eq=False)
class Writer:
    """Writes the tensors of one writer into `folder`, in files of about `file_bytes`. `place` is its number (runtime/checkpoint.py)."""

    folder: Path
    place: int
    file_bytes: int = FILE_BYTES
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    _pending: dict[str, torch.Tensor] = field(default_factory=dict)
    _num_files: int = 0

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write named tensors of the CPU."""
        for name, tensor in tensors:
            self.entries[name] = {"file": self._file, "shape": list(tensor.shape)}
            self._pending[name] = tensor
            if sum(t.nbytes for t in self._pending.values()) > self.file_bytes:
                self._flush()
        self._flush()

    @property
    def _file(self) -> str:
        return f"model-{self.place}-{self._num_files}.safetensors"

    def _flush(self) -> None:
        if self._pending:
            save_file(self._pending, self.folder / self._file, metadata={"format": "pt"})
            _to_disk(self.folder / self._file)
            self._pending.clear()
            self._num_files += 1

    def end(self, scalars: dict[str, Any]) -> None:
        """Tell that everything is written."""
        write_whole(self.folder / f"part-{self.place}.json", json.dumps({"tensors": self.entries, "scalars": scalars}))


def write_whole(path: Path, text: str) -> None:
    """A file that is there with all of its text or not at all."""
    part = path.with_suffix(".tmp")
    part.write_text(text, encoding="utf-8")
    _to_disk(part)
    part.rename(path)


def _to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def fail(scratch: Path, text: str) -> None:
    """Tell `finish` that a part will not come: best effort, where the disk takes no more."""
    with suppress(OSError):
        write_whole(scratch / _FAILED, text)


def finish(path: Path, num_parts: int, index: dict[str, Any], timeout_s: float) -> None:
    """Wait for all parts, then put the new checkpoint in the place of the old. Raises CheckpointError where a part does not come, at once
    where its writer says so (`fail`)."""
    scratch = scratch_of(path)
    parts = [scratch / f"part-{place}.json" for place in range(num_parts)]
    end_s = time.monotonic() + timeout_s
    while missing := [part.name for part in parts if not part.exists()]:
        if (scratch / _FAILED).exists():
            raise CheckpointError(f"{(scratch / _FAILED).read_text(encoding='utf-8')}; the checkpoint before stays")
        if time.monotonic() > end_s:
            raise CheckpointError(f"{', '.join(missing)} of {path} did not come within {timeout_s:g} s; the checkpoint before stays")
        time.sleep(_POLL_S)
    told = [json.loads(part.read_text(encoding="utf-8")) for part in parts]
    index = {
        **index,
        "tensors": {name: entry for own in told for name, entry in sorted(own["tensors"].items())},
        "scalars": {name: value for own in told for name, value in sorted(own["scalars"].items())},
    }
    write_whole(scratch / "index.json", json.dumps(index, indent=1))
    for part in parts:
        part.unlink()
    replace(scratch, path)


def replace(scratch: Path, path: Path) -> None:
    """`scratch` becomes `path`. At every moment `existing(path)` is a whole checkpoint."""
    old = path.with_name(f".{path.name}.old")
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    scratch.rename(path)
    shutil.rmtree(old, ignore_errors=True)


class Saving:
    """A checkpoint on its way. It is in place once `wait` has returned on every rank."""

    def __init__(self, work: Callable[[], None] | None = None) -> None:
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if work is not None:  # no daemon: a process that ends waits for its checkpoint
            self._thread = threading.Thread(target=self._run, args=(work,), name="runtime-saving")
            self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error

    @property
    def is_done(self) -> bool:
        """Whether this rank has nothing left to write."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Until this rank has written its part (on rank 0: until the checkpoint is in place). Raises CheckpointError where that failed."""
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error if isinstance(error, CheckpointError) else CheckpointError(f"a checkpoint could not be written: {error}") from error

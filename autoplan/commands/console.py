"""Results on stdout, progress on stderr, files whole or not at all."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autoplan.errors import UsageError
from autoplan.units import seconds


def say(text: str) -> None:
    """A result, on stdout."""
    print(text, flush=True)


def say_json(value: Any) -> None:
    """A result as one JSON document, on stdout."""
    say(json.dumps(value, indent=2))


def note(text: str) -> None:
    """What a person wants to know but no program reads, on stderr."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Progress for anything that may take over a second: a spinner on a terminal, a line when done elsewhere."""
    start_s = time.monotonic()
    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status(f"{what} …", spinner="dots"):
            yield
    else:
        yield
    took_s = time.monotonic() - start_s
    if took_s >= 1.0:
        note(f"{what}: {seconds(took_s)}")


def check_writable(path: Path | None) -> None:
    """Raise UsageError, before any work is done, where `write_whole` could not write; None is stdout."""
    if path is None:
        return
    path = path.expanduser()
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"{path} cannot be written: {'it is a folder' if path.is_dir() else f'there is no folder {path.parent}'}")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"{path} cannot be written: the folder {path.parent} is read-only")


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that readers see the old content or the new, never a part. Raises UsageError."""
    path = path.expanduser()
    try:
        handle, part = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(part, 0o666 & ~_umask())
            os.replace(part, path)
        except BaseException:
            Path(part).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

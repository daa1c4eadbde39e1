"""Checkpoints that any plan and world size can load: dense tensors under the model's own names.

    PATH/index.json             version, number of steps, hyperparameters, file and shape of each tensor
    PATH/model-P-I.safetensors  of writer P, file I. Writer P is the first rank of "pp" coordinate P: parameters and buffers, optimizer state beside
                                them as "name::state"; or, P = number of coordinates + rank, any rank: what it carries (runtime/carry.py)

PATH is the old checkpoint or the new one, never a part of one (runtime/saving.py). All ranks have to see the same file system.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from runtime.errors import CheckpointError
from runtime.mesh import Mesh
from runtime.saving import Saving, Writer, existing, fail, finish, replace, scratch_of, write_whole
from runtime.scaling import LossScale
from runtime.state import fitted, gather_all, is_first_of_stage, owned
from runtime.storage import Resident

VERSION = 1
_SCALAR = "scalars"


@dataclass(frozen=True, slots=True)
class Progress:
    """What a checkpoint says beside its tensors."""

    num_steps: int
    loss_scale: LossScale | None = None


def save(
    path: str | os.PathLike,
    residents: tuple[Resident, ...],
    mesh: Mesh,
    stage_ranks: tuple[int, ...],
    progress: Progress,
    optimizer: torch.optim.Optimizer | None = None,
    carried: Iterable[tuple[str, torch.Tensor]] = (),
    *,
    wait: bool = True,
) -> Saving:
    """Write a checkpoint. All ranks call it; with `wait` it is in place when they return, else once `Saving.wait` has returned on all.

    `carried`: further dense tensors that this rank has to write, by name (runtime/carry.py).
    Without `wait` the first rank of each stage holds a dense copy of the stage on the CPU until it is written.
    Raises CheckpointError, on every rank, for optimizer state that is neither of its parameter's shape nor a scalar, and for files
    that cannot be written.
    """
    path = Path(path)
    scratch = scratch_of(path)
    together(mesh, lambda: _fresh(scratch) if mesh.rank == 0 else None, f"saving {path}")
    mine = tuple(r for r in owned(residents, mesh, stage_ranks) if r.stored.kind != "constant")
    scalars: dict[str, Any] = {}
    is_writer = is_first_of_stage(mesh)
    writer = Writer(scratch, mesh.axis("pp").index)
    tensors = _on_cpu(_named(mine, optimizer, scalars), is_writer=is_writer)
    index = {
        "version": VERSION,
        "num_steps": progress.num_steps,
        "loss_scale": dataclasses.asdict(progress.loss_scale) if progress.loss_scale is not None else None,
        "groups": _hyperparameters(optimizer),
    }
    kept: list[tuple[str, torch.Tensor]] = []
    more = [(name, dense.to("cpu", copy=True).contiguous()) for name, dense in carried]
    num_stages, is_carried = mesh.axis("pp").size, any(mesh.guard.exchange("carries" if more else None, f"saving {path}", mesh.timeout_s))

    def write(gathered: Iterator[tuple[str, torch.Tensor]]) -> None:
        _drained(writer if is_writer else None, gathered, scalars)
        if is_carried:
            own = Writer(scratch, num_stages + mesh.rank)
            own.write(more)
            own.end({})

    def close() -> None:
        if mesh.rank == 0:
            finish(path, num_stages + (mesh.world_size if is_carried else 0), index, mesh.timeout_s)

    def in_background() -> None:
        try:
            write(iter(kept))
        except Exception as error:
            fail(scratch, f"rank {mesh.rank} could not write its part of {path}: {error}")
            raise
        close()

    if wait:
        together(mesh, lambda: write(tensors), f"saving {path}")
        together(mesh, close, f"saving {path}")
        return Saving()
    together(mesh, lambda: kept.extend(tensors), f"saving {path}")
    return Saving(in_background)


def _drained(writer: Writer | None, gathered: Iterator[tuple[str, torch.Tensor]], scalars: dict[str, Any]) -> None:
    """Write all (None: nothing) that `gathered` gives. It is iterated to its end also where the disk fails: the others of the stage gather with this rank."""
    try:
        if writer is not None:
            writer.write(gathered)
    finally:
        for _ in gathered:
            pass
    if writer is not None:
        writer.end(scalars)


def _fresh(scratch: Path) -> None:
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)


def together(mesh: Mesh, work: Callable[[], None], what: str) -> None:
    """`work` on every rank; what fails on one is raised on all as CheckpointError."""
    failed = None
    try:
        with mesh.guard.waiting():  # for its disk: a rank that writes for long is not stuck
            work()
    except (CheckpointError, OSError, SafetensorError) as error:
        failed = error
    told = mesh.guard.exchange(None if failed is None else str(failed), what, mesh.timeout_s)
    text = next((text for text in told if text is not None), None)
    if text is not None:
        raise CheckpointError(text) from failed


def _on_cpu(tensors: Iterator[tuple[str, torch.Tensor]], *, is_writer: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Copies that the next step does not change; nothing where others write. (Every rank has to iterate: gathering is collective.)"""
    for name, tensor in tensors:
        if is_writer:
            yield name, tensor.to("cpu", copy=True).contiguous()


def export(path: str | os.PathLike, residents: tuple[Resident, ...], mesh: Mesh, stage_ranks: tuple[int, ...], keep: Callable[[str], bool]) -> None:
    """The model alone, as safetensors under its own names (aliases included, each with values of its own): a folder of files with
    model.safetensors.index.json, the form of the Hugging Face hub. `keep` says which names. All ranks call it."""
    path = Path(path)
    scratch = scratch_of(path)
    together(mesh, lambda: _fresh(scratch) if mesh.rank == 0 else None, f"exporting {path}")
    mine = tuple(r for r in owned(residents, mesh, stage_ranks) if r.stored.kind != "constant")
    is_writer = is_first_of_stage(mesh)
    writer = Writer(scratch, mesh.axis("pp").index)

    def named() -> Iterator[tuple[str, torch.Tensor]]:
        for resident, dense in gather_all(mine, lambda r: r.tensor):
            for name in dict.fromkeys((resident.stored.fqn, *resident.stored.aliases)):
                if keep(name):
                    yield name, dense

    def work() -> None:
        _drained(writer if is_writer else None, _on_cpu(named(), is_writer=is_writer), {})

    def close() -> None:
        if mesh.rank:
            return
        homes: dict[str, str] = {}
        for place in range(mesh.axis("pp").size):
            part = scratch / f"part-{place}.json"
            homes |= {name: entry["file"] for name, entry in json.loads(part.read_text(encoding="utf-8"))["tensors"].items()}
            part.unlink()
        write_whole(scratch / "model.safetensors.index.json", json.dumps({"metadata": {}, "weight_map": dict(sorted(homes.items()))}, indent=1))
        replace(scratch, path)

    together(mesh, work, f"exporting {path}")
    together(mesh, close, f"exporting {path}")


def _named(mine: tuple[Resident, ...], optimizer: torch.optim.Optimizer | None, scalars: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a checkpoint, dense, by name; numbers go to `scalars`."""
    for resident, dense in gather_all(mine, lambda r: r.tensor):
        yield resident.stored.fqn, dense
    for resident in mine if optimizer is not None else ():
        assert optimizer is not None
        key_of_state, is_whole = _key(optimizer, resident)
        state_of = getattr(optimizer, "state_of", None)  # of an optimizer that lives on parameter servers
        state = optimizer.state.get(key_of_state, {}) if state_of is None else state_of(resident)
        for key, value in state.items():
            name = f"{resident.stored.fqn}::{key}"
            if isinstance(value, torch.Tensor) and value.dim() > 0 and (is_whole or value.shape == resident.tensor.shape):
                yield name, value if is_whole else resident.gather(value)
            elif isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.dim() == 0):
                scalars[name] = {"value": float(value), "dtype": str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__}
            elif value is not None:
                raise CheckpointError(
                    f"optimizer state {key!r} of {resident.stored.fqn} has no shape that can be cut again: only elementwise optimizers are saved"
                )


def _key(optimizer: torch.optim.Optimizer, resident: Resident) -> tuple[torch.Tensor, bool]:
    """The tensor under which an optimizer keeps a parameter's state, and whether that state is of the dense tensor: an optimizer may work
    on dense copies, by `dense`."""
    key = getattr(optimizer, "dense", {}).get(resident.tensor, resident.tensor)
    return key, key is not resident.tensor or not resident.is_divided


def _hyperparameters(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]] | None:
    if optimizer is None:
        return None
    groups = []
    for group in optimizer.param_groups:
        plain = {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}
        groups.append({k: v for k, v in plain.items() if v is None or isinstance(v, (bool, int, float, str, list, tuple))})
    return groups


class Reader:
    """A checkpoint on disk: dense tensors by name. Raises CheckpointError where it is missing or damaged."""

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = existing(Path(path))
        try:
            index = json.loads((self.path / "index.json").read_text())
            if index["version"] != VERSION:
                raise CheckpointError(f"{self.path} is of checkpoint version {index['version']}, this program reads {VERSION}")
            scale = index.get("loss_scale")
            self.progress = Progress(index["num_steps"], LossScale(**scale) if scale is not None else None)
            self.groups: list[dict[str, Any]] | None = index["groups"]
            self.tensors: Mapping[str, dict] = index["tensors"]
            self.scalars: Mapping[str, dict] = index[_SCALAR]
        except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise CheckpointError(f"{self.path} is no checkpoint or a damaged one: {error}") from error

    def get(self, name: str) -> torch.Tensor | None:
        """The dense tensor called `name` on the CPU; None where there is none."""
        entry = self.tensors.get(name)
        if entry is None:
            return None
        try:
            with safe_open(self.path / entry["file"], framework="pt") as file:
                return file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{name!r} cannot be read from {self.path / entry['file']}: {error}") from error

    def tensor(self, name: str) -> torch.Tensor:
        """A dense tensor that is in the index."""
        found = self.get(name)
        assert found is not None, name
        return found

    def state_of(self, fqn: str) -> dict[str, str]:
        """State keys of a parameter, with the names under which they are kept."""
        prefix = f"{fqn}::"
        return {name.removeprefix(prefix): name for name in (*self.tensors, *self.scalars) if name.startswith(prefix)}


def load(reader: Reader, residents: tuple[Resident, ...], optimizer: torch.optim.Optimizer | None = None) -> Progress:
    """Read a checkpoint into the tensors at rest and the optimizer's state, cut as they lie here.

    Raises CheckpointError, before anything is changed, where it is damaged, of another model, or without the state asked for.
    """
    path = reader.path
    values: list[tuple[Resident, torch.Tensor]] = []
    states: list[tuple[Resident, torch.Tensor, dict[str, Any]]] = []
    if optimizer is not None and reader.groups is None:
        raise CheckpointError(f"{path} was saved without an optimizer: load it without one, or save with optimizer=")
    for resident in residents:
        if resident.stored.kind == "constant":
            continue
        name = next((n for n in (resident.stored.fqn, *resident.stored.aliases) if n in reader.tensors), None)
        if name is None or tuple(reader.tensors[name]["shape"]) != resident.stored.spec.shape:
            found = f"it has shape {reader.tensors[name]['shape']} there" if name else "it is not there"
            raise CheckpointError(f"{path} does not fit this model: {resident.stored.fqn} should be {resident.stored.spec.shape}, {found}")
        dense = reader.get(name)
        assert dense is not None
        values.append((resident, resident.cut(dense).to(resident.tensor.device)))
        if optimizer is not None and resident.stored.requires_grad and resident.stored.kind == "parameter":
            key, is_whole = _key(optimizer, resident)
            states.append((resident, key, _read_state(reader, resident, name, is_whole=is_whole)))
    with torch.no_grad():
        for resident, local in values:
            resident.local().copy_(local)
    if optimizer is not None:
        for resident, key, state in states:
            if hasattr(optimizer, "take_state"):  # it keeps the state elsewhere: on parameter servers
                optimizer.take_state(resident, state)  # type: ignore[attr-defined]
            else:
                optimizer.state[key] = state
        for group, kept in zip(optimizer.param_groups, reader.groups or (), strict=False):
            group.update(kept)
    return reader.progress


def _read_state(reader: Reader, resident: Resident, fqn: str, *, is_whole: bool) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for key, name in reader.state_of(fqn).items():
        dense = reader.get(name)
        if dense is not None:
            device = resident.tensor.device
            state[key] = dense.to(device) if is_whole else resident.like(resident.cut(dense).to(device))
        else:
            entry = reader.scalars[name]
            dtype = getattr(torch, entry["dtype"].removeprefix("torch."), None) if entry["dtype"].startswith("torch.") else None
            number = torch.tensor(entry["value"], dtype=dtype) if dtype else (int if entry["dtype"] == "int" else float)(entry["value"])
            state[key] = number if is_whole else fitted(resident, key, number)
    return state

"""A program made ready for this rank: its blocks compiled, its constants at hand, its actions in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from runtime.action import Schedule
from runtime.bodies import compile_bodies
from runtime.mesh import Mesh
from runtime.module import CompiledBody
from runtime.preamble import Preamble, make_preamble
from runtime.program import MicroBatch, Program, StageCode
from runtime.schedule import schedule
from runtime.storage import Dense, Storage, constants
from runtime.traffic import sums_are_everywhere


@dataclass(frozen=True, eq=False)
class Code:
    """A program made ready for this rank. `bodies` by (stage, rows)."""

    program: Program
    stages: dict[int, StageCode]
    storages: dict[int, Storage]
    bodies: dict[tuple[int, int], CompiledBody]
    preamble: Preamble | None
    constants: dict[str, torch.Tensor]
    actions: Schedule
    has_all_sums: bool = False  # every rank holds the complete sum of every gradient after a step

    def micro_batches(self, mesh: Mesh) -> tuple[MicroBatch, ...]:
        return self.program.micro_batches[mesh.axis("dp").index]


def make_ready(program: Program, storages: Mapping[int, Storage], mesh: Mesh, dense: Dense | None, backend: str | None) -> Code:
    """The code of a program over parameters and buffers that are there. `dense` gives its constants; `backend` is torch.compile's.

    Raises ValueError for constants without `dense`.
    """
    bodies, known = {}, {}
    actions = schedule(program.schedule, program.stage_ranks, program.num_micro_batches)
    for stage in program.stages:
        storage = storages[stage.index]
        own = constants(stage, dense or _no_constants, mesh)
        known.update(own)
        compiled = compile_bodies(stage, storage.module, mesh, storage.later, own, backend)
        bodies.update({(stage.index, rows): body for rows, body in compiled.items()})
    return Code(
        program,
        {stage.index: stage for stage in program.stages},
        dict(storages),
        bodies,
        make_preamble(program.preamble, mesh) if program.preamble else None,
        known,
        actions if program.micro_batches[mesh.axis("dp").index] else ((),) * len(actions),
        sums_are_everywhere(program),
    )


def _no_constants(name: str) -> torch.Tensor:
    raise ValueError(f"the program needs the constant {name!r}: give its source to rebind(program, dense)")

"""From the bodies of a stage to what runs: compiled blocks, and which values live how long."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from runtime.compile import Compiled, compile_block, nameless
from runtime.mesh import Mesh
from runtime.module import CompiledBody, StageModule, Step
from runtime.program import BlockCode, Body, StageCode
from runtime.split import WeightGrads


def kept_values(stage: StageCode, body: Body) -> tuple[str, ...]:
    """What a forward of the stage puts out: values that are sent, the loss, predictions and new buffers, each once."""
    loss = (stage.loss,) if stage.loss else ()
    names = (*(t.value for t in body.sends), *loss, *stage.predictions, *(value for _, value in stage.updates))
    return tuple(dict.fromkeys(names))


def compile_bodies(
    stage: StageCode, module: StageModule, mesh: Mesh, later: WeightGrads | None, constants: Mapping[str, torch.Tensor], backend: str | None = None
) -> dict[int, CompiledBody]:
    """The bodies of a stage by their number of rows. `later` takes the weights' gradients of a split backward pass; `backend` is
    torch.compile's. Blocks that differ in names alone are compiled once."""
    compiled: dict[BlockCode, Compiled] = {}

    def ready(block: BlockCode) -> Compiled:
        key = nameless(block)
        if key not in compiled:
            compiled[key] = compile_block(block, mesh, later, backend)
        return compiled[key]

    return {body.rows: _compile_body(stage, body, module, mesh, ready, constants) for body in stage.bodies}


def _compile_body(
    stage: StageCode, body: Body, module: StageModule, mesh: Mesh, ready: Callable[[BlockCode], Compiled], constants: Mapping[str, torch.Tensor]
) -> CompiledBody:
    keep = kept_values(stage, body)
    last_use = {name: i for i, block in enumerate(body.blocks) for name in (*block.outputs, *block.inputs)}
    steps = []
    for i, block in enumerate(body.blocks):
        dead = tuple(name for name, last in last_use.items() if last == i and name not in keep)
        steps.append(Step(block, ready(block), module.block(block.name), dead, mesh.recorder))
    return CompiledBody(module, tuple(steps), keep, constants)

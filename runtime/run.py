"""One pass over the schedule: what a rank does action by action, and what it holds between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch

from runtime.action import Action
from runtime.batch import first_row, read
from runtime.call import dtype_of
from runtime.code import Code
from runtime.mesh import Mesh
from runtime.preamble import Coming
from runtime.program import MicroBatch, StageCode, Transfer
from runtime.random import RandomState, use_state
from runtime.split import Later, add
from runtime.transfer import Message, Post, known_transfers


@dataclass(frozen=True, eq=False)
class _Held:
    """What a forward leaves for its backward: values that left the stage, and those that came."""

    outputs: dict[str, torch.Tensor]
    received: dict[str, torch.Tensor]


@dataclass(eq=False)
class Run:
    """The state of one step. `loss` is this rank's sum over its micro-batches; None on stages without the loss."""

    code: Code
    mesh: Mesh
    batch: Any
    state: Callable[[int, int], RandomState]  # (micro-batch, first global row)
    is_training: bool = True
    loss_factor: float = 1.0  # gradients are those of the loss times this
    loss: torch.Tensor | None = None
    updates: dict[str, torch.Tensor] = field(default_factory=dict)
    predictions: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    _held: dict[tuple[int, int], _Held] = field(default_factory=dict)
    _later: dict[tuple[int, int], list[Later]] = field(default_factory=dict)
    _shared: dict[str, Coming] = field(default_factory=dict)

    def __post_init__(self) -> None:
        program = self.code.program
        self._rows = self.code.micro_batches(self.mesh)
        self._transfers = tuple(known_transfers(program.stages, mb.stop - mb.start) for mb in self._rows)
        feeds = tuple(feed for stage in program.stages for feed in stage.feeds) + program.preamble_feeds
        own = (MicroBatch(0, program.global_rows),) if program.meshes else self._rows
        self._offset = first_row(self.batch, feeds, own, program.global_rows) if own else 0
        self._post = Post(self.mesh, program.stage_ranks, self._transfers, self.code.actions, program.meshes)
        self._last_backward = {a.stage: a for a in self.code.actions[self.mesh.axis("pp").index] if a.kind in ("B", "BI")}

    def run(self, after_forwards: Callable[[], None] = lambda: None) -> None:
        """All actions of this rank; `after_forwards` is called once the last of its forward passes is over. One without micro-batches has none,
        and adds nothing to what the preamble counts."""
        own = self.code.actions[self.mesh.axis("pp").index]
        last = max((number for number, action in enumerate(own) if action.kind == "F"), default=-1)
        self._run_preamble()
        if last < 0:
            after_forwards()
        for number, (action, following) in enumerate(zip_longest(own, own[1:])):
            if following is not None:
                for message in self._awaited(following):
                    self._post.post(message)
            if action.kind == "F":
                self._forward(action)
            elif action.kind == "BW":
                self._backward_weights(action)
            else:
                self._backward(action)
            if number == last:
                after_forwards()
        self._post.finish()
        for value in self._shared.values():
            value.arrived()

    # -- forward ------------------------------------------------------------------------------------------------------

    def _run_preamble(self) -> None:
        program = self.code.program
        if self.code.preamble is None or program.preamble is None:
            return
        start, stop = (self._rows[0].start - self._offset, self._rows[-1].stop - self._offset) if self._rows else (0, 0)
        if program.meshes:  # rows of a data rank do not lie together: all ranks count all of them
            start, stop = 0, program.global_rows
        feeds = {feed.name: read(self.batch, feed, start, stop, self.mesh.device) for feed in program.preamble_feeds}
        with self.mesh.recorder.action("preamble", "forward"), torch.no_grad():
            args = [feeds[name] for name in program.preamble.inputs] + [self._at_rest(name) for name in program.preamble.stored]
            self._shared.update(self.code.preamble.begin(*args))

    def _at_rest(self, name: str) -> torch.Tensor:
        """What the preamble reads: a constant, or a buffer of one of this rank's stages in the dtype that it is read in."""
        if name in self.code.constants:
            return self.code.constants[name]
        found = next(r for storage in self.code.storages.values() for r in storage.residents if r.stored.name == name)
        return found.tensor.to(dtype_of(found.stored.spec.dtype))

    def _forward(self, action: Action) -> None:
        stage, rows = self.code.stages[action.stage], self._rows[action.micro_batch]
        received = {}
        with self.mesh.recorder.action("wait", "forward", action.stage, action.micro_batch):
            for transfer in self._receives(action):
                value = self._post.receive(Message(transfer, action.micro_batch))
                received[transfer.value] = value.requires_grad_(transfer.grad and self.is_training)
        with self.mesh.recorder.action("F", "forward", action.stage, action.micro_batch):
            start, stop = rows.start - self._offset, rows.stop - self._offset
            feeds = {feed.name: read(self.batch, feed, start, stop, self.mesh.device) for feed in stage.feeds}
            with use_state(self.state(action.micro_batch, rows.start)):
                outputs = self.code.bodies[action.stage, rows.stop - rows.start]({**self._shared, **feeds, **received})
            for transfer in self._sends(action):
                self._post.send(Message(transfer, action.micro_batch), outputs[transfer.value])
            self._collect(stage, outputs)
            if self.is_training:
                leaving = dict.fromkeys([t.value for t in self._sends(action)] + ([stage.loss] if stage.loss else []))
                self._held[action.stage, action.micro_batch] = _Held({name: outputs[name] for name in leaving}, received)

    def _collect(self, stage: StageCode, outputs: dict[str, torch.Tensor]) -> None:
        if stage.loss is not None:
            loss = outputs[stage.loss].detach()
            self.loss = loss if self.loss is None else self.loss + loss
        for _, value in stage.updates:
            self.updates[value] = outputs[value].detach()
        if not self.is_training:
            for name in stage.predictions:
                self.predictions.setdefault(name, []).append(outputs[name].detach())

    # -- backward -----------------------------------------------------------------------------------------------------

    def _backward(self, action: Action) -> None:
        stage = self.code.stages[action.stage]
        held = self._held.pop((action.stage, action.micro_batch))
        grads: dict[str, torch.Tensor] = {}
        with self.mesh.recorder.action("wait", "backward", action.stage, action.micro_batch):
            for transfer in self._sends(action):
                if transfer.grad:
                    grad = self._post.receive(Message(transfer, action.micro_batch, is_grad=True))
                    grads[transfer.value] = grads[transfer.value] + grad if transfer.value in grads else grad
        with self.mesh.recorder.action(action.kind, "backward", action.stage, action.micro_batch):
            if stage.loss is not None:
                one = torch.full_like(held.outputs[stage.loss], self.loss_factor)
                grads[stage.loss] = grads[stage.loss] + one if stage.loss in grads else one
            roots = [name for name in grads if held.outputs[name].requires_grad]
            self.code.storages[action.stage].before_backward(
                is_first=action.micro_batch == self._first_backward(action), is_last=action == self._last_backward[action.stage]
            )
            if roots:
                torch.autograd.backward([held.outputs[name] for name in roots], [grads[name] for name in roots])
            later = self.code.storages[action.stage].later
            if action.kind == "BI" and later is not None:
                self._later[action.stage, action.micro_batch] = later.take()
            for transfer in self._receives(action):
                if transfer.grad:
                    leaf = held.received[transfer.value]
                    grad = leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
                    self._post.send(Message(transfer, action.micro_batch, is_grad=True), grad)

    def _backward_weights(self, action: Action) -> None:
        with self.mesh.recorder.action("BW", "backward", action.stage, action.micro_batch):
            add(self._later.pop((action.stage, action.micro_batch)))
            self.code.storages[action.stage].widen_grads()
            own = self.code.actions[self.mesh.axis("pp").index]
            if action == max((a for a in own if a.kind == "BW" and a.stage == action.stage), key=own.index):
                self.code.storages[action.stage].finish_backward()

    def _first_backward(self, action: Action) -> int:
        own = self.code.actions[self.mesh.axis("pp").index]
        return next(a.micro_batch for a in own if a.stage == action.stage and a.kind == action.kind)

    # -- transfers ----------------------------------------------------------------------------------------------------

    def _receives(self, action: Action) -> list[Transfer]:
        return [t for t in self._transfers[action.micro_batch] if t.dst == action.stage]

    def _sends(self, action: Action) -> list[Transfer]:
        return [t for t in self._transfers[action.micro_batch] if t.src == action.stage]

    def _awaited(self, action: Action) -> list[Message]:
        if action.kind == "BW":
            return []
        if action.kind == "F":
            return [Message(t, action.micro_batch) for t in self._receives(action)]
        return [Message(t, action.micro_batch, is_grad=True) for t in self._sends(action) if t.grad]

"""Values between stages: sent in the order of the sender's actions, received in that same order.

Between two ranks, each kind of traffic in each direction is a channel of its own (a process group), and messages on a
channel have no tags: the schedule is known everywhere, so a receiver posts its receives in the order in which the sender sends.
That order is all that NCCL offers and it works for gloo alike. Sends never block: with the schedule's own check
(runtime/schedule.py) a step cannot deadlock.

A value that travels in pieces (runtime/program.py) is cut before it is sent and gathered when it is received; the ranks that gather run
the same actions, so that they do it in one order. Between stages of different meshes a message comes in portions from several ranks
(runtime/crossing.py), at most one from each, in that same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from runtime.action import Action, Schedule
from runtime.call import dtype_of
from runtime.collective import Part, raw_all_gather, raw_slice
from runtime.crossing import box_of, pieces, shape_of, within
from runtime.errors import failing
from runtime.instr import TensorSpec
from runtime.mesh import Axis, Mesh
from runtime.paceclock import PacedClock
from runtime.program import Chunk, StageCode, StageMesh, Transfer


@dataclass(frozen=True, slots=True)
class Message:
    """One value of one micro-batch on its way. `is_grad`: its gradient, back from dst to src."""

    transfer: Transfer
    micro_batch: int
    is_grad: bool = False


@dataclass(frozen=True, slots=True)
class Channel:
    """Everything of one kind that one "pp" coordinate sends to another."""

    sender: int
    receiver: int
    is_grad: bool

    @property
    def name(self) -> str:
        return f"{'backward' if self.is_grad else 'forward'} {'up' if self.receiver > self.sender else 'down'}"


def known_transfers(stages: tuple[StageCode, ...], rows: int) -> tuple[Transfer, ...]:
    """Every transfer that starts or ends at one of these stages, in an order on which both ends agree."""
    bodies = [body for stage in stages for body in stage.bodies if body.rows == rows]
    found = {(t.src, t.dst, t.value): t for body in bodies for t in (*body.receives, *body.sends)}
    return tuple(found[key] for key in sorted(found))


def after(action: Action, transfers: tuple[Transfer, ...]) -> Iterator[Message]:
    """What leaves a stage after an action, in a fixed order."""
    for t in transfers:
        if action.kind == "F" and t.src == action.stage:
            yield Message(t, action.micro_batch)
        if action.kind in ("B", "BI") and t.dst == action.stage and t.grad:
            yield Message(t, action.micro_batch, is_grad=True)


@dataclass(frozen=True, slots=True)
class Portion:
    """What a rank has of a message for one other rank, or comes from it: all that it holds, or a `window` of it seen with `shape`."""

    peer: int  # global rank
    shape: tuple[int, ...] = ()
    window: tuple[slice, ...] | None = None

    def of(self, value: torch.Tensor) -> torch.Tensor:
        return value if self.window is None else value.reshape(self.shape)[self.window]

    def spec(self, whole: TensorSpec) -> TensorSpec:
        return whole if self.window is None else TensorSpec(tuple(edge.stop - edge.start for edge in self.window), whole.dtype)


@dataclass(frozen=True, eq=False)
class _Sent:
    """A send that may be under way. It is over once the peer, a "pp" coordinate, has come to position `read_at` of its actions."""

    message: Message
    peer: int
    read_at: int
    work: Any
    buffer: torch.Tensor


@dataclass(frozen=True, eq=False)
class _Coming:
    """A portion of a message, of this form, that a rank will send after position `sent_at` of its actions."""

    message: Message
    portion: Portion
    spec: TensorSpec
    sent_at: int


@dataclass(eq=False)
class Post:
    """The transfers of one rank in one step.

    `transfers` holds, for each micro-batch, what `known_transfers` says. Transfers between two stages of this rank are
    handed over in memory. `meshes`: those of the "pp" coordinates, where they are not all alike.
    """

    mesh: Mesh
    stage_ranks: tuple[int, ...]
    transfers: tuple[tuple[Transfer, ...], ...]
    actions: Schedule
    meshes: tuple[StageMesh, ...] = ()
    _sends: list[_Sent] = field(default_factory=list)
    _coming: dict[tuple[Channel, int], deque[_Coming]] = field(default_factory=dict)  # by the global rank that sends
    _posted: dict[tuple[Message, int], tuple[_Coming, Any, torch.Tensor]] = field(default_factory=dict)
    _local: dict[Message, torch.Tensor] = field(default_factory=dict)
    _positions: dict[Action, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        clock = self.mesh.recorder.clock
        self._clock = clock if isinstance(clock, PacedClock) else None
        me = self.mesh.axis("pp").index
        for rank, own in enumerate(self.actions):
            for position, action in enumerate(own):
                self._positions[action] = position
                for message in after(action, self.transfers[action.micro_batch]):
                    channel = self._channel(message)
                    if rank != me and channel.receiver == me:
                        for portion in self._portions(message, is_sender=False):
                            coming = _Coming(message, portion, portion.spec(message.transfer.sent(self._sizes)), position)
                            self._coming.setdefault((channel, portion.peer), deque()).append(coming)

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return {name: axis.size for name, axis in self.mesh.axes.items()}

    def _channel(self, message: Message) -> Channel:
        src, dst = self.stage_ranks[message.transfer.src], self.stage_ranks[message.transfer.dst]
        return Channel(dst, src, True) if message.is_grad else Channel(src, dst, False)

    def _read_at(self, message: Message) -> int:
        if not message.is_grad:
            return self._positions[Action("F", message.transfer.dst, message.micro_batch)]
        whole = Action("B", message.transfer.src, message.micro_batch)
        return self._positions[whole if whole in self._positions else replace(whole, kind="BI")]

    def _pieces(self, message: Message) -> tuple[Part, Axis] | None:
        chunk: Chunk | None = message.transfer.pieces
        return None if chunk is None else (Part(chunk.dim, chunk.outer, chunk.size, chunk.inner), self.mesh.axis(chunk.axis))

    def _portions(self, message: Message, *, is_sender: bool) -> tuple[Portion, ...]:
        """The parts that this rank sends, or receives, of a message."""
        channel, spread = self._channel(message), message.transfer.spread
        if spread is None:
            return (Portion(self.mesh.axis("pp").ranks[channel.receiver if is_sender else channel.sender]),)
        sender, receiver, me, k = self.meshes[channel.sender], self.meshes[channel.receiver], self.mesh.rank, message.micro_batch
        own = box_of(spread, sender if is_sender else receiver, me, k)
        found = ((p.sender, p.receiver, p.box) for p in pieces(spread, sender, receiver, k, is_grad=message.is_grad))
        mine = ((b if is_sender else a, box) for a, b, box in found if me == (a if is_sender else b))
        return tuple(Portion(peer, shape_of(own), within(box, own)) for peer, box in mine)

    def send(self, message: Message, value: torch.Tensor) -> None:
        """Hand a value over; returns at once."""
        channel = self._channel(message)
        if channel.sender == channel.receiver:
            assert message.transfer.pieces is None and message.transfer.spread is None, "what stays on a rank is handed over whole"
            self._local[message] = value.detach()
            return
        axis, cut = self.mesh.axis("pp"), self._pieces(message)
        held = value.detach() if cut is None else raw_slice(value.detach(), *cut)
        for portion in self._portions(message, is_sender=True):
            own = portion.of(held).contiguous()
            buffer = own if self._clock is None else self._clock.seal(own, axis.rank, portion.peer)
            start = axis.recorder.mark()
            with self._failing(message, "send"):
                work = dist.isend(buffer, portion.peer, group=self.mesh.channels[channel.name])
            axis.recorder.add("send", "pp", own.nbytes, start)
            self._sends.append(_Sent(message, channel.receiver, self._read_at(message), work, buffer))

    def post(self, message: Message) -> None:
        """Start to receive a message, and all that come before it on its channels."""
        channel = self._channel(message)
        if channel.sender == channel.receiver:
            return
        for portion in self._portions(message, is_sender=False):
            while (message, portion.peer) not in self._posted:
                coming = self._coming[channel, portion.peer].popleft()
                spec = coming.spec
                buffer = torch.empty(spec.shape, dtype=dtype_of(spec.dtype), device=self.mesh.device) if self._clock is None else self._clock.envelope(spec)
                with self._failing(coming.message, "receive"):
                    work = dist.irecv(buffer, portion.peer, group=self.mesh.channels[channel.name])
                self._posted[coming.message, portion.peer] = (coming, work, buffer)

    def receive(self, message: Message) -> torch.Tensor:
        """The value of a message, once it is there. Raises CommunicationError naming what was waited for."""
        if message in self._local:
            return self._local.pop(message)
        self.post(message)
        arrived: list[tuple[Portion, torch.Tensor]] = []
        for portion in self._portions(message, is_sender=False):
            coming, work, buffer = self._posted.pop((message, portion.peer))
            self._wait(work, message, "receive")
            self._release(self._channel(message).sender, coming.sent_at)
            arrived.append((portion, buffer if self._clock is None else self._clock.opened(buffer, coming.spec)))
        cut, spec = self._pieces(message), message.transfer.spec
        if message.transfer.spread is None:
            return arrived[0][1] if cut is None else raw_all_gather(arrived[0][1], *cut)
        whole = torch.zeros(spec.shape, dtype=dtype_of(spec.dtype), device=self.mesh.device)
        for portion, part in arrived:
            portion.of(whole).add_(part)
        return whole

    def _release(self, peer: int, position: int) -> None:
        """Let go of what the peer has read: it has come to `position`, since it sent a message from there."""
        kept = []
        for sent in self._sends:
            if sent.peer == peer and sent.read_at <= position:
                self._wait(sent.work, sent.message, "send")
            else:
                kept.append(sent)
        self._sends = kept

    def finish(self) -> None:
        """Wait until everything has left."""
        for sent in self._sends:
            self._wait(sent.work, sent.message, "send")
        self._sends.clear()
        assert not self._local and not self._posted and not any(self._coming.values()), "a value was sent that nobody read"

    def _wait(self, work: Any, message: Message, kind: str) -> None:
        with self._failing(message, kind):
            self.mesh.guard.wait_transfer(work, self.mesh.device)

    def _failing(self, message: Message, kind: str) -> AbstractContextManager[None]:
        def what() -> str:
            t, of = message.transfer, "gradient of " if message.is_grad else ""
            return f"rank {self.mesh.rank}: {kind} of {of}{t.value!r}, stage {t.src} -> {t.dst}, micro-batch {message.micro_batch}, on axis 'pp'"

        return failing(what, self.mesh.timeout_s)

"""The ranks of a mesh as threads of this process, for runs that prove something and need no processes.

Each rank gets an `Axis` whose group meets the others at a barrier, so the runtime's own functions run unchanged. Sums are taken in rank order: every rank
sees the same bits.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[import]

from runtime.mesh import Axis
from runtime.record import Recorder

T = TypeVar("T")

_TIMEOUT_S = 30.0


class _Meeting:
    """Where the ranks of a group exchange tensors. A rank that fails breaks the meeting for all."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=_TIMEOUT_S)
        self._slots: list[torch.Tensor | None] = [None] * size

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._slots[rank] = tensor.detach().clone()
        self._barrier.wait()
        found = [slot for slot in self._slots if slot is not None]
        self._barrier.wait()
        return found

    def abort(self) -> None:
        self._barrier.abort()


class _ThreadGroup(dist.ProcessGroup):
    """A process group whose ranks are threads. Only what the operators of `runtime.sharded` use: all-reduce, all-gather, reduce-scatter, all-to-all."""

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._rank, self._size, self._meeting = rank, size, meeting

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        for tensor in tensors:
            parts = torch.stack(self._meeting.exchange(self._rank, tensor))
            if op == dist.ReduceOp.SUM:
                tensor.copy_(parts.sum(0))
            elif op == dist.ReduceOp.MAX:
                tensor.copy_(parts.amax(0))
            else:
                raise ValueError(f"threads in lock-step can sum and take the maximum, asked {op}")
        return _over(tensors)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        output.copy_(torch.cat(self._meeting.exchange(self._rank, input)).view_as(output))
        return _over([output])

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        parts = torch.stack(self._meeting.exchange(self._rank, input)).sum(0)
        output.copy_(parts.view(self._size, *output.shape)[self._rank])
        return _over([output])

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:  # their names before torch 2.13
        return self.all_gather_single(output, input, opts)

    def _reduce_scatter_base(self, outputTensor: torch.Tensor, inputTensor: torch.Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single(outputTensor, inputTensor, opts)

    def alltoall_base(self, output: torch.Tensor, input: torch.Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None) -> Any:
        sent = self._meeting.exchange(self._rank, input)
        sizes = self._meeting.exchange(self._rank, torch.tensor(input_sizes or [input.shape[0] // self._size] * self._size))
        found = [x.split(lengths.tolist())[self._rank] for x, lengths in zip(sent, sizes, strict=True)]
        if output_sizes and [x.shape[0] for x in found] != list(output_sizes):
            raise ValueError(f"rank {self._rank} expects {output_sizes} rows of the others, they send {[x.shape[0] for x in found]}")
        output.copy_(torch.cat(found))
        return _over([output])


def _over(tensors: list[torch.Tensor]) -> Any:
    """A work that is over."""
    done: torch.futures.Future = torch.futures.Future()
    done.set_result(tensors)
    return _create_work_from_future(done)


def run_lockstep(fn: Callable[..., T], *degrees: int) -> list[T]:
    """`fn(axis, ...)` on all ranks of a mesh of `degrees` at once, one `Axis` for each degree; results in row-major order.

    `fn` may use collectives of its axes and autograd. Raises the exception of the rank that failed first; a rank that
    waits longer than 30 s for another one raises too.
    """
    places = list(itertools.product(*(range(degree) for degree in degrees)))
    meetings: dict[tuple[int, tuple[int, ...]], _Meeting] = {}
    results: list[Any] = [None] * len(places)
    errors: list[BaseException] = []

    def axis(place: tuple[int, ...], i: int) -> Axis:
        line = (i, place[:i] + place[i + 1 :])
        meeting = meetings.setdefault(line, _Meeting(degrees[i]))
        ranks = tuple(n for n, other in enumerate(places) if other[:i] + other[i + 1 :] == line[1])
        group = _ThreadGroup(place[i], degrees[i], meeting) if degrees[i] > 1 else None
        return Axis(f"axis{i}", degrees[i], place[i], ranks, group, Recorder(), _TIMEOUT_S)

    def work(rank: int, axes: list[Axis]) -> None:
        try:
            results[rank] = fn(*axes)
        except BaseException as error:
            errors.append(error)
            for meeting in meetings.values():
                meeting.abort()

    mesh = [[axis(place, i) for i in range(len(degrees))] for place in places]
    threads = [threading.Thread(target=work, args=(rank, axes), daemon=True) for rank, axes in enumerate(mesh)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results

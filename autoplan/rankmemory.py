"""Memory of the ranks of a plan, from the loads of its stages.

Bytes of a rank = states at rest of its stages (costmodel/memory.py) + what it holds at its fullest moment (autoplan/holding.py) + buffers
+ communication buffers + residuals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from autoplan.datasums import memory as sum_memory
from autoplan.forecast import Memory
from autoplan.holding import Sizes, fullest, moments
from autoplan.load import BUCKET_BYTES, StageLoad
from autoplan.replay import Step, rest_width, stage_widths
from costmodel.memory import states


def memories(loads: tuple[StageLoad, ...], step: Step) -> tuple[Memory, ...]:
    """Bytes of every stage at the fullest moment of its rank: those of a rank's stages add up to what the rank holds."""
    sizes = {load.index: Sizes(load.saved_bytes, load.put_off_bytes if step.is_split else 0, load.transient_bytes) for load in loads}
    held: dict[int, int] = {}
    for candidates in moments(step.schedule, step.stage_ranks, step.num_micro_batches):
        moment, _ = fullest(candidates, sizes)
        held.update((s, saved * sizes[s].saved + put_off * sizes[s].put_off) for s, saved, put_off in moment.counts)
        held[moment.running] += sizes[moment.running].transient
    return tuple(stage_memory(load, step, held[load.index], received_bytes(loads, load.index, step)) for load in loads)


def stage_memory(load: StageLoad, step: Step, held_bytes: int, received_bytes: int) -> Memory:
    """Bytes of one rank of a stage, `held_bytes` of them for its backward passes."""
    width = stage_widths(load, step)
    zero = min(step.zero, 1) if step.is_split else step.zero
    kept = states(load.trained_elements, width, zero if step.shards > 1 else 0, step.shards, max(load.units, default=0))
    frozen = load.parameter_elements - load.trained_elements
    frozen_bytes = width.parameter * (-(-frozen // step.shards) if zero == 3 else frozen)
    parameters, gathered = kept.parameters + frozen_bytes, kept.gathered
    if zero in (1, 2) and step.shards > 1 and width.master == 0:  # shards are at rest, and a gathered copy beside them
        parameters, gathered = width.parameter * -(-load.parameter_elements // step.shards), parameters
    if width.master:  # masters are what rests (counted with the optimizer); the working copy is kept through a step, or gathered
        if zero and step.shards > 1:
            parameters, gathered = 0, gathered if zero == 3 else parameters
        parameters += width.master * -(-frozen // step.shards)
    own = sum_memory(step.sums, load, width, step.zero, step.degree("dp"))
    bucket = own.communication or (min(BUCKET_BYTES, load.trained_elements * width.gradient) if step.zero == 0 and step.degree("dp") > 1 else 0)
    memory = Memory(
        parameters=parameters,
        gradients=kept.gradients + int(own.gradients),
        optimizer=kept.optimizer,
        activations=held_bytes,
        buffers=load.buffer_bytes,
        communication=gathered + bucket + 2 * received_bytes,
        residuals=int(own.residuals),
    )
    return _served(memory, load, step, bucket) if step.servers else memory


def _served(memory: Memory, load: StageLoad, step: Step, bucket_bytes: int) -> Memory:
    """Bytes of the fuller rank of those that work and those that serve, of `memory` without servers, `bucket_bytes` of it for messages: the states are
    on the servers alone, which receive from every worker."""
    width, trained = stage_widths(load, step), load.trained_elements
    part = -(-trained // len(step.servers))
    if step.sync == "ps":
        message, takes, copy = bucket_bytes, bucket_bytes * (step.num_workers - 1), 0
    else:  # what is pushed and pulled at once; the server's own weights
        message, takes, copy = trained * (width.gradient + rest_width(width)), step.num_workers * part * width.gradient, part * rest_width(width)
    works = replace(memory, optimizer=memory.optimizer - width.optimizer * trained, communication=memory.communication - bucket_bytes + message)
    serves = replace(works, parameters=works.parameters + copy, optimizer=works.optimizer + width.optimizer * part, communication=works.communication + takes)
    if not step.workers or {*step.workers} & {*step.servers}:
        return serves
    return max(works, replace(serves, activations=0), key=lambda m: m.total)


def by_rank(each: Sequence[Memory], stage_ranks: Sequence[int]) -> list[Memory]:
    """Of every stage, the memory of its rank: that of all stages on it."""
    totals: dict[int, Memory] = {}
    for memory, rank in zip(each, stage_ranks, strict=True):
        so_far = totals.get(rank, Memory())
        totals[rank] = Memory(**{f.name: getattr(so_far, f.name) + getattr(memory, f.name) for f in fields(Memory)})
    return [totals[rank] for rank in stage_ranks]


def received_bytes(loads: tuple[StageLoad, ...], stage: int, step: Step) -> int:
    """Bytes that a stage receives from other ranks for one micro-batch."""
    ranks = step.stage_ranks
    return sum(send.received_bytes for load in loads for send in load.sends if send.dst == stage and ranks[load.index] != ranks[stage])

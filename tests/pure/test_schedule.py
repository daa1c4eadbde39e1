from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.action import Action, parse_action
from runtime.errors import ScheduleError
from runtime.schedule import SCHEDULES, Edges, chain, check, schedule


def placement(name: str, num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    if name == "interleaved":
        return tuple(range(num_ranks)) * num_chunks
    if name == "zbv":
        return (*range(num_ranks), *reversed(range(num_ranks)))
    return tuple(range(num_ranks))


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 3), st.integers(1, 14))
def test_every_schedule_is_complete_and_ends(name: str, num_ranks: int, num_chunks: int, num_micro_batches: int):
    """For fewer, as many and more micro-batches than ranks, skips over stages included."""
    stage_ranks = placement(name, num_ranks, num_chunks)
    actions = schedule(name, stage_ranks, num_micro_batches)
    last = len(stage_ranks) - 1
    check(actions, len(stage_ranks), num_micro_batches, chain(len(stage_ranks)) | {(0, last)} if last > 0 else None)
    assert all(stage_ranks[action.stage] == rank for rank, own in enumerate(actions) for action in own)


@given(st.sampled_from(["F", "B", "BI", "BW"]), st.integers(0, 99), st.integers(0, 9999))
def test_actions_print_and_parse(kind, stage: int, micro_batch: int):
    action = Action(kind, stage, micro_batch)
    assert parse_action(str(action)) == action


def test_1f1b_holds_no_more_micro_batches_than_there_are_stages_ahead():
    for rank, own in enumerate(schedule("1f1b", (0, 1, 2, 3), 9)):
        held, most = 0, 0
        for action in own:
            held += 1 if action.kind == "F" else -1
            most = max(most, held)
        assert most == 4 - rank


def test_zero_bubble_holds_no_more_than_1f1b_and_idles_less():
    """Played with unit times; a whole backward takes two."""
    for p, m in [(2, 6), (4, 8), (4, 12)]:
        assert _span("zb", p, m) < _span("1f1b", p, m)
        assert _span("zbv", p, m) / 2 < _span("1f1b", p, m)
        for own in schedule("zb", tuple(range(p)), m):
            held = most = 0
            for action in own:
                held += {"F": 1, "BW": -1}.get(action.kind, 0)
                most = max(most, held)
            assert most <= p


def test_interleaving_shortens_the_bubble():
    assert _span("interleaved", 4, 8) / 2 < _span("1f1b", 4, 8)


def _span(name: str, num_ranks: int, num_micro_batches: int) -> int:
    stage_ranks = placement(name, num_ranks, 2)
    actions, edges = schedule(name, stage_ranks, num_micro_batches), chain(len(stage_ranks))
    passes = {action for own in actions for action in own}
    cost = {"F": 1, "B": 2, "BI": 1, "BW": 1}
    ended: dict[Action, int] = {}
    at, free = [0] * num_ranks, [0] * num_ranks
    while any(at[r] < len(own) for r, own in enumerate(actions)):
        for rank, own in enumerate(actions):
            while at[rank] < len(own) and all(need in ended for need in needs(own[at[rank]], edges, passes)):
                action = own[at[rank]]
                start = max([free[rank], *(ended[need] for need in needs(action, edges, passes))])
                ended[action] = free[rank] = start + cost[action.kind]
                at[rank] += 1
    return max(free)


def needs(action: Action, edges: Edges, passes: set[Action]) -> tuple[Action, ...]:
    """The actions that have to be over before this one can start."""
    s, k = action.stage, action.micro_batch
    if action.kind == "F":
        return tuple(Action("F", src, k) for src, dst in sorted(edges) if dst == s)
    if action.kind == "BW":
        return (Action("BI", s, k),)
    later = tuple(Action("B" if Action("B", dst, k) in passes else "BI", dst, k) for src, dst in sorted(edges) if src == s)
    return (Action("F", s, k), *later)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("num_micro_batches", [4, 8])
def test_the_order_is_that_of_torch(name: str, num_micro_batches: int):
    from torch.distributed.pipelining import schedules as theirs

    p, v = 4, 2 if name == "interleaved" else 1
    their_class = {"gpipe": theirs.ScheduleGPipe, "1f1b": theirs.Schedule1F1B, "interleaved": theirs.ScheduleInterleaved1F1B}[name]
    for rank, own in enumerate(schedule(name, placement(name, p, v), num_micro_batches)):
        expected = _torch_order(their_class, rank, p, v, num_micro_batches)
        if name == "1f1b" and rank == p - 1:  # torch's listing (not its run) numbers this rank's forwards from 1
            expected = [(kind, stage, k - (kind == "F")) for kind, stage, k in expected]
        assert [(a.kind, a.stage, a.micro_batch) for a in own] == expected


def _torch_order(their_class, rank: int, num_ranks: int, num_chunks: int, num_micro_batches: int) -> list[tuple[str, int, int]]:
    bare = object.__new__(their_class)
    if num_chunks > 1:
        bare.pp_group_size, bare.n_local_stages, bare._n_microbatches = num_ranks, num_chunks, num_micro_batches
        bare.rank = rank
        bare.number_of_rounds = max(1, num_micro_batches // num_ranks)
        bare.microbatches_per_round = num_micro_batches // bare.number_of_rounds
        actions = bare._calculate_single_rank_operations(rank)
    else:
        bare._num_stages, bare._n_microbatches = num_ranks, num_micro_batches
        bare.pp_group_size = num_ranks
        actions = bare._get_pipeline_order()[rank]
    names = {"FORWARD": "F", "FULL_BACKWARD": "B"}
    return [(names[a.computation_type.name], a.stage_index, a.microbatch_index) for a in actions if a is not None and a.computation_type.name in names]


def test_an_incomplete_or_stuck_schedule_is_refused():
    good = schedule("1f1b", (0, 1), 2)
    with pytest.raises(ScheduleError, match=r"stage 0, micro-batch 0 needs F"):
        check((good[0][1:], good[1]), 2, 2)
    with pytest.raises(ScheduleError, match=r"B1\.1 is scheduled twice"):
        check((good[0], (*good[1], good[1][-1])), 2, 2)
    backwards_first = tuple(sorted(good[0], key=lambda a: a.kind))
    with pytest.raises(ScheduleError, match=r"never ends: rank 0 at B0\.0"):
        check((backwards_first, good[1]), 2, 2)
    with pytest.raises(ScheduleError, match="no schedule is called 'fast'"):
        schedule("fast", (0, 1), 2)

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import autoplan
from autoplan.constraints import Constraints
from autoplan.explain import short
from autoplan.planfile import dumps, loads
from autoplan.sync import check_sync
from runtime.parse import parse
from runtime.partition import SPLIT_BYTES, Tensor, buckets, partition
from runtime.reduction import BUCKET_BYTES
from runtime.text import text
from tests.dist.programs import Setup, build
from tests.zoo import ZOO

tensors = st.lists(
    st.builds(Tensor, st.one_of(st.integers(0, 40), st.integers(1000, 60_000), st.just(7 * 2**20)), st.just("float32"), st.just(4), st.booleans()),
    max_size=12,
)


@given(tensors, st.integers(1, 5))
def test_every_element_has_one_server_and_servers_hold_like_amounts(given_tensors, num_servers):
    servers = tuple(range(3, 3 + num_servers))
    pieces = partition(given_tensors, servers)
    for number, tensor in enumerate(given_tensors):
        own = [p for p in pieces if p.tensor == number]
        assert [p.start for p in own] == [0, *(p.stop for p in own)][: len(own)]
        assert (own[-1].stop if own else 0) == tensor.num_elements
        if tensor.num_elements * 4 >= SPLIT_BYTES:
            assert {p.server for p in own} == set(servers)
        else:
            assert len(own) == 1
    held = [sum(p.num_elements for p in pieces if p.server == s) * 4 for s in servers]
    assert max(held) - min(held) <= SPLIT_BYTES + 4 * len(given_tensors)


@given(tensors, st.integers(1, 5))
def test_buckets_hold_every_piece_once_and_are_bounded(given_tensors, num_servers):
    servers = tuple(range(num_servers))
    pieces = partition(given_tensors, servers)
    found = buckets(given_tensors, pieces, servers)
    assert sorted((p.tensor, p.start) for own in found for b in own for p in b.pieces) == [(p.tensor, p.start) for p in pieces]
    for server, own in zip(servers, found, strict=True):
        for bucket in own:
            assert bucket.num_bytes <= BUCKET_BYTES and {p.server for p in bucket.pieces} == {server}
            assert bucket.num_bytes == 4 * sum(p.num_elements for p in bucket.pieces)


def test_a_served_program_parses_back():
    program = replace(build(Setup(dp=4), 0), sync="async", servers=(0, 2), staleness=3)
    assert parse(text(program)) == program
    assert parse(text(replace(program, sync="ps", servers=(), staleness=None))) == replace(program, sync="ps", servers=(), staleness=None)
    apart = replace(program, sync="ps", servers=(0, 3), workers=(1, 2), micro_batches=((), *program.micro_batches[:2], ()))
    assert parse(text(apart)) == apart


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (dict(sync="ps", zero=1), "servers keep the optimizer's state"),
        (dict(sync="async", tp=2), "different orders"),
        (dict(sync="async", pp=2), "sync='ps'"),
        (dict(sync="async", placement={"encoder": 1}), "one rank"),
        (dict(staleness=2), "leave staleness out"),
        (dict(servers=(0,)), "leave servers out"),
        (dict(servers=(0,), workers=(1,)), "leave servers out"),
        (dict(sync="ps", dp=2, servers=(2,)), "0 to 1"),
        (dict(sync="ps", compression="1bit"), "all_reduce"),
        (dict(sync="async", delay=1), "all_reduce"),
    ],
)
def test_what_excludes_each_other_is_refused_with_the_reason(values, reason):
    with pytest.raises(autoplan.InfeasibleError, match=reason):
        check_sync(Constraints(**values))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (dict(workers=(0, 1)), r"servers=\(2,\)"),
        (dict(servers=(3,), workers=(0, 1)), "data rank 2 would do nothing"),
        (dict(servers=(2,), workers=(0, 1), dp=4), "name 3 data ranks, dp=4"),
        (dict(servers=(2,), workers=()), "data ranks that compute"),
    ],
)
def test_every_data_rank_works_or_serves(values, reason):
    with pytest.raises(autoplan.UsageError, match=reason):
        Constraints(sync="ps", **values)
    assert Constraints(sync="ps", servers=(2,), workers=(0, 1)).dp == 3


def test_ranks_that_only_serve_take_no_rows_and_no_passes():
    model, batch = ZOO["mlp"]()
    apart = autoplan.find_plan(model, batch, "cpu:5x1", Constraints(sync="ps", servers=(0,), workers=(1, 2, 3, 4)))
    assert (apart.servers, apart.workers, apart.degree("dp")) == ((0,), (1, 2, 3, 4), 5) and loads(dumps(apart)) == apart
    assert apart.micro_batch_size * apart.num_micro_batches * 4 == apart.global_batch
    assert "data rank 0 (data ranks 1, 2, 3, 4 compute)" in apart.explain()
    beside = autoplan.find_plan(model, batch, "cpu:4x1", Constraints(dp=4, sync="ps", servers=(0,)))
    assert apart.forecast.stages[0].forward_s == pytest.approx(beside.forecast.stages[0].forward_s)
    assert apart.forecast.step_time_s > beside.forecast.step_time_s  # the server takes from four others instead of three
    whole = sum(p.numel() * 4 for p in model.parameters())
    assert {use.kind: use.num_bytes for use in apart.collectives if use.axis == "dp" and use.phase != "forward"} == {"push": whole, "pull": whole}
    assert apart.forecast.stages[0].memory.optimizer == 0 or apart.forecast.stages[0].memory.activations == 0


def test_a_model_that_sums_over_the_batch_inside_has_no_ranks_that_only_serve():
    model, batch = ZOO["resnet50"]()
    with pytest.raises(autoplan.InfeasibleError, match="statistics or sums over the batch"):
        autoplan.find_plan(model, batch, "cpu:5x1", Constraints(sync="ps", servers=(0,), workers=(1, 2, 3, 4)))


@pytest.mark.parametrize("servers", [(), (1, 1), (-1,), ("a",)])
def test_servers_are_data_ranks(servers):
    with pytest.raises(autoplan.UsageError, match="data ranks"):
        Constraints(sync="ps", servers=servers)


def test_plans_record_the_mode_and_price_it():
    model, batch = ZOO["mlp"]()

    def found(**values):
        return autoplan.find_plan(model, batch, "cpu:4x1", Constraints(dp=4, **values))

    reduced, spread, one = found(zero=0), found(sync="ps"), found(sync="ps", servers=(0,))
    bounded = found(sync="async", staleness=2)
    assert (one.sync, one.servers, one.zero) == ("ps", (0,), 0) and bounded.staleness == 2
    for plan in (spread, one, bounded):
        assert loads(dumps(plan)) == plan
    assert one.forecast.step_time_s > spread.forecast.step_time_s
    assert bounded.forecast.step_time_s < reduced.forecast.step_time_s
    assert "parameter servers on data rank 0" in one.explain() and "at most 2 steps ahead" in short(bounded)
    assert "not the one of the whole batch" in bounded.explain()
    moved = {use.kind: use.num_bytes for use in one.collectives if use.axis == "dp"}
    whole = sum(p.numel() * 4 for p in model.parameters())
    assert moved["push"] == moved["pull"] == whole and moved["push_in"] == moved["pull_out"] == 4 * whole
    assert {use.kind: use.num_bytes for use in bounded.collectives} == {"push": whole, "pull": whole}

"""Published runs as runs of ours: what is read from a row, what is assumed, what the formulas must do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.accuracy.calibrate import Sample, fit, rounded
from benchmarks.accuracy.footprint import fits, footprint, saved_bytes, settled
from benchmarks.accuracy.predict import predict, seconds, step_s
from benchmarks.accuracy.record import UnsupportedRowError, run_of
from benchmarks.accuracy.score import score
from benchmarks.accuracy.step import Pricer, overlapped_s, step_time
from benchmarks.accuracy.trees import Boosted, ideal_s
from costmodel.calibration import load, priors


def row(**changes: Any) -> dict[str, Any]:
    """A plain run of a 3.6 B GPT on 64 A100; changes are merged into its plan, model or cluster by key."""
    base: dict[str, Any] = {
        "source": "Megatron-LM",
        "row_id": "r",
        "model": {"name": "gpt", "layers": 32, "hidden": 3072, "heads": 32, "kv_heads": 32, "ffn": 12288, "seq_len": 2048, "vocab": 50257},
        "cluster": {"gpu": "A100-SXM-80GB", "n_gpus": 64, "gpus_per_node": 8, "intra_bw_GBps": 300, "inter_bw_GBps": 200},
        "plan": {"tp": 8, "pp": 2, "dp": 4, "cp": 1, "ep": 1, "vpp": 1, "micro_batch": 2, "global_batch": 64, "recompute": "full", "zero_stage": 1},
        "precision": "fp16",
        "measured": {"iteration_s": 1.0},
        "missing": [],
    }
    for key, value in changes.items():
        place = next((part for part in ("plan", "model", "cluster") if key in base[part]), None)
        (base[place] if place else base)[key] = value
    return base


def time_of(**changes: Any) -> float:
    return step_time(settled(run_of(row(**changes)), load()), load()).total_s


def test_a_row_becomes_a_run_on_a_cluster_with_its_links() -> None:
    run = run_of(row(inter_bw_GBps=50))
    assert (run.tp, run.pp, run.dp, run.num_micro) == (8, 2, 4, 8)
    nvlink, network = run.cluster.groups[0].tiers
    assert nvlink.bandwidth_bytes_per_s == 300e9
    assert (network.shared_by, network.bandwidth_bytes_per_s) == (2, 12.5e9)
    assert [stage.layers for stage in run.stages] == [16, 16]


def test_keys_that_a_source_does_not_state_get_the_documented_default() -> None:
    run = run_of(row(micro_batch=None, vpp=None, zero_stage=None, recompute=None))
    assert (run.num_micro, run.vpp, run.zero) == (2, 2, 0)
    assert settled(run, load()).recompute == "none"
    crowded = run_of(row(recompute=None, global_batch=64 * 64, micro_batch=64))
    assert settled(crowded, load()).recompute == "full"


def test_what_cannot_be_expressed_is_said_and_not_guessed() -> None:
    with pytest.raises(UnsupportedRowError, match="expert"):
        run_of(row(ep=8))
    assert "TPU-v4" in predict(row(gpu="TPU-v4"), load())["unsupported"]


def test_recomputation_costs_a_third_more_and_saves_memory() -> None:
    assert 1.2 < time_of(recompute="full") / time_of(recompute="none") < 1.4
    free, full = (footprint(run_of(row(recompute=r)), load()).activations for r in ("none", "full"))
    assert full < free / 3


def test_launches_that_block_cost_their_whole_time_where_the_source_says_so() -> None:
    slow, plain = (step_time(run_of(row(source=f"bigscience {script}")), load()).pipeline_s for script in ("tr11-176B-ml", "gpt2.md"))
    assert slow > 1.1 * plain  # of micro-batches that take little longer than their launches
    large = [step_time(run_of(row(source=f"bigscience {script}", micro_batch=16)), load()).pipeline_s for script in ("tr11-176B-ml", "gpt2.md")]
    assert large[0] - large[1] < slow - plain


def test_an_optimizer_that_sums_whole_fp32_gradients_moves_two_and_a_half_times_the_bytes() -> None:
    """Twice four bytes and the gathered two, against two and two."""
    changes = dict(source="bigscience", pp=1, dp=8, hidden=12288, ffn=49152)
    reduce_s = {p: step_time(run_of(row(precision=p, **changes)), load()).reduce_s for p in ("fp16", "bf16")}
    assert reduce_s["bf16"] / reduce_s["fp16"] == pytest.approx(2.5, rel=0.02)


def test_tensor_parallelism_across_nodes_is_a_disaster() -> None:
    assert time_of(tp=16, pp=1, dp=4) > 1.4 * time_of(tp=8, pp=2, dp=4)


def test_a_page_named_for_asynchronous_tensor_parallelism_measures_without_it_too() -> None:
    page = dict(source="torchtitan:benchmarks/asyncTP_llama3.md", act="swiglu", sequence_parallel=True, notes="torch.compile")
    without, beside = (run_of(row(row_id=f"titan-async-70B-{way}", **page)) for way in ("vanillaTP", "asyncTP"))
    assert (without.async_tp, beside.async_tp) == (False, True)
    assert step_time(beside, load()).total_s < 0.98 * step_time(without, load()).total_s


def test_gathers_through_one_port_take_as_long_on_twice_the_nodes() -> None:
    """And so does a step of one micro-batch that they decide: half of the tokens a GPU make it no shorter."""

    def step_s(gpus: int, **plan: Any) -> float:
        sizes = dict(source="megatron", layers=96, hidden=12288, heads=96, kv_heads=96, ffn=49152)
        return time_of(n_gpus=gpus, tp=1, pp=1, dp=gpus, zero_stage=3, micro_batch=1536 // gpus, global_batch=1536, **sizes, **plan)

    assert step_s(1536) == pytest.approx(step_s(768), rel=0.1)
    stack = load().stack("deepspeed-zero3")
    assert stack.port_share and not load().stack("llm-foundry").port_share
    wide = replace(load(), stacks={**load().stacks, "deepspeed-zero3": replace(stack, port_share=0.0)})
    run = run_of(row(n_gpus=1536, tp=1, pp=1, dp=1536, zero_stage=3, micro_batch=1, global_batch=1536))
    assert step_time(run, wide).total_s < 0.7 * step_time(run, load()).total_s


def test_more_micro_batches_shrink_the_bubble() -> None:
    few, many = time_of(pp=8, dp=1, global_batch=16), time_of(pp=8, dp=1, global_batch=128)
    assert many < 0.75 * 8 * few


def test_a_saved_layer_follows_korthikanti() -> None:
    run = replace(run_of(row(tp=1)), micro_batch=1)
    s, h, a = 2048, 3072, 32
    assert saved_bytes(run, flash=False) == pytest.approx(s * h * (34 + 5 * a * s / h))


def test_traffic_hides_to_its_share_and_slows_what_it_hides_behind() -> None:
    assert overlapped_s(10, 4, 0.0, 1.2) == 14
    assert overlapped_s(10, 4, 1.0, 1.0) == 10
    assert overlapped_s(10, 4, 1.0, 1.2) == pytest.approx(10 + 4 / 6)
    assert overlapped_s(1, 4, 1.0, 1.2) == pytest.approx(4)


def test_a_fit_recovers_the_constant_that_made_the_data() -> None:
    start = priors()
    chip = replace(start.devices["A100"], gemm_ceiling=0.6)
    truth = replace(start, devices={**start.devices, "A100": chip})
    runs = [run_of(row(micro_batch=m, row_id=str(m))) for m in (4, 8)]
    fitted = fit([Sample("s", run, seconds(run, truth)) for run in runs], start, step_s, pull=0.0)
    assert all(seconds(run, fitted) == pytest.approx(seconds(run, truth), rel=0.03) for run in runs)


def test_the_score_counts_missing_rows_as_wrong_and_pairs_by_order() -> None:
    rows = [row(row_id=str(t), tp=tp) | {"measured": {"iteration_s": t}} for t, tp in ((1.0, 8), (2.0, 4), (3.0, 2))]
    found = score(rows, {"1.0": {"iteration_s": 1.1, "fits": True}, "2.0": {"iteration_s": 1.0, "fits": False}})
    assert found.time_mape == pytest.approx((0.1 + 0.5 + 1.0) / 3)
    assert (found.num_pairs, found.ordered, found.refused) == (1, 0.0, 1)


def test_a_run_that_is_too_large_does_not_fit() -> None:
    assert fits(run_of(row()), load())
    assert not fits(run_of(row(tp=1, pp=1, dp=64, recompute="none", micro_batch=16, global_batch=1024)), load())


def test_launches_that_are_not_hidden_add_to_device_time() -> None:
    calibration, run = load(), run_of(row())
    stack = replace(calibration.stack(run.stack), launch_exposed=0.0)
    hidden = replace(calibration, stacks={**calibration.stacks, run.stack: stack})
    exposed = replace(calibration, stacks={**calibration.stacks, run.stack: replace(stack, launch_exposed=1.0)})
    launch_s = 10 * calibration.device(run.cluster.device().name).launch_s * stack.launch_factor
    assert Pricer(run, hidden).seconds(1.0, 10, 0) == 1.0
    assert Pricer(run, exposed).seconds(1.0, 10, 0) == pytest.approx(1.0 + launch_s)


def test_owners_that_broadcast_in_turn_make_a_large_zero_group_slow() -> None:
    run = run_of(row(source="internevo", tp=1, pp=1, dp=64, micro_batch=1, global_batch=64, recompute="none"))
    whole, part = (step_time(replace(run, zero_group=size), load()).reduce_s for size in (64, 8))
    assert whole - part > 0.05


def test_small_misses_are_shared_and_large_ones_count_in_full() -> None:
    assert rounded(0.0) == 0
    assert rounded(0.01) < 0.002
    assert rounded(1.0) == pytest.approx(0.95, abs=0.01)


def test_boosted_trees_learn_what_they_are_shown_and_not_beyond() -> None:
    samples = [Sample("s", run_of(row(row_id=str(b), global_batch=b)), b / 64) for b in (64, 128, 256, 512)]
    trees = Boosted.fit(samples, ideal=False, least=1)
    assert trees.seconds([s.run for s in samples]) == pytest.approx([1, 2, 4, 8], rel=0.01)
    assert trees.seconds([run_of(row(global_batch=4096))]) == pytest.approx([8], rel=0.01)
    ideal = Boosted.fit(samples, ideal=True, least=1)
    assert ideal.seconds([run_of(row(global_batch=4096))]) == pytest.approx([64], rel=0.01)


def test_the_ideal_time_counts_six_flops_a_parameter_and_token() -> None:
    run = run_of(row())
    tokens, parameters = 64 * 2048, 32 * 12 * 3072**2 + 3072 * 50257
    attention = 12 * 32 * 3072 * 2048 / 2
    assert ideal_s(run) == pytest.approx(tokens * (6 * parameters + attention) / (64 * 312e12))

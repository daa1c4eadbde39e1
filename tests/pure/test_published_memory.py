"""Memory of published runs: what each stack keeps, which stage is weighed, how layers are dealt to stages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.accuracy.footprint import fits, footprint, logit_bytes, reported, saved_bytes, widths
from benchmarks.accuracy.predict import Rows, predict, read, refit, timed
from benchmarks.accuracy.record import dated, run_of
from benchmarks.accuracy.robustness import drawn
from benchmarks.accuracy.splits import layers_of_stages
from costmodel.calibration import load
from tests.pure.test_roofline_runs import row


def test_a_stated_list_of_modules_is_cut_where_the_row_says() -> None:
    notes = "pipeline layer split (30 entries incl. embed/noop/head) [0, 9, 15, 21, 30]; more"
    assert layers_of_stages(24, 4, {}, notes, deepspeed=True) == (6, 6, 6, 6)
    notes = "pipeline layer split (30 entries incl. embed/noop/head) [0, 1, 2, 3, 4, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 30]"
    assert layers_of_stages(24, 16, {}, notes, deepspeed=True) == (0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2)


def test_deepspeed_deals_the_rest_to_a_short_last_stage() -> None:
    assert layers_of_stages(78, 12, {}, "", deepspeed=True) == (7,) * 11 + (1,)
    assert layers_of_stages(78, 12, {}, "", deepspeed=False) == (7,) * 6 + (6,) * 6
    assert sum(layers_of_stages(24, 16, {}, "", deepspeed=True)) == 24


def test_tables_may_count_as_layers() -> None:
    assert layers_of_stages(70, 12, {}, "embedding counted as a layer in PP split", deepspeed=True) == (5, *(6,) * 10, 5)


def test_a_stage_with_nothing_to_train_is_refused() -> None:
    run = run_of(row(pp=2))
    hollow = replace(run, pp=4, stages=(run.stages[0], replace(run.stages[0], layers=0), run.stages[1], run.stages[1]))
    assert fits(run, load())
    assert not fits(hollow, load())


def test_the_loss_counts_where_it_is_and_not_beside_a_recomputed_layer() -> None:
    run = run_of(row(tp=1, pp=1, dp=64))
    found, rows = footprint(run, load()), 2 * 2048
    assert found.working == max(rows * 50304 * logit_bytes(run), int(saved_bytes(run, run.flash)))


def test_a_source_that_reads_the_first_device_does_not_see_the_loss() -> None:
    stated = row(tp=1, pp=8, dp=8, micro_batch=8, global_batch=512, vocab=250880, source="bigscience", notes="nvidia-smi memory incl. context")
    run = run_of(stated)
    assert run.reported == "first"
    assert reported(run, load()).total < footprint(run, load()).total


def test_zero_casts_a_share_of_the_gradients_twice() -> None:
    run = run_of(row(source="bigscience"))
    assert widths(run).optimizer == 16
    assert widths(replace(run, zero=0)).optimizer == 12
    assert widths(replace(run, dtype="bfloat16")).gradient == 8


def test_relu_keeps_one_copy_of_the_feed_forward_where_gelu_keeps_two() -> None:
    run = run_of(row())
    rectified = replace(run, model=replace(run.model, relu=True))
    assert saved_bytes(run, flash=True) - saved_bytes(rectified, flash=True) == 2 * 2 * 2048 * 12288 / 8


def test_a_loss_compiled_with_the_model_keeps_no_fp32_logits() -> None:
    def titan(source: str) -> int:
        return logit_bytes(run_of(row(source=source, notes="torch.compile", act="swiglu", tp=1, pp=1, dp=64)))

    assert titan("torchtitan:benchmarks/llama3_h100_202412.md") == 14
    assert titan("torchtitan:benchmarks/llama3-8b_h200_202506.md") == 4


def test_a_year_is_read_from_a_name_and_not_from_a_hash() -> None:
    assert dated("torchtitan@4d20158a4:docs/performance.md (Dec 2024)") == 2024
    assert dated("somewhere") == 0


def test_what_the_allocator_holds_beyond_need_ends_at_the_device() -> None:
    run = run_of(row(tp=1, pp=1, dp=64, recompute="none", micro_batch=16, global_batch=1024))
    found = footprint(run, load())
    assert found.needed > run.cluster.memory_bytes()
    assert found.slack == 0


@pytest.mark.parametrize("seed", [0, 1])
def test_a_draw_takes_a_tenth_of_a_source_and_repeats(seed: int) -> None:
    rows: dict[str, Rows] = {"many": [row(row_id=str(i)) for i in range(30)], "few": [row(row_id="x")], "none": [row(row_id="y", measured={"mfu": 0.4})]}
    found = drawn(rows, seed)
    assert {source: len(records) for source, records in found.items()} == {"many": 3, "few": 1}
    assert drawn(rows, seed) == found


def test_rows_without_measurements_are_read_and_predicted_and_fit_nothing(tmp_path: Path) -> None:
    bare = {key: value for key, value in row().items() if key != "measured"}
    file = tmp_path / "unseen.json"
    file.write_text(json.dumps([bare]))
    rows = read([file])
    assert predict(rows["unseen"][0], load())["iteration_s"] > 0
    assert not timed(rows)
    assert refit(rows, load()) == load()


def test_one_row_is_enough_to_fit_on() -> None:
    fitted = refit({"s": [row()]}, load())
    assert abs(predict(row(), fitted)["iteration_s"] - 1.0) < abs(predict(row(), load())["iteration_s"] - 1.0)

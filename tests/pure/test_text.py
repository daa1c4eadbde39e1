from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.instr import Arg, Dtype, Instr, Other, Output, Ref, TensorSpec
from runtime.parse import ProgramTextError, parse
from runtime.program import Chunk, Program
from runtime.text import text
from tests.dist.programs import Setup, build

SETUPS = [Setup(), Setup(pp=2, dp=2, tp=2, zero=3, num_micro_batches=3, num_rows=14), Setup(dp=4, zero=2, zero_group=2, schedule="gpipe", recompute="full")]
SETUPS += [Setup(pp=2, tp=2, pieces=True)]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_a_program_parses_back(setup: Setup):
    for pp_index in range(setup.pp):
        program = build(setup, pp_index)
        assert parse(text(program)) == program


names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc", "Zl", "Zp")), min_size=1, max_size=12)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63),
    st.floats(allow_nan=False),
    names,
    names.map(Ref),
    st.sampled_from(["float32", "int64"]).map(Dtype),
    st.just(Other("memory_format", "channels_last")),
)
arguments = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6)


def _with_instr(instr: Instr) -> Program:
    program = build(Setup(), 0)
    stage = program.stages[0]
    body = replace(stage.bodies[0], blocks=(replace(stage.bodies[0].blocks[0], instrs=(instr,)), *stage.bodies[0].blocks[1:]))
    stored = replace(stage.stored[0], aliases=("lm_head.weight", 'odd "name", x'), chunks=(Chunk("tp", 0, 1, 11, 1), Chunk("dp", 1, 2, 3, 1)))
    return replace(program, stages=(replace(stage, stored=(stored, *stage.stored[1:]), bodies=(body,), updates=(("a", "b"),)),))


@given(st.lists(arguments, max_size=4), names, st.booleans())
def test_any_argument_and_name_parses_back(args: list[Arg], name: str, is_sequence: bool):
    outputs = (Output(name, TensorSpec((2, 3), "float32")), Output(name + "x", None))
    program = _with_instr(Instr(outputs, "aten.linear.default", tuple(args), (("alpha", 1.5), ("axis", "tp")), is_sequence))
    assert parse(text(program)) == program


def test_backward_collectives_schedule_and_fsdp_are_told():
    told = text(build(Setup(pp=2, dp=2, tp=2, zero=3, num_rows=8), 0))
    assert "= runtime.vary(" not in next(line for line in told.splitlines() if "runtime.vary" in line).split("#")[1]
    assert "# backward all_reduce over tp 288 bytes" in told
    assert "# forward all_reduce over tp 288 bytes" in told
    assert "# forward all_reduce over dp 8 bytes" in text(build(Setup(dp=2), 0))
    assert "# actions of pp 0: F0.0 F0.1 B0.0 B0.1" in told
    assert "fsdp layers.0: reduce_scatter over dp" in told
    assert "gradient of %layers.0.gain summed over tp" in told
    assert "gradient of %embed summed over stages 0,1" in told


def test_a_damaged_text_names_the_line():
    lines = text(build(Setup(), 0)).splitlines()
    with pytest.raises(ProgramTextError, match="line 2: expected"):
        parse("\n".join([lines[0], "axis pp=1", *lines[2:]]))
    with pytest.raises(ProgramTextError, match="the text ends"):
        parse("\n".join(lines[:3]))

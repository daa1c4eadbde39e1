from __future__ import annotations

import threading

import pytest
import torch

from runtime.random import RandomState, Window, bound, coordinate_mask, current_state, element_mask, use_state

CPU = torch.device("cpu")
STATE = RandomState(seed=7, step=3, micro_batch=1)


def test_a_mask_depends_on_each_part_of_its_key():
    def mask(state=STATE, op="drop", coordinates=(0,)):
        return coordinate_mask(state, op, coordinates, (64,), 0.5, CPU)

    assert torch.equal(mask(), mask())
    others = [
        mask(RandomState(8, 3, 1)),
        mask(RandomState(7, 4, 1)),
        mask(RandomState(7, 3, 2)),
        mask(op="drop_1"),
        mask(coordinates=(1,)),
        mask(coordinates=(0, 0)),
    ]
    assert not any(torch.equal(mask(), other) for other in others)


def test_masks_leave_torchs_generator_alone():
    before = torch.get_rng_state()
    coordinate_mask(STATE, "a", (), (8,), 0.5, CPU)
    element_mask(STATE, "a", (), 0, (8,), 0.5, CPU)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("keep", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(
    "make", [lambda keep: coordinate_mask(STATE, "a", (), (256, 256), keep, CPU), lambda keep: element_mask(STATE, "a", (), 0, (256, 256), keep, CPU)]
)
def test_elements_are_kept_with_the_probability_asked(make, keep):
    mask = make(keep).double()
    sigma = (keep * (1 - keep)) ** 0.5
    for part, count in ((mask, 256 * 256), (mask[0], 256), (mask[:, 7], 256)):
        assert abs(part.mean().item() - keep) <= 4 * sigma / count**0.5
    if 0 < keep < 1:  # neighbours along each dimension are uncorrelated
        centred = (mask - keep) / sigma
        assert abs((centred[1:] * centred[:-1]).mean().item()) < 4 / 256
        assert abs((centred[:, 1:] * centred[:, :-1]).mean().item()) < 4 / 256


def test_element_masks_of_parts_are_parts_of_the_whole():
    whole = element_mask(STATE, "a", (), 0, (6, 4, 12), 0.5, CPU)
    rows = element_mask(STATE, "a", (Window(0, 1, 5, 1, 3, 2),), 0, (2, 4, 12), 0.5, CPU)
    assert torch.equal(rows, whole[3:5])
    # dimension 2 is (3, heads 2, 2): a part of the heads is strided
    heads = element_mask(STATE, "a", (Window(2, 3, 2, 2, 1, 1),), 0, (6, 4, 6), 0.5, CPU)
    assert torch.equal(heads, whole.view(6, 4, 3, 2, 2)[:, :, :, 1].reshape(6, 4, 6))
    # cut by the outer factor, then what is left by the inner one
    twice = element_mask(STATE, "a", (Window(2, 1, 3, 4, 2, 1), Window(2, 1, 2, 2, 1, 1)), 0, (6, 4, 2), 0.5, CPU)
    assert torch.equal(twice, whole[:, :, 8:12][:, :, 2:4])


def test_element_masks_do_not_depend_on_the_size_of_the_batch():
    ten = element_mask(STATE, "a", (), 1, (3, 10), 0.5, CPU)
    four = element_mask(STATE, "a", (), 1, (3, 4), 0.5, CPU)
    assert torch.equal(ten[:, :4], four)


def test_a_bound_function_keeps_its_state_on_another_thread():
    found = []
    with use_state(STATE):
        fn = bound(lambda: found.append(current_state()))
    thread = threading.Thread(target=fn)
    thread.start()
    thread.join()
    assert found == [STATE] and current_state() is None

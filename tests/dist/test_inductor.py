"""Stage programs compiled by torch.compile's inductor, which needs a C++ compiler."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch

from tests.dist.launch import run_ranks
from tests.dist.test_what_users_bring import assert_equal, parallel
from tests.zoo import ZOO


def compiled() -> None:
    torch.set_num_threads(1)
    for how in (dict(tp=2), dict(pp=2, num_micro_batches=2)):
        model, batch = ZOO["mlp"]()
        plain = copy.deepcopy(model)
        assert_equal(parallel(model, batch, how, compile_backend="inductor"), plain, batch, how)


@pytest.mark.slow
@pytest.mark.timeout(590)
@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
def test_inductor_gives_the_plain_models_gradients_under_tensor_and_pipeline_parallelism() -> None:
    run_ranks(compiled, 2, timeout_s=580)

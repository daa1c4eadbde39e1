"""Measured mode on this machine: a plan's forecast from measured operators and links against the steps that the plan then takes.

    python benchmarks/accuracy/here.py [MODEL...] [--ranks 1 2] [--steps 12] [--fixed dp=2 ...]

For each model and number of ranks: the links are measured (as `autoplan profile` does), the model is captured, its operators are timed, the best
plan (with the degrees that are `--fixed`) is chosen, and as many processes train under it. Measured is the median step, counted by the slowest rank;
the fastest step and the processor time of the busiest rank are printed beside it, for other work on the machine counts in what is measured between
processes. Nothing is read from earlier measurements.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from autoplan import Constraints  # noqa: E402
from autoplan.api import find_plan  # noqa: E402
from autoplan.commands.profiling import measured_machine, measured_prices  # noqa: E402
from autoplan.explain import degrees  # noqa: E402
from autoplan.launch import run_ranks  # noqa: E402
from autoplan.models.mlp import MLP  # noqa: E402
from autoplan.models.resnet import resnet50  # noqa: E402
from autoplan.parallel import parallelize  # noqa: E402
from autoplan.planfile import dumps, loads  # noqa: E402

BUDGET_S, TIMEOUT_S, WARM_UP = 30.0, 300.0, 3
Batch = Mapping[str, torch.Tensor]


def gpt() -> tuple[nn.Module, Batch]:
    """A GPT-2 of 4 layers, hidden size 256, on 8 x 128 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 128, "vocab_size": 1024, "use_cache": False, "bos_token_id": 0, "eos_token_id": 1}
    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes)
    ids = torch.randint(0, 1024, (8, 128))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids.clone()}


def t5() -> tuple[nn.Module, Batch]:
    """A T5 of 2 + 2 layers, model size 256, on 8 x 128 tokens."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 2, "num_heads": 4, "vocab_size": 1024}
    config = T5Config(dropout_rate=0.0, use_cache=False, pad_token_id=0, **sizes, **{"decoder_start_token_id": 0})
    ids = torch.randint(2, 1024, (8, 128))
    return T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids.clone()}


def resnet() -> tuple[nn.Module, Batch]:
    """A ResNet-50 of a quarter of its width on 16 images of 96 x 96."""
    return resnet50(width=16, num_classes=100), {"images": torch.randn(16, 3, 96, 96), "labels": torch.randint(0, 100, (16,))}


def mlp() -> tuple[nn.Module, Batch]:
    """Five layers of 1024 on 256 rows."""
    return MLP([1024] * 6), {"x": torch.randn(256, 1024), "labels": torch.randint(0, 1024, (256,))}


MODELS: Mapping[str, Callable[[], tuple[nn.Module, Batch]]] = {"gpt": gpt, "resnet": resnet, "t5": t5, "mlp": mlp}


def built(name: str) -> tuple[nn.Module, Batch]:
    """A model of the list and its batch, the same in every process."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    return model.train(), batch


def train(name: str, plan: str, steps: int) -> list[tuple[float, float]]:
    """Seconds, and seconds of processor time, of every step of this rank under a plan."""
    model, batch = built(name)
    parallel = parallelize(model, batch, plan=loads(plan))
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-3)
    seconds = []
    for _ in range(WARM_UP + steps):
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        parallel.forward_backward(batch)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append((time.perf_counter() - start_s, time.process_time() - start_cpu_s))
    return seconds[WARM_UP:]


def measured_s(name: str, plan: str, ranks: int, steps: int) -> tuple[float, float, float]:
    """Seconds of the median and of the fastest step, counted by the slowest rank; median processor time of the busiest rank."""
    runs = run_ranks(train, ranks, name, plan, steps, timeout_s=TIMEOUT_S)
    wall, busy = ([max(step[which] for step in steps) for steps in zip(*runs, strict=True)] for which in (0, 1))
    return statistics.median(wall), min(wall), statistics.median(busy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--fixed", nargs="*", default=[], metavar="DEGREE=NUMBER", help="degrees that the plan must have")
    options = parser.parse_args()
    asked = Constraints(**{name: int(number) for name, number in (item.split("=") for item in options.fixed)})
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    print("| model | ranks | plan | forecast | measured | fastest | processor time | error |\n|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # nothing measured before counts
        for ranks in options.ranks:
            cluster, _ = measured_machine(ranks)
            for name in options.models:
                model, batch = built(name)
                plan = find_plan(model, batch, cluster, asked, prices=measured_prices(cluster, BUDGET_S))
                predicted_s, (median_s, fastest_s, busy_s) = plan.forecast.step_time_s, measured_s(name, dumps(plan), ranks, options.steps)
                times = (f"{seconds:.3f} s" for seconds in (predicted_s, median_s, fastest_s, busy_s))
                row = (name, ranks, degrees(plan), *times, f"{100 * (predicted_s / median_s - 1):+.1f} %")
                print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()

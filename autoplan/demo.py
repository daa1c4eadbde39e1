"""The demonstration: measure this machine, plan, train a small Llama under the plan and alone, compare what was promised.

The data are sonnets (data/sonnets.txt), a byte a token. Both trainings start from the same weights and see the same batches.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autoplan.api import find_plan
from autoplan.commands.console import note, say, working, write_whole
from autoplan.commands.profiling import measured_machine, measured_prices
from autoplan.errors import UsageError
from autoplan.explain import degrees, ranking
from autoplan.forecast import Event, Measured
from autoplan.launch import run_ranks
from autoplan.peak import PeakMemory
from autoplan.plan import Plan
from autoplan.planfile import dumps, loads
from autoplan.report import html
from autoplan.timeline import joined, measured, rank_events
from autoplan.trace import trace
from autoplan.units import num_bytes, seconds
from costmodel.cluster import Cluster

TEXT = Path(__file__).parent / "data" / "sonnets.txt"
ROWS, SEQ = 8, 64
LEARNING_RATE = 2e-3
TOLERANCE = 1e-5  # relative, of every loss
_WARM_UP = 3  # steps whose times do not count
_OPERATOR_BUDGET_S, _TIMEOUT_S = 25.0, 600.0

Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Training:
    """One training run as one rank saw it. `events` of each step, in seconds of the machine's clock."""

    losses: tuple[float, ...]
    step_s: tuple[float, ...]
    peak_bytes: int
    events: tuple[tuple[Event, ...], ...] = ()


def run(ranks: int, steps: int, folder: Path) -> int:
    """The whole demonstration; exit code 1 if the two trainings differ."""
    if ranks < 1 or steps < _WARM_UP + 1:
        raise UsageError(f"--ranks must be at least 1 and --steps at least {_WARM_UP + 1}, found {ranks} and {steps}")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # four ranks rarely have four devices; CPU ranks are the same everywhere
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    model = small_llama()
    size = sum(p.numel() for p in model.parameters())
    say(f"A Llama of {model.config.num_hidden_layers} layers and {size / 1e6:.2f} M parameters learns {TEXT.stat().st_size:,} bytes of Shakespeare.")
    say(f"{ranks} ranks on {_num_cores()} cores; a batch is {ROWS} rows of {SEQ} bytes.")
    if (busy := os.getloadavg()[0]) > 0.5:
        say(f"Other work keeps {busy:.1f} cores busy: steps will take longer than predicted.")
    say("")

    with working(f"measuring compute and links of {ranks} ranks"):
        cluster, _ = measured_machine(ranks)
    with working("capturing the model, measuring its operators, planning"):
        plan = planned(model, cluster)
    say(f"{ranking(plan)}\n")
    for reason in plan.reasons:
        say(f"Why: {reason}")

    with working(f"training {steps} steps under the plan, in {ranks} processes"):
        runs = run_ranks(_train_parallel, ranks, dumps(plan), steps, timeout_s=_TIMEOUT_S)
    with working(f"training {steps} steps in one process"):
        alone = train_alone(steps)

    real = measured_step(plan, runs)
    same = _say_losses(alone, runs[0])
    _say_forecast(plan, real)
    for name, text in (("plan.json", dumps(plan)), ("report.html", html(plan, real)), ("trace.json", trace(plan, real))):
        write_whole(folder / name, text)
    say(f"\nReport: {folder / 'report.html'}   plan: {folder / 'plan.json'}   trace for Perfetto: {folder / 'trace.json'}")
    if not same:
        note(f"The loss curves differ by more than {TOLERANCE:g}.")
    return 0 if same else 1


def small_llama() -> Any:
    """A Llama of 6 layers for bytes: 8 heads in 4 groups, hidden 256; the same weights in every process."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise UsageError("the demonstration's model comes from transformers, which is not installed; fix: pip install 'autoplan[models]'") from error
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = LlamaConfig(vocab_size=256, max_position_embeddings=SEQ, use_cache=False, attention_dropout=0.0, **sizes)
    torch.manual_seed(0)
    return LlamaForCausalLM(config).train()


def batch_of(step: int) -> Batch:
    """Rows of the text that begin at places drawn for this step."""
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    starts = torch.randint(0, len(text) - SEQ, (ROWS,), generator=torch.Generator().manual_seed(step))
    rows = torch.stack([text[start : start + SEQ] for start in starts])
    return {"input_ids": rows, "labels": rows.clone()}


def planned(model: torch.nn.Module, cluster: Cluster) -> Plan:
    """The best plan for this machine, from measured prices."""
    plan = find_plan(model, batch_of(0), cluster, prices=measured_prices(cluster, _OPERATOR_BUDGET_S))
    return replace(plan, model="small Llama")


def train_alone(steps: int) -> Training:
    """The plain model in this process."""
    model = small_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses, times = [], []
    for step in range(steps):
        batch = batch_of(step)
        start_s = time.perf_counter()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start_s)
        losses.append(loss.item())
    return Training(tuple(losses), tuple(times), 0)


def _train_parallel(plan: str, steps: int) -> Training:
    """The plan on this rank: `steps` timed steps, then one more that counts memory."""
    from autoplan.parallel import parallelize

    parallel = parallelize(small_llama(), batch_of(0), plan=loads(plan))
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=LEARNING_RATE)
    losses, times, events = [], [], []
    for step in range(steps + 1):
        batch = batch_of(step)
        torch.distributed.barrier()
        if step == steps:
            return Training(tuple(losses), tuple(times), _peak_bytes(parallel, optimizer, batch), tuple(events))
        start_s = time.perf_counter()
        loss = parallel.forward_backward(batch)
        update_s = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        end_s = time.perf_counter()
        times.append(end_s - start_s)
        losses.append(loss.item())
        rank = torch.distributed.get_rank()
        update = Event(rank, "compute", "optimizer", "optimizer", update_s, end_s)
        events.append((*rank_events(parallel.executor.mesh.recorder, rank), update))
    raise AssertionError("unreachable")


def _peak_bytes(parallel: Any, optimizer: torch.optim.Optimizer, batch: Batch) -> int:
    resident = [*parallel.parameters(), *(value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor))]
    with PeakMemory(resident) as memory:
        parallel.forward_backward(batch)
        optimizer.step()
    return memory.peak_bytes


def measured_step(plan: Plan, runs: list[Training]) -> Measured:
    """The median step, counted by the slowest rank, with the events of all ranks; the fullest rank's memory."""
    took_s = {step: max(run.step_s[step] for run in runs) for step in range(_WARM_UP, len(runs[0].step_s))}
    middle = sorted(took_s, key=lambda step: took_s[step])[len(took_s) // 2]
    return measured(plan, joined(run.events[middle] for run in runs), took_s[middle], max(run.peak_bytes for run in runs))


def _say_losses(alone: Training, parallel: Training) -> bool:
    say("\nstep    one process       the plan   relative difference")
    errors = [abs(a - b) / abs(a) for a, b in zip(alone.losses, parallel.losses, strict=True)]
    for step, (a, b, error) in enumerate(zip(alone.losses, parallel.losses, errors, strict=True)):
        say(f"{step + 1:4}   {a:12.7f}   {b:12.7f}   {error:.1e}")
    same = max(errors) <= TOLERANCE
    say(f"largest difference {max(errors):.1e}, allowed {TOLERANCE:g}: {'equal' if same else 'NOT EQUAL'}\n")
    return same


def _say_forecast(plan: Plan, real: Measured) -> None:
    forecast = plan.forecast
    say(f"{degrees(plan)}\n             predicted    measured")
    say(f"step time   {seconds(forecast.step_time_s):>10}  {seconds(real.step_time_s):>10}   {forecast.step_time_s / real.step_time_s - 1:+.0%}")
    memory = forecast.peak_memory_bytes / real.peak_memory_bytes - 1
    say(f"peak memory {num_bytes(forecast.peak_memory_bytes):>10}  {num_bytes(real.peak_memory_bytes):>10}   {memory:+.0%}")


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

"""Plans on paced devices that nobody has looked at: steps are as long as forecast, in the forecast's order, and the chosen plan is the best of them."""

from __future__ import annotations

import math
import os
import shutil

import pytest

from autoplan.pacing import SLACK_S
from benchmarks.modes.namespaces import SUBNET, Skip, hosts, throttle
from benchmarks.paced.cases import described, ready, sample
from benchmarks.paced.jobs import Host, jobs_of, ranks
from benchmarks.paced.paced import kendall, summary


def _compared(model: str, devices: str, num: int, slack_s: float, at: tuple[Host, ...] = (), **sizes: int) -> dict:
    setting, rows = ready(model, devices, **sizes), []
    assert setting.cluster.paced is not None
    chosen = setting.plan()
    plans = {described(chosen): chosen} | dict(sample(setting, num, 5 * chosen.forecast.step_time_s))
    with ranks(setting.cluster.num_devices, slack_s, timeout_s=400.0, hosts=at) as pool:
        for name, plan in plans.items():
            found = pool.measure(plan, jobs_of(plan, setting.graph, setting.cluster.paced, setting.batch, slack_s))
            rows.append({"plan": name, "forecast_s": plan.forecast.step_time_s, "measured_s": found.step_s, "error": found.error})
    return summary(f"{model}:{devices}", described(chosen), rows)


def _check(found: dict, most_error: float) -> None:
    assert found["largest_error"] <= most_error and found["kendall_tau"] >= 0.9, found
    assert found["regret"] <= 0.03, found


def test_the_clocks_of_drawn_devices_confirm_forecasts_and_choice() -> None:
    """Within 5 %: replicas with unlike shares of a batch meet at every ZeRO reduction, where the forecast lets the slowest go through alone."""
    _check(_compared("mlp", "drawn:4:0", 5, math.inf, num_layers=6), 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mlp:drawn:8:4", "gpt2:drawn:8:5", "llama:drawn:8:6"])
def test_steps_on_drawn_devices_confirm_forecasts_and_choice(case: str) -> None:
    model, devices = case.split(":", 1)
    _check(_compared(model, devices, 8, SLACK_S, num_layers=6), 0.05)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("tc") is None, reason="network namespaces need root and iproute2")
def test_steps_of_hosts_behind_a_throttled_link_confirm_forecasts_and_choice() -> None:
    """The wire that both hosts share carries 1 MB/s by its file, and 10 Mbit/s in fact."""
    try:
        with hosts(2) as names:
            throttle(names, 10)
            at = tuple(Host(name, "eth0", f"{SUBNET}.{i + 1}") for i, name in enumerate(names))
            _check(_compared("mlp", "hosts8", 8, SLACK_S, at, num_layers=8), 0.05)
    except Skip as reason:
        pytest.skip(str(reason))


def test_kendalls_tau_counts_pairs_in_the_same_order() -> None:
    assert kendall([(1.0, 10.0), (2.0, 20.0), (3.0, 30.0)]) == 1.0
    assert kendall([(1.0, 10.0), (2.0, 30.0), (3.0, 20.0)]) == pytest.approx(1 / 3, abs=1e-4)

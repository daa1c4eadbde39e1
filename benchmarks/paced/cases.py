"""Models, paced devices and plans that are measured on them."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from autoplan import AutoplanError, Cluster, Constraints, Plan, capture, find_plan
from autoplan.clusterprices import prices_of
from autoplan.explain import short
from autoplan.graph import Graph
from autoplan.models import MLP
from autoplan.space import divisors
from benchmarks.paced.drawn import drawn
from costmodel.clusterfile import paced_cluster
from costmodel.paced import PacedDevices
from costmodel.prices import Prices

DEVICES = Path(__file__).parent / "devices"
ROWS, TOKENS, VOCAB = 32, 16, 64
_LIMIT_S = 2.0  # of the search for one plan of a sample
Built = tuple[torch.nn.Module, dict[str, torch.Tensor]]


def _text() -> dict[str, torch.Tensor]:
    ids = torch.zeros((ROWS, TOKENS), dtype=torch.long)
    return {"input_ids": ids, "labels": ids.clone()}


def llama(num_layers: int = 12) -> Built:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=80, num_hidden_layers=num_layers, num_attention_heads=8, num_key_value_heads=4,
        max_position_embeddings=TOKENS, use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train(), _text()


def gpt2(num_layers: int = 10) -> Built:
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=TOKENS, n_embd=48, n_layer=num_layers, n_head=8, n_inner=128, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).train(), _text()


def mlp(num_layers: int = 24) -> Built:
    """A deep one, of which some sizes are odd."""
    sizes = [(64, 96, 72, 80, 100, 64)[i % 6] for i in range(num_layers)]
    return MLP((32, *sizes, 16)), {"x": torch.zeros(ROWS, 32), "labels": torch.zeros(ROWS, dtype=torch.long)}


MODELS: dict[str, Callable[..., Built]] = {"llama": llama, "gpt2": gpt2, "mlp": mlp}


@dataclass(frozen=True)
class Setting:
    """A model on paced devices, known to the planner by its profile."""

    model: str
    cluster: Cluster
    graph: Graph
    batch: dict[str, torch.Tensor]
    prices: Prices

    def plan(self, *, time_limit_s: float | None = None, **fixed: Any) -> Plan:
        return find_plan(self.graph, None, self.cluster, Constraints(**fixed), "sgd", prices=self.prices, time_limit_s=time_limit_s)


def ready(model: str, devices: str | Path, slower: float = 1.0, **sizes: int) -> Setting:
    """`devices`: one of the files here, a path, or "drawn:RANKS:SEED", with everything `slower` times as long. `sizes`: num_layers of the model."""
    cluster = paced_cluster(_devices(devices).slower(slower))
    built, batch = MODELS[model](**sizes)
    profile = Path(tempfile.mkdtemp(prefix="paced-profile-")) / "profile.sqlite"
    return Setting(model, cluster, capture(built, batch), batch, prices_of(cluster, profile))


def _devices(asked: str | Path) -> PacedDevices:
    if str(asked).startswith("drawn:"):
        num_ranks, seed = map(int, str(asked).split(":")[1:])
        return drawn(num_ranks, seed)
    path = DEVICES / f"{asked}.yaml"
    found = Cluster.parse(path if path.exists() else asked).paced
    assert found is not None, f"{asked} describes no paced devices"
    return found


def sample(setting: Setting, num: int, most_s: float, seed: int = 0) -> Iterator[tuple[str, Plan]]:
    """Plans unlike each other, of random meshes, micro-batches, schedules and ways of storing, the rest as the search finds it in a moment: those that are
    feasible and predicted to take `most_s` at most."""
    draw, seen, tried = random.Random(seed), set(), set()
    for _ in range(20 * num):
        if len(seen) == num:
            return
        fixed = _fixed(setting, draw)
        if tuple(fixed.items()) in tried:
            continue
        tried.add(tuple(fixed.items()))
        try:
            plan = setting.plan(**fixed, time_limit_s=_LIMIT_S)
        except AutoplanError:
            continue
        name = described(plan)
        if name not in seen and plan.forecast.step_time_s <= most_s:
            seen.add(name)
            yield name, plan


def _fixed(setting: Setting, draw: random.Random) -> dict[str, Any]:
    world = setting.cluster.num_devices
    tp = draw.choice([n for n in divisors(world) if n <= 8])
    pp = draw.choice([n for n in divisors(world // tp) if n <= len(setting.graph.blocks)])
    dp = world // tp // pp
    fields: dict[str, Any] = {"tp": tp, "pp": pp, "dp": dp, "micro_batch_size": draw.choice([n for n in (2, 4, 8, 16, 32) if n * dp <= ROWS] or [1])}
    fields["recompute"] = draw.choice(["none", "none", "selective", "full"])
    fields["zero"] = draw.choice([0, 1, 2, 3]) if dp > 1 else 0
    if pp > 1:
        fields["schedule"] = draw.choice(["gpipe", "1f1b", "interleaved", "zb", "zbv"])
    if tp > 1 and setting.model != "mlp":
        fields["sequence_parallel"] = draw.choice([True, False])
    return fields


def described(plan: Plan) -> str:
    """A plan in words that tell it from others of its mesh."""
    cuts = ",".join(str(stage.stop - stage.start) for stage in plan.stages) if len(plan.stages) > 1 else ""
    more = [plan.blocks[len(plan.blocks) // 2].recompute.replace("none", ""), f"blocks {cuts}" if cuts else "", f"rows {plan.shares}" if plan.shares else ""]
    return ", ".join([short(plan), *(text for text in more if text)])

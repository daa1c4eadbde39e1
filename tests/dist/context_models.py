"""The zoo's models for context and expert parallelism in fp64: dropout where it is asked, experts and losses that compute in fp64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.dist.parity import Case, Outcome, run_cases
from tests.zoo import ZOO, Built, gpt2, llama, mixtral, mixtral_aux


def causal_loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
    """transformers' causal loss without its cast to fp32."""
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:]
    return F.cross_entropy(logits.view(-1, vocab_size), shifted.reshape(-1))


def wide(build: Callable[[], Built]) -> Built:
    """transformers' grouped products know no fp64, its plain loop over experts does; its causal loss and its own norms cast to fp32."""
    model, batch = build()
    for path, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            norm = nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon)  # type: ignore[arg-type, union-attr]
            norm.weight = module.weight  # type: ignore[assignment]
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, norm)
    model.config._experts_implementation = "eager"  # type: ignore[union-attr]
    model.loss_function = causal_loss  # type: ignore[assignment]
    return model, batch


def odd(build: Callable[[], Built]) -> Callable[[], Built]:
    """The same model on sequences of 13, which neither 2 nor 4 ranks divide."""

    def shorter() -> Built:
        model, batch = build()
        return model, {name: x[:, :13].contiguous() for name, x in batch.items()}

    return shorter


MODELS: Mapping[str, Callable[[], Built]] = {
    **ZOO,
    "gpt2": lambda: wide(gpt2),
    "llama": lambda: wide(llama),
    "mixtral": lambda: wide(mixtral),
    "mixtral-aux": lambda: wide(mixtral_aux),
    "llama-4-kv": lambda: wide(lambda: llama(num_key_value_heads=4)),
}
MODELS = {**MODELS, **{f"{name}-13": odd(MODELS[name]) for name in ("gpt2", "llama", "llama-4-kv", "mixtral", "mixtral-aux", "bert", "t5")}}


def run_context_cases(cases: list[Case]) -> list[Outcome]:
    """`run_cases` on these models."""
    return run_cases(cases, MODELS)

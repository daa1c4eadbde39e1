"""The zoo's models for context and expert parallelism in fp64: dropout where it is asked, experts that compute in fp64."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.dist.parity import Case, Outcome, run_cases
from tests.zoo import ZOO, Built, llama, mixtral, mixtral_aux


def _wide(build: Callable[[], Built]) -> Built:
    """transformers' grouped products know no fp64; its plain loop over experts does."""
    model, batch = build()
    model.config._experts_implementation = "eager"  # type: ignore[union-attr]
    return model, batch


MODELS: Mapping[str, Callable[[], Built]] = {
    **ZOO,
    "mixtral": lambda: _wide(mixtral),
    "mixtral-aux": lambda: _wide(mixtral_aux),
    "llama-4-kv": lambda: llama(num_key_value_heads=4),
}


def run_context_cases(cases: list[Case]) -> list[Outcome]:
    """`run_cases` on these models."""
    return run_cases(cases, MODELS)

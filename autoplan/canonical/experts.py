"""Layers of experts stay whole in the capture.

transformers dispatches its gated experts through a registry of implementations. While a model is exported, one of ours stands there that
calls a single operator; the graph then holds `runtime.experts`, whose rule divides tokens, experts and inner features. The sorts and
scatters that it stands for would have to see all tokens at once. Experts of another form (biases, no gate, own gating, another layout) keep
the implementation that they have.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autoplan.canonical.trace import Step, Trace

_TARGET = "autoplan.experts.default"
_ACTIVATIONS = {"SiLU": "silu", "SiLUActivation": "silu", "GELU": "gelu", "ReLU": "relu"}
_NAME = "autoplan"


@torch.library.custom_op("autoplan::experts", mutates_args=())
def _experts(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, act: str, num_experts: int) -> torch.Tensor:
    raise RuntimeError("autoplan::experts is a mark in a captured graph; it is never run")


@_experts.register_fake
def _(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, act: str, num_experts: int) -> torch.Tensor:
    return torch.empty_like(x)


@contextmanager
def whole_experts(model: nn.Module) -> Iterator[None]:
    """Inside, the experts of `model` call one operator. The model's configuration is restored afterwards."""
    library: Any = sys.modules.get("transformers.integrations.moe")
    layers: list[Any] = [module for module in model.modules() if _is_plain(module)] if library is not None else []
    if library is None or not layers:
        yield
        return
    configs = {id(layer.config): (layer.config, layer.config._experts_implementation) for layer in layers}
    originals = {layer: layer.config._experts_implementation for layer in layers}

    def forward(self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        act = _activation(self) if _is_plain(self) else None
        if act is None:
            found = library.ALL_EXPERTS_FUNCTIONS.get_interface(originals.get(self, "eager"), type(self).forward.__wrapped__)
            return found(self, hidden_states, top_k_index, top_k_weights)
        weights = top_k_weights.to(hidden_states.dtype)
        return torch.ops.autoplan.experts(hidden_states, top_k_index, weights, self.gate_up_proj, self.down_proj, act, self.gate_up_proj.shape[0])

    library.ALL_EXPERTS_FUNCTIONS.register(_NAME, forward)
    try:
        for config, _ in configs.values():
            config._experts_implementation = _NAME
        yield
    finally:
        for config, implementation in configs.values():
            config._experts_implementation = implementation
        library.ALL_EXPERTS_FUNCTIONS._global_mapping.pop(_NAME, None)


def name_experts(trace: Trace) -> Trace:
    """The marks that `whole_experts` left in the exported program, as the operator that runs them."""

    def named(step: Step) -> Step:
        return replace(step, instr=replace(step.instr, target="runtime.experts")) if step.instr.target == _TARGET else step

    return replace(trace, steps=tuple(named(step) for step in trace.steps))


def _is_plain(module: Any) -> bool:
    """A layer of gated experts, gate above up, without biases or a gate of its own."""
    library: Any = sys.modules.get("transformers.integrations.moe")
    gate = getattr(type(module), "_apply_gate", None)
    if library is None or gate is not library._default_apply_gate or not hasattr(module, "gate_up_proj") or _activation(module) is None:
        return False
    flags = {name: getattr(module, name, None) for name in ("has_gate", "is_concatenated", "has_bias", "is_transposed", "has_post_expert_norm")}
    return flags == dict(has_gate=True, is_concatenated=True, has_bias=False, is_transposed=False, has_post_expert_norm=False)


def _activation(module: Any) -> str | None:
    act: Any = getattr(module, "act_fn", None)
    name = _ACTIVATIONS.get(type(act).__name__)
    return None if name == "gelu" and getattr(act, "approximate", "none") != "none" else name

"""A layer of gated experts, capacity-free: every token goes to each expert that its router chose.

With x (T, h), ids and weights (T, k), gate_up (E, 2f, h) holding gate above up, down (E, h, f):

    y[t] = sum over slots s of weights[t, s] * down[e] (act(gate[e] x[t]) * (up[e] x[t])),   e = ids[t, s]

Under expert parallelism a rank holds E/p experts and adds the slots that chose them; the sum over ranks is y.
Under tensor parallelism inside the experts f is divided, and the sum over ranks is y again.
Source: Jiang et al. 2024 (Mixtral), section 2.1; Shazeer et al. 2017.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from runtime.mesh import Axis

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    act: str,
    num_experts: int,
    *,
    axis: Axis | None = None,
) -> torch.Tensor:
    """y (T, h) of the experts held here: all `num_experts`, or those of this rank of `axis`, numbered by rank."""
    num_local = gate_up.shape[0]
    assert num_local * (axis.size if axis is not None else 1) == num_experts
    first = axis.index * num_local if axis is not None else 0
    flat = ids.reshape(-1) - first
    slots = ((flat >= 0) & (flat < num_local)).nonzero().squeeze(1)
    slots = slots[torch.argsort(flat[slots], stable=True)]
    tokens = slots // ids.shape[1]
    counts = torch.bincount(flat[slots], minlength=num_local).tolist()
    parts = [expert(part, gate_up[e], down[e], act) for e, part in enumerate(x[tokens].split(counts))]
    return x.new_zeros(x.shape[0], down.shape[1]).index_add(0, tokens, torch.cat(parts) * weights.reshape(-1)[slots].unsqueeze(1))


def expert(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, act: str) -> torch.Tensor:
    """One expert's result (rows, h') for its rows (rows, h)."""
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(ACTIVATIONS[act](gate) * up, down)

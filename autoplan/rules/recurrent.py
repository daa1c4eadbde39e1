"""Recurrent layers and cells: rows map; steps, features and directions stay whole.

lstm(x, (h[l, b, p], c[l, b, q]), weights) -> y, h, c        gru, rnn: one state; x and y are [b, t, i] or [t, b, i]
lstm_cell(x[b, i], (h[b, p], c[b, q]), weights) -> h, c      gru_cell, rnn_cell: one state and result
"""

from __future__ import annotations

from autoplan.rules.signature import OPAQUE, Call, Dims, Signature

_STATE: Dims = (OPAQUE, ("b",), OPAQUE)


def layers(call: Call) -> Signature | None:
    """None with dropout between layers, which draws from torch's generator, for packed sequences, and without a dimension of rows."""
    if "input" not in call.args or call.rank("input") != 3 or (call.get("dropout", 0.0) and call.get("train", False) and call.get("num_layers", 1) > 1):
        return None
    steps: Dims = (("b",), OPAQUE, OPAQUE) if call.get("batch_first", False) else (OPAQUE, ("b",), OPAQUE)
    reads = tuple(steps if i == 0 else _STATE if i in call.at["hx"] else (OPAQUE,) * len(spec.shape) for i, spec in enumerate(call.inputs))
    return Signature(reads, (steps, *(_STATE,) * (len(call.outputs) - 1)))


def cell(call: Call) -> Signature | None:
    if call.rank("input") != 2:
        return None
    rows: Dims = (("b",), OPAQUE)
    reads = tuple(rows if i == 0 or i in call.at["hx"] else (OPAQUE,) * len(spec.shape) for i, spec in enumerate(call.inputs))
    return Signature(reads, (rows,) * len(call.outputs))


_KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")

RULES = {**{f"aten.{kind}": layers for kind in _KINDS}, **{f"aten.{kind}_cell": cell for kind in _KINDS}}

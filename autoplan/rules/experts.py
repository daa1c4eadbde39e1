"""Layers of experts (runtime/sharded/experts.py): tokens map; experts and their inner features leave partial sums."""

from __future__ import annotations

from autoplan.rules.signature import Call, Inner, Pair, Signature, sign

_OWN = Inner("sum", "runtime.experts")
_DISPATCH = Pair("dispatch", "t", "e", (3, 4), "runtime.dispatch_experts")


def experts(call: Call) -> Signature:
    """experts(x[t, h], ids[t, k], weights[t, k], gate_up[e, (2 f), h], down[e, o, f]): h is contracted before the activation, so it stays whole."""
    return sign(call, "t h, t _, t _, e (g f) h, e o f -> t o", sums="f", whole="g h", inner={"e": _OWN}, sizes={"g": 2}, pairs=(_DISPATCH,))


RULES = {"runtime.experts": experts}

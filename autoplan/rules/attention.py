"""Scaled dot-product attention: batch and heads map; grouped heads are (key-value head, repetition)."""

from __future__ import annotations

from autoplan.rules.signature import Call, Dim, Pair, Signature, aligned

RINGS = (
    Pair("ring", "s", "t", (1, 2), "runtime.ring_attention", is_same=True),
    Pair("self", "s", "t", (1, 2), "runtime.self_attention_ring", is_same=True),
)


def attention(call: Call) -> Signature | None:
    """q[..., h, s, e], k[..., hk, t, e], v[..., hk, t, d], mask[..., s, t] -> [..., h, s, d].

    Queries map unless the mask is causal by position. Keys and the contracted head dimension stay whole, or are divided together with
    the queries of the same positions: blocks of keys then travel a ring.
    """
    if call.target.startswith("aten.") and call.get("dropout_p", 0.0):
        return None  # draws from the global generator: another sequence of numbers on each shard
    names = ("query", "key", "value") if "query" in call.args else ("q", "k", "v")
    q, k, v = (call.shape(name) for name in names)
    out = call.out()
    if len(q) < 3 or not len(q) == len(k) == len(v):
        return None
    grouped = bool(call.get("enable_gqa", False)) and q[-3] != k[-3]
    lead = out[:-3] if grouped else out[:-2]

    def heads(shape: tuple[int, ...], own: Dim) -> tuple[Dim, ...]:
        return (*aligned(shape[:-3], lead, "b"), own) if grouped else aligned(shape[:-2], lead, "b")

    both: Dim = ("g", "r")
    reads: list[tuple[Dim, ...]] = [(*heads(q, both), ("s",), ("e",)), (*heads(k, ("g",)), ("t",), ("e",)), (*heads(v, ("g",)), ("t",), ("d",))]
    mask = "attn_mask" if "attn_mask" in call.args else "mask"
    if call.has(mask):
        shape = call.shape(mask)
        named = (*(tuple((f"b{i}",) for i in range(len(lead)))), *((both,) if grouped else ()), ("s",), ("t",))
        full = (*out[:-1], k[-2])
        shift = len(full) - len(shape)
        reads.append(tuple(named[i + shift] if n == full[i + shift] else () for i, n in enumerate(shape)))
    write = (*(tuple((f"b{i}",) for i in range(len(lead)))), *((both,) if grouped else ()), ("s",), ("d",))
    dropped = bool(call.get("dropout_p", 0.0))  # one mask over (s, t) for all features of v: ranks that divide d would draw others
    whole = frozenset({"t", "e", *(("s",) if call.get("is_causal", False) else ()), *(("d",) if dropped else ())})
    sizes = {"g": k[-3], "r": q[-3] // k[-3]} if grouped else {}
    pairs = RINGS if q[:-3] == k[:-3] == v[:-3] and q[-2] == k[-2] == v[-2] and (grouped or q[-3] == k[-3]) else ()
    return Signature(tuple(reads), (write,), whole=whole, linear=() if dropped else ((2,),), sizes=sizes, pairs=pairs)


RULES = {"aten.scaled_dot_product_attention": attention, "runtime.attention": attention}

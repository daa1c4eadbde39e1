"""Operators of the canonical transformer block, embedding and head on local shapes, as price keys.

Tensor parallelism splits heads, feed-forward and vocabulary; sequence parallelism also the rows of norms and residuals;
context parallelism the rows everywhere. A key's operands and outputs are local.
"""

from __future__ import annotations

import json
from functools import lru_cache

from benchmarks.accuracy.record import Model, Run
from costmodel.opkey import OpKey, Shape

_T = [{"tensor": i} for i in range(4)]


def _linear(rows: int, n: int, k: int, dtype: str) -> OpKey:
    return OpKey("aten.linear.default", (((rows, k), dtype), ((n, k), dtype)), (((rows, n), dtype),), json.dumps([_T[:2], {}]), (True, True), 2 * rows * n * k)


def _pass(target: str, shape: Shape, dtype: str, operands: int = 1) -> OpKey:
    return OpKey(target, ((shape, dtype),) * operands, ((shape, dtype),), "", (True,) * operands, 0)


def _attention(m: Model, b: int, cp: int, heads: int, dropout: float, dtype: str) -> OpKey:
    d = m.hidden // m.heads
    q, k = (b, heads, m.seq // cp, d), (b, heads, m.seq, d)
    args = json.dumps([[*_T[:3], None, dropout, True], {}])
    return OpKey("aten.scaled_dot_product_attention.default", ((q, dtype), (k, dtype), (k, dtype)), ((q, dtype),), args, (True,) * 3, 0)


def layer(run: Run) -> tuple[tuple[OpKey, ...], tuple[OpKey, ...]]:
    """Keys of a layer: (products and then attention, memory passes), of one micro-batch on one rank."""
    return _layer(run.model, run.micro_batch, run.tp, run.cp, run.sequence_parallel, run.dtype, run.gemm_dtype)


@lru_cache(maxsize=4096)
def _layer(m: Model, batch: int, t: int, cp: int, sequence_parallel: bool, dtype: str, gemm: str) -> tuple[tuple[OpKey, ...], tuple[OpKey, ...]]:
    rows = batch * m.seq // cp
    narrow = max(1, rows // t) if sequence_parallel else rows
    d = m.hidden // m.heads
    heads, kv, ffn = max(1, m.heads // t), max(1, m.kv_heads // t), max(1, m.ffn // t)
    wide, slim = (rows, ffn), (narrow, m.hidden)
    products = [_linear(rows, (heads + 2 * kv) * d, m.hidden, gemm), _linear(rows, m.hidden, heads * d, gemm), _linear(rows, m.hidden, ffn, gemm)]
    dropout = 0.0 if m.gated else 0.1
    passes = [_pass("aten.layer_norm.default", slim, dtype)] * 2 + [_pass("aten.add.Tensor", slim, dtype, 2)] * 2
    if m.gated:
        products += [_linear(rows, ffn, m.hidden, gemm)] * 2
        passes += [_pass("aten.silu.default", wide, dtype), _pass("aten.mul.Tensor", wide, dtype, 2)]
        passes += [_pass("aten.mul.Tensor", (rows, (heads + kv) * d), dtype)] * 3  # rotary positions
    else:
        products.append(_linear(rows, ffn, m.hidden, gemm))
        passes += [_pass("aten.gelu.default", wide, dtype)]
        passes += [_pass("aten.dropout.default", slim, dtype)] * 2 + [_pass("aten.clone.default", (rows, (heads + 2 * kv) * d), dtype)]
    if gemm == "float8":  # quantisation of every product's operands
        passes += [_pass("aten.to.dtype", (rows, k.operands[0][0][1]), dtype) for k in products]
    return (*products, _attention(m, batch, cp, heads, dropout, dtype)), tuple(passes)


def embedding(run: Run) -> tuple[OpKey, ...]:
    """Lookup of the first stage."""
    rows, m = run.micro_batch * run.model.seq // run.cp, run.model
    table = (max(1, m.vocab // run.tp), m.hidden)
    key = OpKey("aten.embedding.default", ((table, run.dtype), ((rows,), "int64")), (((rows, m.hidden), run.dtype),), "", (True, False), 0)
    return (key, _pass("aten.add.Tensor", (rows, m.hidden), run.dtype, 2))


def head(run: Run) -> tuple[OpKey, ...]:
    """Final norm, projection on the vocabulary and loss of the last stage."""
    rows, m = run.micro_batch * run.model.seq // run.cp, run.model
    vocab = max(1, padded_vocab(m, run.tp) // run.tp)
    norm = _pass("aten.layer_norm.default", (rows, m.hidden), run.dtype)
    if not m.head:
        return (norm, _pass("aten.cross_entropy_loss.default", (rows, m.hidden), "float32"))
    dtype = "tf32" if run.gemm_dtype == "tf32" else run.dtype
    return (
        norm,
        _linear(rows, vocab, m.hidden, dtype),
        _pass("aten.to.dtype", (rows, vocab), "float32"),
        _pass("aten.cross_entropy_loss.default", (rows, vocab), "float32"),
    )


def padded_vocab(m: Model, tp: int) -> int:
    """Vocabulary padded to a multiple of 128 tp."""
    step = 128 * tp
    return -(-m.vocab // step) * step


def layer_parameters(run: Run) -> int:
    """Elements of one layer on one rank."""
    m, t = run.model, run.tp
    d = m.hidden // m.heads
    attention = m.hidden * (m.heads + 2 * m.kv_heads) * d + m.heads * d * m.hidden
    return (attention + (3 if m.gated else 2) * m.hidden * m.ffn) // t + 4 * m.hidden


def vocab_parameters(run: Run) -> int:
    """Elements of one vocabulary table on one rank."""
    return padded_vocab(run.model, run.tp) // run.tp * run.model.hidden

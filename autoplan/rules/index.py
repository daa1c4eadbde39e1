"""Gathers: what is looked up is whole, the index and everything beside it maps."""

from __future__ import annotations

from autoplan.rules.signature import OPAQUE, Call, Dims, Inner, Signature, aligned, integer, labels, sign
from runtime.instr import Ref


def embedding(call: Call) -> Signature | None:
    """embedding(weight[v, h], ids[...]): a divided vocabulary leaves partial sums (Megatron-LM, section 3)."""
    if call.get("scale_grad_by_freq", False) or call.get("sparse", False):
        return None
    return sign(call, "v h, b* -> b* h", linear=((0,),), inner={"v": Inner("sum", "runtime.vocab_embedding")})


def gather(call: Call) -> Signature:
    """gather(x, dim, index): dimensions beside `dim` where the index has the length of x."""
    shape, index = call.shape("self"), call.shape("index")
    rank = len(shape)
    if not rank:
        return Signature(((), ()), ((),), linear=((0,),))
    dim = integer(call.args["dim"]) % rank
    shared = [k != dim and shape[k] == index[k] for k in range(rank)]
    read = tuple(d if shared[k] else OPAQUE for k, d in enumerate(labels(rank)))
    wrote = tuple(d if shared[k] or k == dim else OPAQUE for k, d in enumerate(labels(rank)))
    return Signature((read, wrote), (wrote,), linear=((0,),))


def index_put(call: Call) -> Signature | None:
    """x with values written at x[:, i, j]: dimensions without an index, where the values have them too."""
    given = call.args["indices"]
    assert isinstance(given, tuple)
    if any(call.inputs[i].dtype in ("bool", "uint8") for i in call.at["indices"]):
        return None
    rank, where = call.rank("self"), [k for k, item in enumerate(given) if isinstance(item, Ref)]
    count = max(len(call.inputs[i].shape) for i in call.at["indices"])
    kept = [k for k in range(rank) if k not in where]
    first = where[0] if where[-1] - where[0] + 1 == len(where) else 0
    looked: list[int | None] = [*kept]
    looked[first:first] = [None] * count
    shape, values = call.shape("self"), call.shape("values")
    looked = looked[len(looked) - len(values) :]
    shared = {k for k, n in zip(looked, values, strict=True) if k is not None and n == shape[k]}
    read = tuple((f"d{k}",) if k in shared else OPAQUE for k in range(rank))
    source = tuple((f"d{k}",) if k in shared else OPAQUE for k in looked)
    indices = tuple((OPAQUE,) * len(call.inputs[i].shape) for i in call.at["indices"])
    return Signature((read, *indices, source), (read,))


def index_select(call: Call) -> Signature:
    shape = call.shape("self")
    dim = integer(call.args["dim"]) % max(len(shape), 1)
    dims = labels(len(shape))
    read = (*dims[:dim], OPAQUE, *dims[dim + 1 :])
    return Signature((read, (dims[dim],)), (dims,), linear=((0,),)) if call.rank("index") == 1 else Signature((read, ()), (dims,), linear=((0,),))


def index(call: Call) -> Signature | None:
    """x[:, i, j]: integer indices are broadcast together; they replace the dimensions that they index."""
    given = call.args["indices"]
    assert isinstance(given, tuple)
    if any(call.inputs[i].dtype in ("bool", "uint8") for i in call.at["indices"]):
        return None  # the number of results depends on the data
    shape, out = call.shape("self"), call.out()
    where = [k for k, item in enumerate(given) if isinstance(item, Ref)]
    count = max(len(call.inputs[i].shape) for i in call.at["indices"])
    kept = [k for k in range(len(shape)) if k not in where]
    together = where[-1] - where[0] + 1 == len(where)
    first = where[0] if together else 0
    joint = out[first : first + count]
    looked = tuple((f"j{k}",) for k in range(count))
    rest: Dims = tuple((f"d{k}",) for k in kept)
    reads = (tuple(OPAQUE if k in where else (f"d{k}",) for k in range(len(shape))), *(aligned(call.inputs[i].shape, joint, "j") for i in call.at["indices"]))
    return Signature(reads, (rest[:first] + looked + rest[first:],), linear=((0,),))


def scatter(call: Call) -> Signature | None:
    """scatter(x, dim, index, src): dimensions beside `dim` that all of them share."""
    if len({len(spec.shape) for spec in call.inputs}) != 1:
        return None
    rank = call.rank("self")
    dim = integer(call.args["dim"]) % rank
    shared = [k != dim and len({spec.shape[k] for spec in call.inputs}) == 1 for k in range(rank)]
    dims = tuple(d if shared[k] else OPAQUE for k, d in enumerate(labels(rank)))
    return Signature((dims,) * len(call.inputs), (dims,))


def inserted(call: Call) -> Signature:
    """select_scatter and slice_scatter: x with `src` written over a part of dimension `dim`."""
    rank = call.rank("self")
    dim = integer(call.get("dim", 0)) % rank
    dims = labels(rank)
    beside = (*dims[:dim], OPAQUE, *dims[dim + 1 :])
    source = beside if call.rank("src") == rank else dims[:dim] + dims[dim + 1 :]
    return Signature((beside, source), (beside,), linear=((0, 1),))


def one_hot(call: Call) -> Signature | None:
    return sign(call, "b* -> b* _") if call.get("num_classes", -1) > 0 else None


def bucketize(call: Call) -> Signature:
    return sign(call, "b*, _* -> b*")


RULES = {
    "aten.embedding": embedding,
    "aten.gather": gather,
    "aten.index_select": index_select,
    "aten.index": index,
    "aten.index_put": index_put,
    **{f"aten.{name}": scatter for name in ("scatter", "scatter_add", "scatter_reduce")},
    "aten.one_hot": one_hot,
    "aten.select_scatter": inserted,
    "aten.slice_scatter": inserted,
    "aten.bucketize.Tensor": bucketize,
    "aten.isin.Tensor_Tensor": bucketize,
}

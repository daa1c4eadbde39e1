"""Which rule an operator has: built-in rows, the pointwise tag, and what the user registered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from autoplan.errors import UsageError
from autoplan.rules import attention, conv, create, experts, fourier, index, loss, matmul, norm, pointwise, recurrent, reduce, shape
from autoplan.rules.signature import OPAQUE, Call, Signature, bind, lengths, parse, sign
from runtime.call import resolve
from runtime.instr import Instr, TensorSpec, uses

Rule = Callable[[Call], "Signature | None"]

BUILT_IN: Mapping[str, Rule] = {
    **attention.RULES,
    **conv.RULES,
    **create.RULES,
    **experts.RULES,
    **fourier.RULES,
    **index.RULES,
    **loss.RULES,
    **matmul.RULES,
    **norm.RULES,
    **pointwise.RULES,
    **recurrent.RULES,
    **reduce.RULES,
    **shape.RULES,
}

# Parameters of functions of this project, with defaults, as ATen's schemas give them for operators.
_RUNTIME: Mapping[str, tuple[str, ...]] = {
    "runtime.batch_norm": ("x", "weight", "bias", "running_mean", "running_var", "momentum", "eps"),
    "runtime.dropout": ("x", "p", "op_id"),
    "runtime.attention": ("q", "k", "v", "mask", "dropout_p", "is_causal", "scale", "enable_gqa", "op_id"),
    "runtime.experts": ("x", "ids", "weights", "gate_up", "down", "act", "num_experts"),
    "runtime.scale_by_count": ("x", "count"),
}


@dataclass(slots=True)
class Registry:
    """Rules of user operators: "ns.op" -> text of the signature."""

    texts: dict[str, str] = field(default_factory=dict)

    def register(self, operator: str, text: str) -> None:
        """Give `operator` ("ns::op") a signature. Raises UsageError for a name or text of another form."""
        namespace, colons, name = operator.partition("::")
        if not colons or not namespace or not name:
            raise UsageError(f"a rule was registered for {operator!r}: name the operator as 'namespace::operator'")
        try:
            parse(text)
        except ValueError as error:
            raise UsageError(str(error)) from error
        self.texts[f"{namespace}.{name}"] = text


DEFAULT = Registry()


def register_rule(operator: str, text: str) -> None:
    """Give a custom operator its factors: `register_rule("ns::op", "b s h d, b t h d, b t h d -> b s h d")`.

    Labels are claims: a loop is used once the shard simulator has proved it. Inputs that share a label with
    every output map; a label that outputs lack is never taken for a sum. Raises UsageError.
    """
    DEFAULT.register(operator, text)


@cache
def parameters(target: str) -> tuple[tuple[str, Any], ...] | None:
    """Names and defaults of a target's parameters; None where nothing states them."""
    if target.startswith("runtime."):
        names = _RUNTIME.get(target)
        return None if names is None else tuple((name, None) for name in names)
    schema = getattr(resolve(target), "_schema", None)
    if schema is None:
        return None
    defaults = [a.default_value if a.has_default_value() else None for a in schema.arguments]
    return tuple((a.name, tuple(d) if isinstance(d, list) else d) for a, d in zip(schema.arguments, defaults, strict=True))


@cache
def _tagged_pointwise(target: str) -> bool:
    """Whether torch itself calls an operator elementwise. Those that draw random numbers are not: shards would draw others."""
    if target.startswith(("runtime.", "operator.")):
        return False
    operator = resolve(target)
    tags, schema = getattr(operator, "tags", ()), getattr(operator, "_schema", None)
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags and schema is not None and not schema.is_mutable


def call_of(instr: Instr, inputs: tuple[TensorSpec, ...]) -> Call | None:
    """`instr` with its arguments by name; None where its parameters are not known."""
    names = parameters(instr.target)
    if names is None:
        return None
    args, at = bind(instr.target, names, instr.args, instr.kwargs)
    return Call(instr.target, args, at, inputs, tuple(output.spec for output in instr.outputs))


def signature(instr: Instr, inputs: tuple[TensorSpec, ...], registry: Registry = DEFAULT) -> Signature | None:
    """The signature of `instr` for operands of specs `inputs`; None where it has none and stays whole.

    Raises UsageError where a user's rule does not fit the shapes.
    """
    assert len(inputs) == len(uses(instr))
    call = call_of(instr, inputs)
    if call is None:
        return None
    packet = call.target.rpartition(".")[0] if not call.target.startswith("runtime.") else call.target
    if packet in registry.texts:
        return _claimed(call, registry.texts[packet])
    rule = BUILT_IN.get(call.target) or BUILT_IN.get(packet)
    if rule is None and _tagged_pointwise(call.target) and any(call.outputs):
        rule = pointwise.elementwise
    return None if rule is None else rule(call)


def _claimed(call: Call, text: str) -> Signature:
    """A user's signature. Labels that are not in every output stay whole: nothing says that they are summed."""
    left, right = parse(text)
    outputs = tuple(spec for spec in call.outputs if spec is not None)
    try:
        if (len(left), len(right)) != (len(call.inputs), len(outputs)):
            counts = f"{len(left)} operands and {len(right)} outputs, the call {len(call.inputs)} operands and {len(outputs)} outputs"
            raise ValueError(f"the rule {text!r} of {call.target} has {counts}")
        found = sign(call, text)
        found = replace(found, sizes=lengths(found, call.inputs, outputs))
    except ValueError as error:
        hint = "" if str(error).startswith("the rule") else f"the rule {text!r} of {call.target} "
        raise UsageError(f"{hint}{error}; give one label per dimension, '_' for those that nothing is known of") from error
    everywhere = [{label for dim in dims for label in dim} for dims in found.writes]
    used = {label for dims in (*found.reads, *found.writes) for dim in dims for label in dim}
    mapped = set.intersection(*everywhere) if everywhere else set()
    return replace(found, whole=frozenset(used - mapped), proved=False)


def opaque(inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> Signature:
    """The signature of an operator without a rule: nothing is known of any dimension."""
    return Signature(tuple((OPAQUE,) * len(s.shape) for s in inputs), tuple((OPAQUE,) * len(s.shape) for s in outputs))

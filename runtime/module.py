"""The modules that hold a stage's tensors and compute with them, in a shape that FSDP2 can wrap.

A `Holder` hands its tensors to a function that the caller passes. FSDP2 gathers what a holder keeps around that call. One
group of FSDP2 takes trainable parameters of one dtype only, so holders nest: one layer for each dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from runtime.call import dtype_of
from runtime.collective import share
from runtime.compile import Compiled
from runtime.master import Copies
from runtime.mesh import Axis
from runtime.preamble import Coming
from runtime.program import BlockCode, Stored
from runtime.random import bound
from runtime.record import Recorder, is_profiled, profiled
from runtime.selective import contexts

Values = Mapping[str, torch.Tensor]
Function = Callable[[Values, Values], dict[str, torch.Tensor]]  # (inputs, stored) -> outputs


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a stored value is kept, and how it is read."""

    attribute: str
    shape: tuple[int, ...]
    dtype: torch.dtype  # in which it is read
    is_parameter: bool
    share_over: Axis | None  # the gradient is complete on each data rank, but will be summed over them


class Holder(nn.Module):
    """Tensors at rest for one function. `inner` holds trainable parameters of a further dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: Holder | None = None
        self.copies = Copies()
        self._slots: dict[str, _Slot] = {}
        self._dtype: torch.dtype | None = None

    def hold(self, stored: Stored, local: torch.Tensor, *, at_least_1d: bool = False, share_over: Axis | None = None) -> None:
        """Keep `local` as what `stored` is. FSDP2 takes no scalars: `at_least_1d` keeps them as one entry."""
        if stored.kind == "parameter" and stored.requires_grad:
            if self._dtype not in (None, local.dtype):
                if self.inner is None:
                    self.inner = Holder()
                return self.inner.hold(stored, local, at_least_1d=at_least_1d, share_over=share_over)
            self._dtype = local.dtype
        dtype = dtype_of(stored.spec.dtype)
        slot = _Slot(f"t{len(self._slots)}", tuple(local.shape), dtype, stored.kind == "parameter", share_over if stored.requires_grad else None)
        self._slots[stored.name] = slot
        if slot.is_parameter:
            kept = local.reshape(1) if at_least_1d and local.dim() == 0 else local
            self.register_parameter(slot.attribute, nn.Parameter(kept, requires_grad=stored.requires_grad))
        else:
            setattr(self, slot.attribute, local)  # no module buffer: FSDP2 must neither move nor cast it

    def kept(self, name: str) -> torch.Tensor:
        """The tensor at rest that `hold` kept under this name."""
        if name in self._slots:
            return getattr(self, self._slots[name].attribute)
        assert self.inner is not None, name
        return self.inner.kept(name)

    def layers(self) -> list[Holder]:
        """This holder and the inner ones, innermost first."""
        return [*(self.inner.layers() if self.inner is not None else []), self]

    def names(self) -> tuple[str, ...]:
        """What is held here and inside."""
        return (*self._slots, *(self.inner.names() if self.inner is not None else ()))

    @property
    def has_parameters(self) -> bool:
        return any(slot.is_parameter for slot in self._slots.values())

    @property
    def read_dtype(self) -> torch.dtype | None:
        """The dtype in which trainable parameters of this layer are read, where it is another than they rest in."""
        found = {slot.dtype for slot in self._slots.values() if slot.is_parameter and getattr(self, slot.attribute).dtype != slot.dtype}
        assert len(found) <= 1, found
        return next(iter(found), None)

    def forward(self, function: Function, inputs: Values, stored: Values) -> dict[str, torch.Tensor]:
        stored = {**stored, **{name: self._read(name, slot) for name, slot in self._slots.items()}}
        return function(inputs, stored) if self.inner is None else self.inner(function, inputs, stored)

    def _read(self, name: str, slot: _Slot) -> torch.Tensor:
        value = self.copies.read(name, getattr(self, slot.attribute), slot.dtype)
        if value.shape != slot.shape:
            value = value.reshape(slot.shape)
        return value if slot.share_over is None else share(value, axis=slot.share_over)


class StageModule(Holder):
    """A stage: what several of its blocks read, and one holder for each block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict()
        self._keys: dict[str, str] = {}  # block name -> module name, which takes no dots

    def holders(self) -> tuple[tuple[str, Holder], ...]:
        """The holder of each block, by the block's name."""
        return tuple((name, self.block(name)) for name in self._keys)

    def block(self, name: str) -> Holder:
        """The holder of the block called `name`, made at the first call."""
        key = self._keys.setdefault(name, f"b{len(self._keys)}")
        if key not in self.blocks:
            self.blocks[key] = Holder()
        found = self.blocks[key]
        assert isinstance(found, Holder)
        return found


@dataclass(frozen=True, eq=False)
class Step:
    """A block ready to run. `dead` are the values that nothing after it reads."""

    code: BlockCode
    compiled: Compiled
    holder: Holder
    dead: tuple[str, ...]
    recorder: Recorder


@dataclass(frozen=True, eq=False)
class CompiledBody:
    """The blocks of a stage for one number of rows; `keep` are the values that the executor wants to have, `constants` those
    of the stage."""

    module: StageModule
    steps: tuple[Step, ...]
    keep: tuple[str, ...]
    constants: Values

    def __call__(self, inputs: Mapping[str, torch.Tensor | Coming]) -> dict[str, torch.Tensor]:
        """The values of `keep`. What of the inputs is on its way is waited for by the block that reads it."""
        return self.module(self._run, inputs, self.constants)

    def _run(self, inputs: Mapping[str, torch.Tensor | Coming], stored: Values) -> dict[str, torch.Tensor]:
        env = dict(inputs)
        for step in self.steps:
            read = {name: _arrived(env[name]) for name in step.code.inputs}
            shared = {name: stored[name] for name in step.code.stored if name in stored}
            env.update(step.holder(_block_function(step), read, shared))
            for name in step.dead:
                env.pop(name, None)
        return {name: _arrived(env[name]) for name in self.keep}


def _arrived(value: torch.Tensor | Coming) -> torch.Tensor:
    return value.arrived() if isinstance(value, Coming) else value


def _block_function(step: Step) -> Function:
    code = step.code

    def ranged(inputs: Values, stored: Values) -> dict[str, torch.Tensor]:
        with profiled(f"{code.name}, stage {step.recorder.stage}, micro-batch {step.recorder.micro_batch}"):
            return run(inputs, stored)

    def run(inputs: Values, stored: Values) -> dict[str, torch.Tensor]:
        args = [inputs[name] for name in code.inputs] + [stored[name] for name in code.stored]
        if code.recompute == "none" or not torch.is_grad_enabled():
            outputs = step.compiled(*args)
        else:
            # No early stop: what is repeated, collectives included, has to follow from the program alone.
            context_fn = contexts if code.recompute == "selective" else noop_context_fn
            outputs = checkpoint(bound(step.compiled), *args, use_reentrant=False, preserve_rng_state=False, early_stop=False, context_fn=context_fn)
        return dict(zip(code.outputs, outputs, strict=True))

    return ranged if is_profiled() else run

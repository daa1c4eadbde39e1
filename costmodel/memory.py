"""Bytes of the states at rest: parameters, gradients, optimizer states, master copies, by ZeRO stage.

With P parameters on a rank before ZeRO, N ranks that share states, and bytes an element of the working copy (w), gradient
(g), master copy (m) and optimizer states (o) (Rajbhandari et al. 2020, section 3 and appendix):

    stage 0    (w + g + m + o) P
    stage 1    (w + g) P           + (m + o) P/N
    stage 2     w P                + (g + m + o) P/N
    stage 3    (w + g + m + o) P/N + the largest group that is gathered at once, w each of its elements

Mixed-precision Adam: w = g = 2, m = 4, o = 8: 16 P, 4 P + 12 P/N, 2 P + 14 P/N, 16 P/N. Every part rounds up to whole elements.
"""

from __future__ import annotations

from dataclasses import dataclass

# Optimizer states in elements a parameter: what each keeps beside parameter and gradient.
_STATES = {"sgd": 0, "sgd-momentum": 1, "adagrad": 1, "rmsprop": 1, "lion": 1, "adadelta": 2, "adam": 2, "adamw": 2, "nadam": 2, "radam": 2, "adamax": 2}


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes an element."""

    parameter: int
    gradient: int
    master: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameter + self.gradient + self.master + self.optimizer


@dataclass(frozen=True, slots=True)
class States:
    """Bytes of a rank. `optimizer` includes master copies; `gathered`: whole parameters that stage 3 holds for a moment."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.gathered


def widths(precision: str | None, optimizer: str, parameter_bytes: int = 4) -> Widths:
    """Widths under a precision: None or "fp32" keep everything at `parameter_bytes`; "bf16" computes on 2-byte copies of
    fp32 masters, gradients reduced in fp32; "fp16" likewise. ValueError for an optimizer or precision that is not known."""
    if optimizer not in _STATES:
        raise ValueError(f"optimizer {optimizer!r} is not known; known: {', '.join(sorted(_STATES))}")
    if precision in ("bf16", "fp16"):
        return Widths(2, 4, 4, 4 * _STATES[optimizer])
    if precision not in (None, "fp32"):
        raise ValueError(f"precision {precision!r} is not known; known: fp32, bf16, fp16")
    width = 4 if precision == "fp32" else parameter_bytes
    return Widths(width, width, 0, width * _STATES[optimizer])


def states(num_elements: int, per_element: Widths, stage: int, group: int, largest_gathered: int = 0) -> States:
    """Bytes of a rank's states. `num_elements`: P, trainable, after tensor and pipeline splits; `group`: N;
    `largest_gathered`: elements that stage 3 gathers at once. ValueError for a stage outside 0..3 or a group below 1."""
    if stage not in (0, 1, 2, 3) or group < 1:
        raise ValueError(f"ZeRO stage {stage} over {group} ranks: the stage is 0, 1, 2 or 3 and the group at least 1")
    share = -(-num_elements // group)
    whole, part = num_elements, share
    return States(
        parameters=per_element.parameter * (part if stage >= 3 else whole),
        gradients=per_element.gradient * (part if stage >= 2 else whole),
        optimizer=(per_element.master + per_element.optimizer) * (part if stage >= 1 else whole),
        gathered=per_element.parameter * largest_gathered if stage >= 3 and group > 1 else 0,
    )

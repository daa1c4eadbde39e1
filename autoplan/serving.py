"""Data ranks that serve parameters and compute nothing: what a model's passes must not ask of them.

Such a rank runs the preamble, for none of the rows, and takes part in pushes and pulls. It has no passes, so no collective over the data axis can be
inside of them, and it writes no buffers.
"""

from __future__ import annotations

from autoplan.errors import InfeasibleError
from runtime.program import Program
from runtime.traffic import passes


def check_serving(program: Program) -> None:
    """Raises InfeasibleError for a program whose passes exchange over the data axis or write buffers."""
    kinds = sorted({kind for kind, axis, phase, _ in passes(program, {"dp": program.first_worker}) if axis == "dp"})
    if kinds:
        raise InfeasibleError(
            f"workers={program.workers}: the model's passes exchange over the data axis ({', '.join(kinds)}: statistics or sums over the batch inside of the "
            "model), and ranks that only serve have no passes. Leave workers out, so that servers compute too"
        )
    written = [buffer for stage in program.stages for buffer, _ in stage.updates]
    if written:
        raise InfeasibleError(
            f"workers={program.workers}: the model writes {written[0]!r} in every step, which ranks that only serve do not compute. "
            "Leave workers out, so that servers compute too"
        )

"""Quantities as text for people: three significant figures and a unit."""

from __future__ import annotations

import math

_TIME = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_BYTES = ((2**50, "PiB"), (2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
_COUNT = ((1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def seconds(value_s: float) -> str:
    """0.01234 -> "12.3 ms"; two minutes and more in minutes, two hours and more in hours."""
    if value_s >= 7200:
        return f"{figures(value_s / 3600)} h"
    if value_s >= 120:
        return f"{figures(value_s / 60)} min"
    return _scaled(value_s, _TIME)


def num_bytes(value: float) -> str:
    """Binary multiples: 1536 -> "1.5 KiB"."""
    return _scaled(value, _BYTES)


def count(value: float, unit: str = "") -> str:
    """Decimal multiples: 12345 -> "12.3 k"; with a unit "12.3 kFLOP"."""
    return f"{_scaled(value, _COUNT)}{unit}".rstrip()


def figures(value: float) -> str:
    """Three significant figures without an exponent, trailing zeros dropped: 12.345 -> "12.3", 1234.5 -> "1,234"."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _scaled(value: float, scale: tuple[tuple[float, str], ...]) -> str:
    for size, unit in scale:
        if abs(value) >= size:
            return f"{figures(value / size)} {unit}"
    return f"{figures(value / scale[-1][0])} {scale[-1][1]}"

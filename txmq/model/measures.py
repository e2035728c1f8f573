"""Durations, sizes and counts as people write them: 90s, 15 min, 10MiB, 1 letter."""

from __future__ import annotations

import re
from collections.abc import Mapping

UNITS_MS = {
    "ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000,
    "w": 604_800_000,
}  # fmt: skip
SIZES = {"": 1, "B": 1} | {
    name + ending: base**power
    for power, name in enumerate("KMGT", start=1)
    for ending, base in (("iB", 1_024), ("B", 1_000))
}
SECONDS_MS = {"": 1_000} | UNITS_MS  # a number alone is seconds
_MEASURE = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s?([A-Za-z]*)")


def parse_measure(text: str, units: Mapping[str, int], kind: str, form: str) -> int:
    """Return a number times its unit. `kind` and `form` are for the error.

    Raises ValueError.
    """
    match = _MEASURE.fullmatch(text)
    if match is None or match[2] not in units:
        raise ValueError(f"invalid {kind} {text!r:.80}: use {form}")
    number = round(float(match[1]) * units[match[2]])
    if number >= 1 << 63:
        raise ValueError(f"invalid {kind} {text!r:.80}: it does not fit into 64 bits")
    return number


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, as "1 letter" and "2,000 letters"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"

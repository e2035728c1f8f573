"""Settings, arguments and results of calls in words, by the names of their fields.

Calls name the unit of a value at the end of its field: `retention_ms`, `lease_us`,
`ramp_s`, `bytes_per_s`. People read a label without it, and a value with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from txmq.model.letter_filter import format_filter
from txmq.model.units import DAY, HOUR, MILLISECOND, MINUTE, SECOND

LENGTHS = ((DAY, "d"), (HOUR, "h"), (MINUTE, "min"), (SECOND, "s"), (MILLISECOND, "ms"))
SIZES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
UNITS = {"_us": 1, "_ms": MILLISECOND, "_s": SECOND}
RATE = "_per_s"
YEAR_2000 = 946_684_800 * SECOND
PLACE = (str, int, int)  # of a message
_TIME = re.compile(r"(at|start|end|to|.*_(at|from|before))")  # fields with an instant


def instant(value: int) -> str:
    """Return a time, from microseconds since the epoch, in UTC."""
    try:
        return datetime.fromtimestamp(value / SECOND, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return str(value)


def label(name: str) -> str:
    """Return the name of a field as people read it, without its unit."""
    if not name.endswith(RATE):
        for ending in UNITS:
            name = name.removesuffix(ending)
    return name.replace(RATE, " per second").replace("_", " ")


def in_words(value: object, name: str = "") -> str:
    """Return a value of a field as people read it."""
    match value:
        case bool():
            return "yes" if value else "no"
        case int() | float():
            return _number(value, name)
        case list() | tuple() if value:
            if tuple(map(type, value)) == PLACE:
                return "/".join(map(str, value))
            return ", ".join(in_words(one, name) for one in value)
        case dict() if value:
            return _fields(value, name)
    return str(value) if value else "–"


def length(micros: float) -> str:
    """Return a duration exactly, in the largest unit of which it is a whole number."""
    for unit, name in LENGTHS:
        if micros and micros % unit == 0:
            return f"{micros // unit:.0f} {name}"
    return f"{micros / SECOND:.6f}".rstrip("0").rstrip(".") + " s"


def _number(value: float, name: str) -> str:
    if "bytes" in name:
        return _size(value)
    if not name.endswith(RATE):
        for ending, unit in UNITS.items():
            if name.endswith(ending):
                return length(value * unit)
    if value > YEAR_2000 and _TIME.fullmatch(name):
        return instant(int(value))
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _size(value: float) -> str:
    for unit, name in SIZES:
        if value and value % unit == 0:
            return f"{value // unit:,.0f} {name}"
    return f"{value:,.0f} B"


def _fields(value: Mapping[str, Any], name: str) -> str:
    if value.keys() == {"items"}:  # a long list of the audit topic
        return f"{value['items']:,} of them"
    if name == "select":
        return format_filter(value) or "all open letters"
    return "; ".join(
        f"{label(one)}: {in_words(each, one)}" for one, each in value.items() if each or each == 0
    )

"""Times and sizes as people write them: 7d, 90s, 10GiB; "default" and "none" where
those mean something.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import typer

TIMES_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
SIZES = {"": 1, "B": 1} | {
    name + ending: base**power
    for power, name in enumerate("KMGT", start=1)
    for ending, base in (("iB", 1_024), ("B", 1_000))
}
DEFAULT, NONE = "default", "none"
POLICIES = ("delete", "archive", DEFAULT)
SWITCHES = {"yes": True, "no": False, "true": True, "false": False}


def milliseconds(text: str) -> int:
    """The time in such a text as "36h"."""
    return _measured(
        text, TIMES_MS, "a time: a number and ms, s, m, h, d or w are needed, as in 36h"
    )


def octets(text: str) -> int:
    """The size in such a text as "10GiB"."""
    return _measured(
        text, SIZES, "a size: a number and B, KiB, MiB, GiB or TiB are needed, as in 10GiB"
    )


def limit_ms(text: str) -> int | str:
    """A time, "default", or 0 for "none"."""
    return _limit(text, milliseconds)


def limit_octets(text: str) -> int | str:
    """A size, "default", or 0 for "none"."""
    return _limit(text, octets)


def flush_of(text: str) -> str | list[int]:
    """The time and the number of messages in such a text as "10ms,1000"; or "sync", or
    "default".
    """
    if text in ("sync", DEFAULT):
        return text
    time, _, messages = text.partition(",")
    if not (messages.isascii() and messages.isdigit()):
        raise typer.BadParameter(
            f"{text!r} is no way to flush: sync, default, or a time and messages, as in 10ms,1000"
        )
    return [milliseconds(time), int(messages)]


def octets_or_default(text: str) -> int | str:
    """A size, or "default"."""
    return DEFAULT if text == DEFAULT else octets(text)


def policy_of(text: str) -> str:
    """What becomes of old segments."""
    if text not in POLICIES:
        raise typer.BadParameter(f"{text!r} is none of {', '.join(POLICIES)}")
    return text


def switch_of(text: str) -> bool:
    """Yes or no."""
    if text not in SWITCHES:
        raise typer.BadParameter(f"{text!r} is neither yes nor no")
    return SWITCHES[text]


def _limit(text: str, measured: Callable[[str], int]) -> int | str:
    if text == DEFAULT:
        return DEFAULT
    return 0 if text == NONE else measured(text)


def _measured(text: str, units: dict[str, int], what: str) -> int:
    found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s?([A-Za-z]*)", text)
    if found is None or found[2] not in units:
        raise typer.BadParameter(f"{text!r} is not {what}")
    return round(float(found[1]) * units[found[2]])

"""Texts of errors: tracebacks of Python, or what another client has sent."""

from __future__ import annotations

import re

IN_PLACE = re.compile(r"\(attempt \d+ of \d+ in place\)")


def last_line(text: str) -> str:
    """Return the last line of a traceback, which is the error itself.

    A note about attempts in place may stand behind it.
    """
    lines = (line.strip() for line in reversed(text.splitlines()))
    return next((line for line in lines if line and not IN_PLACE.fullmatch(line)), "")

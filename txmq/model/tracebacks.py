"""Texts of errors: tracebacks of Python, or what another client has sent."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable

IN_PLACE = re.compile(r"\(attempt \d+ of \d+ in place\)")


def text_of(error: BaseException, write: Callable[[BaseException], str] = str) -> str:
    """Return the text of an error as `str`, `repr` or `trace` write it.

    An error may be of any class of a user's, whose methods may raise. Then the text
    names the class, and what was raised.
    """
    try:
        return str(write(error))
    except Exception as again:  # noqa: BLE001  # a method of the user's
        return f"<{type(error).__qualname__}, whose text raises {type(again).__qualname__}>"


def trace(error: BaseException) -> str:
    """Return the traceback of an error, and of those that led to it."""
    return "".join(traceback.format_exception(error))


def last_line(text: str) -> str:
    """Return the last line of a traceback, which is the error itself.

    A note about attempts in place may stand behind it.
    """
    lines = (line.strip() for line in reversed(text.splitlines()))
    return next((line for line in lines if line and not IN_PLACE.fullmatch(line)), "")

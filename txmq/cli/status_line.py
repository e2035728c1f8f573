"""A line on a terminal that changes while a command works."""

from __future__ import annotations

import sys

from txmq.model.printable import escape_unprintable

CLEAR = "\r\x1b[K"


class StatusLine:
    """A line on standard error, where that is a terminal and the line is wanted."""

    def __init__(self, *, wanted: bool = True) -> None:
        self.is_shown = wanted and sys.stderr.isatty()
        self._has_text = False

    def show(self, text: str) -> None:
        """Show a text in the place of the one before."""
        if self.is_shown:
            self._has_text = True
            print(f"{CLEAR}{escape_unprintable(text)}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Clear the line for what is printed next."""
        if self._has_text:
            print(CLEAR, end="", file=sys.stderr, flush=True)

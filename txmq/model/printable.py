"""Texts of strangers, on their way to a terminal or a page."""

from __future__ import annotations


def escape_unprintable(text: str) -> str:
    """Return `text` on one line, with its unprintable characters escaped.

    So a message cannot forge titles, colours or lines, nor turn the text around it.
    """
    if text.isprintable():  # usually, and thirty times as fast
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )

"""Whole numbers in addresses and forms."""

from __future__ import annotations

MAX_DIGITS = 18  # fits into 64 bits


def is_whole_number(text: str) -> bool:
    """Return whether a text is a whole number in decimal digits."""
    return text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS

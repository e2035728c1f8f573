"""Parts of addresses: patterns of paths, and whole numbers, which forms have too."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ANY_NAME = "*"  # in a pattern
MAX_DIGITS = 18  # fits into 64 bits


def fits(pattern: Sequence[str], parts: Sequence[str]) -> bool:
    """Return whether the parts of a path fit a pattern."""
    return len(pattern) == len(parts) and all(
        one in (ANY_NAME, part) for one, part in zip(pattern, parts, strict=True)
    )


def is_whole_number(text: str) -> bool:
    """Return whether a text is a whole number in decimal digits."""
    return text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS

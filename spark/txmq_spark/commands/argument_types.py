"""Numbers as arguments of the command `txmq-spark`."""

from __future__ import annotations

from argparse import ArgumentTypeError


def positive(text: str) -> int:
    """Return a number from 1 on. Raises ArgumentTypeError."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def percentage(text: str) -> int:
    """Return a number from 1 to 100. Raises ArgumentTypeError."""
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= 100):
        raise ArgumentTypeError(f"{text!r} is not a percentage from 1 to 100")
    return int(text)

"""Operators and their reasons, as the log keeps them."""

from __future__ import annotations

from typing import Protocol


class OperatorArgs(Protocol):
    """Arguments of an operator's call."""

    @property
    def operator(self) -> str | None: ...
    @property
    def reason(self) -> str: ...


def operator_note(args: OperatorArgs) -> str:
    """Return the operator and the reason, for the log."""
    return ": ".join(filter(None, (args.operator, args.reason)))

"""Operators and their reasons, as the log and the audit topic keep them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from txmq.core.audit import Audited, AuditEntry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from txmq.wire.json import WireModel

# who and why have fields of their own; contents of messages are nobody's business
LEFT_OUT = {"operator", "reason", "body", "bodies", "headers", "entries", "password", "digest"}
MAX_ITEMS = 20  # of a list of arguments; of a longer one, the length


class OperatorArgs(Protocol):
    """Arguments of an operator's call."""

    @property
    def operator(self) -> str | None: ...
    @property
    def reason(self) -> str: ...


def operator_note(args: OperatorArgs) -> str:
    """Return the operator and the reason, for the log."""
    return ": ".join(filter(None, (args.operator, args.reason)))


def audited(call: str, about: str, args: WireModel, command: object) -> Audited:
    """Return a command that leaves a message in the audit topic if it changes
    something. `about` names the thing, such as "group:billing".
    """
    given: Mapping[str, Any] = args.model_dump(exclude_defaults=True, exclude=LEFT_OUT)
    return Audited(
        command,
        AuditEntry(
            getattr(args, "operator", None) or "",
            call,
            about,
            getattr(args, "reason", ""),
            {name: _plain(value) for name, value in given.items()},
            getattr(args, "via", ""),
        ),
    )


def group(name: str) -> str:
    """Return how entries name a consumer group."""
    return f"group:{name}"


def topic(name: str) -> str:
    """Return how entries name a topic."""
    return f"topic:{name}"


def transaction(token: str) -> str:
    """Return how entries name a transaction."""
    return f"tx:{token}"


def _plain(value: object) -> object:
    """Return a value for JSON."""
    match value:
        case bytes():
            return value.hex()
        case dict():
            return {str(name): _plain(item) for name, item in value.items()}
        case list() | tuple() if len(value) > MAX_ITEMS:
            return {"items": len(value)}
        case list() | tuple():
            return [_plain(item) for item in value]
        case None | bool() | int() | float() | str():
            return value
    return str(value)

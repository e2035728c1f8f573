"""Changes that operators made, from the audit topic, without I/O."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple, TypedDict

from txmq.model.message import to_micros

PAGE = 1_000


class AuditOptions(TypedDict, total=False):
    """Selection of entries: each has all that is given.

    `call` is the name of a call, or its beginning such as "dlq."; `about` a thing such
    as "group:billing" or "plan:mend". `start` <= time < `end`.
    """

    operator: str
    call: str
    about: str
    topic: str
    start: datetime | int
    end: datetime | int


class AuditEntry(NamedTuple):
    """Change by an operator. `messages` are the places of messages that were changed,
    `arguments` have no bodies. Times are microseconds.
    """

    offset: int
    at: int
    operator: str
    call: str
    about: str
    reason: str
    arguments: Mapping[str, Any]
    result: Mapping[str, Any]
    messages: list[Any]


class AuditPages:
    """Pages of entries, oldest first: while `next_args` has the arguments of a call,
    `read` gets its reply.
    """

    def __init__(self, options: AuditOptions) -> None:
        self._args: dict[str, object] = {"limit": PAGE, **options}
        for name in ("start", "end"):
            if name in self._args:
                self._args[name] = to_micros(self._args[name])  # type: ignore[arg-type]  # its own type
        self._over = False

    def next_args(self) -> dict[str, object] | None:
        """Return the arguments of the next call of audit.list, or None at the end."""
        return None if self._over else self._args

    def read(self, reply: Mapping[str, Any]) -> list[AuditEntry]:
        """Return the entries of a page. Those that are damaged are left out."""
        self._over = reply["next"] is None
        self._args["after"] = reply["next"]
        return [_parse(entry) for entry in reply["entries"] if "damaged" not in entry]


def _parse(entry: Mapping[str, Any]) -> AuditEntry:
    fields = {name: entry[name] for name in AuditEntry._fields if name != "messages"}
    return AuditEntry(**fields, messages=entry.get("messages", []))

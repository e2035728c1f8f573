"""Arguments of the control call of the audit topic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from txmq.model import limits
from txmq.wire.calls.arguments import Args, Limit, Name
from txmq.wire.calls.consumers import MessagePlace

Time = Annotated[int, Field(ge=0, le=limits.TIME)]
Offset = Annotated[int, Field(ge=0, lt=2**63)]
Word = Annotated[str, StringConstraints(min_length=1, max_length=limits.KEY)]


class AuditList(Args):
    """A page of what operators did, by all criteria given.

    `call` is the name of a call, or its beginning such as "dlq."; `about` a thing such
    as "group:billing". `topic` and `message` select entries that name them. `start`
    (included) and `end` bound the time. `after` is `next` of the page before; `newest`:
    the newest first.
    """

    operator: Name | None = None
    call: Word | None = None
    about: Word | None = None
    topic: Name | None = None
    message: MessagePlace | None = None
    start: Time | None = None
    end: Time | None = None
    after: Offset | None = None
    newest: bool = False
    limit: Limit = 100

    def has_time(self, at: int) -> bool:
        """Return whether something of this time is asked for."""
        return (self.start or 0) <= at and (self.end is None or at < self.end)

    def matches(self, entry: Mapping[str, Any]) -> bool:
        """Return whether an entry is one that is asked for."""
        if self.operator is not None and entry["operator"] != self.operator:
            return False
        if self.call is not None and not _has_name(str(entry["call"]), self.call):
            return False
        if self.about is not None and entry["about"] != self.about:
            return False
        places = _places(entry)
        if self.message is not None and list(self.message) not in places:
            return False
        return (
            self.topic is None
            or entry["about"] == f"topic:{self.topic}"
            or any(place[:1] == [self.topic] for place in places)
        )


def _places(entry: Mapping[str, Any]) -> list[list[Any]]:
    """Return the messages that an entry names: [topic, partition, offset], or as much
    of it as there is.
    """
    changed = entry.get("messages", ())
    # a redrive adds the place of each copy
    named = [place[:3] for place in changed if isinstance(place, list)]
    arguments = entry["arguments"]
    if isinstance(arguments, dict) and "topic" in arguments:
        fields = ("topic", "partition", "offset")
        named.append([arguments[field] for field in fields if field in arguments])
    return named


def _has_name(name: str, wanted: str) -> bool:
    return name.startswith(wanted) if wanted.endswith(".") else name == wanted

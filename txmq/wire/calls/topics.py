"""Arguments of control calls about topics (docs/FORMATS.md 2.3).

Of a topic's settings, null leaves the value; "default" selects the broker's.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints

from txmq.model import limits
from txmq.model.schemas.bodies import checked_schema
from txmq.model.schemas.compatibility import Compatibility
from txmq.model.units import DAY, MILLISECOND
from txmq.wire.calls.arguments import Args, ListArgs, Name, Text

Default = Literal["default"]
Milliseconds = Annotated[
    int, Field(ge=0, le=100 * 366 * DAY // MILLISECOND)
]  # milliseconds, 0 = no limit
Bytes = Annotated[int, Field(ge=0, le=1 << 60)]  # bytes, 0 = no limit
Flush = tuple[
    Annotated[int, Field(ge=1, le=limits.FLUSH_MS)],
    Annotated[int, Field(ge=1, le=limits.FLUSH_MESSAGES)],
]


class TopicSettingsArgs(Args):
    """Settings of a topic.

    `flush` is "sync", or the most (milliseconds, messages) that a power cut may lose.
    """

    retention_ms: Milliseconds | Default | None = None
    retention_bytes: Bytes | Default | None = None
    letters_ms: Milliseconds | Default | None = None
    policy: Literal["delete", "archive", "default"] | None = None
    flush: Literal["sync", "default"] | Flush | None = None
    message_bytes: Annotated[int, Field(ge=1, le=limits.MESSAGE)] | Default | None = None
    writable: bool | None = None
    readable: bool | None = None
    note: Annotated[str, StringConstraints(max_length=1_024)] | None = None  # "" = none

    def changes(self) -> dict[str, Any]:
        """Return the given settings as fields of the broker's own.

        Times are in microseconds there; "default" is -1 or "".
        """
        fields: dict[str, Any] = {}
        for name, value in (("retention_us", self.retention_ms), ("letters_us", self.letters_ms)):
            fields |= (
                {}
                if value is None
                else {name: -1 if value == "default" else int(value) * MILLISECOND}
            )
        for name in ("retention_bytes", "message_bytes"):
            value = getattr(self, name)
            fields |= {} if value is None else {name: -1 if value == "default" else value}
        for name in ("policy", "flush"):
            value = getattr(self, name)
            fields |= {} if value is None else {name: "" if value == "default" else value}
        others = {"writable": self.writable, "readable": self.readable, "note": self.note}
        return fields | {name: value for name, value in others.items() if value is not None}


class TopicName(Args):
    """One topic, or one watermark."""

    name: Name


class TopicList(ListArgs):
    """A page of the list of topics; with `own` also the broker's own."""

    own: bool = False


class TopicActs(TopicName):
    """An operator's change of a topic; operator and reason are stored in the log."""

    operator: Name | None = None
    reason: Text = ""


class TopicDelete(TopicActs):
    """A topic to delete."""


class TopicShape(TopicName):
    """A topic and its number of partitions."""

    partitions: Annotated[int, Field(ge=1, le=4_096)]


class TopicCreate(TopicShape, TopicSettingsArgs):
    """A new topic, with settings of its own."""


class TopicGrow(TopicShape, TopicActs):
    """A topic that is to have so many partitions."""


class TopicAlter(TopicActs, TopicSettingsArgs):
    """Changed settings of a topic; null ones stay as they are."""


def _schema(text: str) -> str:
    return checked_schema(text) if text else ""


class TopicSchema(TopicActs):
    """A topic's JSON Schema as a text, "" = none, and the rule for its changes; null
    ones stay as they are.

    `force`: whatever the change breaks. `dry_run`: judge, and change nothing.
    """

    json_schema: Annotated[str, AfterValidator(_schema)] | None = None
    compatibility: Compatibility | None = None
    force: bool = False
    dry_run: bool = False


class TopicNames(Args):
    """Several topics; `create` creates missing ones, where the broker allows it."""

    names: Annotated[tuple[Name, ...], Field(max_length=10_000)]
    create: bool = False

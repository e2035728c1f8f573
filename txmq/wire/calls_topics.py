"""Control calls about topics. Of their settings null means: leave it, and "default": as
the broker has it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from txmq.model import limits
from txmq.wire.args import Args, Name

Default = Literal["default"]
Time = Annotated[int, Field(ge=0, le=100 * 366 * 24 * 3_600 * 1_000)]  # milliseconds, 0 = no limit
Size = Annotated[int, Field(ge=0, le=1 << 60)]  # bytes, 0 = no limit
Flush = tuple[
    Annotated[int, Field(ge=1, le=3_600_000)], Annotated[int, Field(ge=1, le=1_000_000_000)]
]
MS = 1_000


class TopicSettings(Args):
    """`flush` is "sync", or at most (milliseconds, messages) that a power cut may
    take.
    """

    retention_ms: Time | Default | None = None
    retention_bytes: Size | Default | None = None
    letters_ms: Time | Default | None = None
    policy: Literal["delete", "archive", "default"] | None = None
    flush: Literal["sync", "default"] | Flush | None = None
    message_bytes: Annotated[int, Field(ge=1, le=limits.MESSAGE)] | Default | None = None
    writable: bool | None = None
    readable: bool | None = None

    def changes(self) -> dict[str, Any]:
        """What is named, as fields of the broker's own settings: times in microseconds,
        -1 and "" for "default".
        """
        found: dict[str, Any] = {}
        for name, value in (("retention_us", self.retention_ms), ("letters_us", self.letters_ms)):
            found |= {} if value is None else {name: -1 if value == "default" else int(value) * MS}
        for name in ("retention_bytes", "message_bytes"):
            value = getattr(self, name)
            found |= {} if value is None else {name: -1 if value == "default" else value}
        for name in ("policy", "flush"):
            value = getattr(self, name)
            found |= {} if value is None else {name: "" if value == "default" else value}
        switches = {"writable": self.writable, "readable": self.readable}
        return found | {name: value for name, value in switches.items() if value is not None}


class TopicName(Args):
    """One topic, or one mark."""

    name: Name


class TopicShape(TopicName):
    """A topic and its number of partitions."""

    partitions: Annotated[int, Field(ge=1, le=4_096)]


class TopicCreate(TopicShape, TopicSettings):
    """A topic to be, with settings of its own."""


class TopicAlter(TopicName, TopicSettings):
    """Settings of a topic; those not named stay as they are."""


class TopicNames(Args):
    """Several topics; `create` makes the missing ones, where the broker allows it."""

    names: Annotated[tuple[Name, ...], Field(max_length=10_000)]
    create: bool = False

"""Settings of a broker's storage, and what all settings have in common
(`txmq.config.broker` has the rest).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(gt=0)]


class Model(BaseModel):
    """Strict, frozen, and nothing unknown: a misspelt setting is an error, not a
    default.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class FlushEvery(Model):
    """Asynchronous flush: plain sends are answered before they are on disk.

    At most this much can be lost with the power. MetaQ's default was 1,000 messages or
    10 s.
    """

    every_ms: PositiveInt = 10
    messages: PositiveInt = 1_000


class Retention(Model):
    """How long messages are kept, where a topic has no setting of its own; 0 = no limit
    (MetaQ's is 168 h).

    Segments of the log of which nothing is needed any more are deleted, or moved to
    `archive` where a topic says so.
    """

    hours: float = Field(default=168.0, ge=0, le=876_000)
    bytes: int = Field(default=0, ge=0)  # of one topic, all of its partitions together
    letters_hours: float = Field(
        default=0.0, ge=0, le=876_000
    )  # of dead letters; RocketMQ's go with the others, 72 h
    policy: Literal["delete", "archive"] = "delete"
    archive: Path | None = Field(
        default=None, strict=False
    )  # None = archive/ in the data directory
    every_s: float = Field(default=60.0, gt=0)


class Scrub(Model):
    """Reading the log again in the background: so many MiB a second, and all of it
    every so many hours; 0 = never.

    A step of it is followed by a pause at least twenty times as long, whatever the
    rate.
    """

    mib_per_s: float = Field(default=8.0, gt=0)
    every_hours: float = Field(default=168.0, ge=0)


class Catalogues(Model):
    """When keys and ids of new messages are catalogued, by a process beside the broker:
    after so many MiB of log, and of less after so many seconds. 0 MiB = never: whoever
    looks for a key then looks through all messages of a topic.
    """

    mib: float = Field(default=16.0, ge=0)
    every_s: float = Field(default=30.0, gt=0)


class DiskSpace(Model):
    """How much space, in MiB, must be free on the data directory's disk: an alarm, no
    more writes, writes again.

    RocketMQ's are 85 % and 95 % of the disk; what a broker needs to go on does not grow
    with the disk, so these are no shares of it. The `ballast` is a file of that size,
    made once the log has had a second segment, and given up when others have filled the
    disk: acks, decisions and retention go on with that.
    """

    warn_free_mib: int = Field(default=1_024, ge=0)
    refuse_free_mib: int = Field(default=256, ge=0)
    resume_free_mib: int = Field(default=384, ge=0)
    ballast_mib: int = Field(default=64, ge=0)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if not self.refuse_free_mib <= self.resume_free_mib <= self.warn_free_mib:
            raise ValueError(
                "refuse_free_mib, resume_free_mib and warn_free_mib must rise, or be equal"
            )
        return self

"""Arguments of control calls about the log (docs/FORMATS.md 2.3)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from txmq.wire.calls.arguments import Args, Name, Reason

MOST_READ = 256 << 10
HoldName = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]


class LogRelease(Args):
    """The end of a backup's hold."""

    hold: HoldName


class LogHold(LogRelease):
    """A hold of the log from `position` on, for a backup; again = for longer."""

    position: Annotated[int, Field(ge=0, lt=1 << 63)] = 0


class LogRead(Args):
    """Bytes of a file of the log, for the copy of another node: of the segment that
    begins at `position`, or of the snapshot of that position.
    """

    file: Literal["segment", "snapshot"]
    position: Annotated[int, Field(ge=0, lt=1 << 63)]
    offset: Annotated[int, Field(ge=0, lt=1 << 63)]
    size: Annotated[int, Field(ge=0, le=MOST_READ)]


class LogBackedUp(Args):
    """The end of a backup: it has the log as it was at the time `taken_at`."""

    taken_at: Annotated[int, Field(ge=0, lt=1 << 63)]


class LogRestores(Args):
    """The restores of the log; with `topics`, also the ends of partitions at each."""

    topics: bool = True


class RestoreAccept(Args):
    """An operator's word that what the last restore lost has been dealt with."""

    operator: Name
    reason: Reason

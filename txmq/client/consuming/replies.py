"""What the control calls of a member reply (docs/FORMATS.md 2.3), checked before it is believed."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Partition = tuple[str, int]


class Reply(BaseModel):
    """Fields that a newer broker adds are no harm."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class Joined(Reply):
    """A member's place in its group. `group` is the name to use from now on."""

    group: str
    member: str
    generation: int
    epoch: int = 0
    assignment: tuple[Partition, ...]
    session_ms: Annotated[int, Field(gt=0)]
    lease_ms: Annotated[int, Field(gt=0)]


class Beat(Reply):
    """The present generation, and the member's share in it; `epoch` None where the broker does not tell."""

    generation: int
    assignment: tuple[Partition, ...]
    epoch: int | None = None


class Nacked(Reply):
    """What became of a failed message. Messages of its key under leases below `fence_lease` are to be given back;
    of a `guarded` group all that was not begun.
    """

    moved: str
    attempt: int
    fence_lease: int = 0
    guarded: bool = False

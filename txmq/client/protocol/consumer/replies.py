"""What the control calls of a member reply (docs/FORMATS.md 2.3), checked before it is
believed.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from txmq.client.protocol.consumer.requests import Seat

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
    consume_timeout_ms: Annotated[int, Field(gt=0)] = 900_000

    def seat(self, instance: str) -> Seat:
        """The place as the member keeps it."""
        return Seat(
            *(
                self.group,
                self.member,
                instance,
                self.generation,
                self.epoch,
                frozenset(self.assignment),
            ),
            *(self.session_ms / 1_000, self.lease_ms / 1_000, self.consume_timeout_ms / 1_000),
        )


class Beat(Reply):
    """The present generation, and the member's share in it; `epoch` None where the
    broker does not tell.
    """

    generation: int
    assignment: tuple[Partition, ...]
    epoch: int | None = None
    consume_timeout_ms: Annotated[int, Field(gt=0)] | None = None

    def seat(self, before: Seat) -> Seat:
        """The member's place from now on."""
        epoch = before.epoch if self.epoch is None else self.epoch
        told = self.consume_timeout_ms
        timeout_s = before.consume_timeout_s if told is None else told / 1_000
        return before._replace(
            generation=self.generation,
            epoch=epoch,
            assignment=frozenset(self.assignment),
            consume_timeout_s=timeout_s,
        )


class Nacked(Reply):
    """What became of a failed message. Messages of its key under leases below
    `fence_lease` are to be given back; of a `guarded` group all that was not begun.
    """

    moved: str
    attempt: int
    fence_lease: int = 0
    guarded: bool = False

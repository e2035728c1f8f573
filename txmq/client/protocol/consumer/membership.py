"""What a consumer of either face tells of its place in the group."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from txmq.client.protocol.consumer.member import Member
    from txmq.client.protocol.consumer.settings import Settings


class Seated:
    """A consumer, before and after its broker has given it a seat."""

    settings: Settings
    _member: Member

    @property
    def group(self) -> str:
        """The group as the broker knows it: of a broadcast member its own,
        `group@member`.
        """
        seat = self._member.seat
        return self.settings.group if seat is None else seat.group

    @property
    def member(self) -> str:
        """The name of the member, given or made by the broker."""
        seat = self._member.seat
        return (self.settings.member or "") if seat is None else seat.member

    @property
    def epoch(self) -> int:
        """How many times the group was told to process messages once more: the inbox
        counts by it.
        """
        seat = self._member.seat
        return 0 if seat is None else seat.epoch

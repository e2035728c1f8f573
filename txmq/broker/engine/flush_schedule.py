"""The times of syncs, for records that were acknowledged before they were on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from txmq.config.broker import FlushEvery

NEVER = float("inf")


class FlushSchedule:
    """Records that were acknowledged before they were on disk, and the strictest policy
    among theirs. `policy` is the broker's own; None = every reply waits for the disk.
    """

    def __init__(self, policy: FlushEvery | None) -> None:
        self.policy = policy
        self._messages, self._max_messages, self._every_ms = 0, NEVER, NEVER
        self.sync_began()

    def add(self, policy: FlushEvery, messages: int = 1) -> None:
        """Count messages whose sender does not wait for the disk."""
        self._messages += messages
        self._max_messages = min(self._max_messages, policy.messages)
        self._every_ms = min(self._every_ms, policy.every_ms)

    def sync_began(self) -> None:
        """Start counting anew: the sync that begins now covers all records so far."""
        self._messages, self._max_messages = 0, NEVER
        self._every_ms = NEVER if self.policy is None else self.policy.every_ms

    @property
    def is_due(self) -> bool:
        """Return whether more messages wait for a sync than some policy allows."""
        return self._messages >= self._max_messages

    @property
    def after_s(self) -> float:
        """The longest time that the oldest message may wait for a sync."""
        return self._every_ms / 1_000

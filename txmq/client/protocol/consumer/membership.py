"""A member's place in its consumer group."""

from __future__ import annotations

from typing import NamedTuple

from txmq.model.topic_partition import PartitionName


class Membership(NamedTuple):
    """A member's place in its group, as the broker last reported it.

    `group` is the name to use in requests: in broadcast mode the member's own,
    `group@member`. `instance` tells this process from others with the same member name.
    """

    group: str
    member: str
    instance: str
    generation: int
    epoch: int
    assignment: frozenset[PartitionName]
    session_s: float
    lease_s: float
    consume_timeout_s: float

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two heartbeats."""
        return min(self.session_s, self.lease_s) / 3

"""What a node tells of the cluster that it is part of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, Self
from uuid import UUID

# leader and follower: heard of lately; left: ended in order
NodeRole = Literal["leader", "follower", "silent", "left"]
LogRow = tuple[bytes, str, int, int]  # the fields of a ListedLog


class NodeView(NamedTuple):
    """One node of a cluster, as it said itself `heard_s` ago.

    Its copy of the log ended at `position` and lacked `lag_bytes`, which were there
    already; reading was behind by `lag_s`. `epoch` is the newest that it knew of.
    Clients find it at `address`, HOST:PORT.
    """

    name: str
    address: str
    role: NodeRole
    epoch: int
    position: int
    lag_bytes: int
    lag_s: float
    heard_s: float
    version: str


class ListedLog(NamedTuple):
    """One of several logs that have topics in common.

    It has keys of the topics whose ids at the first log are `keys_from` or more, and
    less than `keys_to`. A log that is drained has a `keys_to`, others 0. `addresses` is
    HOST:PORT, or several with commas.
    """

    log_id: UUID
    addresses: str
    keys_from: int
    keys_to: int = 0

    @property
    def is_drained(self) -> bool:
        """True if neither keys of new topics are here, nor messages without one."""
        return self.keys_to > 0

    def has_keys_of(self, topic_id: int) -> bool:
        """Return whether keys of the topic with this id at the first log are here."""
        return self.keys_from <= topic_id and (not self.keys_to or topic_id < self.keys_to)


class LogList(NamedTuple):
    """Several logs, in the order by which partitions are numbered across them.

    The first one keeps the list, the others have copies of it. `version` rises. A log
    that is not listed with others has an empty list.
    """

    version: int = 0
    logs: tuple[ListedLog, ...] = ()

    @property
    def rows(self) -> tuple[LogRow, ...]:
        """The logs in plain types."""
        return tuple((log.log_id.bytes, *log[1:]) for log in self.logs)

    @classmethod
    def of(cls, version: int, rows: Iterable[LogRow]) -> Self:
        """Return the list with these rows."""
        return cls(version, tuple(ListedLog(UUID(bytes=row[0]), *row[1:]) for row in rows))


NOT_LISTED = LogList()


class ClusterView(NamedTuple):
    """The nodes that share a log, by name, as the node `answered_by` knows them.

    A broker alone is the one node of its own log. `logs` are those that are listed with
    this one.
    """

    log_id: str
    epoch: int
    answered_by: str
    nodes: tuple[NodeView, ...]
    logs: LogList = NOT_LISTED

    @property
    def leader(self) -> NodeView | None:
        """The node that leads; None while nobody is known to."""
        return next((node for node in self.nodes if node.role == "leader"), None)

    @property
    def followers(self) -> list[NodeView]:
        """The nodes that were heard of lately, and may lead next."""
        return [node for node in self.nodes if node.role == "follower"]


def who_leads(view: ClusterView) -> str:
    """Return who leads, for "this node does not lead: ..."."""
    leader = view.leader
    if leader is None:
        return "nobody is known to"
    if leader.name == view.answered_by:
        return "it is about to"
    return f"{leader.name} does, at {leader.address}"

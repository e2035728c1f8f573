"""What a node tells of the cluster that it is part of."""

from __future__ import annotations

from typing import Literal, NamedTuple

# leader and follower: heard of lately; left: ended in order
NodeRole = Literal["leader", "follower", "silent", "left"]


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


class ClusterView(NamedTuple):
    """The nodes that share a log, by name, as the node `answered_by` knows them.

    A broker alone is the one node of its own log.
    """

    log_id: str
    epoch: int
    answered_by: str
    nodes: tuple[NodeView, ...]

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

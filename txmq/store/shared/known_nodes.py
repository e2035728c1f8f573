"""The nodes of a shared log as one of them knows them, by what each says of itself.

A node says so by a `NodeStatus` in the partition: once it has read everything, every
SAYS_EVERY_S, soon after another one has begun, and when it leaves. Nothing that counts
follows from it: a node that nobody knows may lead.
"""

from __future__ import annotations

from typing import NamedTuple

from txmq.model.cluster import ClusterView, NodeRole, NodeView
from txmq.store.shared.records import NodeStatus
from txmq.store.shared.rules import Place

SAYS_EVERY_S = 30.0
# So a node that begins soon knows the others. Those that begin together are answered
# together.
ANSWERS_AFTER_S = 1.0
SILENT_AFTER_S = 3 * SAYS_EVERY_S
FORGOTTEN_AFTER_S = 86_400.0
THERE = ("leader", "follower")


class _Heard(NamedTuple):
    said: NodeStatus
    lag_bytes: int  # of the log before it, which its node had not read
    at: float


class KnownNodes:
    """What a node says of itself, and what it has heard of the others.

    Like `Node` it has no clock.
    """

    def __init__(self, name: str, address: str, version: str, nonce: bytes) -> None:
        """`nonce` is that of the node's claims."""
        self._name, self._address, self._version, self._nonce = name, address, version, nonce
        self._heard: dict[tuple[str, str], _Heard] = {}  # by name and address
        self._says_at = 0.0
        self._lag_s = 0.0
        self._unread_since: float | None = None  # when it said what it has not read yet

    def is_due(self, now: float) -> bool:
        """Return whether the node should say something of itself."""
        return now >= self._says_at

    def say(self, place: Place, now: float, *, leaves: bool = False) -> NodeStatus:
        """Return what the node says now."""
        self._says_at = now + SAYS_EVERY_S
        for key in [key for key, one in self._heard.items() if now - one.at >= FORGOTTEN_AFTER_S]:
            del self._heard[key]
        own = self._own(place, now)._replace(leaves=leaves)
        self._unread_since = self._unread_since or now
        return own

    def note_lost(self) -> None:
        """Note that what was said may never be read."""
        self._unread_since = None

    def hear(self, said: NodeStatus, place: Place, now: float, *, is_history: bool) -> None:
        """Take what a node has said. `is_history`: before this node began. Who has said
        nothing since is silent.
        """
        if said.nonce == self._nonce:
            if self._unread_since is not None:
                self._lag_s, self._unread_since = now - self._unread_since, None
            return
        key = said.node, said.address
        if said.log_id != place.log_id or (is_history and key == (self._name, self._address)):
            return
        if (said.epoch, said.end) > (place.epoch, place.end):
            return  # no node knows more than what stands before its words
        before = self._heard.get(key)
        if before is not None and _is_late(said, before.said):
            return
        if before is None or before.said.nonce != said.nonce:  # it has begun
            self._says_at = min(self._says_at, now + ANSWERS_AFTER_S)
        at = now - SILENT_AFTER_S if is_history else now
        self._heard[key] = _Heard(said, max(0, place.end - said.end), at)

    def view(self, place: Place, now: float) -> ClusterView:
        """Return all nodes, at the place up to which this one has read."""
        own = _seen(_Heard(self._own(place, now), 0, now), place, now)
        others = [_seen(one, place, now) for one in self._heard.values()]
        # a twin that is away was this node before it began
        shown = [one for one in others if one[:2] != own[:2] or one.role in THERE]
        return ClusterView(str(place.log_id), place.epoch, self._name, tuple(sorted([own, *shown])))

    def addresses(self, place: Place, now: float) -> tuple[str, ...]:
        """Return where clients find the nodes that are there, the leader's first."""
        there = [one for one in self.view(place, now).nodes if one.role in THERE]
        return tuple(one.address for one in sorted(there, key=lambda one: one.role != "leader"))

    def _own(self, place: Place, now: float) -> NodeStatus:
        assert place.log_id is not None, "the genesis was read"
        since = now if self._unread_since is None else self._unread_since
        return NodeStatus(
            place.log_id,
            place.epoch,
            self._nonce,
            place.end,
            int(max(self._lag_s, now - since) * 1_000),
            self._name,
            self._version,
            self._address,
        )


def _is_late(said: NodeStatus, before: NodeStatus) -> bool:
    """Return whether a node said this before: records come late, and copies of them."""
    if said.nonce == before.nonce and before.leaves:
        return True
    return (said.epoch, said.end) < (before.epoch, before.end)


def _seen(heard: _Heard, place: Place, now: float) -> NodeView:
    said, lag_bytes, at = heard
    return NodeView(
        said.node,
        said.address,
        _role(heard, place, now),
        said.epoch,
        said.end,
        lag_bytes,
        said.lag_ms / 1_000,
        round(now - at, 3),
        said.version,
    )


def _role(heard: _Heard, place: Place, now: float) -> NodeRole:
    if heard.said.leaves:
        return "left"
    if heard.said.nonce == place.nonce:
        return "leader"
    return "silent" if now - heard.at >= SILENT_AFTER_S else "follower"

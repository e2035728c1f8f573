"""Which connections may be there: of all, of one peer, and of those that nobody knows
yet.
"""

from __future__ import annotations

from collections import Counter
from ipaddress import IPv6Address
from typing import TYPE_CHECKING, Protocol

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from txmq.broker.reactor.interfaces import Clock

BACKLOG = 1_024  # connections of a port that the kernel holds until they are accepted
REFUSALS_S = 60.0  # between lines in the log about refused connections
# Connections before the end of greeting and login. Each has a deadline and few bytes;
# those beyond push out the oldest, which has had its time.
MAX_STRANGERS = 2_048
log = structlog.get_logger()


class Stranger(Protocol):
    """A connection that has not greeted, or not logged in."""

    def cut(self, why: str) -> None: ...


class ConnectionLimits:
    """Counts connections. `most` returns how many there may be now, `per_peer` of one
    host; 0 = three quarters of all.
    """

    def __init__(self, clock: Clock, most: Callable[[], int], per_peer: int) -> None:
        self._clock, self._most, self._per_peer = clock, most, per_peer
        self._peers: dict[Hashable, str] = {}  # by connection
        self._of_peer: Counter[str] = Counter()
        self._users: dict[Hashable, str] = {}  # by connection
        self._of_user: Counter[str] = Counter()
        self._strangers: dict[Stranger, None] = {}  # the oldest first
        self.refused: Counter[str] = Counter()  # by limit, since the start
        self._log_at = float("-inf")

    def admits(self, peer: str) -> bool:
        """Return whether a host may have one more connection."""
        most = self._most()
        if len(self._peers) >= most:
            hint = "raise the limit of open files (ulimit -n)"
            self._refuse("all", peer, hint)
            return False
        if self._of_peer[network_of(peer)] >= (self._per_peer or max(1, most * 3 // 4)):
            hint = "see which process connects so often, or raise limits.connections_per_peer"
            self._refuse("peer", peer, hint)
            return False
        return True

    def _refuse(self, limit: str, peer: str, hint: str) -> None:
        self.refused[limit] += 1
        now = self._clock.seconds()
        if now >= self._log_at:  # they try again and again
            self._log_at = now + REFUSALS_S
            log.warning(
                "connection.refused",
                peer=peer,
                open=len(self._peers),
                refused=self.refused.total(),
                hint=hint,
            )

    def add(self, connection: Hashable, peer: str) -> None:
        """Count a new connection of a host."""
        network = network_of(peer)
        self._peers[connection] = network
        self._of_peer[network] += 1

    def remove(self, connection: Hashable) -> None:
        """Count a connection no more."""
        network = self._peers.pop(connection, None)
        if network is not None:
            self._of_peer[network] -= 1
            if not self._of_peer[network]:
                del self._of_peer[network]
        user = self._users.pop(connection, None)
        if user is not None:
            self._of_user[user] -= 1
            if not self._of_user[user]:
                del self._of_user[user]

    def log_in(self, connection: Hashable, user: str, most: int) -> bool:
        """Count a connection of a user. False = the user has as many as allowed."""
        if most and self._of_user[user] >= most:
            return False
        self._users[connection] = user
        self._of_user[user] += 1
        return True

    def begin(self, stranger: Stranger) -> None:
        """Note a connection that has to greet; too many push out the oldest."""
        self._strangers[stranger] = None
        if len(self._strangers) > MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            self.refused["login"] += 1
            oldest.cut("too many connections without a login")

    def end(self, stranger: Stranger) -> None:
        """Note that a connection is known now, or gone."""
        self._strangers.pop(stranger, None)


def network_of(host: str) -> str:
    """Return what counts as one peer: an address, or a /64 of IPv6, which one machine
    may have for itself.
    """
    if ":" not in host:
        return host
    try:
        address = IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return f"{IPv6Address(int(address) >> 64 << 64)}/64"

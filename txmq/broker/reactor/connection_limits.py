"""Limits of connections: of all, of those of one peer, and of those that nobody knows
yet.
"""

from __future__ import annotations

from collections import Counter
from ipaddress import IPv6Address
from typing import TYPE_CHECKING, Protocol

import structlog

from txmq.config.listen import ListenAddress

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from txmq.broker.reactor.interfaces import Clock

BACKLOG = 1_024  # connections of a port that the kernel holds until they are accepted
REFUSALS_S = 60.0  # between lines in the log about refused connections
# Connections before the end of greeting and login. Each has a deadline and few bytes;
# those beyond push out the oldest of the host that has the most.
MAX_STRANGERS = 2_048
FEW_STRANGERS = 1  # of a host: the only one is not pushed out for a connection beyond a limit
log = structlog.get_logger()


class Stranger(Protocol):
    """A connection that has not greeted, or not logged in."""

    def cut(self, why: str) -> None: ...
    def __hash__(self) -> int: ...


class Strangers:
    """Connections before the end of greeting and login, the oldest of each host first.

    The host that has the most is known at once: a count changes by one at a time.
    """

    def __init__(self) -> None:
        self._network: dict[Stranger, str] = {}
        self._of: dict[str, dict[Stranger, None]] = {}
        self._by_count: dict[int, dict[str, None]] = {}
        self._most = 0

    def __len__(self) -> int:
        return len(self._network)

    def add(self, stranger: Stranger, network: str) -> None:
        """Add a connection of a host."""
        self._network[stranger] = network
        of_host = self._of.setdefault(network, {})
        of_host[stranger] = None
        self._recount(network, len(of_host) - 1, len(of_host))

    def remove(self, stranger: Stranger) -> None:
        """Remove a connection, if it is here."""
        network = self._network.pop(stranger, None)
        if network is None:
            return
        of_host = self._of[network]
        del of_host[stranger]
        if not of_host:
            del self._of[network]
        self._recount(network, len(of_host) + 1, len(of_host))

    def _recount(self, network: str, before: int, now: int) -> None:
        if before:
            del self._by_count[before][network]
            if not self._by_count[before]:
                del self._by_count[before]
        if now:
            self._by_count.setdefault(now, {})[network] = None
        if now > self._most or self._most not in self._by_count:
            self._most = now

    def oldest(self, network: str | None = None, few: int = 0) -> Stranger | None:
        """Return the oldest connection of a host, by default the one that has the most;
        None where it has so few, or none.
        """
        if network is None:
            network = next(iter(self._by_count.get(self._most, ())), "")
        of_host = self._of.get(network, {})
        return next(iter(of_host)) if len(of_host) > few else None


class ConnectionLimits:
    """Counts connections. `most` returns how many there may be now, `per_peer` of one
    host; 0 = three quarters of all.

    Beyond a limit, connections that nobody knows yet make room, those of the host that
    has the most of them first: strangers alone keep nobody out.
    """

    def __init__(self, clock: Clock, most: Callable[[], int], per_peer: int) -> None:
        self._clock, self._most, self._per_peer = clock, most, per_peer
        self._peers: dict[Hashable, str] = {}  # by connection
        self._of_peer: Counter[str] = Counter()
        self._users: dict[Hashable, str] = {}  # by connection
        self._of_user: Counter[str] = Counter()
        self._strangers = Strangers()
        self.refused: Counter[str] = Counter()  # by limit, since the start
        self._log_at = float("-inf")

    def admits(self, peer: str) -> bool:
        """Return whether a host may have one more connection. It may be that of a
        stranger, which is cut.
        """
        most, network = self._most(), network_of(peer)
        if self._of_peer[network] >= (self._per_peer or max(1, most * 3 // 4)):
            hint = "see which process connects so often, or raise limits.connections_per_peer"
            self._refuse("peer", peer, hint)
            stranger = self._strangers.oldest(network, FEW_STRANGERS)
        elif len(self._peers) >= most:
            self._refuse("all", peer, "raise the limit of open files (ulimit -n)")
            stranger = self._strangers.oldest(few=FEW_STRANGERS)
        else:
            return True
        if stranger is None:
            return False
        self._push_out(stranger)
        return True

    def _push_out(self, stranger: Stranger) -> None:
        self._strangers.remove(stranger)
        stranger.cut("too many connections without a login")

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
        """Note a connection that has to greet; too many push out the oldest of the host
        that has the most.
        """
        self._strangers.add(stranger, self._peers.get(stranger, ""))
        if len(self._strangers) > MAX_STRANGERS:
            oldest = self._strangers.oldest()
            assert oldest is not None, "there is one at least"
            self.refused["login"] += 1
            self._push_out(oldest)

    def end(self, stranger: Stranger) -> None:
        """Note that a connection is known now, or gone."""
        self._strangers.remove(stranger)


def peer_name(peer: object) -> str:
    """Return host and port of Twisted's address of a peer, for the log."""
    host, port = getattr(peer, "host", None), getattr(peer, "port", 0)
    return str(peer) if host is None else str(ListenAddress(host, port))


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

"""How many connections there may be, of all, of a host, and before a login."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from twisted.internet.address import IPv4Address, IPv6Address
from twisted.internet.task import Clock

from tests.broker.support import HELLO, BrokerInMemory
from txmq.broker.reactor import connection_limits
from txmq.broker.reactor.connection_limits import (
    ConnectionLimits,
    Strangers,
    network_of,
    peer_name,
)


def test_a_host_has_three_quarters_of_the_connections_and_others_the_rest() -> None:
    limits = ConnectionLimits(Clock(), lambda: 8, 0)
    for number in range(6):
        assert limits.admits("10.0.0.1")
        limits.add(number, "10.0.0.1")
    assert not limits.admits("10.0.0.1")
    for number in (6, 7):
        assert limits.admits("10.0.0.2")
        limits.add(number, "10.0.0.2")
    assert not limits.admits("10.0.0.3")
    assert limits.refused == {"peer": 1, "all": 1}
    limits.remove(0)
    assert limits.admits("10.0.0.1")


def test_a_limit_of_a_peer_is_that_of_the_settings() -> None:
    limits = ConnectionLimits(Clock(), lambda: 1_000, 2)
    for number in range(2):
        limits.add(number, "2001:db8::1")
    assert not limits.admits("2001:db8::2"), "one machine may have all addresses of a /64"
    assert limits.admits("2001:db8:0:1::2")


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("::", "::/64"),
        ("no:address", "no:address"),
    ],
)
def test_what_counts_as_one_peer(host: str, network: str) -> None:
    assert network_of(host) == network


def test_a_peer_is_logged_as_addresses_are_written() -> None:
    assert peer_name(IPv4Address("TCP", "10.0.0.9", 7)) == "10.0.0.9:7"
    assert peer_name(IPv6Address("TCP", "::1", 7)) == "[::1]:7"
    assert peer_name("the broker itself") == "the broker itself"


def test_strangers_beyond_their_number_push_out_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "MAX_STRANGERS", 3)
    broker = BrokerInMemory()
    known = broker.connect()
    strangers = [broker.connect(None) for _ in range(5)]
    assert [each.closed for each in strangers] == [True, True, False, False, False]
    strangers[2].send(HELLO)
    broker.connect(None)
    assert [each.closed for each in strangers[2:]] == [False, False, False]
    broker.connect(None)
    assert [each.closed for each in strangers[2:]] == [False, True, False]
    assert not known.closed


def test_a_connection_that_was_pushed_out_is_not_cut_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "MAX_STRANGERS", 1)
    broker = BrokerInMemory()
    timers = len(broker.clock.getDelayedCalls())
    for _ in range(50):
        broker.connect(None)
    broker.clock.advance(0)
    assert len(broker.clock.getDelayedCalls()) == timers + 1, "that of the last one"


class Unknown:
    """A connection without a login."""

    def __init__(self, host: str) -> None:
        self.host, self.is_cut = host, False

    def cut(self, why: str) -> None:
        del why
        self.is_cut = True


class Port:
    """Connections of a port within limits."""

    def __init__(self, most: int, per_peer: int = 0) -> None:
        self.limits = ConnectionLimits(Clock(), lambda: most, per_peer)

    def connect(self, host: str, *, logs_in: bool = False) -> Unknown | None:
        """Return a new connection, None where it is refused."""
        if not self.limits.admits(host):
            return None
        made = Unknown(host)
        self.limits.add(made, host)
        self.limits.begin(made)
        if logs_in:
            self.limits.end(made)
        return made

    def sweep(self, connections: list[Unknown]) -> list[Unknown]:
        """Let the connections that were cut end; return the others."""
        for one in connections:
            if one.is_cut:
                self.limits.end(one)
                self.limits.remove(one)
        return [one for one in connections if not one.is_cut]


def test_one_host_without_a_login_pushes_out_none_of_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection_limits, "MAX_STRANGERS", 8)
    port = Port(1_000)
    slow = [port.connect(f"10.0.0.{number}") for number in range(3)]
    flood = [port.connect("10.9.9.9") for _ in range(100)]
    assert [one is not None and not one.is_cut for one in slow] == [True] * 3
    assert [one is not None and not one.is_cut for one in flood] == [False] * 95 + [True] * 5
    assert port.limits.refused["login"] == 95


@pytest.mark.parametrize("hosts", [1, 2, 5])
def test_connections_without_a_login_give_way_where_all_places_are_taken(hosts: int) -> None:
    port = Port(40)
    known = [port.connect("10.0.0.1", logs_in=True) for _ in range(4)]
    strangers = [
        made
        for number in range(200)
        if (made := port.connect(f"10.9.9.{number % hosts}")) is not None
    ]
    strangers = port.sweep(strangers)
    assert len(strangers) == min(36, 30 * hosts)
    for _ in range(20):
        made = port.connect("10.0.0.2", logs_in=True)
        assert made is not None
        assert not made.is_cut
        strangers = port.sweep(strangers)
    assert all(one is not None and not one.is_cut for one in known)
    assert len(port.limits._peers) <= 40


def test_a_host_at_its_limit_pushes_out_its_own_connection_without_a_login() -> None:
    port = Port(1_000, per_peer=4)
    other = port.connect("10.0.0.2")
    first, second = port.connect("10.0.0.1"), port.connect("10.0.0.1")
    for _ in range(2):
        assert port.connect("10.0.0.1", logs_in=True) is not None
    assert port.connect("10.0.0.1", logs_in=True) is not None
    assert (first is not None and first.is_cut, second is not None and second.is_cut) == (
        True,
        False,
    )
    assert port.connect("10.0.0.1") is None, "the only one left in its handshake has its time"
    assert other is not None
    assert not other.is_cut


def test_the_host_with_the_most_strangers_is_known_at_each_moment() -> None:
    random, strangers, there = Random(7), Strangers(), list[Unknown]()
    for _ in range(3_000):
        if there and random.random() < 0.48:
            gone = there.pop(random.randrange(len(there)))
            strangers.remove(gone)
            strangers.remove(gone)
        else:
            there.append(Unknown(f"10.0.0.{random.randrange(6)}"))
            strangers.add(there[-1], there[-1].host)
        assert len(strangers) == len(there)
        counts = Counter(one.host for one in there)
        found = strangers.oldest()
        if found is None:
            assert not there
            continue
        assert isinstance(found, Unknown)
        assert counts[found.host] == max(counts.values())
        assert found is next(one for one in there if one.host == found.host)

"""How many connections there may be, of all, of a host, and before a login."""

from __future__ import annotations

import pytest
from twisted.internet.task import Clock

from tests.broker.support import HELLO, BrokerInMemory
from txmq.broker.reactor import connection_limits
from txmq.broker.reactor.connection_limits import ConnectionLimits, network_of


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

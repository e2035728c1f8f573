"""The brokers of a client of several: which list they know, and what is where."""

from __future__ import annotations

import asyncio
from uuid import UUID

import pytest

from txmq.client.protocol.address import Addresses, parse_url
from txmq.client.protocol.conversation import LogIdentity, MeetsLog
from txmq.client.protocol.sender.brokers import Brokers
from txmq.client.protocol.sender.routing import Routing
from txmq.client.protocol.sender.topics import TopicMetadata
from txmq.client.protocol.settings import ClientSettings
from txmq.model.cluster import ListedLog, LogList
from txmq.wire.hello import BrokerLimits, Welcome

A, B, C = (UUID(int=number) for number in range(1, 4))
URLS = ("txmqs://kim@a,a2/?ca=ca.pem", "txmqs://kim@b/?ca=ca.pem")
LISTED = (ListedLog(A, "a:7650", 0), ListedLog(B, "b:7650", 0), ListedLog(C, "c:7650", 10))


class Core(MeetsLog):
    """The core of a broker that is not there."""

    def __init__(self, url: str | Addresses) -> None:
        self._addresses, self._log = parse_url(url), LogIdentity()

    def told(self, *logs: ListedLog, version: int = 1, log_id: UUID | None = None) -> None:
        """Be welcomed by a broker with this list."""
        limits = BrokerLimits(frame=1_000, message=1_000)
        log_id = log_id or self.known_log_id or logs[0].log_id
        welcome = Welcome(
            version=1, broker="b", log_id=log_id, boot_epoch=1, limits=limits,
            log_list=LogList(version, logs),
        )  # fmt: skip
        self._log.check(welcome)
        self._log.take_news(welcome)


def brokers_of(*urls: str) -> tuple[Brokers[Core], list[int]]:
    """Return brokers, and the list that gets those that are found."""
    found: list[int] = []
    return Brokers([Core(url) for url in urls], Core, found.append), found


def test_without_a_list_all_that_were_named_have_keys_and_messages() -> None:
    brokers, found = brokers_of(*URLS)
    brokers.refresh()
    assert (brokers.version, brokers.first, found) == (0, 0, [])
    assert [*brokers.with_keys_of(7)] == [*brokers.for_any] == [0, 1]


def test_a_log_that_no_broker_has_gets_one_with_the_login_of_the_others() -> None:
    brokers, found = brokers_of(*URLS)
    brokers.cores[1].told(*LISTED, log_id=B)
    assert found == [2]
    made = brokers.cores[2]
    assert (made.known_log_id, made._addresses.tls) == (C, brokers.cores[1]._addresses.tls)
    assert made._addresses.login is not None
    assert made._addresses.login.user == "kim"
    assert [*brokers.for_any] == [0, 1]  # until it has answered
    brokers.after_fork()  # as nobody waits for that in the child
    assert found == [2, 2]
    brokers.note_answer(2)
    assert [*brokers.for_any] == [0, 1, 2]
    assert [*brokers.with_keys_of(9)] == [0, 1]
    assert [*brokers.with_keys_of(10)] == [0, 1, 2]
    made.told(*LISTED)  # which it does not learn twice
    brokers.after_fork()
    assert found == [2, 2]


def test_the_order_is_that_of_the_list() -> None:
    brokers, _found = brokers_of(*reversed(URLS))
    brokers.cores[0].told(*LISTED, log_id=B)
    assert (brokers.first, [*brokers.with_keys_of(1)]) == (1, [1, 0])


def test_a_log_is_known_by_its_id_whatever_the_address() -> None:
    brokers, found = brokers_of("txmq://elsewhere")
    brokers.cores[0].told(*LISTED[:2], log_id=A)
    assert (found, brokers.first) == ([1], 0)
    moved = LISTED[1]._replace(addresses="b2:7650")
    brokers.cores[0].told(LISTED[0], moved, version=2)
    assert found == [1]
    core = brokers.cores[1]
    turn = core._log.in_turn(core._addresses, lambda: 1.0)
    tried = [str(address) for address, _share in turn]
    assert tried == ["b2:7650", "b:7650"]


def test_an_older_list_and_that_of_other_logs_change_nothing() -> None:
    brokers, found = brokers_of(*URLS)
    brokers.cores[0].told(*LISTED, version=2, log_id=A)
    brokers.cores[1].told(*LISTED[:2], log_id=B)
    assert (brokers.version, found) == (2, [2])
    brokers.cores[1].told(LISTED[2], LISTED[1], version=3)
    assert (brokers.version, brokers.first) == (2, 0)


def test_a_drained_log_keeps_its_keys_and_gets_no_others() -> None:
    brokers, _found = brokers_of(*URLS)
    drained = LISTED[1]._replace(keys_to=5)
    brokers.cores[0].told(LISTED[0], drained, log_id=A)
    assert [*brokers.for_any] == [0]
    assert [*brokers.with_keys_of(4)] == [0, 1]
    assert [*brokers.with_keys_of(5)] == [0]


def test_a_broker_expects_the_log_at_its_address_and_has_it_once_that_is_noted() -> None:
    core = Core(URLS[1])
    assert [core.expects(one) for one in LISTED] == [False, True, False]
    assert core.known_log_id is None  # to ask changes nothing
    core.note_listed(LISTED[1])
    assert [core.expects(one) for one in LISTED] == [False, True, False]
    assert core.known_log_id == B


@pytest.mark.parametrize("topic_id", [9, 10])
def test_a_topic_is_looked_up_again_where_the_first_log_tells_of_others(topic_id: int) -> None:
    routing = Routing(URLS, ClientSettings(), lambda _topic: {}, None)
    brokers, _found = brokers_of(*URLS)
    routing.brokers = brokers
    asked: list[int] = []

    async def describe(broker: int, topic: str) -> TopicMetadata:
        asked.append(broker)
        if len(asked) == 3:  # all that were known had answered
            brokers.cores[0].told(*LISTED, log_id=A)
        return TopicMetadata(topic, 2, 1, topic_id)

    counts = asyncio.run(routing.look_up("t", describe))
    assert counts == dict.fromkeys([0, 1, 2] if topic_id == 10 else [0, 1], 2)
    assert routing.map.partition_counts("t") == counts

"""Half messages without a block: they share frames, and each has its own outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from twisted.internet.defer import Deferred, gatherResults

import txmq
import txmq.twisted
from tests.client.proxy import Proxy
from tests.client.reactor_thread import InReactor
from tests.client.real import RealBroker
from tests.client.scripted_broker import FakeBroker, HangUp
from tests.client.scripted_bundles import BundleAnswers
from tests.client.scripted_member import fresh
from txmq.client.blocking.client import Client
from txmq.client.protocol.transaction.checks import Half
from txmq.client.protocol.transaction.open_work import REASON, end_work
from txmq.errors import (
    ClientClosed,
    ConfigError,
    Conflict,
    MessageTooLarge,
    StaleTopic,
    Throttled,
    TransactionAborted,
    UnknownTopic,
)
from txmq.model.bundle import BundleReceipt, BundleState
from txmq.model.decider import ByChecker
from txmq.model.message import COMMIT, Decision
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.wire.bundle import pack_bundle_receipt
from txmq.wire.data_requests import Opcode

Connect = Callable[..., Client]


def store(client: Client, count: int, topic: str = "orders", **options: Any) -> list[Any]:
    return [
        client.half_async(topic, b"%d" % number, checker="bank", **options)
        for number in range(count)
    ]


def bodies(real: RealBroker, topic: str) -> list[bytes]:
    return [found.body for found in real.read(topic)]


def results(futures: list[Any]) -> list[Any]:
    return [future.result(PATIENCE_S) for future in futures]


def test_half_messages_and_decisions_in_flight_together_share_frames(
    fake: FakeBroker, connect: Connect
) -> None:
    answers, client = BundleAnswers(fake), connect(fake.url)
    for _ in range(5):
        halves = results(store(client, 40))
        assert results([half.commit() for half in halves]) == [True] * 40
    stats = client.stats
    assert len({part.token for parts in answers.parts() for part in parts}) == 200
    assert stats.requests > 200
    assert len(answers.frames) < 200


def test_a_single_half_is_an_ordinary_bundle(fake: FakeBroker, connect: Connect) -> None:
    answers, client = BundleAnswers(fake), connect(fake.url)
    [half] = results(store(client, 1, key="k", check_after=2.5))
    assert half.rollback().result(PATIENCE_S)
    assert [opcode for opcode, _requests in answers.frames] == [Opcode.GROUP, Opcode.DECIDE]
    [[part]] = answers.parts()
    assert part.description is not None
    assert (part.description.decider, part.description.service) == (ByChecker("bank"), "orders")
    assert (part.description.check_after, part.token) == (2_500_000, half.token.bytes)
    assert half.message_id == f"{half.token.hex}-0"


def bundled(client: Client, count: int) -> list[Any]:
    """Half messages that go out in one frame, gathered while the sender is kept
    busy.
    """
    outbox = client._core.sender._accumulator
    outbox._threshold = count
    return store(client, count)


def test_one_that_is_refused_fails_alone(fake: FakeBroker, connect: Connect) -> None:
    answers, client = BundleAnswers(fake), connect(fake.url)
    results(store(client, 1))
    rolled_back = pack_bundle_receipt(BundleReceipt(BundleState.ROLLED_BACK, 7))
    answers.script = [[None, UnknownTopic("none such"), rolled_back, None]]
    first, second, third, fourth = bundled(client, 4)
    halves = results([first, fourth])
    with pytest.raises(UnknownTopic):
        second.result(PATIENCE_S)
    with pytest.raises(TransactionAborted):
        third.result(PATIENCE_S)
    assert [len(requests) for _opcode, requests in answers.frames] == [1, 4]
    assert [half.token.bytes for half in halves] == [answers.parts()[1][at].token for at in (0, 3)]


def test_after_a_lost_connection_the_same_bundles_come_again(
    fake: FakeBroker, connect: Connect
) -> None:
    answers, client = BundleAnswers(fake), connect(fake.url)
    results(store(client, 1))
    answers.script = [HangUp]
    assert len({half.token for half in results(bundled(client, 5))}) == 5
    lost, again = answers.parts()[1:]
    assert {part.token: part.digest for part in lost} == {part.token: part.digest for part in again}


def test_a_bundle_for_a_topic_that_has_grown_is_built_anew(
    fake: FakeBroker, connect: Connect
) -> None:
    answers, client = BundleAnswers(fake), connect(fake.url)
    results(store(client, 1))
    fake.partitions, fake.epoch = 4, 2
    answers.script = [
        [None, StaleTopic("it has grown", detail={"topic": "orders", "epoch": 2}), None]
    ]
    halves = results(bundled(client, 3))
    again = answers.parts()[2]
    assert [part.token for part in again] == [halves[1].token.bytes]
    assert again[0].batches[0].topic_epoch == 2


def test_an_invalid_half_message_fails_at_once(fake: FakeBroker, connect: Connect) -> None:
    with pytest.raises(ConfigError):
        connect(fake.url, service=None).half_async("orders", b"", checker="bank")
    client = connect(fake.url)
    with pytest.raises(MessageTooLarge):
        client.half_async("orders", bytes((4 << 20) + 1), checker="bank")
    with pytest.raises(ConfigError):
        client.half_async("orders", b"", checker="bank", check_after=-1.0)
    client.close()
    with pytest.raises(ClientClosed):
        client.half_async("orders", b"", checker="bank")


def test_a_full_window_accepts_no_more_half_messages(fake: FakeBroker, connect: Connect) -> None:
    fake.others = lambda _frame: b"not an answer to wait for"
    client = connect(fake.url, window=2)
    client._core.topics.get("orders")
    fake.hang_up()
    fake.close()
    store(client, 2)
    with pytest.raises(Throttled):
        store(client, 1, timeout=0.01)
    client.close(timeout=0.1)


def test_a_half_is_published_dropped_or_asked_about(real: RealBroker, connect: Connect) -> None:
    topic, asked = fresh("t"), list[bytes]()

    def checker(half: Half) -> Decision:
        asked.append(half.messages[0].body)
        return COMMIT

    client = connect(real.url, service=fresh("s"))
    client.register_checker("bank", checker)
    kept, dropped, *others = results(store(client, 12, topic, key="k"))
    assert [half.commit().result(PATIENCE_S) for half in others[::-1]] == [False] * 10
    assert dropped.rollback().result(PATIENCE_S) is False
    with pytest.raises(Conflict):
        dropped.commit().result(PATIENCE_S)
    assert bodies(real, topic) == []
    assert kept.commit().result(PATIENCE_S)
    wait_until(lambda: len(bodies(real, topic)) == 11)
    assert bodies(real, topic) == [b"0", *(b"%d" % number for number in range(2, 12))]
    [last] = results(store(client, 1, topic, key="other", check_after=0.1))
    wait_until(lambda: client.call("tx.show", token=last.token.hex)["check_reason"] == REASON)
    assert asked == []
    end_work(last.token)  # as if its process had died
    client.call("tx.check", token=last.token.hex)
    wait_until(lambda: asked == [b"0"])
    wait_until(lambda: len(bodies(real, topic)) == 12)
    assert last.commit().result(PATIENCE_S)


def test_lost_answers_do_not_double_anything(real: RealBroker, connect: Connect) -> None:
    topic = fresh("t")
    with Proxy(real.url) as proxy:
        client = connect(proxy.url, service=fresh("s"))
        results(store(client, 1, topic))[0].commit().result(PATIENCE_S)
        for opcode in (Opcode.GROUPS, Opcode.DECISIONS, Opcode.GROUP, Opcode.DECIDE):
            proxy.lose[opcode] = 1
        halves = results(store(client, 30, topic))
        results([half.commit() for half in halves])
        client.close()
    wait_until(lambda: len(bodies(real, topic)) == 31)
    assert len(set(bodies(real, topic))) == 30


@pytest.fixture
def client(reactor: Any, real: RealBroker, in_reactor: InReactor) -> Iterator[txmq.twisted.Client]:
    client = txmq.twisted.connect(reactor, real.url, service="tests", timeout=PATIENCE_S)
    yield client

    async def close() -> None:
        await client.close()

    in_reactor(close)


def test_on_twisted_those_of_one_turn_share_a_frame(
    client: txmq.twisted.Client, real: RealBroker, in_reactor: InReactor
) -> None:
    topic = fresh("t")

    async def story() -> None:
        halves: Any = await gatherResults(
            [client.half(topic, b"%d" % n, checker="bank") for n in range(20)]
        )
        decided: list[Deferred[bool]] = [half.commit() for half in halves[:15]]
        decided += [half.rollback() for half in halves[15:]]
        answers: Any = await gatherResults(decided)
        assert answers == [True] * 15 + [False] * 5

    in_reactor(story)
    assert sorted(map(int, bodies(real, topic))) == list(range(15))
    stats = client._bridge.at_once(lambda: client._awaited.stats)
    assert stats.requests >= 36


def test_on_twisted_a_client_needs_a_service(
    reactor: Any, real: RealBroker, in_reactor: InReactor
) -> None:
    async def story() -> None:
        nobody = txmq.twisted.connect(reactor, real.url)
        with pytest.raises(ConfigError):
            await nobody.half("t", b"", checker="bank")
        await nobody.close()

    in_reactor(story)


def test_halves_that_the_broker_throttles_go_again_and_their_decisions_do_not_wait(
    fake: FakeBroker, connect: Connect
) -> None:
    answers, client = BundleAnswers(fake), connect(fake.url)
    [first] = results(store(client, 1))
    answers.script = [[Throttled.after(0.4, "the disk is behind")]]
    [second] = store(client, 1)
    wait_until(lambda: len(answers.frames) >= 2)
    assert first.commit().result(PATIENCE_S)
    assert not second.done(), "it waits, and the decision did not"
    assert second.result(PATIENCE_S).commit().result(PATIENCE_S)
    codes = [code for code, _requests in answers.frames]
    assert codes == [Opcode.GROUP, Opcode.GROUP, Opcode.DECIDE, Opcode.GROUP, Opcode.DECIDE]


def test_a_half_that_stays_throttled_fails_with_that_error(
    fake: FakeBroker, connect: Connect
) -> None:
    answers, client = BundleAnswers(fake), connect(fake.url, delivery_timeout=2.0)
    answers.script = [[Throttled.after(30, "the disk is behind")]] * 3
    [half] = store(client, 1)
    with pytest.raises(Throttled, match="behind"):
        half.result(PATIENCE_S)

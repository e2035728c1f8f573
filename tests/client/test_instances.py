"""Producers that outlive their processes: of two incarnations, the older sends nothing
any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import txmq
import txmq.twisted
from tests.client.reactor_thread import InReactor
from tests.client.real import RealBroker
from tests.client.scripted_member import fresh
from txmq.client.blocking.client import Client
from txmq.client.protocol.conversation import Conversation, LogIdentity
from txmq.client.protocol.identity import ProducerInstance
from txmq.errors import BadRequest, BrokerUnavailable, ConfigError, ProducerFenced
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.wire.data_requests import Opcode
from txmq.wire.frames import FrameDecoder, encode_frame
from txmq.wire.status import error_reply

Connect = Callable[..., Client]
WELCOME = (
    b'{"version":1,"broker":"b","log_id":"01890a5d-ac96-774b-bcce-b302099a8057","boot_epoch":1,'
    b'"limits":{"frame":9999,"message":99}}'
)


def bodies(broker: RealBroker, topic: str) -> list[bytes]:
    return [found.body for found in broker.read(topic)]


def registrations(client: Client, instance: str) -> int:
    """How many there have been."""
    return int(client.call("producer.register", service="orders", instance=instance)["epoch"]) - 1


def test_an_older_incarnation_is_fenced_and_decides_what_it_stored(
    real: RealBroker, connect: Connect
) -> None:
    name, topic = fresh("orders"), fresh("t")
    older, newer = (connect(real.url, instance=name) for _ in range(2))
    older.send(topic, b"before")
    with older.transaction(checker="billing", check_after=600) as tx:
        tx.send(topic, b"half")
        tx.prepare()
        assert newer.send(topic, b"newer").offset is not None
        with pytest.raises(
            ProducerFenced, match=r"incarnation 1 .* the current one is 2"
        ) as fenced:
            older.send(topic, b"late")
        assert not fenced.value.retriable
        with pytest.raises(ProducerFenced):
            older.send_async(topic, b"late").result(PATIENCE_S)
        with pytest.raises(ProducerFenced), older.transaction() as late:
            late.send(topic, b"late")
    wait_until(lambda: sorted(bodies(real, topic)) == [b"before", b"half", b"newer"])


def test_a_client_registers_once_however_many_connections_it_has(
    real: RealBroker, connect: Connect
) -> None:
    name, topic = fresh("orders"), fresh("t")
    client = connect(real.url, instance=name)
    threads = [
        threading.Thread(target=client.send, args=(topic, b"%d" % number)) for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.send_async(topic, b"8").result(PATIENCE_S)
    assert sorted(bodies(real, topic)) == [b"%d" % number for number in range(9)]
    assert registrations(connect(real.url), name) == 1


def test_an_incarnation_outlives_the_broker(own_broker: RealBroker, connect: Connect) -> None:
    older, newer = (connect(own_broker.url, instance="orders-1") for _ in range(2))
    for client in (older, newer):
        client.send("t", b"x")
    own_broker.kill()
    own_broker.start()
    newer.send("t", b"y")
    with pytest.raises(ProducerFenced):
        older.send("t", b"late")
    assert registrations(newer, "orders-1") == 2


def test_the_twisted_face_registers_once_for_all_its_connections(
    real: RealBroker, reactor: Any, in_reactor: InReactor
) -> None:
    name, topic = fresh("orders"), fresh("t")

    def made() -> txmq.twisted.Client:
        return txmq.twisted.connect(
            reactor, real.url, service="orders", instance=name, timeout=PATIENCE_S
        )

    async def story() -> None:
        older, newer = made(), made()
        await older.send(topic, b"1")
        consumer = await older.consumer(fresh("g"), [topic])
        # on a connection of the client's threads
        async with older.transaction(checker="billing") as tx:
            tx.send(topic, b"2")
        assert (await older.call("producer.register", service="orders", instance=fresh("other")))[
            "epoch"
        ] == 1
        await newer.send(topic, b"3")
        with pytest.raises(ProducerFenced, match=r"incarnation 1 .* the current one is 2"):
            await older.send(topic, b"late")
        await consumer.close()
        await older.close()
        await newer.close()

    in_reactor(story)
    assert sorted(bodies(real, topic)) == [b"1", b"2", b"3"]


@pytest.mark.parametrize(
    "options",
    [{"instance": "orders-1", "service": None}, {"instance": ""}, {"instance": "../x"}],
    ids=str,
)
def test_an_instance_has_a_name_and_a_service(connect: Connect, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="instance"):
        connect("txmq://127.0.0.1:1", **options)


def replies(conversation: Conversation, pieces: list[bytes]) -> list[bytes]:
    """The welcome and the answer to a registration, for requests of these
    correlations.
    """
    hello, register = FrameDecoder(4_096).feed(b"".join(pieces))
    registered = encode_frame(Opcode.CALL, register.correlation, b'{"epoch":7}')
    return [encode_frame(Opcode.HELLO, hello.correlation, WELCOME), registered]


def test_one_connection_registers_and_the_others_wait() -> None:
    pin, one = LogIdentity(), ProducerInstance("orders-1")
    first, second = (Conversation("orders", pin, one) for _ in range(2))
    answers = replies(first, first.hello())
    with pytest.raises(BrokerUnavailable, match="registering"):
        second.hello()
    assert first.receive(answers[0]) == []
    assert first.welcome is None
    assert first.receive(answers[1]) == []
    assert (first.welcome is not None, one.epoch) == (True, 7)
    assert b'"incarnation":7' in b"".join(second.hello())


def test_a_registration_that_is_lost_or_refused_is_another_connection_s() -> None:
    pin, one = LogIdentity(), ProducerInstance("orders-1")
    lost, refused = (Conversation("orders", pin, one) for _ in range(2))
    lost.hello()
    lost.close()
    pieces = refused.hello()
    status, payload = error_reply(BadRequest("no more epochs"))
    correlation = FrameDecoder(4_096).feed(b"".join(pieces))[1].correlation
    with pytest.raises(BadRequest, match="no more epochs"):
        refused.receive(
            replies(refused, pieces)[0]
            + encode_frame(Opcode.CALL, correlation, payload, status=status)
        )
    refused.close()
    refused.close()
    assert (one.epoch, one.claim()) == (0, True)

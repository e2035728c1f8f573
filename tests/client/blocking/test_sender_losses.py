"""Sends without waiting over lost connections, without a broker, refused, and to topics
that change.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.client.held_sends import Connect, paused, refuse_from_here, results
from tests.client.scripted_broker import FakeBroker, HangUp, Silent, receipt
from txmq.batch import BatchView
from txmq.client.protocol.sender.accumulator import SideRequest
from txmq.errors import (
    BrokerUnavailable,
    ClientClosed,
    ConnectionLost,
    LocalProtocolError,
    LogChanged,
    NotPermitted,
    ReadOnly,
    RequestRejected,
    RequestTimeout,
    SequenceGap,
    StaleTopic,
    Throttled,
    UnknownProducer,
    UnknownTopic,
)
from txmq.model.keys import partition_of
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.wire.data_requests import Opcode


def test_a_lost_connection_loses_and_doubles_nothing(fake: FakeBroker, connect: Connect) -> None:
    client = connect(fake.url)
    fake.script += [None, HangUp]
    receipts = results(
        [client.send_async("orders", str(n).encode() * 50_000, key="k") for n in range(60)]
    )
    assert [got.message_id for got in receipts] == sorted(
        {got.message_id for got in receipts}, key=_number
    )
    once = dict.fromkeys(send.batch for send in fake.sends)
    assert [body for batch in once for body in BatchView(batch).bodies] == [
        str(n).encode() * 50_000 for n in range(60)
    ]
    assert client.stats.connections == 2
    assert client.stats.resent >= 1


def _number(message_id: str) -> int:
    return int(message_id.rpartition("-")[2])


def test_a_silent_connection_is_given_up_and_its_frames_are_sent_again(
    fake: FakeBroker, connect: Connect
) -> None:
    fake.script += [Silent] + [receipt(9, duplicate=True)] * 20
    assert connect(fake.url, timeout=0.3).send_async("orders", b"x").result(PATIENCE_S).duplicate
    assert fake.sends[0] == fake.sends[1]


def test_messages_survive_while_no_broker_is_there(connect: Connect) -> None:
    with FakeBroker() as fake:
        client = connect(fake.url)
        client.send_async("orders", b"before").result(PATIENCE_S)
        port = fake.port
    futures = [client.send_async("orders", str(n).encode()) for n in range(10)]
    with FakeBroker(port=port) as again:
        assert len(results(futures)) == 10
        assert [body for bodies in again.bodies() for body in bodies] == [
            str(n).encode() for n in range(10)
        ]


def test_messages_that_find_no_broker_in_time_fail_and_were_not_sent(
    fake: FakeBroker, connect: Connect
) -> None:
    client = connect(fake.url, delivery_timeout=2.0)
    client.send_async("orders", b"x").result(PATIENCE_S)
    with capture_logs() as logged:
        fake.close()
        # Before it the sender could still write to the lost connection.
        wait_until(lambda: any(entry["event"] == "pipeline.connection_lost" for entry in logged))
    with pytest.raises(BrokerUnavailable) as caught:
        client.send_async("orders", b"y").result(PATIENCE_S)
    assert caught.value.outcome == "not done"
    assert client.stats.failed == 1


def test_a_message_without_an_answer_in_time_has_an_unknown_outcome(
    fake: FakeBroker, connect: Connect
) -> None:
    fake.script += [Silent] * 100
    client = connect(fake.url, timeout=60, delivery_timeout=2.0)
    client._core.topics.get("orders")
    with pytest.raises(RequestTimeout) as caught:
        client.send_async("orders", b"x").result(PATIENCE_S)
    assert caught.value.outcome == "unknown"


def test_a_refusal_fails_its_own_messages_and_later_ones_are_sent_again(
    fake: FakeBroker, connect: Connect
) -> None:
    fake.partitions = 3
    client = connect(fake.url)
    client.send_async("orders", b"a", partition=0).result(PATIENCE_S)
    refuse_from_here(fake, NotPermitted("not you"))
    refused, behind = (
        client.send_async("orders", body, partition=p) for p, body in ((1, b"b"), (2, b"c"))
    )
    with pytest.raises(NotPermitted):
        refused.result(PATIENCE_S)
    assert behind.result(PATIENCE_S).partition == 2
    assert client.send_async("orders", b"d", partition=0).result(PATIENCE_S).offset == 1
    kept = {body for bodies in fake.bodies() for body in bodies}
    assert kept == {b"a", b"b", b"c", b"d"}


@pytest.mark.parametrize(
    "refusal", [Throttled("busy"), UnknownProducer("forgotten"), SequenceGap("missing")]
)
def test_retriable_refusals_are_retried_in_order(
    fake: FakeBroker, connect: Connect, refusal: RequestRejected
) -> None:
    client = connect(fake.url)
    client.send_async("orders", b"0").result(PATIENCE_S)
    refuse_from_here(fake, refusal)
    receipts = results(
        [client.send_async("orders", str(n).encode(), key="k") for n in range(1, 30)]
    )
    assert [got.offset for got in receipts] == list(range(1, 30))
    assert client.stats.refused >= 1


def test_a_grown_topic_moves_waiting_messages_to_their_new_partitions(
    fake: FakeBroker, connect: Connect
) -> None:
    client = connect(fake.url)
    client.send_async("orders", b"before", key="k").result(PATIENCE_S)
    fake.partitions, fake.epoch = 16, 2
    refuse_from_here(fake, StaleTopic("grown", detail={"topic": "orders"}))
    receipts = results([client.send_async("orders", b"x", key=f"k{n}") for n in range(40)])
    assert [got.partition for got in receipts] == [partition_of(f"k{n}", 16) for n in range(40)]
    fixed = client.send_async("orders", b"x", key="k", partition=5).result(PATIENCE_S)
    assert fixed.partition == 5


def test_a_refused_doubtful_frame_never_gets_another_sequence(
    fake: FakeBroker, connect: Connect
) -> None:
    client = connect(fake.url)
    fake.script += [HangUp, Throttled("busy"), receipt(0, duplicate=True)]
    assert client.send_async("orders", b"x").result(PATIENCE_S).duplicate
    assert len(set(fake.origins())) == 1


def test_a_doubtful_frame_that_fails_keeps_its_place_in_the_sequence(
    fake: FakeBroker, connect: Connect
) -> None:
    client = connect(fake.url)
    fake.script += [HangUp, ReadOnly("no space")]
    with pytest.raises(ReadOnly) as caught:
        client.send_async("orders", b"maybe").result(PATIENCE_S)
    assert caught.value.outcome == "unknown"
    client.send_async("orders", b"next").result(PATIENCE_S)
    assert [sequence for _, sequence in fake.origins()] == [0, 0, 1]


def test_messages_for_a_topic_that_is_gone_fail_and_others_go_on(
    fake: FakeBroker, connect: Connect
) -> None:
    client = connect(fake.url)
    results([client.send_async(topic, b"x") for topic in ("orders", "gone")])
    refuse_from_here(fake, UnknownTopic("deleted"))
    with paused(client):
        gone = client.send_async("gone", b"x")
        client._core.topics.forget("gone")
    assert isinstance(gone.exception(PATIENCE_S), UnknownTopic)
    assert client.send_async("orders", b"last").result(PATIENCE_S).topic == "orders"


def test_a_partitioner_that_fails_fails_its_messages_alone(
    fake: FakeBroker, connect: Connect
) -> None:
    def choose(_topic: str, key: str | None, partitions: int) -> int:
        return {1: 0, 2: 1}[partitions] if key == "frail" else 0

    client = connect(fake.url, partitioner=choose)
    client.send_async("orders", b"x", key="frail").result(PATIENCE_S)
    fake.partitions, fake.epoch = 9, 2
    refuse_from_here(fake, StaleTopic("grown", detail={"topic": "orders"}))
    frail, sound = (client.send_async("orders", b"x", key=key) for key in ("frail", "sound"))
    with pytest.raises(LocalProtocolError, match="KeyError"):
        frail.result(PATIENCE_S)
    assert sound.result(PATIENCE_S).partition == 0


def test_another_log_fails_all_waiting_messages(fake: FakeBroker, connect: Connect) -> None:
    client = connect(fake.url)
    client.send_async("orders", b"x").result(PATIENCE_S)
    fake.log_id = fake.log_id.__class__(int=9)
    fake.hang_up()
    with pytest.raises((LogChanged, ConnectionLost)):
        client.send_async("orders", b"y").result(PATIENCE_S)
    assert [b"y"] not in fake.bodies()


def test_closing_does_not_wait_for_ever(fake: FakeBroker, connect: Connect) -> None:
    fake.script += [Silent] * 100
    client = connect(fake.url)
    future = client.send_async("orders", b"x")
    wait_until(lambda: fake.sends)
    began = time.monotonic()
    client.close(timeout=0.2)
    assert time.monotonic() - began < PATIENCE_S
    with pytest.raises(ConnectionLost) as caught:
        future.result(0)
    assert caught.value.outcome == "unknown"


def test_closing_without_a_broker_fails_waiting_messages(
    fake: FakeBroker, connect: Connect
) -> None:
    client = connect(fake.url)
    client.send("orders", b"x")
    fake.close()
    future = client.send_async("orders", b"x")
    client.close(timeout=0.1)
    with pytest.raises(ClientClosed):
        future.result(0)


def test_side_requests_are_repeated_after_a_lost_connection(
    fake: FakeBroker, connect: Connect
) -> None:
    client = connect(fake.url)
    replies: list[Any] = [HangUp, b"done"]
    fake.others = lambda _frame: replies.pop(0)
    assert (
        client._core.sender.request(SideRequest(Opcode.ACK, b"payload")).result(PATIENCE_S)
        == b"done"
    )
    assert [frame.payload for frame in fake.frames if frame.opcode == Opcode.ACK] == [
        b"payload"
    ] * 2


def test_a_refused_side_request_fails_alone(fake: FakeBroker, connect: Connect) -> None:
    client = connect(fake.url)
    fake.others = lambda _frame: NotPermitted("not you")
    with pytest.raises(NotPermitted):
        client._core.sender.request(SideRequest(Opcode.DECIDE, b"x")).result(PATIENCE_S)
    assert client.send_async("orders", b"x").result(PATIENCE_S).offset == 0

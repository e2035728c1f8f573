"""Sends without waiting: order, coalescing, the window, and the end of the client."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

import txmq
from tests.client.held_sends import Connect, Gate, eight_in_flight, gate, paused, results
from tests.client.scripted_broker import FakeBroker
from txmq.batch import BatchView
from txmq.client.blocking.client import Client
from txmq.client.blocking.connections.stream import NonBlockingConnection
from txmq.client.protocol.conversation import Conversation
from txmq.client.protocol.sender import multi_send
from txmq.client.protocol.sender.batcher import Batcher
from txmq.client.protocol.sender.rows import SMALL_BATCH_BYTES
from txmq.errors import LocalProtocolError, MessageTooLarge, RequestTimeout, Throttled
from txmq.model.keys import partition_of
from txmq.testing.wait import PATIENCE_S, wait_until

__all__ = ["gate"]


def test_a_lone_message_goes_out_at_once(fake: FakeBroker, connect: Connect) -> None:
    got = connect(fake.url).send_async(
        "orders", b"x", key="k", tag="t", headers={"a": "b"}, delay=5
    )
    view = BatchView((got.result(PATIENCE_S), fake.sends[0])[1].batch)
    assert got.result() == (view.message_ids[0], "orders", 0, 0, False)
    assert (view.bodies, view.keys, view.tags, view.deliver_at) == (
        [b"x"],
        ["k"],
        ["t"],
        [5_000_000],
    )


def test_messages_that_come_during_a_write_share_the_next_frame(
    fake: FakeBroker, connect: Connect
) -> None:
    client = connect(fake.url)
    results([client.send_async("orders", b"first")])
    with paused(client):
        futures = [client.send_async("orders", b"x", key=str(n)) for n in range(100)]
    assert [got.offset for got in results(futures)] == list(range(1, 101))
    assert [len(bodies) for bodies in fake.bodies()] == [1, 100]
    assert (client.stats.coalesced, client.stats.messages, client.stats.frames) == (100, 101, 2)


def test_messages_linger_until_they_are_half_of_those_without_a_receipt(
    fake: FakeBroker, connect: Connect, gate: Gate
) -> None:
    client = connect(fake.url)
    with eight_in_flight(client, gate) as futures:
        futures += [client.send_async("orders", b"second") for _ in range(4)]
        wait_until(lambda: client.stats.frames == 2)
    results(futures)
    assert [len(bodies) for bodies in fake.bodies()] == [8, 4]


def _waiting_connection(client: Client) -> NonBlockingConnection:
    """Return the sender's connection once its thread waits for replies."""
    sender = client._core.sender
    wait_until(lambda: sender._caller_io.connection is not None)
    assert sender._caller_io.connection is not None
    return sender._caller_io.connection


def test_the_caller_that_completes_a_frame_sends_it(
    fake: FakeBroker, connect: Connect, gate: Gate
) -> None:
    client = connect(fake.url)
    with eight_in_flight(client, gate) as futures:
        _waiting_connection(client)
        futures += [client.send_async("orders", b"second") for _ in range(4)]
        assert client.stats.frames == 2
    results(futures)


def test_a_caller_that_sends_does_not_notice_a_lost_connection(
    fake: FakeBroker, connect: Connect, gate: Gate
) -> None:
    client = connect(fake.url)
    with eight_in_flight(client, gate) as futures:
        _waiting_connection(client).abort()
        futures += [client.send_async("orders", b"second") for _ in range(40)]
    assert len({got.message_id for got in results(futures)}) == 48


@pytest.mark.parametrize("where", ["_encode", "request", "write"])
def test_an_interrupt_of_a_sending_caller_loses_nothing(
    fake: FakeBroker, connect: Connect, gate: Gate, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    client = connect(fake.url)
    owner: type = {"_encode": Batcher, "request": Conversation, "write": NonBlockingConnection}[
        where
    ]
    with eight_in_flight(client, gate) as futures:
        _waiting_connection(client)
        futures += [client.send_async("orders", b"second") for _ in range(3)]
        with monkeypatch.context() as patched:
            patched.setattr(owner, where, _interrupted)
            with pytest.raises(KeyboardInterrupt):
                client.send_async("orders", b"second")
    results(futures)
    wait_until(lambda: client.stats.messages == 12)
    views = [BatchView(send.batch) for send in fake.sends]
    sent = {
        name: body
        for view in views
        for name, body in zip(view.message_ids, view.bodies, strict=True)
    }
    assert Counter(sent.values()) == {b"first": 8, b"second": 4}


def _interrupted(*_args: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("look", [Future.done, lambda future: future.add_done_callback(print)])
def test_an_observed_message_goes_out_at_once(
    fake: FakeBroker, connect: Connect, gate: Gate, look: Callable[[Future[txmq.Receipt]], object]
) -> None:
    client = connect(fake.url)
    with eight_in_flight(client, gate) as futures:
        futures.append(client.send_async("orders", b"second"))
        look(futures[-1])
        wait_until(lambda: client.stats.frames == 2)
    results(futures)
    assert [len(bodies) for bodies in fake.bodies()] == [8, 1]


def test_an_unobserved_message_goes_out_with_the_last_receipt(
    fake: FakeBroker, connect: Connect, gate: Gate
) -> None:
    client = connect(fake.url)
    with eight_in_flight(client, gate):
        client.send_async("orders", b"second")
    wait_until(lambda: client.stats.messages == 9)
    client.send_async("orders", b"third")
    wait_until(lambda: client.stats.messages == 10)
    assert [len(bodies) for bodies in fake.bodies()] == [8, 1, 1]


def _send_in_a_thread(
    client: Client, count: int, topic: str = "orders"
) -> Callable[[], list[Future[txmq.Receipt]]]:
    """Start a thread that sends, and return a function that returns its futures."""
    futures: list[Future[txmq.Receipt]] = []
    thread = threading.Thread(
        target=lambda: futures.extend(
            client.send_async(topic, str(n).encode()) for n in range(count)
        )
    )
    thread.start()

    def finished() -> list[Future[txmq.Receipt]]:
        thread.join()
        return futures

    return finished


def test_messages_of_one_key_keep_their_order_and_every_receipt_is_its_own(
    fake: FakeBroker, connect: Connect
) -> None:
    fake.partitions = 4
    client = connect(fake.url)
    sent = [(f"k{n % 7}", str(n).encode()) for n in range(700)]
    receipts = results([client.send_async("orders", body, key=key) for key, body in sent])
    views = [(send.partition, BatchView(send.batch)) for send in fake.sends]
    for key in {key for key, _ in sent}:
        arrived = [
            body
            for partition, view in views
            if partition == partition_of(key, 4)
            for body, own in zip(view.bodies, view.keys, strict=True)
            if own == key
        ]
        assert arrived == [body for own, body in sent if own == key]
    ids = {
        name: body
        for _, view in views
        for name, body in zip(view.message_ids, view.bodies, strict=True)
    }
    assert [ids[got.message_id] for got in receipts] == [body for _, body in sent]


def test_many_threads_share_one_session_without_gaps(fake: FakeBroker, connect: Connect) -> None:
    client = connect(fake.url)
    threads = [
        threading.Thread(
            target=lambda: results([client.send_async("orders", b"x") for _ in range(200)])
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({producer for producer, _ in fake.origins()}) == 1
    expected = 0
    for (_, sequence), bodies in zip(fake.origins(), fake.bodies(), strict=True):
        assert sequence == expected
        expected += len(bodies)
    assert expected == 800


def test_the_window_makes_callers_wait_and_then_throttles_them(
    fake: FakeBroker, connect: Connect, gate: Gate
) -> None:
    client = connect(fake.url, window=5)
    futures = [client.send_async("orders", b"x") for _ in range(5)]
    with pytest.raises(Throttled, match="window"):
        client.send_async("orders", b"x", timeout=0.05)
    late = _send_in_a_thread(client, 3)
    gate.open()
    assert len(results(futures + late())) == 8


def test_the_window_counts_bytes_too(fake: FakeBroker, connect: Connect, gate: Gate) -> None:
    client = connect(fake.url, window_bytes=10_000)
    futures = [client.send_async("orders", b"x" * 5_000) for _ in range(2)]
    with pytest.raises(Throttled):
        client.send_async("orders", b"x", timeout=0.05)
    gate.open()
    results(futures)
    client.send_async("orders", b"x").result(PATIENCE_S)


def test_a_callback_may_send_though_the_window_is_full(
    fake: FakeBroker, connect: Connect, gate: Gate
) -> None:
    client = connect(fake.url, window=1)
    answers: list[Future[txmq.Receipt]] = []
    first = client.send_async("orders", b"x")
    first.add_done_callback(
        lambda _: answers.append(client.send_async("orders", b"reply", timeout=0))
    )
    gate.open()
    wait_until(lambda: answers)
    assert answers[0].result(PATIENCE_S).offset == 1


def test_no_more_than_256_frames_are_in_flight(
    fake: FakeBroker, connect: Connect, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multi_send, "MAX_BATCHES", 1)
    fake.partitions = 400
    client = connect(fake.url)
    futures = [client.send_async("orders", b"x", partition=n) for n in range(400)]
    assert gate.arrived.wait(PATIENCE_S)
    wait_until(lambda: client.stats.frames >= 256)
    assert client.stats.frames == 256
    gate.open()
    results(futures)
    assert client.stats.frames == 400


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"body": "text"}, LocalProtocolError),
        ({"body": b"x", "key": "k" * 2_000}, LocalProtocolError),
        ({"body": b"x", "tag": 5}, LocalProtocolError),
        ({"body": b"x", "headers": {"a": 5}}, LocalProtocolError),
        ({"body": b"x", "deliver_at": -1}, LocalProtocolError),
        ({"body": b"x", "partition": -1}, LocalProtocolError),
        ({"body": b"x" * (5 << 20)}, MessageTooLarge),
    ],
)
def test_an_invalid_message_is_refused_at_once_and_alone(
    fake: FakeBroker, connect: Connect, fields: dict[str, Any], error: type[Exception]
) -> None:
    client = connect(fake.url)
    before = client.send_async("orders", b"before")
    with pytest.raises(error):
        client.send_async("orders", **fields)
    results([before, client.send_async("orders", b"after")])


def test_a_body_may_change_after_the_call(fake: FakeBroker, connect: Connect, gate: Gate) -> None:
    client = connect(fake.url)
    first, body, headers = client.send_async("orders", b"first"), bytearray(b"kept"), {"a": "kept"}
    second = client.send_async("orders", body, headers=headers)  # type: ignore[arg-type]  # taken all the same
    body[:], headers["a"] = b"gone", "gone"
    gate.open()
    results([first, second])
    view = BatchView(fake.sends[-1].batch)
    assert (view.bodies[-1], dict(view.headers[-1])) == (b"kept", {"a": "kept"})


def test_flush_waits_for_every_receipt(fake: FakeBroker, connect: Connect, gate: Gate) -> None:
    client = connect(fake.url)
    future = client.send_async("orders", b"x")
    with pytest.raises(RequestTimeout):
        client.flush(0.05)
    gate.open()
    client.flush(PATIENCE_S)
    assert future.done()


def test_closing_sends_pending_messages(fake: FakeBroker, connect: Connect) -> None:
    client = connect(fake.url)
    futures = [client.send_async("orders", b"x") for _ in range(500)]
    client.close()
    assert all(future.done() for future in futures)
    assert len(results(futures)) == 500


def test_a_send_cannot_be_cancelled(fake: FakeBroker, connect: Connect, gate: Gate) -> None:
    future = connect(fake.url).send_async("orders", b"x")
    assert not future.cancel()
    gate.open()
    assert future.result(PATIENCE_S).offset == 0


def test_a_pipelined_send_that_is_throttled_goes_again(fake: FakeBroker, connect: Connect) -> None:
    fake.script += [Throttled.after(0.2, "the disk is behind")]
    assert connect(fake.url).send_async("orders", b"x").result(PATIENCE_S).offset == 0


def test_pipelined_sends_that_stay_throttled_fail_with_that_error(
    fake: FakeBroker, connect: Connect
) -> None:
    client = connect(fake.url, delivery_timeout=2.0)
    client._core.topics.get("orders")
    fake.script += [Throttled.after(30, "the disk is behind")] * 3
    with pytest.raises(Throttled, match="not sent in time: the disk is behind"):
        client.send_async("orders", b"y").result(PATIENCE_S)


def test_batches_grow_with_quick_receipts_and_are_small_after_a_refusal(
    fake: FakeBroker, connect: Connect
) -> None:
    client = connect(fake.url)
    client.send("orders", b"the topic is known")
    fake.sends.clear()

    def sizes(number: int) -> list[int]:
        with paused(client):
            futures = [client.send_async("orders", bytes(8 << 10)) for _ in range(number)]
        results(futures)
        found = [len(send.batch) for send in fake.sends]
        fake.sends.clear()
        return found

    small = SMALL_BATCH_BYTES
    largest = [max(sizes(200)) for _ in range(5)]
    steps = [small, 2 * small, 4 * small, 8 * small, 8 * small]
    assert all(step * 0.9 < size < step * 1.01 for size, step in zip(largest, steps, strict=True))
    fake.script += [Throttled.after(0.05, "the disk is behind")]
    large, *rest = sizes(60)
    assert large > 3 * small
    assert len(rest) >= 4, "the same messages again"
    assert max(rest) <= small + 1_024

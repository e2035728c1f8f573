"""Sends that nobody waits for one by one: order, coalescing, the window, lost connections and refusals."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest

import txmq
from tests.client.fake import FakeBroker, HangUp, Silent, receipt
from txmq.batch import BatchView
from txmq.client.blocking import Client
from txmq.client.conversation import Conversation
from txmq.client.loader import Loader
from txmq.client.stream import Stream
from txmq.errors import (
    BrokerUnavailable,
    ClientClosed,
    ConnectionLost,
    LocalProtocolError,
    LogChanged,
    MessageTooLarge,
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
from txmq.keys import partition_of
from txmq.testing.wait import wait_until
from txmq.wire.frames import Frame
from txmq.wire.headers import Opcode, unpack_send

Connect = Callable[..., Client]
DEADLINE_S = 20


class Gate:
    """Holds the replies to sends back until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.arrived = threading.Event()

    def __call__(self, _frame: object) -> None:
        self.arrived.set()
        assert self._open.wait(DEADLINE_S)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(fake: FakeBroker) -> Iterator[Gate]:
    """The first send is held back."""
    gate = Gate()
    fake.script.append(gate)
    yield gate
    gate.open()


def results(futures: list[Future[txmq.Receipt]]) -> list[txmq.Receipt]:
    return [future.result(DEADLINE_S) for future in futures]


def refuse_from_here(fake: FakeBroker, refusal: RequestRejected) -> None:
    """The next send is refused, and so is everything behind it in its session, as a broker does."""
    sessions: list[bytes] = []

    def step(frame: Frame) -> RequestRejected | None:
        sessions.append(BatchView(unpack_send(frame.payload).batch).header.producer_id)
        if len(sessions) == 1:
            return refusal
        return SequenceGap("a send is missing") if sessions[-1] == sessions[0] else None

    fake.script += [step] * 100


def test_a_lone_message_goes_out_at_once(fake: FakeBroker, connect: Connect) -> None:
    got = connect(fake.url).send_async("orders", b"x", key="k", tag="t", headers={"a": "b"}, delay=5)
    view = BatchView((got.result(DEADLINE_S), fake.sends[0])[1].batch)
    assert got.result() == (view.message_ids[0], "orders", 0, 0, False)
    assert (view.bodies, view.keys, view.tags, view.deliver_at) == ([b"x"], ["k"], ["t"], [5_000_000])


@contextmanager
def paused(client: Client) -> Iterator[None]:
    """The pipeline takes nothing meanwhile, as if a write were under way."""
    flights = client.core.pipeline._flights
    flights.paused_until = time.monotonic() + 3_600
    yield
    flights.paused_until = 0.0


def test_what_comes_during_a_write_shares_the_next_frame(fake: FakeBroker, connect: Connect) -> None:
    client = connect(fake.url)
    results([client.send_async("orders", b"first")])
    with paused(client):
        futures = [client.send_async("orders", b"x", key=str(n)) for n in range(100)]
    assert [got.offset for got in results(futures)] == list(range(1, 101))
    assert [len(bodies) for bodies in fake.bodies()] == [1, 100]
    assert (client.stats.coalesced, client.stats.messages, client.stats.frames) == (100, 101, 2)


@contextmanager
def eight_under_way(client: Client, gate: Gate) -> Iterator[list[Future[txmq.Receipt]]]:
    """A frame of eight messages, whose receipts come at the end of the block."""
    client.core.topics.shape("orders")
    with paused(client):
        futures = [client.send_async("orders", b"first") for _ in range(8)]
    assert gate.arrived.wait(DEADLINE_S)
    yield futures
    gate.open()


def test_half_as_many_as_have_no_receipt_go_out_together(fake: FakeBroker, connect: Connect, gate: Gate) -> None:
    client = connect(fake.url)
    with eight_under_way(client, gate) as futures:
        futures += [client.send_async("orders", b"second") for _ in range(4)]
        wait_until(lambda: client.stats.frames == 2)
    results(futures)
    assert [len(bodies) for bodies in fake.bodies()] == [8, 4]


def _stream_that_waits(client: Client) -> Stream:
    """The connection of the pipeline's thread, which waits for replies."""
    pipeline = client.core.pipeline
    wait_until(lambda: pipeline._line.stream is not None)
    assert pipeline._line.stream is not None
    return pipeline._line.stream


def test_who_completes_the_half_sends_it_himself(fake: FakeBroker, connect: Connect, gate: Gate) -> None:
    client = connect(fake.url)
    with eight_under_way(client, gate) as futures:
        _stream_that_waits(client)
        futures += [client.send_async("orders", b"second") for _ in range(4)]
        assert client.stats.frames == 2
    results(futures)


def test_who_sends_himself_over_a_lost_connection_does_not_notice(
    fake: FakeBroker, connect: Connect, gate: Gate
) -> None:
    client = connect(fake.url)
    with eight_under_way(client, gate) as futures:
        _stream_that_waits(client).abort()
        futures += [client.send_async("orders", b"second") for _ in range(40)]
    assert len({got.message_id for got in results(futures)}) == 48


@pytest.mark.parametrize("where", ["_encode", "request", "write"])
def test_an_interrupt_of_who_sends_himself_loses_nothing(
    fake: FakeBroker, connect: Connect, gate: Gate, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    client = connect(fake.url)
    owner: type = {"_encode": Loader, "request": Conversation, "write": Stream}[where]
    with eight_under_way(client, gate) as futures:
        _stream_that_waits(client)
        futures += [client.send_async("orders", b"second") for _ in range(3)]
        with monkeypatch.context() as patched:
            patched.setattr(owner, where, _interrupted)
            with pytest.raises(KeyboardInterrupt):
                client.send_async("orders", b"second")
    results(futures)
    wait_until(lambda: client.stats.messages == 12)
    views = [BatchView(send.batch) for send in fake.sends]
    sent = {name: body for view in views for name, body in zip(view.message_ids, view.bodies, strict=True)}
    assert Counter(sent.values()) == {b"first": 8, b"second": 4}


def _interrupted(*_args: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("look", [Future.done, lambda future: future.add_done_callback(print)])
def test_what_somebody_looks_at_goes_out_at_once(
    fake: FakeBroker, connect: Connect, gate: Gate, look: Callable[[Future[txmq.Receipt]], object]
) -> None:
    client = connect(fake.url)
    with eight_under_way(client, gate) as futures:
        futures.append(client.send_async("orders", b"second"))
        look(futures[-1])
        wait_until(lambda: client.stats.frames == 2)
    results(futures)
    assert [len(bodies) for bodies in fake.bodies()] == [8, 1]


def test_a_message_that_nobody_looks_at_goes_out_with_the_last_receipt(
    fake: FakeBroker, connect: Connect, gate: Gate
) -> None:
    client = connect(fake.url)
    with eight_under_way(client, gate):
        client.send_async("orders", b"second")
    wait_until(lambda: client.stats.messages == 9)
    client.send_async("orders", b"third")
    wait_until(lambda: client.stats.messages == 10)
    assert [len(bodies) for bodies in fake.bodies()] == [8, 1, 1]


def _put_in_a_thread(client: Client, count: int, topic: str = "orders") -> Callable[[], list[Future[txmq.Receipt]]]:
    """Starts a thread that sends as soon as it can; returns how to get its futures."""
    futures: list[Future[txmq.Receipt]] = []
    thread = threading.Thread(
        target=lambda: futures.extend(client.send_async(topic, str(n).encode()) for n in range(count))
    )
    thread.start()

    def finished() -> list[Future[txmq.Receipt]]:
        thread.join(DEADLINE_S)
        return futures

    return finished


def test_messages_of_one_key_keep_their_order_and_every_receipt_is_its_own(fake: FakeBroker, connect: Connect) -> None:
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
    ids = {name: body for _, view in views for name, body in zip(view.message_ids, view.bodies, strict=True)}
    assert [ids[got.message_id] for got in receipts] == [body for _, body in sent]


def test_many_threads_share_one_session_without_gaps(fake: FakeBroker, connect: Connect) -> None:
    client = connect(fake.url)
    threads = [
        threading.Thread(target=lambda: results([client.send_async("orders", b"x") for _ in range(200)]))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len({producer for producer, _ in fake.origins()}) == 1
    expected = 0
    for (_, sequence), bodies in zip(fake.origins(), fake.bodies(), strict=True):
        assert sequence == expected
        expected += len(bodies)
    assert expected == 800


def test_a_lost_connection_loses_and_doubles_nothing(fake: FakeBroker, connect: Connect) -> None:
    client = connect(fake.url)
    fake.script += [None, HangUp]
    receipts = results([client.send_async("orders", str(n).encode() * 50_000, key="k") for n in range(60)])
    assert [got.message_id for got in receipts] == sorted({got.message_id for got in receipts}, key=_number)
    once = dict.fromkeys(send.batch for send in fake.sends)
    assert [body for batch in once for body in BatchView(batch).bodies] == [str(n).encode() * 50_000 for n in range(60)]
    assert client.stats.connections == 2
    assert client.stats.resent >= 1


def _number(message_id: str) -> int:
    return int(message_id.rpartition("-")[2])


def test_a_silent_connection_is_given_up_and_its_frames_go_out_again(fake: FakeBroker, connect: Connect) -> None:
    fake.script += [Silent, receipt(9, duplicate=True)]
    assert connect(fake.url, timeout=0.3).send_async("orders", b"x").result(DEADLINE_S).duplicate
    assert fake.sends[0] == fake.sends[1]


def test_messages_survive_while_no_broker_is_there(connect: Connect) -> None:
    with FakeBroker() as fake:
        client = connect(fake.url)
        client.send_async("orders", b"before").result(DEADLINE_S)
        port = fake.port
    futures = [client.send_async("orders", str(n).encode()) for n in range(10)]
    with FakeBroker(port=port) as again:
        assert len(results(futures)) == 10
        assert [body for bodies in again.bodies() for body in bodies] == [str(n).encode() for n in range(10)]


def test_messages_that_find_no_broker_in_time_fail_and_were_not_sent(fake: FakeBroker, connect: Connect) -> None:
    client = connect(fake.url, delivery_timeout=0.3)
    client.send_async("orders", b"x").result(DEADLINE_S)
    fake.close()
    wait_until(lambda: not client.core.pipeline._flights.awaits_replies)
    with pytest.raises(BrokerUnavailable) as caught:
        client.send_async("orders", b"y").result(DEADLINE_S)
    assert caught.value.outcome == "not done"
    assert client.stats.failed == 1


def test_a_message_without_an_answer_in_time_has_an_unknown_outcome(fake: FakeBroker, connect: Connect) -> None:
    fake.script += [Silent] * 100
    client = connect(fake.url, timeout=60, delivery_timeout=0.3)
    with pytest.raises(RequestTimeout) as caught:
        client.send_async("orders", b"x").result(DEADLINE_S)
    assert caught.value.outcome == "unknown"


def test_the_window_makes_callers_wait_and_then_throttles_them(fake: FakeBroker, connect: Connect, gate: Gate) -> None:
    client = connect(fake.url, window=5)
    futures = [client.send_async("orders", b"x") for _ in range(5)]
    with pytest.raises(Throttled, match="window"):
        client.send_async("orders", b"x", timeout=0.05)
    late = _put_in_a_thread(client, 3)
    gate.open()
    assert len(results(futures + late())) == 8


def test_the_window_counts_bytes_too(fake: FakeBroker, connect: Connect, gate: Gate) -> None:
    client = connect(fake.url, window_bytes=10_000)
    futures = [client.send_async("orders", b"x" * 5_000) for _ in range(2)]
    with pytest.raises(Throttled):
        client.send_async("orders", b"x", timeout=0.05)
    gate.open()
    results(futures)
    client.send_async("orders", b"x").result(DEADLINE_S)


def test_a_callback_may_send_though_the_window_is_full(fake: FakeBroker, connect: Connect, gate: Gate) -> None:
    client = connect(fake.url, window=1)
    answers: list[Future[txmq.Receipt]] = []
    first = client.send_async("orders", b"x")
    first.add_done_callback(lambda _: answers.append(client.send_async("orders", b"reply", timeout=0)))
    gate.open()
    wait_until(lambda: answers, DEADLINE_S)
    assert answers[0].result(DEADLINE_S).offset == 1


def test_no_more_than_256_frames_are_under_way(fake: FakeBroker, connect: Connect, gate: Gate) -> None:
    fake.partitions = 400
    client = connect(fake.url)
    futures = [client.send_async("orders", b"x", partition=n) for n in range(400)]
    assert gate.arrived.wait(DEADLINE_S)
    wait_until(lambda: client.stats.frames >= 256, DEADLINE_S)
    assert client.stats.frames == 256
    gate.open()
    results(futures)
    assert client.stats.frames == 400


def test_a_refusal_fails_its_own_messages_and_those_behind_go_out_again(fake: FakeBroker, connect: Connect) -> None:
    fake.partitions = 3
    client = connect(fake.url)
    client.send_async("orders", b"a", partition=0).result(DEADLINE_S)
    refuse_from_here(fake, NotPermitted("not you"))
    refused, behind = (client.send_async("orders", body, partition=p) for p, body in ((1, b"b"), (2, b"c")))
    with pytest.raises(NotPermitted):
        refused.result(DEADLINE_S)
    assert behind.result(DEADLINE_S).partition == 2
    assert client.send_async("orders", b"d", partition=0).result(DEADLINE_S).offset == 1
    kept = {body for bodies in fake.bodies() for body in bodies}
    assert kept == {b"a", b"b", b"c", b"d"}


@pytest.mark.parametrize("refusal", [Throttled("busy"), UnknownProducer("forgotten"), SequenceGap("missing")])
def test_what_may_be_tried_again_is_tried_again_in_order(
    fake: FakeBroker, connect: Connect, refusal: RequestRejected
) -> None:
    client = connect(fake.url)
    client.send_async("orders", b"0").result(DEADLINE_S)
    refuse_from_here(fake, refusal)
    receipts = results([client.send_async("orders", str(n).encode(), key="k") for n in range(1, 30)])
    assert [got.offset for got in receipts] == list(range(1, 30))
    assert client.stats.refused >= 1


def test_a_grown_topic_moves_waiting_messages_to_their_new_partitions(fake: FakeBroker, connect: Connect) -> None:
    client = connect(fake.url)
    client.send_async("orders", b"before", key="k").result(DEADLINE_S)
    fake.partitions, fake.epoch = 16, 2
    refuse_from_here(fake, StaleTopic("grown", detail={"topic": "orders"}))
    receipts = results([client.send_async("orders", b"x", key=f"k{n}") for n in range(40)])
    assert [got.partition for got in receipts] == [partition_of(f"k{n}", 16) for n in range(40)]
    fixed = client.send_async("orders", b"x", key="k", partition=5).result(DEADLINE_S)
    assert fixed.partition == 5


def test_a_doubtful_frame_that_is_refused_never_goes_out_under_another_name(fake: FakeBroker, connect: Connect) -> None:
    client = connect(fake.url)
    fake.script += [HangUp, Throttled("busy"), receipt(0, duplicate=True)]
    assert client.send_async("orders", b"x").result(DEADLINE_S).duplicate
    assert len(set(fake.origins())) == 1


def test_a_doubtful_frame_that_fails_keeps_its_place_in_the_sequence(fake: FakeBroker, connect: Connect) -> None:
    client = connect(fake.url)
    fake.script += [HangUp, ReadOnly("no space")]
    with pytest.raises(ReadOnly) as caught:
        client.send_async("orders", b"maybe").result(DEADLINE_S)
    assert caught.value.outcome == "unknown"
    client.send_async("orders", b"next").result(DEADLINE_S)
    assert [sequence for _, sequence in fake.origins()] == [0, 0, 1]


def test_messages_for_a_topic_that_is_gone_fail_and_others_go_on(fake: FakeBroker, connect: Connect) -> None:
    client = connect(fake.url)
    results([client.send_async(topic, b"x") for topic in ("orders", "gone")])
    refuse_from_here(fake, UnknownTopic("deleted"))
    with paused(client):
        gone = client.send_async("gone", b"x")
        client.core.topics.forget("gone")
    assert isinstance(gone.exception(DEADLINE_S), UnknownTopic)
    assert client.send_async("orders", b"last").result(DEADLINE_S).topic == "orders"


def test_a_partitioner_that_fails_fails_its_messages_alone(fake: FakeBroker, connect: Connect) -> None:
    def choose(_topic: str, key: str | None, partitions: int) -> int:
        return {1: 0, 2: 1}[partitions] if key == "frail" else 0

    client = connect(fake.url, partitioner=choose)
    client.send_async("orders", b"x", key="frail").result(DEADLINE_S)
    fake.partitions, fake.epoch = 9, 2
    refuse_from_here(fake, StaleTopic("grown", detail={"topic": "orders"}))
    frail, sound = (client.send_async("orders", b"x", key=key) for key in ("frail", "sound"))
    with pytest.raises(LocalProtocolError, match="KeyError"):
        frail.result(DEADLINE_S)
    assert sound.result(DEADLINE_S).partition == 0


def test_another_log_fails_everything_that_waits(fake: FakeBroker, connect: Connect) -> None:
    client = connect(fake.url)
    client.send_async("orders", b"x").result(DEADLINE_S)
    fake.log_id = fake.log_id.__class__(int=9)
    fake.hang_up()
    with pytest.raises((LogChanged, ConnectionLost)):
        client.send_async("orders", b"y").result(DEADLINE_S)
    assert [b"y"] not in fake.bodies()


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
def test_what_cannot_be_sent_is_refused_at_once_and_takes_nobody_along(
    fake: FakeBroker, connect: Connect, fields: dict[str, Any], error: type[Exception]
) -> None:
    client = connect(fake.url)
    before = client.send_async("orders", b"before")
    with pytest.raises(error):
        client.send_async("orders", **fields)
    results([before, client.send_async("orders", b"after")])


def test_a_body_may_be_changed_once_it_is_handed_over(fake: FakeBroker, connect: Connect, gate: Gate) -> None:
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
    client.flush(DEADLINE_S)
    assert future.done()


def test_closing_lets_go_out_what_was_taken(fake: FakeBroker, connect: Connect) -> None:
    client = connect(fake.url)
    futures = [client.send_async("orders", b"x") for _ in range(500)]
    client.close()
    assert all(future.done() for future in futures)
    assert len(results(futures)) == 500


def test_closing_does_not_wait_for_ever(fake: FakeBroker, connect: Connect) -> None:
    fake.script += [Silent] * 100
    client = connect(fake.url)
    future = client.send_async("orders", b"x")
    wait_until(lambda: fake.sends, DEADLINE_S)
    began = time.monotonic()
    client.close(timeout=0.2)
    assert time.monotonic() - began < 30
    with pytest.raises(ConnectionLost) as caught:
        future.result(0)
    assert caught.value.outcome == "unknown"


def test_closing_without_a_broker_fails_what_waits(fake: FakeBroker, connect: Connect) -> None:
    client = connect(fake.url)
    client.send("orders", b"x")
    fake.close()
    future = client.send_async("orders", b"x")
    client.close(timeout=0.1)
    with pytest.raises(ClientClosed):
        future.result(0)


def test_a_send_cannot_be_cancelled(fake: FakeBroker, connect: Connect, gate: Gate) -> None:
    future = connect(fake.url).send_async("orders", b"x")
    assert not future.cancel()
    gate.open()
    assert future.result(DEADLINE_S).offset == 0


def test_other_requests_travel_along_and_are_made_again_after_a_loss(fake: FakeBroker, connect: Connect) -> None:
    client = connect(fake.url)
    replies: list[Any] = [HangUp, b"done"]
    fake.others = lambda _frame: replies.pop(0)
    assert client.core.pipeline.submit(Opcode.ACK, b"payload").result(DEADLINE_S) == b"done"
    assert [frame.payload for frame in fake.frames if frame.opcode == Opcode.ACK] == [b"payload"] * 2


def test_a_refused_request_of_another_kind_fails_alone(fake: FakeBroker, connect: Connect) -> None:
    client = connect(fake.url)
    fake.others = lambda _frame: NotPermitted("not you")
    with pytest.raises(NotPermitted):
        client.core.pipeline.submit(Opcode.DECIDE, b"x").result(DEADLINE_S)
    assert client.send_async("orders", b"x").result(DEADLINE_S).offset == 0

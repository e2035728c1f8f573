"""Batches for several partitions in one frame: each keeps its own sequence, receipt and
refusal.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest

import txmq
from tests.client.held_sends import paused, results
from tests.client.real import RealBroker
from tests.client.scripted_broker import LOG, FakeBroker, HangUp, Reaction, receipt
from tests.client.scripted_member import fresh
from txmq.batch import BatchView
from txmq.client.blocking.client import Client
from txmq.client.protocol.conversation import Conversation, LogIdentity
from txmq.client.protocol.offsets import FileOffsets
from txmq.client.protocol.sender import multi_send
from txmq.client.protocol.sender.accumulator import Accumulator, PendingBatch
from txmq.client.protocol.sender.batcher import Batcher, SequencedBatch
from txmq.client.protocol.sender.multi_send import SenderStats
from txmq.client.protocol.sender.topics import TopicCache
from txmq.errors import (
    MessageTooLarge,
    RemoteProtocolError,
    RequestRejected,
    SequenceGap,
    TopicClosed,
    UnknownTopic,
)
from txmq.model.message import Message
from txmq.testing.wait import PATIENCE_S
from txmq.wire.batched import BatchedReply, pack_replies, unpack_requests
from txmq.wire.data_requests import Opcode, unpack_send
from txmq.wire.frames import Frame
from txmq.wire.hello import BrokerLimits, Welcome
from txmq.wire.status import error_reply

Connect = Callable[..., Client]
Step = list[RequestRejected | None] | Reaction


class MultiSends:
    """Replies of a scripted broker to frames of several batches: a script, then
    receipts.

    Like a broker, it refuses all batches of a session after a refused one.
    """

    def __init__(self, fake: FakeBroker) -> None:
        self.fake, self.frames = fake, list[list[str]]()  # topics of each frame
        self.script: list[Step] = []
        fake.others, fake.takes_sends = self, True

    def __call__(self, frame: Frame) -> Reaction:
        assert frame.opcode == Opcode.SENDS
        requests = unpack_requests(frame.payload)
        self.frames.append([unpack_send(request).topic for request in requests])
        step = self.script.pop(0) if self.script else []
        if not isinstance(step, list):
            self.fake.sends += map(unpack_send, requests)
            return step
        answers, gone = [], set[bytes]()
        for number, request in enumerate(requests):
            send = unpack_send(request)
            self.fake.sends.append(send)
            session, said = (
                BatchView(send.batch).header.producer_id,
                step[number] if number < len(step) else None,
            )
            if session in gone or said is not None:
                gone.add(session)
                answers.append(BatchedReply(*error_reply(said or SequenceGap("a send is missing"))))
            else:
                answers.append(BatchedReply(0, receipt(100 * len(self.frames) + number)))
        return b"".join(pack_replies(answers))


@pytest.fixture
def multi_sends(fake: FakeBroker) -> MultiSends:
    return MultiSends(fake)


def sent(client: Client, *topics: str, body: bytes = b"x") -> list[Future[txmq.Receipt]]:
    """Send a message to each topic, all in one drain."""
    for topic in topics:
        client._core.topics.get(topic)
    with paused(client):
        return [client.send_async(topic, body, key="k") for topic in topics]


def places(receipts: list[txmq.Receipt]) -> list[tuple[str, int | None]]:
    return [(got.topic, got.offset) for got in receipts]


def test_pending_messages_for_several_topics_share_a_frame(
    connect: Connect, multi_sends: MultiSends
) -> None:
    client = connect(multi_sends.fake.url)
    receipts = results(sent(client, "a", "b", "a", "c"))
    assert multi_sends.frames == [["a", "b", "c"]]
    assert places(receipts) == [("a", 100), ("b", 101), ("a", 101), ("c", 102)]
    assert [sequence for _producer, sequence in multi_sends.fake.origins()] == [0, 2, 3]
    assert [got.message_id.rpartition("-")[2] for got in receipts] == ["0", "2", "1", "3"]
    assert (client.stats.frames, client.stats.messages, client.stats.coalesced) == (1, 4, 4)


def test_a_lone_batch_and_large_ones_have_frames_of_their_own(
    connect: Connect, multi_sends: MultiSends
) -> None:
    client = connect(multi_sends.fake.url)
    results(sent(client, "a"))
    results(sent(client, "b", "c", body=bytes(multi_send.TARGET_BYTES)))
    assert multi_sends.frames == []
    assert [send.topic for send in multi_sends.fake.sends] == ["a", "b", "c"]


def test_a_frame_has_no_more_batches_than_its_limit(
    connect: Connect, multi_sends: MultiSends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multi_send, "MAX_BATCHES", 3)
    topics = [f"t{number}" for number in range(8)]
    client = connect(multi_sends.fake.url)
    assert [got.topic for got in results(sent(client, *topics))] == topics
    assert multi_sends.frames == [topics[:3], topics[3:6], topics[6:]]


def test_a_refused_batch_leaves_its_neighbours_their_receipts_and_their_order(
    connect: Connect, multi_sends: MultiSends
) -> None:
    client = connect(multi_sends.fake.url)
    multi_sends.script.append([None, UnknownTopic("there is no topic b"), None, None])
    before, refused, *behind = sent(client, "a", "b", "c", "d")
    assert before.result(PATIENCE_S).offset == 100
    assert isinstance(refused.exception(PATIENCE_S), UnknownTopic)
    assert places(results(behind)) == [("c", 200), ("d", 201)]
    assert multi_sends.frames == [["a", "b", "c", "d"], ["c", "d"]]
    (old, _first), (new, sequence) = multi_sends.fake.origins()[0], multi_sends.fake.origins()[4]
    assert (old != new, sequence) == (True, 0)
    assert (client.stats.messages, client.stats.failed, client.stats.refused) == (3, 1, 3)


def test_after_a_lost_connection_batches_are_sent_again_unchanged(
    connect: Connect, multi_sends: MultiSends
) -> None:
    multi_sends.script.append(HangUp)
    client = connect(multi_sends.fake.url)
    assert places(results(sent(client, "a", "b", "c"))) == [("a", 200), ("b", 201), ("c", 202)]
    assert multi_sends.fake.origins()[:3] == multi_sends.fake.origins()[3:]
    assert multi_sends.frames == [["a", "b", "c"]] * 2
    assert (client.stats.frames, client.stats.resent) == (1, 3)


def test_a_batch_refused_after_a_lost_connection_may_be_stored(
    connect: Connect, multi_sends: MultiSends
) -> None:
    multi_sends.script += [HangUp, [None, TopicClosed("topic b is closed"), None]]
    first, refused, last = sent(connect(multi_sends.fake.url), "a", "b", "c")
    assert first.result(PATIENCE_S).offset == 200
    error = refused.exception(PATIENCE_S)
    assert isinstance(error, TopicClosed)
    assert error.outcome == "unknown"
    assert last.result(PATIENCE_S).topic == "c"


@pytest.mark.parametrize("reply", [b"\0", b"\1\0\0\0\0\0\0\0\0\0", b"\2\0\0\0" + bytes(12)])
def test_an_invalid_reply_leaves_the_outcome_unknown(
    connect: Connect, multi_sends: MultiSends, reply: bytes
) -> None:
    multi_sends.script.append(reply)
    for future in sent(connect(multi_sends.fake.url), "a", "b"):
        error = future.exception(PATIENCE_S)
        assert isinstance(error, RemoteProtocolError)
        assert error.outcome == "unknown"


def test_an_invalid_message_fails_alone(connect: Connect) -> None:
    with FakeBroker(message=1_000) as fake:
        multi_sends = MultiSends(fake)
        client = connect(fake.url)
        client._core.topics.get("a")
        with paused(client):
            futures = [
                client.send_async(topic, bytes(size))
                for topic, size in (("a", 1), ("b", 2_000), ("c", 1))
            ]
        assert isinstance(futures[1].exception(PATIENCE_S), MessageTooLarge)
        assert [future.result(PATIENCE_S).topic for future in (futures[0], futures[2])] == [
            "a",
            "c",
        ]
        assert multi_sends.frames == [["a", "c"]]


def test_messages_of_many_threads_are_where_their_receipts_say(
    connect: Connect, real: RealBroker, tmp_path: Path
) -> None:
    topics, client = [fresh("t") for _ in range(5)], connect(real.url)
    wanted = [
        (topic, b"%d-%d" % (thread, n))
        for thread in range(4)
        for n in range(25)
        for topic in topics
    ]

    def send(thread: int) -> list[txmq.Receipt]:
        mine = wanted[thread * 125 : thread * 125 + 125]
        return results([client.send_async(topic, body, key=f"{thread}") for topic, body in mine])

    with ThreadPoolExecutor(4) as threads:
        receipts = [receipt for got in threads.map(send, range(4)) for receipt in got]
    with client.reader("r", topics, FileOffsets(tmp_path)) as reader:
        read = [message for _ in wanted if (message := reader.receive(PATIENCE_S))]
    there = {
        (message.topic, message.partition, message.offset): (message.topic, message.body)
        for message in read
    }
    assert [there[got.topic, got.partition, got.offset or 0] for got in receipts] == wanted
    assert client.stats.frames < len(wanted) / 2


def test_an_interrupt_while_a_frame_is_filled_loses_no_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topics = TopicCache(
        lambda name, _within: {
            "topics": [{"name": name, "partitions": 1, "epoch": 1, "topic_id": 1}]
        },
        None,
    )
    accumulator = Accumulator(topics, messages=100, size=1 << 20, wake=lambda: None)
    batcher = Batcher(topics, lambda _batch, error: pytest.fail(str(error)))
    dispatch, conversation = (
        multi_send.SendQueue(batcher, accumulator, SenderStats()),
        Conversation("s", LogIdentity()),
    )
    sizes = BrokerLimits(frame=1 << 24, message=1_000)
    conversation.welcome = Welcome(version=1, broker="fake", log_id=LOG, boot_epoch=1, limits=sizes)
    for topic in "abcd":
        accumulator.append(topic, Message(b"x"), None, 0.0)
    encode, calls = batcher._encode, count()

    def interrupted(batch: PendingBatch, max_body: int) -> SequencedBatch | None:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return encode(batch, max_body)

    monkeypatch.setattr(batcher, "_encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        dispatch.next(conversation, 256)
    found = dispatch.next(conversation, 256)
    assert found is not None
    assert [(batch.pending.destination.topic, batch.sequence) for batch in found.batches] == list(
        zip("abcd", count())
    )
    assert dispatch.empty

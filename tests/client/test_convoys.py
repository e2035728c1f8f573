"""Sends to several partitions that share frames: each with its own sequence, receipt
and refusal.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from uuid import UUID

import pytest

import txmq
from tests.client.consuming import fresh
from tests.client.fake import LOG, FakeBroker, HangUp, Reaction, receipt
from tests.client.pipelining import DEADLINE_S, paused, results
from tests.client.real import RealBroker
from txmq.batch import BatchView
from txmq.client.blocking.client import Client
from txmq.client.protocol.conversation import Conversation, LogPin
from txmq.client.protocol.offsets import FileOffsets
from txmq.client.protocol.sender import multi_send
from txmq.client.protocol.sender.accumulator import Accumulator, PendingBatch
from txmq.client.protocol.sender.batcher import Flight, Loader
from txmq.client.protocol.sender.stats import Stats
from txmq.client.protocol.sender.topics import Topics
from txmq.errors import (
    MessageTooLarge,
    RemoteProtocolError,
    RequestRejected,
    SequenceGap,
    TopicClosed,
    UnknownTopic,
)
from txmq.model.message import Message
from txmq.wire.frames import Frame
from txmq.wire.headers import Opcode, unpack_send
from txmq.wire.hello import Limits, Welcome
from txmq.wire.status import reply_for
from txmq.wire.together import SENDS, Answer, pack_answers, unpack_requests

Connect = Callable[..., Client]
Step = list[RequestRejected | None] | Reaction


def greeting(log_id: UUID, message: int, *features: str) -> Welcome:
    sizes = Limits(frame=1 << 24, message=message)
    return Welcome(
        version=1, features=features, broker="fake", log_id=log_id, boot_epoch=1, limits=sizes
    )


class Convoys:
    """What a fake broker answers to frames of sends; what is not said is that all is
    well.

    A refused send takes those of its session behind it along, as in a broker.
    """

    def __init__(self, fake: FakeBroker, *, together: bool = True) -> None:
        self.fake, self.frames = fake, list[list[str]]()  # topics of the sends in each frame
        self.script: list[Step] = []
        fake.others = self
        welcome = greeting(fake.log_id, fake.message, *((SENDS,) if together else ())).encode()
        fake._welcome = lambda: welcome  # type: ignore[method-assign]

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
                answers.append(Answer(*reply_for(said or SequenceGap("a send is missing"))))
            else:
                answers.append(Answer(0, receipt(100 * len(self.frames) + number)))
        return b"".join(pack_answers(answers))


@pytest.fixture
def convoys(fake: FakeBroker) -> Convoys:
    return Convoys(fake)


def sent(client: Client, *topics: str, body: bytes = b"x") -> list[Future[txmq.Receipt]]:
    """One message to each, all at once."""
    for topic in topics:
        client.core.topics.shape(topic)
    with paused(client):
        return [client.send_async(topic, body, key="k") for topic in topics]


def places(receipts: list[txmq.Receipt]) -> list[tuple[str, int | None]]:
    return [(got.topic, got.offset) for got in receipts]


def test_what_is_outstanding_for_several_topics_shares_a_frame(
    connect: Connect, convoys: Convoys
) -> None:
    client = connect(convoys.fake.url)
    receipts = results(sent(client, "a", "b", "a", "c"))
    assert convoys.frames == [["a", "b", "c"]]
    assert places(receipts) == [("a", 100), ("b", 101), ("a", 101), ("c", 102)]
    assert [sequence for _producer, sequence in convoys.fake.origins()] == [0, 2, 3]
    assert [got.message_id.rpartition("-")[2] for got in receipts] == ["0", "2", "1", "3"]
    assert (client.stats.frames, client.stats.messages, client.stats.coalesced) == (1, 4, 4)


def test_a_broker_that_does_not_take_them_gets_a_frame_for_each(
    fake: FakeBroker, connect: Connect
) -> None:
    convoys = Convoys(fake, together=False)
    assert places(results(sent(connect(fake.url), "a", "b"))) == [("a", 0), ("b", 1)]
    assert convoys.frames == []
    assert [send.topic for send in fake.sends] == ["a", "b"]


def test_one_alone_and_what_is_large_go_as_ever(connect: Connect, convoys: Convoys) -> None:
    client = connect(convoys.fake.url)
    results(sent(client, "a"))
    results(sent(client, "b", "c", body=bytes(multi_send.ENOUGH_BYTES)))
    assert convoys.frames == []
    assert [send.topic for send in convoys.fake.sends] == ["a", "b", "c"]


def test_no_more_sends_share_a_frame_than_it_may_have(
    connect: Connect, convoys: Convoys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multi_send, "MOST", 3)
    topics = [f"t{number}" for number in range(8)]
    client = connect(convoys.fake.url)
    assert [got.topic for got in results(sent(client, *topics))] == topics
    assert convoys.frames == [topics[:3], topics[3:6], topics[6:]]


def test_a_refused_send_leaves_its_neighbours_their_receipts_and_their_order(
    connect: Connect, convoys: Convoys
) -> None:
    client = connect(convoys.fake.url)
    convoys.script.append([None, UnknownTopic("there is no topic b"), None, None])
    before, refused, *behind = sent(client, "a", "b", "c", "d")
    assert before.result(DEADLINE_S).offset == 100
    assert isinstance(refused.exception(DEADLINE_S), UnknownTopic)
    assert places(results(behind)) == [("c", 200), ("d", 201)]
    assert convoys.frames == [["a", "b", "c", "d"], ["c", "d"]]
    (old, _first), (new, sequence) = convoys.fake.origins()[0], convoys.fake.origins()[4]
    assert (old != new, sequence) == (True, 0)
    assert (client.stats.messages, client.stats.failed, client.stats.refused) == (3, 1, 3)


def test_after_a_lost_connection_they_go_out_again_as_they_were(
    connect: Connect, convoys: Convoys
) -> None:
    convoys.script.append(HangUp)
    client = connect(convoys.fake.url)
    assert places(results(sent(client, "a", "b", "c"))) == [("a", 200), ("b", 201), ("c", 202)]
    assert convoys.fake.origins()[:3] == convoys.fake.origins()[3:]
    assert convoys.frames == [["a", "b", "c"]] * 2
    assert (client.stats.frames, client.stats.resent) == (1, 3)


def test_what_was_refused_after_a_lost_connection_may_have_been_stored(
    connect: Connect, convoys: Convoys
) -> None:
    convoys.script += [HangUp, [None, TopicClosed("topic b is closed"), None]]
    first, refused, last = sent(connect(convoys.fake.url), "a", "b", "c")
    assert first.result(DEADLINE_S).offset == 200
    error = refused.exception(DEADLINE_S)
    assert isinstance(error, TopicClosed)
    assert error.outcome == "unknown"
    assert last.result(DEADLINE_S).topic == "c"


@pytest.mark.parametrize("reply", [b"\0", b"\1\0\0\0\0\0\0\0\0\0", b"\2\0\0\0" + bytes(12)])
def test_a_reply_that_is_none_leaves_the_outcome_open(
    connect: Connect, convoys: Convoys, reply: bytes
) -> None:
    convoys.script.append(reply)
    for future in sent(connect(convoys.fake.url), "a", "b"):
        error = future.exception(DEADLINE_S)
        assert isinstance(error, RemoteProtocolError)
        assert error.outcome == "unknown"


def test_a_message_that_cannot_be_sent_keeps_nobody_from_it(connect: Connect) -> None:
    with FakeBroker(message=1_000) as fake:
        convoys = Convoys(fake)
        client = connect(fake.url)
        client.core.topics.shape("a")
        with paused(client):
            futures = [
                client.send_async(topic, bytes(size))
                for topic, size in (("a", 1), ("b", 2_000), ("c", 1))
            ]
        assert isinstance(futures[1].exception(DEADLINE_S), MessageTooLarge)
        assert [future.result(DEADLINE_S).topic for future in (futures[0], futures[2])] == [
            "a",
            "c",
        ]
        assert convoys.frames == [["a", "c"]]


def test_threads_that_send_everywhere_find_every_message_where_its_receipt_says(
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
        read = [message for _ in wanted if (message := reader.receive(DEADLINE_S))]
    there = {
        (message.topic, message.partition, message.offset): (message.topic, message.body)
        for message in read
    }
    assert [there[got.topic, got.partition, got.offset or 0] for got in receipts] == wanted
    assert client.stats.frames < len(wanted) / 2


def test_an_interrupt_while_a_frame_is_filled_loses_none_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topics = Topics(lambda name: {"topics": [{"name": name, "partitions": 1, "epoch": 1}]}, None)
    outbox = Accumulator(topics, messages=100, size=1 << 20, wake=lambda: None)
    loader = Loader(topics, lambda _pile, error: pytest.fail(str(error)))
    dispatch, conversation = (
        multi_send.Dispatch(loader, outbox, Stats()),
        Conversation("s", LogPin()),
    )
    conversation.welcome = greeting(LOG, 1_000, SENDS)
    for topic in "abcd":
        outbox.put(topic, Message(b"x"), None, 0.0)
    encode, calls = loader._encode, count()

    def interrupted(pile: PendingBatch, most: int) -> Flight | None:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return encode(pile, most)

    monkeypatch.setattr(loader, "_encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        dispatch.next(conversation, 256)
    found = dispatch.next(conversation, 256)
    assert found is not None
    assert [(flight.pile.place.topic, flight.sequence) for flight in found.flights] == list(
        zip("abcd", count())
    )
    assert dispatch.empty

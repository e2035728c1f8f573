"""The drain of a spool by itself: what it sends, and what it does about refusals."""

from __future__ import annotations

from itertools import count
from typing import cast

import pytest

from tests.recover.spool.disks import SESSION, batch, new_disk, new_spool, store, waiting
from tests.recover.spool.spool_world import Connection
from txmq.batch import read_header
from txmq.client.protocol.conversation import Conversation
from txmq.client.protocol.sender.spool_drain import MAX_FAILURES, SpoolDrain
from txmq.client.protocol.sender.topics import TopicCache
from txmq.errors import (
    BrokerFailed,
    MessageTooLarge,
    ProducerFenced,
    ReadOnly,
    RequestRejected,
    SequenceGap,
    StaleTopic,
    Throttled,
    UnknownProducer,
    UnknownTopic,
)
from txmq.recover.local.batches import SPOOL, refused_batches
from txmq.recover.local.database import read_only
from txmq.recover.local.spool import Spool
from txmq.wire.batched import BatchedReply, pack_replies, unpack_requests
from txmq.wire.data_requests import Opcode, SendReceipt, pack_send_receipt, unpack_send
from txmq.wire.frames import Frame
from txmq.wire.status import OK, error_reply


class Scene:
    """A drain of batches of two messages, over a connection without multi-send."""

    def __init__(self, batches: int = 3) -> None:
        self.spool: Spool = new_spool(new_disk())
        store(self.spool, *(batch(2 * n, b"%d" % n, b"+") for n in range(batches)))
        self.topics = TopicCache(
            lambda _topic, _within: {"topics": [{"partitions": 4, "epoch": 9, "topic_id": 1}]}, None
        )
        self.drain = SpoolDrain(self.spool, self.topics)
        self.connection = Connection()

    def sends(self) -> list[tuple[bytes, int, int]]:
        """Session, sequence and number of messages of what goes out now."""
        self.drain.paused_until = 0.0
        self.drain.next_writes(cast("Conversation", self.connection))
        sends = [send for one in self.connection.requests for send in sends_in(one)]
        headers = [read_header(unpack_send(send).batch) for send in sends]
        return [(header.producer_id, header.sequence, header.count) for header in headers]

    def answer(self, *errors: RequestRejected | None) -> None:
        """Answer all sends; the last error goes for all that follow."""
        requests, self.connection.requests = self.connection.requests, []
        at = count()
        for request in requests:
            replies = [self._reply(next(at), errors) for _send in sends_in(request)]
            status, payload = replies[0]
            if request.opcode == Opcode.SENDS:
                status, payload = OK, b"".join(pack_replies(replies))
            self.drain.receive([Frame(request.opcode, status, request.correlation, payload)])

    def _reply(self, at: int, errors: tuple[RequestRejected | None, ...]) -> BatchedReply:
        error = errors[min(at, len(errors) - 1)]
        if error is not None:
            return BatchedReply(*error_reply(error))
        return BatchedReply(OK, pack_send_receipt(SendReceipt(at, 1)))


def sends_in(request: Frame) -> list[bytes]:
    return unpack_requests(request.payload) if request.opcode == Opcode.SENDS else [request.payload]


def test_all_is_sent_before_the_first_reply_and_marked_after_the_last() -> None:
    scene = Scene()
    assert scene.sends() == [(SESSION, 0, 2), (SESSION, 2, 2), (SESSION, 4, 2)]
    assert scene.drain.all_sent
    assert not scene.drain.done
    assert scene.spool.waiting == 6
    scene.answer(None)
    assert scene.drain.done
    assert scene.spool.waiting == 0


def test_a_lost_connection_repeats_with_the_same_sequences() -> None:
    scene = Scene()
    before = scene.sends()
    scene.drain.connection_lost()
    scene.connection = Connection()
    # The first batch of the session may be stored, and the session be forgotten.
    for row in (1, 0):
        assert scene.sends() == []
        assert scene.drain.in_doubt == ("orders", f"{SESSION.hex()}-{row}")
        scene.drain.settle(stored=False)
    assert scene.sends() == before


def test_a_batch_of_which_a_copy_has_sent_a_row_is_sent_row_by_row() -> None:
    scene = Scene(2)
    scene.sends()
    scene.answer(None, StaleTopic("partly", detail={"last": 2}))
    scene.topics.refresh("orders")
    assert scene.sends() == [(SESSION, 2, 1), (SESSION, 3, 1)]


def test_a_batch_of_which_only_the_first_row_is_found_is_judged_row_by_row() -> None:
    scene = Scene(1)
    scene.sends()
    scene.drain.connection_lost()
    scene.connection = Connection()
    assert scene.sends() == []
    scene.drain.settle(stored=False)
    scene.drain.settle(stored=True)
    scene.topics.refresh("orders")
    assert scene.sends() == []
    assert scene.drain.in_doubt == ("orders", f"{SESSION.hex()}-0")
    scene.drain.settle(stored=True)
    assert scene.sends() == [(SESSION, 1, 1)]


@pytest.mark.parametrize("error", [Throttled("t"), ReadOnly("r")])
def test_after_a_pause_the_same_batches_are_sent_again(error: RequestRejected) -> None:
    scene = Scene()
    before = scene.sends()
    scene.answer(None, error, SequenceGap("g"))
    assert scene.sends() == before[1:]
    assert scene.spool.waiting == 4


def test_a_gap_is_skipped() -> None:
    scene = Scene()
    before = scene.sends()
    scene.answer(None, SequenceGap("g"))
    assert scene.sends() == []
    assert scene.drain.to_skip == (SESSION, 0, 2)
    scene.drain.skipped()
    assert scene.sends() == before[1:]


def test_what_the_broker_refuses_to_skip_to_is_put_aside() -> None:
    scene = Scene()
    before = scene.sends()
    scene.answer(None, SequenceGap("g"))
    scene.drain.skipped(RequestRejected("not for you"))
    assert scene.spool.refused == 2
    assert scene.sends() == before[2:]


def test_a_refused_batch_is_kept_and_the_rest_goes_on_in_its_session() -> None:
    scene = Scene()
    before = scene.sends()
    scene.answer(UnknownTopic("no"), SequenceGap("g"))
    assert scene.spool.refused == 2
    assert scene.sends() == before[1:]
    scene.answer(UnknownProducer("not begun"))
    scene.drain.settle(stored=False)
    scene.drain.settle(stored=False)
    assert scene.drain.to_skip == (SESSION, 0, 2)
    scene.drain.skipped()
    assert scene.sends() == before[1:]
    scene.answer(None)
    assert scene.drain.done
    assert waiting(scene.spool) == []


def test_a_stale_topic_splits_a_batch_into_rows_with_their_own_sequences() -> None:
    scene = Scene(1)
    scene.sends()
    scene.answer(StaleTopic("grown"))
    assert scene.sends() == []
    assert scene.drain.unknown_topics == {"orders"}
    scene.topics.refresh("orders")
    scene.drain.topic_refreshed("orders")
    assert scene.sends() == [(SESSION, 0, 1), (SESSION, 1, 1)]
    assert len(waiting(scene.spool)) == 2  # on disk, before they are sent


def test_a_message_that_is_too_large_is_refused_alone() -> None:
    scene = Scene(2)
    scene.sends()
    scene.answer(MessageTooLarge("large"), SequenceGap("g"))
    scene.topics.refresh("orders")
    assert [count for _session, _sequence, count in scene.sends()] == [1, 1, 2]
    scene.answer(None, MessageTooLarge("large"), SequenceGap("g"))
    assert scene.spool.refused == 1
    scene.sends()
    scene.answer(None)
    assert scene.drain.done


@pytest.mark.parametrize("stored", [True, False])
def test_a_doubtful_batch_of_a_forgotten_session_is_searched(stored: bool) -> None:  # noqa: FBT001
    scene = Scene(2)
    scene.sends()
    scene.answer(None, Throttled("t"))
    scene.sends()
    scene.drain.connection_lost()
    scene.connection = Connection()
    assert scene.sends() == [(SESSION, 2, 2)]
    scene.answer(UnknownProducer("forgotten"))
    assert scene.drain.in_doubt == ("orders", f"{SESSION.hex()}-3")
    assert scene.sends() == []
    scene.drain.settle(stored=stored)
    assert scene.drain.done is stored
    if not stored:
        assert scene.drain.in_doubt == ("orders", f"{SESSION.hex()}-2")
        scene.drain.settle(stored=False)
        assert scene.drain.to_skip == (SESSION, 0, 2)
        scene.drain.skipped()
        assert scene.sends() == [(SESSION, 2, 2)]


def test_a_search_that_is_refused_for_good_puts_the_message_aside() -> None:
    scene = Scene(2)
    scene.sends()
    scene.drain.connection_lost()
    scene.connection = Connection()
    assert scene.sends() == []
    assert scene.drain.in_doubt is not None
    scene.drain.search_refused(RequestRejected("not for you"))
    assert scene.drain.in_doubt is None
    with read_only(scene.spool.path, SPOOL) as connection:
        [(_batch, refusal)] = refused_batches(connection)
    assert refusal.outcome == "unknown"
    assert scene.sends() == [(SESSION, 2, 2)]


def test_what_a_copy_has_put_aside_is_put_aside_row_by_row() -> None:
    scene = Scene(1)
    scene.sends()
    scene.answer(UnknownProducer("passed", detail={"last": 7}))
    scene.drain.settle(stored=False)
    scene.drain.settle(stored=False)
    scene.topics.refresh("orders")
    for _ in range(2):
        assert len(scene.sends()) == 2 - scene.spool.refused
        scene.answer(UnknownProducer("passed", detail={"last": 7}))
        scene.drain.settle(stored=False)
    assert scene.spool.refused == 2
    assert scene.drain.done


def test_a_fenced_producer_stops_and_keeps_everything() -> None:
    scene = Scene()
    scene.sends()
    scene.answer(ProducerFenced("newer"))
    assert isinstance(scene.drain.halted, ProducerFenced)
    assert scene.sends() == []
    assert scene.spool.waiting == 6


def test_a_batch_over_which_the_broker_fails_each_time_is_refused_in_the_end() -> None:
    scene = Scene(1)
    for _ in range(MAX_FAILURES + 1):
        assert scene.sends() == [(SESSION, 0, 2)]
        scene.answer(BrokerFailed("a bug"))
    assert scene.sends() == []
    assert scene.drain.done
    assert scene.spool.refused == 2

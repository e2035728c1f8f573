"""The local queue of a member: order, redelivery, tags."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.client.scripted_member import bodies, chunk, fetched_batch, keyed, places
from txmq.batch import BatchView
from txmq.client.protocol.consumer.acks import PendingAcks
from txmq.client.protocol.consumer.fetched import DeliveredMessage
from txmq.client.protocol.consumer.local_queue import LocalQueue
from txmq.errors import LocalProtocolError
from txmq.model.message import Message, ReceivedMessage
from txmq.selector import parse
from txmq.wire.data_requests import AckedRange


def queue_of(keys: str, *, ordered: bool = True, lease: int = 1) -> LocalQueue:
    queue = LocalQueue(ordered=ordered)
    queue.add(fetched_batch(chunk(*keyed(keys), lease=lease)))
    return queue


def pop_many(queue: LocalQueue, most: int = 100) -> list[DeliveredMessage]:
    return queue.pop_many(most, now=1.0)


def pop_singly(queue: LocalQueue) -> list[DeliveredMessage]:
    """Pop messages one by one, without settling any."""
    received = []
    while found := pop_many(queue, 1):
        received += found
    return received


def place_of(message: DeliveredMessage) -> AckedRange:
    return AckedRange(message.topic, message.partition, message.offset, message.offset + 1)


def settle(queue: LocalQueue, start: int, end: int) -> int:
    return queue.settle(places((start, end))[0], now=2.0)


def test_a_concurrent_group_receives_messages_as_they_arrived() -> None:
    queue = queue_of("aab", ordered=False)
    queue.add(fetched_batch(chunk("x", at=3)))
    assert bodies(pop_many(queue, 2)) == ["a0", "a1"]
    assert bodies(pop_many(queue)) == ["b2", "x"]
    assert pop_many(queue) == []


def test_a_message_has_all_that_was_sent_and_its_place() -> None:
    queue = LocalQueue(ordered=False)
    sent = Message(b"body", "k", "t", {"h": "v"})
    queue.add(fetched_batch(chunk("before", sent, at=41, partition=3, attempt=2, rows=slice(1, 2))))
    [message] = pop_many(queue)
    assert message == (
        *("orders", 3, 42, "k", "t", {"h": "v"}, b"body"),
        *("70" * 16 + "-42", 2, 7, 9),
    )


def test_a_message_travels_to_another_process_without_its_delivery() -> None:
    [message] = pop_many(queue_of("a", ordered=False))
    copy = pickle.loads(pickle.dumps(message))
    assert type(copy) is ReceivedMessage
    assert copy == message


def test_the_next_message_of_a_key_waits_while_other_keys_flow() -> None:
    queue = queue_of("aabac")
    assert bodies(pop_singly(queue)) == ["a0", "b2", "c4"]
    settle(queue, 0, 1)
    assert bodies(pop_singly(queue)) == ["a1"]
    settle(queue, 2, 3)
    assert pop_singly(queue) == []
    settle(queue, 1, 2)
    assert bodies(pop_singly(queue)) == ["a3"]


def test_messages_without_a_key_wait_for_nothing_in_an_ordered_group() -> None:
    queue = LocalQueue(ordered=True)
    queue.add(fetched_batch(chunk("x", "y", "z")))
    assert bodies(pop_singly(queue)) == ["x", "y", "z"]


def test_one_caller_gets_a_key_in_a_row_and_others_wait_for_all_of_it() -> None:
    queue = queue_of("abaab")
    assert bodies(pop_many(queue, 2)) == ["a0", "a2"]
    assert bodies(pop_many(queue, 9)) == ["b1", "b4"]
    settle(queue, 0, 1)
    assert pop_many(queue) == []
    settle(queue, 2, 3)
    assert bodies(pop_many(queue)) == ["a3"]


def test_batches_are_columns_and_leave_out_what_is_not_wanted() -> None:
    queue = LocalQueue(ordered=False, tags=frozenset({"paid", "sent"}))
    rows = [
        Message(f"{n}".encode(), f"k{n}", tag)
        for n, tag in enumerate(("paid", "new", None, "sent"))
    ]
    unwanted = queue.add(fetched_batch(chunk(*rows, at=10)))
    assert unwanted == list(places((11, 13)))
    batch = queue.pop_batch(now=1.0)
    assert batch is not None
    assert (list(batch.offsets), batch.bodies, batch.keys, batch.tags) == (
        [10, 13], [b"0", b"3"], ["k0", "k3"], ["paid", "sent"],
    )  # fmt: skip
    assert bodies(batch.messages()) == ["0", "3"]


def test_a_delivery_without_a_wanted_tag_leaves_nothing_behind() -> None:
    queue = LocalQueue(ordered=False, tags=frozenset({"paid"}))
    assert queue.add(fetched_batch(chunk("x", "y", at=5))) == list(places((5, 7)))
    assert (pop_many(queue), queue.ready, queue.ready_bytes) == ([], 0, 0)


@pytest.mark.parametrize("accepted", [False, True])
def test_what_the_group_has_accepted_before_is_not_filtered(accepted: bool) -> None:  # noqa: FBT001
    for by_batch in (False, True):
        queue = LocalQueue(ordered=False, tags=frozenset({"paid"}), selector=parse("price > 9"))
        made = chunk(Message(b"edited", "k", "new", {"price": "1"}), at=5, accepted=accepted)
        unwanted = queue.add(fetched_batch(made))
        if by_batch:
            batch = queue.pop_batch(now=1.0)
            got = [] if batch is None else list(batch.offsets)
        else:
            got = [message.offset for message in pop_many(queue)]
        assert (unwanted, got) == (([], [5]) if accepted else (list(places((5, 6))), []))


def test_a_selector_filters_by_headers_beside_the_tags() -> None:
    queue = LocalQueue(
        ordered=False, tags=frozenset({"paid"}), selector=parse("price > 9 AND $key <> 'k3'")
    )
    rows = [
        Message(b"", f"k{n}", "paid" if n != 2 else "new", {"price": price})
        for n, price in enumerate(["9", "10", "20", "30", "40"])
    ]
    assert queue.add(fetched_batch(chunk(*rows, at=5))) == list(places((5, 6), (7, 9)))
    assert [message.offset for message in pop_many(queue)] == [6, 9]


def test_ordered_batches_come_one_at_a_time_from_each_partition() -> None:
    queue = LocalQueue(ordered=True)
    for at, partition in ((0, 0), (2, 0), (0, 1)):
        queue.add(fetched_batch(chunk("x", "y", at=at, partition=partition)))
    first, second = queue.pop_batch(now=1.0), queue.pop_batch(now=1.0)
    assert first is not None
    assert second is not None
    assert [(batch.partition, list(batch.offsets)) for batch in (first, second)] == [
        (0, [0, 1]),
        (1, [0, 1]),
    ]
    assert queue.pop_batch(now=1.0) is None
    settle(queue, 0, 1)
    assert queue.pop_batch(now=1.0) is None
    settle(queue, 1, 2)
    third = queue.pop_batch(now=1.0)
    assert third is not None
    assert list(third.offsets) == [2, 3]


def test_an_ordered_consumer_gives_messages_or_batches_but_not_both() -> None:
    queue = queue_of("a")
    pop_many(queue)
    with pytest.raises(LocalProtocolError, match="take either"):
        queue.pop_batch(now=1.0)


def test_a_redelivered_message_that_waits_is_received_once_from_the_newer_delivery() -> None:
    queue = queue_of("ab", lease=1)
    queue.add(fetched_batch(chunk(*keyed("ab"), lease=2, attempt=2)))
    assert [(message.body, message.attempt) for message in pop_singly(queue)] == [
        (b"a0", 2),
        (b"b1", 2),
    ]
    assert queue.leases() == {2}


def test_a_redelivered_message_that_is_outstanding_is_settled_with_the_first_delivery() -> None:
    queue = queue_of("aa", lease=1)
    [first] = pop_many(queue, 1)
    queue.add(fetched_batch(chunk(*keyed("aa"), lease=2, attempt=2)))
    assert pop_many(queue) == []
    assert queue.leases() == {1, 2}
    assert queue.settle_one(first, now=2.0)
    assert [(message.body, message.attempt) for message in pop_many(queue)] == [(b"a1", 2)]
    settle(queue, 1, 2)
    assert queue.leases() == set()


def test_unsettled_messages_are_listed_and_the_rest_can_be_dropped() -> None:
    queue = queue_of("abcd")
    pop_many(queue, 2)
    assert queue.unsettled() == list(places((0, 2)))
    assert queue.drop_ready() == list(places((2, 4)))
    assert (pop_many(queue), queue.ready, queue.ready_bytes) == ([], 0, 0)
    assert settle(queue, 0, 2) == 2
    assert queue.unsettled() == []


def test_a_key_can_be_dropped_up_to_a_lease() -> None:
    queue = queue_of("abab", lease=5)
    queue.add(fetched_batch(chunk(*keyed("aa"), at=4, lease=6)))
    assert queue.drop_key("orders", "a", 6) == list(places((0, 1), (2, 3)))
    assert sorted(bodies(pop_many(queue))) == ["a0", "a1", "b1", "b3"]


def test_keys_are_hashed_once_however_many_messages_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else what fails in a long queue costs the length of the queue, each time."""
    hashed: list[BatchView] = []
    hashes = BatchView.key_hashes

    def counted(view: BatchView) -> list[int | None]:
        hashed.append(view)
        return hashes(view)

    monkeypatch.setattr(BatchView, "key_hashes", counted)
    queue = queue_of("abcdef", lease=5)
    for row, key in enumerate("abcdef"):
        assert queue.drop_key("orders", key, 6) == list(places((row, row + 1)))
    assert len(hashed) == 1


def test_a_dropped_message_does_not_block_later_ones_of_its_key() -> None:
    queue = queue_of("aa", lease=5)
    queue.add(fetched_batch(chunk(*keyed("a"), at=2, lease=6)))
    [first] = pop_many(queue, 1)
    assert queue.drop_key("orders", "a", 6) == list(places((1, 2)))
    queue.settle_one(first, now=2.0)
    assert [message.offset for message in pop_many(queue)] == [2]


def test_acking_twice_settles_once() -> None:
    queue = queue_of("a", ordered=False)
    [message] = pop_many(queue)
    assert queue.settle_one(message, now=2.0)
    assert not queue.settle_one(message, now=2.0)


STEPS = st.lists(
    st.tuples(st.sampled_from(("take", "settle", "add")), st.integers(0, 3)), max_size=60
)


@given(keys=st.lists(st.sampled_from("abc"), max_size=12), steps=STEPS)
def test_every_message_comes_once_and_each_key_in_order(
    keys: list[str], steps: list[tuple[str, int]]
) -> None:
    queue, pieces, at = LocalQueue(ordered=True), keyed("".join(keys)), 0
    outstanding: list[DeliveredMessage] = []
    seen: list[DeliveredMessage] = []
    for step, number in [*steps, *[("add", 3)] * 4, *[("take", 1), ("settle", 0)] * 12]:
        if step == "add" and at < len(pieces):
            part = pieces[at : at + number + 1]
            queue.add(fetched_batch(chunk(*part, at=at)))
            at += len(part)
        elif step == "take":
            found = pop_many(queue, 1)
            assert not {message.key for message in found} & {message.key for message in outstanding}
            outstanding += found
            seen += found
        elif step == "settle" and outstanding:
            message = outstanding.pop(number % len(outstanding))
            queue.settle(AckedRange("orders", 0, message.offset, message.offset + 1), now=2.0)
    assert sorted(message.offset for message in seen) == list(range(len(pieces)))
    for key in "abc":
        offsets = [message.offset for message in seen if message.key == key]
        assert offsets == sorted(offsets)


def test_messages_are_decoded_correctly_around_gaps() -> None:
    queue = LocalQueue(ordered=False)
    queue.add(fetched_batch(chunk(*map(str, range(200)))))
    queue.add(fetched_batch(chunk("anew", "anew", at=70, lease=2)))
    found = {message.offset: message.body.decode() for message in pop_singly(queue)}
    assert found == {offset: "anew" if offset in {70, 71} else str(offset) for offset in range(200)}
    assert queue.ready == 0


def test_messages_of_a_run_have_times_of_their_own_and_are_acked_as_one_range() -> None:
    first, second = chunk("a", "b"), chunk("c", at=2)
    batches, further = first.batch + second.batch, ((len(second.batch), 1, 11),)
    queue, acks = LocalQueue(ordered=False), PendingAcks()
    queue.add(fetched_batch(first._replace(rows=3, batch=batches, further=further)))
    received = pop_many(queue)
    assert [(m.offset, m.body, m.stored_at) for m in received] == [
        (0, b"a", 9),
        (1, b"b", 9),
        (2, b"c", 11),
    ]
    for message in received:
        assert queue.settle_one(message, now=2.0)
        acks.add(message.topic, message.partition, message.offset, message.offset + 1, 2.0)
    assert acks.begin_request() == ((AckedRange("orders", 0, 0, 3),), ())
    assert not queue.unsettled()

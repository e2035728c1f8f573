"""What a consumer holds: order, redelivery, tags."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.client.consuming import bodies, chunk, keyed, parcel, places
from txmq.client.protocol.consumer.acks import AckBook
from txmq.client.protocol.consumer.fetched import DeliveredMessage
from txmq.client.protocol.consumer.local_queue import Holdings
from txmq.errors import LocalProtocolError
from txmq.model.message import Message, ReceivedMessage
from txmq.selector import parse
from txmq.wire.headers import Acked


def holding(keys: str, *, ordered: bool = True, lease: int = 1) -> Holdings:
    holdings = Holdings(ordered=ordered)
    holdings.add(parcel(chunk(*keyed(keys), lease=lease)))
    return holdings


def take(holdings: Holdings, most: int = 100) -> list[DeliveredMessage]:
    return holdings.take(most, now=1.0)


def take_singly(holdings: Holdings) -> list[DeliveredMessage]:
    """As threads do that take one at a time and have not finished any."""
    taken = []
    while found := take(holdings, 1):
        taken += found
    return taken


def place_of(message: DeliveredMessage) -> Acked:
    return Acked(message.topic, message.partition, message.offset, message.offset + 1)


def settle(holdings: Holdings, start: int, end: int) -> int:
    return holdings.settle(places((start, end))[0], now=2.0)


def test_messages_come_as_they_arrived_where_no_order_is_kept() -> None:
    holdings = holding("aab", ordered=False)
    holdings.add(parcel(chunk("x", at=3)))
    assert bodies(take(holdings, 2)) == ["a0", "a1"]
    assert bodies(take(holdings)) == ["b2", "x"]
    assert take(holdings) == []


def test_a_message_has_everything_that_was_sent_and_where_it_stands() -> None:
    holdings = Holdings(ordered=False)
    sent = Message(b"body", "k", "t", {"h": "v"})
    holdings.add(parcel(chunk("before", sent, at=41, partition=3, attempt=2, rows=slice(1, 2))))
    [message] = take(holdings)
    assert message == (
        *("orders", 3, 42, "k", "t", {"h": "v"}, b"body"),
        *("70" * 16 + "-42", 2, 7, 9),
    )


def test_a_message_travels_to_another_process_without_its_delivery() -> None:
    [message] = take(holding("a", ordered=False))
    copy = pickle.loads(pickle.dumps(message))
    assert type(copy) is ReceivedMessage
    assert copy == message


def test_the_next_message_of_a_key_waits_while_other_keys_flow() -> None:
    holdings = holding("aabac")
    assert bodies(take_singly(holdings)) == ["a0", "b2", "c4"]
    settle(holdings, 0, 1)
    assert bodies(take_singly(holdings)) == ["a1"]
    settle(holdings, 2, 3)
    assert take_singly(holdings) == []
    settle(holdings, 1, 2)
    assert bodies(take_singly(holdings)) == ["a3"]


def test_messages_without_a_key_wait_for_nobody_in_an_ordered_group() -> None:
    holdings = Holdings(ordered=True)
    holdings.add(parcel(chunk("x", "y", "z")))
    assert bodies(take_singly(holdings)) == ["x", "y", "z"]


def test_one_taker_gets_a_key_in_a_row_and_others_wait_for_all_of_it() -> None:
    holdings = holding("abaab")
    assert bodies(take(holdings, 2)) == ["a0", "a2"]
    assert bodies(take(holdings, 9)) == ["b1", "b4"]
    settle(holdings, 0, 1)
    assert take(holdings) == []
    settle(holdings, 2, 3)
    assert bodies(take(holdings)) == ["a3"]


def test_batches_are_columns_and_leave_out_what_is_not_wanted() -> None:
    holdings = Holdings(ordered=False, tags=frozenset({"paid", "sent"}))
    rows = [
        Message(f"{n}".encode(), f"k{n}", tag)
        for n, tag in enumerate(("paid", "new", None, "sent"))
    ]
    unwanted = holdings.add(parcel(chunk(*rows, at=10)))
    assert unwanted == list(places((11, 13)))
    batch = holdings.take_batch(now=1.0)
    assert batch is not None
    assert (list(batch.offsets), batch.bodies, batch.keys, batch.tags) == (
        [10, 13], [b"0", b"3"], ["k0", "k3"], ["paid", "sent"],
    )  # fmt: skip
    assert bodies(batch.messages()) == ["0", "3"]


def test_a_delivery_without_a_wanted_tag_leaves_nothing_behind() -> None:
    holdings = Holdings(ordered=False, tags=frozenset({"paid"}))
    assert holdings.add(parcel(chunk("x", "y", at=5))) == list(places((5, 7)))
    assert (take(holdings), holdings.ready, holdings.ready_bytes) == ([], 0, 0)


def test_a_selector_chooses_by_headers_beside_the_tags() -> None:
    holdings = Holdings(
        ordered=False, tags=frozenset({"paid"}), selector=parse("price > 9 AND $key <> 'k3'")
    )
    rows = [
        Message(b"", f"k{n}", "paid" if n != 2 else "new", {"price": price})
        for n, price in enumerate(["9", "10", "20", "30", "40"])
    ]
    assert holdings.add(parcel(chunk(*rows, at=5))) == list(places((5, 6), (7, 9)))
    assert [message.offset for message in take(holdings)] == [6, 9]


def test_ordered_batches_come_one_at_a_time_from_each_partition() -> None:
    holdings = Holdings(ordered=True)
    for at, partition in ((0, 0), (2, 0), (0, 1)):
        holdings.add(parcel(chunk("x", "y", at=at, partition=partition)))
    first, second = holdings.take_batch(now=1.0), holdings.take_batch(now=1.0)
    assert first is not None
    assert second is not None
    assert [(batch.partition, list(batch.offsets)) for batch in (first, second)] == [
        (0, [0, 1]),
        (1, [0, 1]),
    ]
    assert holdings.take_batch(now=1.0) is None
    settle(holdings, 0, 1)
    assert holdings.take_batch(now=1.0) is None
    settle(holdings, 1, 2)
    third = holdings.take_batch(now=1.0)
    assert third is not None
    assert list(third.offsets) == [2, 3]


def test_an_ordered_consumer_gives_messages_or_batches_but_not_both() -> None:
    holdings = holding("a")
    take(holdings)
    with pytest.raises(LocalProtocolError, match="take either"):
        holdings.take_batch(now=1.0)


def test_what_comes_again_before_it_was_taken_comes_once_from_the_newer_delivery() -> None:
    holdings = holding("ab", lease=1)
    holdings.add(parcel(chunk(*keyed("ab"), lease=2, attempt=2)))
    assert [(message.body, message.attempt) for message in take_singly(holdings)] == [
        (b"a0", 2),
        (b"b1", 2),
    ]
    assert holdings.leases() == {2}


def test_what_comes_again_while_it_is_in_hand_is_settled_with_it() -> None:
    holdings = holding("aa", lease=1)
    [first] = take(holdings, 1)
    holdings.add(parcel(chunk(*keyed("aa"), lease=2, attempt=2)))
    assert take(holdings) == []
    assert holdings.leases() == {1, 2}
    assert holdings.settle_one(first, now=2.0)
    assert [(message.body, message.attempt) for message in take(holdings)] == [(b"a1", 2)]
    settle(holdings, 1, 2)
    assert holdings.leases() == set()


def test_what_was_taken_is_known_and_the_rest_can_be_dropped() -> None:
    holdings = holding("abcd")
    take(holdings, 2)
    assert holdings.taken() == list(places((0, 2)))
    assert holdings.drop_ready() == list(places((2, 4)))
    assert (take(holdings), holdings.ready, holdings.ready_bytes) == ([], 0, 0)
    assert settle(holdings, 0, 2) == 2
    assert holdings.taken() == []


def test_a_key_can_be_dropped_up_to_a_lease() -> None:
    holdings = holding("abab", lease=5)
    holdings.add(parcel(chunk(*keyed("aa"), at=4, lease=6)))
    assert holdings.drop_key("orders", "a", 6) == list(places((0, 1), (2, 3)))
    assert sorted(bodies(take(holdings))) == ["a0", "a1", "b1", "b3"]


def test_a_dropped_message_does_not_hold_back_those_behind_it() -> None:
    holdings = holding("aa", lease=5)
    holdings.add(parcel(chunk(*keyed("a"), at=2, lease=6)))
    [first] = take(holdings, 1)
    assert holdings.drop_key("orders", "a", 6) == list(places((1, 2)))
    holdings.settle_one(first, now=2.0)
    assert [message.offset for message in take(holdings)] == [2]


def test_acking_twice_settles_once() -> None:
    holdings = holding("a", ordered=False)
    [message] = take(holdings)
    assert holdings.settle_one(message, now=2.0)
    assert not holdings.settle_one(message, now=2.0)


STEPS = st.lists(
    st.tuples(st.sampled_from(("take", "settle", "add")), st.integers(0, 3)), max_size=60
)


@given(keys=st.lists(st.sampled_from("abc"), max_size=12), steps=STEPS)
def test_every_message_comes_once_and_each_key_in_order(
    keys: list[str], steps: list[tuple[str, int]]
) -> None:
    holdings, pieces, at = Holdings(ordered=True), keyed("".join(keys)), 0
    in_hand: list[DeliveredMessage] = []
    seen: list[DeliveredMessage] = []
    for step, number in [*steps, *[("add", 3)] * 4, *[("take", 1), ("settle", 0)] * 12]:
        if step == "add" and at < len(pieces):
            part = pieces[at : at + number + 1]
            holdings.add(parcel(chunk(*part, at=at)))
            at += len(part)
        elif step == "take":
            found = take(holdings, 1)
            assert not {message.key for message in found} & {message.key for message in in_hand}
            in_hand += found
            seen += found
        elif step == "settle" and in_hand:
            message = in_hand.pop(number % len(in_hand))
            holdings.settle(Acked("orders", 0, message.offset, message.offset + 1), now=2.0)
    assert sorted(message.offset for message in seen) == list(range(len(pieces)))
    for key in "abc":
        offsets = [message.offset for message in seen if message.key == key]
        assert offsets == sorted(offsets)


def test_messages_are_made_right_whatever_is_left_out_between_them() -> None:
    holdings = Holdings(ordered=False)
    holdings.add(parcel(chunk(*map(str, range(200)))))
    holdings.add(parcel(chunk("anew", "anew", at=70, lease=2)))
    found = {message.offset: message.body.decode() for message in take_singly(holdings)}
    assert found == {offset: "anew" if offset in {70, 71} else str(offset) for offset in range(200)}
    assert holdings.ready == 0


def test_messages_of_a_run_have_times_of_their_own_and_are_acked_as_one_range() -> None:
    first, second = chunk("a", "b"), chunk("c", at=2)
    batches, further = first.batch + second.batch, ((len(second.batch), 1, 11),)
    holdings, book = Holdings(ordered=False), AckBook()
    holdings.add(parcel(first._replace(rows=3, batch=batches, further=further)))
    taken = take(holdings)
    assert [(m.offset, m.body, m.stored_at) for m in taken] == [
        (0, b"a", 9),
        (1, b"b", 9),
        (2, b"c", 11),
    ]
    for message in taken:
        assert holdings.settle_one(message, now=2.0)
        book.add(message.topic, message.partition, message.offset, message.offset + 1, 2.0)
    assert book.take() == (Acked("orders", 0, 0, 3),)
    assert not holdings.taken()

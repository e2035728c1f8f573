"""What becomes of messages in a member's hands: acked, failed, held for too long, part
of a transaction.
"""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.client.consuming import Spoken, bodies, chunk, keyed, places
from txmq.client.protocol.consumer.operations import NO_ACK
from txmq.errors import NotLeased, Throttled
from txmq.model.message import Message
from txmq.wire.headers import pack_refused


def test_acks_go_out_together_as_ranges_after_a_moment() -> None:
    spoken = Spoken().joined().fetched(chunk(*"abcdef"))
    messages = spoken.take(6)
    for place in (0, 1, 4, 2):
        spoken.hands.ack(messages[place], spoken.now)
    assert spoken.names() == ["fetch"]
    assert spoken.member.wake_at() == pytest.approx(spoken.now + 0.01)
    spoken.now += 0.01
    assert spoken.asked("ack").ranges == places((0, 3), (4, 5))


def test_acks_wait_for_the_answer_to_those_before_them() -> None:
    spoken = Spoken().joined().fetched(chunk(*"abc"))
    messages = spoken.take(3)
    first = spoken.hands.ack(messages[0], spoken.now)
    spoken.now += 1
    spoken.ask()
    second = spoken.hands.ack(messages[1], spoken.now)
    spoken.now += 1
    assert spoken.asked("ack").ranges == places((0, 1))
    acks = spoken.member.settling.acks
    spoken.answer("ack", b"")
    assert (acks.confirmed(first), acks.confirmed(second)) == (True, False)
    assert spoken.asked("ack").ranges == places((1, 2))
    spoken.answer("ack", b"")
    assert acks.confirmed(second)


def test_an_ack_that_came_too_late_is_told_to_whom_it_belongs() -> None:
    spoken = Spoken().joined().fetched(chunk("a", "b", "c"))
    messages = spoken.take(3)
    first = [spoken.hands.ack(message, spoken.now) for message in messages[:2]]
    spoken.now += 1
    spoken.answer("ack", pack_refused(places((1, 2))))
    second = spoken.hands.ack(messages[2], spoken.now)
    spoken.now += 1
    spoken.answer("ack", b"")
    assert [
        spoken.hands.refused(*each) for each in zip([*first, second], messages, strict=True)
    ] == [
        False,
        True,
        False,
    ]
    assert not spoken.hands.refused(second, messages[1]), "it was acked once more, and taken"
    assert spoken.member.stats.refused == 1


def test_messages_without_a_wanted_tag_are_acked_by_themselves() -> None:
    rows = [Message(tag.encode(), None, tag) for tag in ("new", "paid", "old")]
    spoken = Spoken(tags={"paid"}).joined().fetched(chunk(*rows))
    spoken.now += 1
    assert spoken.asked("ack").ranges == places((0, 1), (2, 3))
    assert bodies(spoken.take(9)) == ["paid"]
    assert spoken.member.stats.filtered == 2


def in_time(spoken: Spoken, seconds: float, **beat: Any) -> None:
    """So long, with all looks that are due, and heartbeats answered."""
    until = spoken.now + seconds
    while spoken.now < until:
        spoken.now += 1
        if "consumer.heartbeat" in spoken.names():
            spoken.answer(
                "consumer.heartbeat", generation=1, epoch=1, assignment=[["orders", 0]], **beat
            )
        if "consumer.extend" in spoken.names():
            spoken.answer("consumer.extend", deadline=0)


def test_a_message_held_for_too_long_has_failed_and_what_is_said_of_it_later_has_no_effect() -> (
    None
):
    spoken = Spoken().joined().fetched(chunk("a", "b", "c", lease=7))
    spoken.take()
    in_time(spoken, 850)
    (second,) = spoken.take()
    assert "consumer.nack" not in spoken.names()
    in_time(spoken, 120)
    nack = spoken.asked("consumer.nack")
    assert (nack["offset"], nack["error"]["type"], nack["delay_ms"]) == (0, "ConsumeTimeout", None)
    assert "more than 900 s" in nack["error"]["text"]
    spoken.answer("consumer.nack", moved="retry", attempt=1, due_at=0)
    assert spoken.hands.ack(second, spoken.now) != NO_ACK, (
        "others of its delivery are in hand as before"
    )
    assert spoken.member.stats.nacked == 1
    (third,) = spoken.take()
    in_time(spoken, 2_000)
    assert spoken.asked("consumer.nack")["offset"] == 2
    with capture_logs() as told:
        assert spoken.hands.ack(third, spoken.now) == NO_ACK
    assert [one["event"] for one in told] == ["message.ack_late"]
    with pytest.raises(NotLeased):
        spoken.hands.nack(third, None, "late")
    with pytest.raises(NotLeased):
        spoken.hands.extend(third, None, spoken.now)


def test_a_handler_may_ask_for_more_time_and_an_operator_for_less() -> None:
    spoken = Spoken().joined().fetched(chunk("a", "b", lease=7))
    (first,) = spoken.take()
    spoken.hands.extend(first, 2_000, spoken.now)
    in_time(spoken, 1_990)
    assert "consumer.nack" not in spoken.names()
    spoken.hands.extend(first, None, spoken.now)
    in_time(spoken, 890)
    assert "consumer.nack" not in spoken.names()
    spoken.hands.extend(first, None, spoken.now)
    in_time(spoken, 90, consume_timeout_ms=30_000)
    assert spoken.asked("consumer.nack")["offset"] == 0


def test_behind_a_message_held_for_too_long_its_key_goes_back() -> None:
    spoken = Spoken("ordered").joined().fetched(chunk(*keyed("aba"), lease=7))
    assert bodies(spoken.take()) == ["a0"]
    [other] = spoken.take()
    assert other.body == b"b1"
    in_time(spoken, 600)
    spoken.hands.extend(other, None, spoken.now)
    in_time(spoken, 400)
    spoken.answer("consumer.nack", moved="retry", attempt=1, due_at=0, fence_lease=8)
    assert spoken.asked("consumer.return")["ranges"] == [["orders", 0, 2, 3]]


def test_the_time_of_a_batch_begins_anew_as_it_makes_progress() -> None:
    spoken = Spoken().joined().fetched(chunk("a", "b", "c", lease=7))
    batch = spoken.hands.take_batch(spoken.now)
    assert batch is not None
    messages = batch.messages()
    for message in messages[:2]:
        in_time(spoken, 800)
        spoken.hands.ack(message, spoken.now)
    assert "consumer.nack" not in spoken.names()
    in_time(spoken, 1_000)
    assert spoken.asked("consumer.nack")["offset"] == 2


def test_a_failed_message_is_nacked_with_its_error_and_delay() -> None:
    spoken = Spoken().joined().fetched(chunk("a"))
    [message] = spoken.take()
    spoken.hands.nack(message, 1.5, ValueError("no stock"))
    nack = spoken.asked("consumer.nack")
    assert (nack["topic"], nack["partition"], nack["offset"], nack["delay_ms"]) == (
        "orders",
        0,
        0,
        1_500,
    )
    assert (nack["error"]["type"], nack["dead"]) == ("ValueError", False)
    with pytest.raises(NotLeased):
        spoken.hands.nack(message, None, None)
    spoken.answer("consumer.nack", moved="retry", attempt=1, due_at=5, fence_lease=0)
    assert (spoken.member.stats.nacked, spoken.member.holdings.taken()) == (1, [])


def test_several_messages_are_acked_or_fail_at_once_but_for_those_that_are_done_with() -> None:
    spoken = Spoken().joined().fetched(chunk(*"abcdef"))
    messages = spoken.take(6)
    spoken.hands.ack(messages[1], spoken.now)
    spoken.hands.ack_many(messages[:3], spoken.now)
    assert [message.in_hand for message in messages] == [False, False, False, True, True, True]
    spoken.hands.nack(messages[4], None, "no")
    spoken.hands.nack_many(messages, 2.0, "away")
    assert not any(message.in_hand for message in messages)
    assert spoken.member.settling.acks.ranges() == list(places((1, 2), (0, 1), (2, 3)))
    nacked = [asked.args for asked in spoken.ask() if asked.name == "consumer.nack"]
    assert [(args["offset"], args["delay_ms"]) for args in nacked] == [
        (4, None),
        (3, 2_000),
        (5, 2_000),
    ]


def test_behind_a_fence_the_messages_of_a_key_are_given_back_unprocessed() -> None:
    spoken = Spoken("ordered").joined().fetched(chunk(*keyed("abaa"), lease=3))
    [first] = spoken.take()
    spoken.hands.nack(first, None, "no")
    assert bodies(spoken.take(1)) == ["b1"]
    assert spoken.take() == []
    spoken.fetched(
        chunk(*keyed("a"), at=4, lease=4), chunk(*keyed("a"), at=0, lease=5, attempt=2, moved=True)
    )
    spoken.answer("consumer.nack", moved="retry", attempt=1, due_at=5, fence_lease=5)
    assert spoken.asked("consumer.return")["ranges"] == [["orders", 0, 2, 5]]
    assert [(message.offset, message.attempt) for message in spoken.take(9)] == []


def test_a_postponed_message_is_in_nobodys_hands_and_did_not_fail() -> None:
    spoken = Spoken().joined().fetched(chunk("a"))
    [message] = spoken.take()
    spoken.hands.postpone(message, 1.5)
    nack = spoken.asked("consumer.nack")
    assert (nack["offset"], nack["delay_ms"], nack["postpone"], nack["dead"]) == (
        0,
        1_500,
        True,
        False,
    )
    with pytest.raises(NotLeased):
        spoken.hands.postpone(message, None)
    spoken.answer("consumer.nack", moved="retry", attempt=0, due_at=5, fence_lease=0)
    assert (
        spoken.member.stats.nacked,
        spoken.member.stats.postponed,
        spoken.member.holdings.taken(),
    ) == (0, 1, [])


def test_after_a_nack_without_a_fence_the_key_goes_on() -> None:
    spoken = Spoken("ordered").joined().fetched(chunk(*keyed("aa"), lease=3))
    [first] = spoken.take()
    spoken.hands.nack(first, None, "no")
    spoken.answer("consumer.nack", moved="letter", attempt=1, due_at=0, fence_lease=0)
    assert bodies(spoken.take()) == ["a1"]
    assert spoken.member.stats.dead_lettered == 1


def test_a_guarded_group_gets_back_what_was_not_begun() -> None:
    spoken = Spoken().joined().fetched(chunk("a", "b", "c", "d"))
    first, second = spoken.take(2)
    spoken.hands.nack(first, None, "away")
    spoken.answer("consumer.nack", moved="retry", attempt=0, due_at=5, fence_lease=0, guarded=True)
    assert spoken.asked("consumer.return")["ranges"] == [["orders", 0, 2, 4]]
    assert spoken.hands.holds(second)


def test_a_nack_that_comes_too_late_gives_the_rest_of_its_key_back() -> None:
    spoken = Spoken("ordered").joined().fetched(chunk(*keyed("aab"), lease=3))
    first = spoken.take()[0]
    spoken.hands.nack(first, None, "no")
    spoken.refuse("consumer.nack", NotLeased("lapsed", detail={"fence_lease": 4}))
    assert spoken.asked("consumer.return")["ranges"] == [["orders", 0, 1, 2]]
    assert bodies(spoken.take(9)) == ["b2"]


def test_a_nack_is_repeated_where_the_broker_asks_for_a_pause() -> None:
    spoken = Spoken().joined().fetched(chunk("a"))
    spoken.hands.nack(spoken.take()[0], None, "no")
    spoken.refuse("consumer.nack", Throttled("full"))
    spoken.now += 0.2
    assert spoken.asked("consumer.nack")["offset"] == 0


def test_an_ack_can_be_part_of_a_transaction() -> None:
    spoken = Spoken().joined(generation=3).fetched(chunk("a", "b", "c"))
    kept, returned, doubtful = spoken.take(3)
    [action] = spoken.hands.lend(kept)
    assert action == ("ack", "billing", "m-1", 3, "orders", 0, 0, 1)
    with pytest.raises(NotLeased):
        spoken.hands.lend(kept)
    assert spoken.hands.ack(kept, spoken.now) == 0
    for message in (returned, doubtful):
        spoken.hands.lend(message)
    spoken.hands.lent(kept, spoken.now, committed=True)
    spoken.hands.lent(doubtful, spoken.now, committed=None)
    spoken.hands.lent(returned, spoken.now, committed=False)
    assert spoken.member.holdings.taken() == list(places((1, 2)))
    assert spoken.hands.ack(returned, spoken.now) != 0


def test_what_is_left_of_a_batch_can_be_acked_in_a_transaction() -> None:
    spoken = Spoken().joined().fetched(chunk("a", "b", "c"))
    batch = spoken.hands.take_batch(spoken.now)
    assert batch is not None
    spoken.hands.nack(batch.messages()[1], None, "no")
    actions = spoken.hands.lend(batch)
    assert [action[-2:] for action in actions] == [(0, 1), (2, 3)]
    spoken.hands.lent(batch, spoken.now, committed=True)
    assert spoken.member.holdings.taken() == list(places((1, 2)))

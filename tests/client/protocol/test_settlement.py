"""The settlement of outstanding messages: acked, failed, held for too long, part of a
transaction.
"""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.client.scripted_member import ScriptedMember, bodies, chunk, keyed, places
from txmq.client.protocol.consumer.operations import NO_ACK
from txmq.errors import NotLeased, Throttled
from txmq.model.message import Message
from txmq.wire.data_requests import pack_refused


def test_acks_are_sent_together_as_ranges_after_lingering() -> None:
    scripted = ScriptedMember().joined().fetched(chunk(*"abcdef"))
    messages = scripted.receive(6)
    for place in (0, 1, 4, 2):
        scripted.operations.ack(messages[place], scripted.now)
    assert scripted.request_names() == ["fetch"]
    assert scripted.member.wake_at() == pytest.approx(scripted.now + 0.01)
    scripted.now += 0.01
    assert scripted.args_of("ack").ranges == places((0, 3), (4, 5))


def test_acks_wait_for_the_reply_to_those_before_them() -> None:
    scripted = ScriptedMember().joined().fetched(chunk(*"abc"))
    messages = scripted.receive(3)
    first = scripted.operations.ack(messages[0], scripted.now)
    scripted.now += 1
    scripted.requests()
    second = scripted.operations.ack(messages[1], scripted.now)
    scripted.now += 1
    assert scripted.args_of("ack").ranges == places((0, 1))
    acks = scripted.member.settlement.acks
    scripted.answer("ack", b"")
    assert (acks.is_confirmed(first), acks.is_confirmed(second)) == (True, False)
    assert scripted.args_of("ack").ranges == places((1, 2))
    scripted.answer("ack", b"")
    assert acks.is_confirmed(second)


def test_a_late_ack_is_reported_to_its_caller() -> None:
    scripted = ScriptedMember().joined().fetched(chunk("a", "b", "c"))
    messages = scripted.receive(3)
    first = [scripted.operations.ack(message, scripted.now) for message in messages[:2]]
    scripted.now += 1
    scripted.answer("ack", pack_refused(places((1, 2))))
    second = scripted.operations.ack(messages[2], scripted.now)
    scripted.now += 1
    scripted.answer("ack", b"")
    assert [
        scripted.operations.ack_refused(*each)
        for each in zip([*first, second], messages, strict=True)
    ] == [
        False,
        True,
        False,
    ]
    assert not scripted.operations.ack_refused(second, messages[1]), (
        "it was acked once more, and taken"
    )
    assert scripted.member.stats.refused == 1


def test_messages_without_a_wanted_tag_are_acked_by_themselves() -> None:
    rows = [Message(tag.encode(), None, tag) for tag in ("new", "paid", "old")]
    scripted = ScriptedMember(tags={"paid"}).joined().fetched(chunk(*rows))
    scripted.now += 1
    assert scripted.args_of("ack")[3:] == ((), places((0, 1), (2, 3)))
    assert bodies(scripted.receive(9)) == ["paid"]
    assert scripted.member.stats.filtered == 2


def test_what_was_filtered_stays_so_in_an_ack_that_is_repeated() -> None:
    rows = [Message(tag.encode(), None, tag) for tag in ("new", "paid", "old")]
    scripted = ScriptedMember(tags={"paid"}).joined().fetched(chunk(*rows))
    [paid] = scripted.receive(9)
    scripted.operations.ack(paid, scripted.now)
    scripted.now += 1
    acks = scripted.args_of("ack")[3:]
    assert acks == (places((1, 2)), places((0, 1), (2, 3)))
    scripted.disconnect()
    scripted.joined()
    assert scripted.args_of("ack")[3:] == acks


def pass_time(scripted: ScriptedMember, seconds: float, **beat: Any) -> None:
    """Let so many seconds pass, with all checks that are due; answer heartbeats."""
    until = scripted.now + seconds
    while scripted.now < until:
        scripted.now += 1
        if "consumer.heartbeat" in scripted.request_names():
            scripted.answer(
                "consumer.heartbeat", generation=1, epoch=1, assignment=[["orders", 0]], **beat
            )
        if "consumer.extend" in scripted.request_names():
            scripted.answer("consumer.extend", deadline=0)


def test_a_message_held_for_too_long_has_failed_and_later_acks_have_no_effect() -> None:
    scripted = ScriptedMember().joined().fetched(chunk("a", "b", "c", lease=7))
    scripted.receive()
    pass_time(scripted, 850)
    (second,) = scripted.receive()
    assert "consumer.nack" not in scripted.request_names()
    pass_time(scripted, 120)
    nack = scripted.args_of("consumer.nack")
    assert (nack["offset"], nack["error"]["type"], nack["delay_ms"]) == (0, "ConsumeTimeout", None)
    assert "more than 900 s" in nack["error"]["text"]
    scripted.answer("consumer.nack", moved="retry", attempt=1, due_at=0)
    assert scripted.operations.ack(second, scripted.now) != NO_ACK, (
        "others of its delivery are in hand as before"
    )
    assert scripted.member.stats.nacked == 1
    (third,) = scripted.receive()
    pass_time(scripted, 2_000)
    assert scripted.args_of("consumer.nack")["offset"] == 2
    with capture_logs() as told:
        assert scripted.operations.ack(third, scripted.now) == NO_ACK
    assert [one["event"] for one in told] == ["message.ack_late"]
    with pytest.raises(NotLeased):
        scripted.operations.nack(third, None, "late")
    with pytest.raises(NotLeased):
        scripted.operations.extend(third, None, scripted.now)


def test_a_handler_may_extend_the_timeout_and_an_operator_shorten_it() -> None:
    scripted = ScriptedMember().joined().fetched(chunk("a", "b", lease=7))
    (first,) = scripted.receive()
    scripted.operations.extend(first, 2_000, scripted.now)
    pass_time(scripted, 1_990)
    assert "consumer.nack" not in scripted.request_names()
    scripted.operations.extend(first, None, scripted.now)
    pass_time(scripted, 890)
    assert "consumer.nack" not in scripted.request_names()
    scripted.operations.extend(first, None, scripted.now)
    pass_time(scripted, 90, consume_timeout_ms=30_000)
    assert scripted.args_of("consumer.nack")["offset"] == 0


def test_behind_a_message_held_for_too_long_its_key_is_returned() -> None:
    scripted = ScriptedMember("ordered").joined().fetched(chunk(*keyed("aba"), lease=7))
    assert bodies(scripted.receive()) == ["a0"]
    [other] = scripted.receive()
    assert other.body == b"b1"
    pass_time(scripted, 600)
    scripted.operations.extend(other, None, scripted.now)
    pass_time(scripted, 400)
    scripted.answer("consumer.nack", moved="retry", attempt=1, due_at=0, fence_lease=8)
    assert scripted.args_of("consumer.return")["ranges"] == [["orders", 0, 2, 3]]


def test_the_timeout_of_a_batch_restarts_as_it_makes_progress() -> None:
    scripted = ScriptedMember().joined().fetched(chunk("a", "b", "c", lease=7))
    batch = scripted.operations.receive_batch(scripted.now)
    assert batch is not None
    messages = batch.messages()
    for message in messages[:2]:
        pass_time(scripted, 800)
        scripted.operations.ack(message, scripted.now)
    assert "consumer.nack" not in scripted.request_names()
    pass_time(scripted, 1_000)
    assert scripted.args_of("consumer.nack")["offset"] == 2


def test_a_failed_message_is_nacked_with_its_error_and_delay() -> None:
    scripted = ScriptedMember().joined().fetched(chunk("a"))
    [message] = scripted.receive()
    scripted.operations.nack(message, 1.5, ValueError("no stock"))
    nack = scripted.args_of("consumer.nack")
    assert (nack["topic"], nack["partition"], nack["offset"], nack["delay_ms"]) == (
        "orders",
        0,
        0,
        1_500,
    )
    assert (nack["error"]["type"], nack["dead"]) == ("ValueError", False)
    with pytest.raises(NotLeased):
        scripted.operations.nack(message, None, None)
    scripted.answer("consumer.nack", moved="retry", attempt=1, due_at=5, fence_lease=0)
    assert (scripted.member.stats.nacked, scripted.member.queue.unsettled()) == (1, [])


def test_several_messages_are_acked_or_nacked_at_once_except_settled_ones() -> None:
    scripted = ScriptedMember().joined().fetched(chunk(*"abcdef"))
    messages = scripted.receive(6)
    scripted.operations.ack(messages[1], scripted.now)
    scripted.operations.ack_many(messages[:3], scripted.now)
    assert [message.in_hand for message in messages] == [False, False, False, True, True, True]
    scripted.operations.nack(messages[4], None, "no")
    scripted.operations.nack_many(messages, 2.0, "away")
    assert not any(message.in_hand for message in messages)
    assert scripted.member.settlement.acks.unconfirmed() == list(places((1, 2), (0, 1), (2, 3)))
    nacked = [asked.args for asked in scripted.requests() if asked.name == "consumer.nack"]
    assert [(args["offset"], args["delay_ms"]) for args in nacked] == [
        (4, None),
        (3, 2_000),
        (5, 2_000),
    ]


def test_behind_a_key_fence_the_messages_of_a_key_are_returned_unprocessed() -> None:
    scripted = ScriptedMember("ordered").joined().fetched(chunk(*keyed("abaa"), lease=3))
    [first] = scripted.receive()
    scripted.operations.nack(first, None, "no")
    assert bodies(scripted.receive(1)) == ["b1"]
    assert scripted.receive() == []
    scripted.fetched(
        chunk(*keyed("a"), at=4, lease=4), chunk(*keyed("a"), at=0, lease=5, attempt=2, moved=True)
    )
    scripted.answer("consumer.nack", moved="retry", attempt=1, due_at=5, fence_lease=5)
    assert scripted.args_of("consumer.return")["ranges"] == [["orders", 0, 2, 5]]
    assert [(message.offset, message.attempt) for message in scripted.receive(9)] == []


def test_a_nack_overtakes_no_ack_of_an_ordered_group() -> None:
    scripted = ScriptedMember(mode="ordered").joined().fetched(chunk(*keyed("aaa")))
    first, second, third = scripted.receive(3)
    scripted.operations.ack(first, scripted.now)
    scripted.now += 1
    assert scripted.args_of("ack").ranges == places((0, 1))  # in flight from here on
    scripted.operations.ack(second, scripted.now)
    scripted.operations.nack(third, None, "no")
    assert "consumer.nack" not in scripted.request_names()
    scripted.answer("ack", b"")
    assert [name for name in scripted.request_names() if name != "fetch"][-2:] == [
        "ack",
        "consumer.nack",
    ]
    assert scripted.args_of("consumer.nack")["offset"] == 2


@pytest.mark.parametrize(("mode", "received"), [("ordered", []), ("concurrent", ["a1"])])
def test_no_message_on_its_way_overtakes_one_that_is_given_back(
    mode: str, received: list[str]
) -> None:
    scripted = ScriptedMember(mode).joined().fetched(chunk(*keyed("a")))
    [first] = scripted.receive()
    assert "fetch" in scripted.request_names()
    scripted.operations.give_back(first, scripted.now, rejoin=True)
    scripted.fetched(chunk(Message(b"a1", "a"), at=1, lease=2))
    assert bodies(scripted.receive(5)) == received
    assert scripted.member.needs_reconnect is (mode == "ordered")


def test_a_member_that_joins_anew_delivers_nothing_before_and_wakes_its_driver() -> None:
    scripted = ScriptedMember("ordered").joined().fetched(chunk(*keyed("ab")))
    [first] = scripted.receive()
    scripted.requests()
    assert (scripted.member.wake_at() or 0.0) > scripted.now
    scripted.operations.give_back(first, scripted.now, rejoin=True)
    assert scripted.member.wake_at() == 0.0
    assert scripted.receive(5) == [], "the broker has b1 behind others of its key, perhaps"


def test_a_broker_is_not_away_whose_connection_a_member_has_ended_to_join_anew() -> None:
    scripted = ScriptedMember("ordered").joined().fetched(chunk(*keyed("a")))
    [first] = scripted.receive()
    scripted.operations.give_back(first, scripted.now, rejoin=True)
    scripted.member.leave()
    scripted.disconnect()
    assert not scripted.member.away
    scripted.joined(generation=2)
    assert scripted.request_names() == ["consumer.leave"]
    scripted.disconnect()
    assert scripted.member.away


def test_a_broker_is_away_where_a_member_cannot_join_anew() -> None:
    scripted = ScriptedMember("ordered").joined()
    scripted.member.rejoin()
    for away in (False, True):
        scripted.disconnect()
        assert scripted.member.away is away


def test_a_member_without_a_connection_does_not_log_that_it_ends_one() -> None:
    scripted = ScriptedMember("ordered").joined()
    with capture_logs() as told:
        scripted.disconnect()
        scripted.member.rejoin()
        assert told == []
        scripted.joined(generation=2)
        scripted.member.rejoin()
        scripted.member.rejoin()
    assert [one["event"] for one in told] == ["consumer.joined", "consumer.rejoining"]


def test_a_postponed_message_is_settled_and_did_not_fail() -> None:
    scripted = ScriptedMember().joined().fetched(chunk("a"))
    [message] = scripted.receive()
    scripted.operations.postpone(message, 1.5)
    nack = scripted.args_of("consumer.nack")
    assert (nack["offset"], nack["delay_ms"], nack["postpone"], nack["dead"]) == (
        0,
        1_500,
        True,
        False,
    )
    with pytest.raises(NotLeased):
        scripted.operations.postpone(message, None)
    with capture_logs() as logs:
        scripted.answer("consumer.nack", moved="retry", attempt=0, due_at=5, fence_lease=0)
    assert logs == []  # it is no failure, and the end of a run postpones, too
    assert (
        scripted.member.stats.nacked,
        scripted.member.stats.postponed,
        scripted.member.queue.unsettled(),
    ) == (0, 1, [])


def test_after_a_nack_without_a_fence_the_key_goes_on() -> None:
    scripted = ScriptedMember("ordered").joined().fetched(chunk(*keyed("aa"), lease=3))
    [first] = scripted.receive()
    scripted.operations.nack(first, None, "no")
    scripted.answer("consumer.nack", moved="letter", attempt=1, due_at=0, fence_lease=0)
    assert bodies(scripted.receive()) == ["a1"]
    assert scripted.member.stats.dead_lettered == 1


def test_a_member_of_a_guarded_group_returns_what_waits() -> None:
    scripted = ScriptedMember().joined().fetched(chunk("a", "b", "c", "d"))
    first, second = scripted.receive(2)
    scripted.operations.nack(first, None, "away")
    scripted.answer(
        "consumer.nack", moved="retry", attempt=0, due_at=5, fence_lease=0, guarded=True
    )
    assert scripted.args_of("consumer.return")["ranges"] == [["orders", 0, 2, 4]]
    assert scripted.operations.is_outstanding(second)


def test_a_late_nack_returns_the_rest_of_its_key() -> None:
    scripted = ScriptedMember("ordered").joined().fetched(chunk(*keyed("aab"), lease=3))
    first = scripted.receive()[0]
    scripted.operations.nack(first, None, "no")
    scripted.refuse("consumer.nack", NotLeased("lapsed", detail={"fence_lease": 4}))
    assert scripted.args_of("consumer.return")["ranges"] == [["orders", 0, 1, 2]]
    assert bodies(scripted.receive(9)) == ["b2"]


def test_a_nack_is_repeated_after_a_retriable_refusal() -> None:
    scripted = ScriptedMember().joined().fetched(chunk("a"))
    scripted.operations.nack(scripted.receive()[0], None, "no")
    scripted.refuse("consumer.nack", Throttled("full"))
    scripted.now += 0.2
    assert scripted.args_of("consumer.nack")["offset"] == 0


def test_an_ack_can_be_part_of_a_transaction() -> None:
    scripted = ScriptedMember().joined(generation=3).fetched(chunk("a", "b", "c"))
    kept, returned, doubtful = scripted.receive(3)
    [action] = scripted.operations.add_to_transaction(kept)
    assert action == ("ack", "billing", "m-1", 3, "orders", 0, 0, 1)
    with pytest.raises(NotLeased):
        scripted.operations.add_to_transaction(kept)
    assert scripted.operations.ack(kept, scripted.now) == 0
    for message in (returned, doubtful):
        scripted.operations.add_to_transaction(message)
    scripted.operations.transaction_ended(kept, scripted.now, committed=True)
    scripted.operations.transaction_ended(doubtful, scripted.now, committed=None)
    scripted.operations.transaction_ended(returned, scripted.now, committed=False)
    assert scripted.member.queue.unsettled() == list(places((1, 2)))
    assert scripted.operations.ack(returned, scripted.now) != 0


def test_what_is_left_of_a_batch_can_be_acked_in_a_transaction() -> None:
    scripted = ScriptedMember().joined().fetched(chunk("a", "b", "c"))
    batch = scripted.operations.receive_batch(scripted.now)
    assert batch is not None
    scripted.operations.nack(batch.messages()[1], None, "no")
    actions = scripted.operations.add_to_transaction(batch)
    assert [action[-2:] for action in actions] == [(0, 1), (2, 3)]
    scripted.operations.transaction_ended(batch, scripted.now, committed=True)
    assert scripted.member.queue.unsettled() == list(places((1, 2)))


def restarted(mode: str = "ordered") -> tuple[ScriptedMember, Any]:
    """Return a member whose broker was restarted while it had a message in hand, which
    failed after the rejoin: the nack is on its way.
    """
    scripted = ScriptedMember(mode).joined().fetched(chunk(*keyed("aba"), lease=7))
    (message,) = scripted.receive()
    scripted.disconnect()
    scripted.joined(generation=3)
    assert "fetch" in scripted.request_names()
    scripted.operations.nack(message, None, "failed")
    return scripted, message


def refusal(fence_lease: int) -> NotLeased:
    return NotLeased("not leased", detail={"fence_lease": fence_lease})


@pytest.mark.parametrize("mode", ["ordered", "concurrent"])
def test_a_refused_nack_does_not_settle_what_was_delivered_anew_but_goes_to_its_lease(
    mode: str,
) -> None:
    scripted, _message = restarted(mode)
    scripted.requests()
    scripted.fetched(chunk(*keyed("aba"), lease=8))  # overtakes the refusal
    scripted.refuse("consumer.nack", refusal(8))
    assert scripted.args_of("consumer.nack")["offset"] == 0
    received = bodies(scripted.receive(9))
    assert received == (["b1"] if mode == "ordered" else ["b1", "a2"])
    scripted.answer("consumer.nack", moved="retry", attempt=1, due_at=0, fence_lease=9)
    assert scripted.member.stats.nacked == 1
    if mode == "ordered":
        assert scripted.args_of("consumer.return")["ranges"] == [["orders", 0, 2, 3]]


def test_a_message_delivered_anew_after_the_refusal_is_received_before_later_ones() -> None:
    scripted, _message = restarted()
    scripted.refuse("consumer.nack", refusal(8))
    scripted.fetched(chunk(*keyed("aba"), lease=8))
    assert bodies([*scripted.receive(), *scripted.receive()]) == ["b1", "a0"]
    assert scripted.receive() == []


def test_a_refusal_is_about_no_lease_of_a_later_generation_than_the_nack_names() -> None:
    scripted, _message = restarted()
    scripted.requests()
    scripted.fetched(chunk(*keyed("aba"), lease=8))
    assert scripted.args_of("consumer.nack")["generation"] == 1
    scripted.refuse("consumer.nack", refusal(9))  # by now, so lease 8 was there
    assert scripted.args_of("consumer.nack")["generation"] == 3
    assert bodies(scripted.receive(9)) == ["b1"]


@pytest.mark.parametrize("is_nacked", [True, False])
def test_a_message_in_hand_stands_for_its_lease_on_the_next_connection(*, is_nacked: bool) -> None:
    scripted = ScriptedMember("ordered").joined().fetched(chunk(*keyed("aba"), lease=7))
    (message,) = scripted.receive()
    scripted.disconnect()
    scripted.joined(generation=3)
    scripted.fetched(chunk(*keyed("aba"), lease=8))
    if is_nacked:
        scripted.operations.nack(message, None, "failed")
    scripted.disconnect()
    scripted.joined(generation=3)
    if not is_nacked:
        scripted.operations.nack(message, None, "failed")
    assert scripted.args_of("consumer.nack")["generation"] == 3


def test_a_refusal_settles_what_was_delivered_before_it_was_decided() -> None:
    scripted, _message = restarted()
    scripted.requests()
    scripted.fetched(chunk(*keyed("a"), lease=8))
    scripted.refuse("consumer.nack", refusal(8))
    scripted.refuse("consumer.nack", refusal(9))  # that lease is over, too
    assert "consumer.nack" not in scripted.request_names()
    assert scripted.member.queue.unsettled() == []


def test_a_delivery_of_a_former_connection_takes_no_nack() -> None:
    scripted, _message = restarted()
    scripted.requests()
    scripted.fetched(chunk(*keyed("aba"), lease=8))
    scripted.disconnect()
    scripted.joined(generation=5)
    scripted.refuse("consumer.nack", refusal(8))
    assert "consumer.nack" not in scripted.request_names()
    scripted.fetched(chunk(*keyed("aba"), lease=8))  # the number of a lost lease is given again
    assert bodies([*scripted.receive(), *scripted.receive()]) == ["b1", "a0"]


def test_nacks_and_acks_of_a_lost_connection_are_answered_before_anything_is_fetched() -> None:
    scripted = ScriptedMember().joined().fetched(chunk(*map(str, range(100)), lease=7))
    messages = scripted.receive(100)
    scripted.operations.ack(messages[0], scripted.now)
    for message in messages[1:]:
        scripted.operations.nack(message, 0, "failed")
    scripted.disconnect()
    scripted.joined(generation=3)
    assert scripted.request_names() == ["ack", *["consumer.nack"] * 99]
    for _ in range(99):
        scripted.answer("consumer.nack", moved="retry", attempt=1, due_at=0)
    assert scripted.request_names() == ["ack"]
    scripted.answer("ack", b"")
    assert scripted.request_names() == ["fetch"]


def test_a_thousand_nacks_are_on_their_way_at_once() -> None:
    scripted = ScriptedMember().joined().fetched(chunk(*map(str, range(1_100))))
    scripted.operations.nack_many(scripted.receive(1_100), 0, "failed")
    assert scripted.request_names().count("consumer.nack") == 1_024
    scripted.answer("consumer.nack", moved="retry", attempt=1, due_at=0)
    assert scripted.request_names().count("consumer.nack") == 1_024
    assert scripted.member.settlement.unconfirmed_nacks == 1_099


def redelivered(lease: int = 8) -> tuple[ScriptedMember, Any, Any]:
    """Return a member with two deliveries of a message: the handler of the first one
    took too long, and the second one is outstanding beside a neighbour of the first.
    """
    scripted = ScriptedMember().joined().fetched(chunk("a", "b", lease=7))
    first, _neighbour = scripted.receive(2)
    scripted.operations.nack(first, 0, "too long")
    scripted.answer("consumer.nack", moved="retry", attempt=1, due_at=0)
    scripted.fetched(chunk("a", lease=lease, attempt=2, moved=True))
    (second,) = scripted.receive()
    return scripted, first, second


def test_a_late_handler_cannot_settle_the_delivery_of_another_handler() -> None:
    scripted, first, second = redelivered()
    operations = scripted.operations
    assert operations.ack(first, scripted.now) == NO_ACK
    for late in (
        lambda: operations.nack(first, None, "late"),
        lambda: operations.postpone(first, None),
        lambda: operations.extend(first, None, scripted.now),
        lambda: operations.give_back(first, scripted.now),
        lambda: operations.add_to_transaction(first),
    ):
        with pytest.raises(NotLeased):
            late()
    operations.ack_many([first], scripted.now)
    operations.nack_many([first], None, "late")
    assert second.in_hand
    assert operations.ack(second, scripted.now) != NO_ACK


def lost_with_the_broker(
    mode: str = "ordered", *, failed: bool = False
) -> tuple[ScriptedMember, Any]:
    """Return a member whose broker has died before it had the acks of two messages of
    a key. The third is in hand, or has failed meanwhile.
    """
    scripted = ScriptedMember(mode).joined().fetched(chunk(*keyed("aaa"), lease=7))
    for _ in range(2):
        scripted.operations.ack(scripted.receive()[0], scripted.now)
    (third,) = scripted.receive()
    if failed:
        scripted.operations.nack(third, None, "failed")
    scripted.disconnect()
    return scripted.joined(generation=3), third


def all_bodies(scripted: ScriptedMember) -> list[str]:
    """Receive and ack all messages that can be received now, one by one."""
    received = []
    while messages := scripted.receive():
        received += bodies(messages)
        scripted.operations.ack(messages[0], scripted.now)
    return received


def test_nothing_is_fetched_until_the_answers_to_what_was_repeated_are_there() -> None:
    scripted, _third = lost_with_the_broker(failed=True)
    assert scripted.request_names() == ["ack", "consumer.nack"]
    scripted.answer("ack", pack_refused(places((0, 2))))
    assert scripted.request_names() == ["consumer.nack"]
    scripted.refuse("consumer.nack", refusal(7))
    assert scripted.request_names() == ["fetch"]
    scripted.fetched(chunk(*keyed("aaa"), lease=7))
    assert all_bodies(scripted) == ["a0", "a1", "a2"]


@pytest.mark.parametrize("most", [1, 9])
@pytest.mark.parametrize("end", ["ack", "nack", "postpone", "transaction"])
def test_a_message_in_hand_comes_again_behind_earlier_ones_that_come_again(
    end: str, most: int
) -> None:
    scripted, third = lost_with_the_broker()
    scripted.answer("ack", pack_refused(places((0, 2))))
    scripted.fetched(chunk(*keyed("aaab"), lease=8))
    scripted.fetched(chunk(*keyed("aa"), at=4, lease=9))
    assert bodies(scripted.receive(most)) == ["b3"]
    operations = scripted.operations
    if end == "ack":
        assert operations.ack(third, scripted.now) == NO_ACK
    elif end == "nack":
        operations.nack(third, None, "failed")
    elif end == "postpone":
        operations.postpone(third, None)
    else:
        with pytest.raises(NotLeased):
            operations.add_to_transaction(third)
    assert all_bodies(scripted) == ["a0", "a1", "a2", "a0", "a1"]
    assert "consumer.nack" not in scripted.request_names()


def test_a_batch_in_hand_comes_again_behind_earlier_messages_that_come_again() -> None:
    scripted = ScriptedMember("ordered").joined().fetched(chunk(*keyed("ab"), lease=6))
    first = scripted.operations.receive_batch(scripted.now)
    assert first is not None
    scripted.operations.ack_batch(first, scripted.now)
    scripted.fetched(chunk(*keyed("ab"), at=2, lease=7))
    second = scripted.operations.receive_batch(scripted.now)
    assert second is not None
    scripted.disconnect()
    scripted.joined(generation=3).answer("ack", pack_refused(places((0, 2))))
    scripted.fetched(
        *(chunk(*keyed("ab"), at=at, lease=8) for at in (0, 2)), chunk("later", at=4, lease=8)
    )
    assert scripted.operations.receive_batch(scripted.now) is None
    assert scripted.operations.ack_batch(second, scripted.now) == NO_ACK
    offsets: list[int] = []
    while (batch := scripted.operations.receive_batch(scripted.now)) is not None:
        offsets += batch.offsets
        scripted.operations.ack_batch(batch, scripted.now)
    assert offsets == [0, 1, 2, 3, 4]


def test_a_failed_message_comes_again_behind_earlier_ones_that_overtook_the_refusal() -> None:
    scripted, third = lost_with_the_broker()
    scripted.answer("ack", pack_refused(places((0, 2))))
    assert scripted.request_names() == ["fetch"]
    scripted.operations.nack(third, None, "failed")
    scripted.requests()
    scripted.fetched(chunk(*keyed("aaa"), lease=8))
    scripted.refuse("consumer.nack", refusal(8))
    assert all_bodies(scripted) == ["a0", "a1", "a2"]
    assert "consumer.nack" not in scripted.request_names()


def test_a_nack_names_the_generation_of_the_delivery_that_failed() -> None:
    scripted, _message = restarted()
    assert scripted.args_of("consumer.nack")["generation"] == 1  # no newer delivery takes it
    scripted.fetched(chunk(*keyed("aba"), lease=8))
    scripted.refuse("consumer.nack", refusal(8))
    assert scripted.args_of("consumer.nack")["generation"] == 3


@pytest.mark.parametrize("end", ["ack", "nack", "give back", "lost"])
def test_a_nack_waits_for_earlier_messages_of_its_key_in_hand(end: str) -> None:
    scripted = ScriptedMember("ordered").joined().fetched(chunk(*keyed("aba"), lease=7))
    first, second = (one for one in scripted.receive(3) if one.key == "a")
    operations, now = scripted.operations, scripted.now
    operations.nack(second, None, "failed")
    assert "consumer.nack" not in scripted.request_names()
    assert scripted.member.settlement.idle
    if end == "ack":
        operations.ack(first, now)
    elif end == "nack":
        operations.nack(first, None, "failed, too")
    elif end == "give back":
        operations.give_back(first, now)
    else:
        scripted.disconnect()
        assert not second.in_hand
        return
    names = [name for name in scripted.request_names() if name != "fetch"]
    expected = {
        "ack": ["ack", "consumer.nack"],
        "nack": ["consumer.nack", "consumer.nack"],
        "give back": ["consumer.return"],
    }
    assert names == expected[end]


def test_what_is_given_back_behind_a_nack_that_waits_goes_behind_it() -> None:
    scripted = ScriptedMember("ordered").joined().fetched(chunk(*keyed("aaa"), lease=7))
    first, second, third = scripted.receive(3)
    scripted.operations.nack(second, None, "failed")
    scripted.operations.give_back(third, scripted.now)
    assert "consumer.return" not in scripted.request_names()
    scripted.operations.ack(first, scripted.now)
    names = [name for name in scripted.request_names() if name != "fetch"]
    assert names == ["ack", "consumer.nack", "consumer.return"]

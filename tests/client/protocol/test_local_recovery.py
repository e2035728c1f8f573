"""Failed messages in a member's local store, on a real disk: what goes there, what the
broker is told, and what handlers get.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client.scripted_member import bodies, chunk, keyed, places
from tests.client.scripted_store import TOPIC_ID, StoredMember
from txmq.client.protocol.consumer.in_place import InPlaceAttempts
from txmq.errors import LocalProtocolError, NotLeased
from txmq.model.retry import RetryPolicy
from txmq.recover.local import handed_out

RETRY = RetryPolicy((5, 60), retries=2, dead=["ValueError"], postpone=["OSError"])


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Any]:
    """Make members with one store, one after the other."""
    members: list[StoredMember] = []

    def make(mode: str = "concurrent", **options: Any) -> StoredMember:
        for before in members:
            before.crash()
        members.append(StoredMember(tmp_path, mode, **{"retry": RETRY, **options}))
        return members[-1]

    yield make
    for member in members:
        member.crash()


def fail(member: StoredMember, error: Exception | None = None, **options: Any) -> Any:
    [message] = member.receive()
    member.operations.nack(message, options.get("delay"), error or KeyError("k"))
    return message


def test_a_failed_message_is_on_disk_before_the_broker_hears_of_it(made: Any) -> None:
    member = made().serving().fetched(chunk("m0", "m1"))
    fail(member)
    assert member.request_names() == ["fetch"]
    member.disk()
    assert member.told() == [(0, "stored", 1)]
    assert (member.recovery.counters().stored, member.recovery.counters().nacked) == (1, 1)
    member.disk()
    assert member.recovery.idle


def test_a_stored_message_is_not_tried_in_place(made: Any) -> None:
    member = made().serving().fetched(chunk("m0"))
    fail(member)
    member.disk()
    member.told()
    member.wait(5.1)
    error = KeyError("k")
    assert InPlaceAttempts(5, RETRY).pause_after(error, member.receive()) is None
    assert not hasattr(error, "__notes__"), "nothing was tried in place"


def test_it_is_retried_when_it_is_due_and_its_effect_is_told(made: Any) -> None:
    member = made().serving().fetched(chunk("m0"))
    fail(member)
    member.disk()
    member.told()
    member.wait(4)
    assert member.receive() == []
    member.wait(1.1)
    [message] = member.receive()
    assert (message.body, message.attempt, message.in_hand) == (b"m0", 2, True)
    member.operations.ack(message, member.now)
    assert not message.in_hand
    member.disk()
    assert member.told("settled") == [(0, "acked", 2)]
    member.disk()
    assert member.recovery.counters().stored == 0
    with pytest.raises(NotLeased):
        member.operations.nack(message, None, "late")


def test_attempts_end_with_the_policy_in_a_dead_letter(made: Any) -> None:
    member = made().serving().fetched(chunk("m0"))
    fail(member)
    for pause in (5, 60):
        member.disk()
        member.told()
        member.wait(pause + 0.1)
        fail(member)
    member.disk()
    assert member.told("settled") == [(0, "dead", 3)]


@pytest.mark.parametrize("error", [ValueError("dead"), OSError("postponed")])
def test_an_error_that_the_policy_names_is_treated_by_it(made: Any, error: Exception) -> None:
    member = made().serving().fetched(chunk("m0"))
    fail(member, error)
    member.disk()
    if isinstance(error, ValueError):  # the broker makes the letter, with the message at hand
        assert member.args_of("consumer.nack")["offset"] == 0
    else:
        assert member.told() == [(0, "stored", 0)]


def test_a_delay_that_is_asked_for_holds(made: Any) -> None:
    member = made().serving().fetched(chunk("m0"))
    fail(member, delay=20.0)
    member.disk()
    member.told()
    member.wait(6)
    assert member.receive() == []
    member.wait(15)
    assert bodies(member.receive()) == ["m0"]


def test_with_a_broker_it_takes_what_the_broker_cannot(made: Any) -> None:
    member = made(on_failure="broker").serving().fetched(chunk("m0", "m1", "m2", "m3"))
    first, *rest = member.receive(4)
    member.operations.nack(first, None, "with the broker there")
    assert member.args_of("consumer.nack")["offset"] == 0
    member.operations.nack(rest[0], None, "not sent yet")
    member.disconnect()
    member.operations.nack(rest[1], None, "the broker is away")
    member.disk()
    assert member.recovery.counters().stored == 3
    member.wait(5.1)
    again = member.receive(3)
    assert bodies(again) == ["m0"]  # one at a time, for one handler
    member.operations.ack(again[0], member.now)
    member.disk()
    member.joined(generation=2)
    member.disk()
    assert member.told("settled", "kept", "kept") == [
        (0, "acked", 2),
        (1, "stored", 2),  # its attempt has begun
        (2, "stored", 1),
    ]


def test_nothing_is_fetched_before_the_broker_knows_what_the_store_has(made: Any) -> None:
    member = made().serving().fetched(chunk("m0"))
    fail(member)
    member.disk()
    again = made().joined(generation=2)
    assert again.request_names() == []
    again.disk()
    assert again.request_names() == ["consumer.stored"]
    assert again.told() == [(0, "stored", 1)]
    again.disk()
    assert "fetch" in again.request_names()


def test_everything_is_told_once_more_after_a_join(made: Any) -> None:
    member = made().serving().fetched(chunk("m0", "m1"))
    fail(member)
    fail(member)
    member.disk()
    member.told()
    member.disk()
    again = made().joined(generation=2)
    again.disk()
    assert again.told() == []  # nothing is untold; the broker learns who has the store
    again.disk()
    assert again.told() == [(0, "stored", 1), (1, "stored", 1)]


def test_the_outcome_of_an_attempt_that_killed_its_process_is_counted(made: Any) -> None:
    member = made().serving().fetched(chunk("m0"))
    fail(member)
    for pause in (5.1, 60.1):
        member.disk()
        while "consumer.stored" in member.request_names():
            member.told()
            member.disk()
        member.wait(pause)
        [message] = member.receive()
        assert message.body == b"m0"
        now = member.now
        member = made()
        member.now = now
        member.serving(generation=2)
    member.wait(61)
    assert member.receive() == []
    told = []
    while "consumer.stored" in member.request_names():
        told += member.told()
        member.disk()
    assert told[-1] == (0, "dead", 3)


@pytest.mark.parametrize(
    ("begun", "boot", "attempts"), [(0, "", [1, 1]), (1, "", [2, 1]), (0, "0f" * 16, [2, 2])]
)
def test_an_attempt_that_no_handler_has_begun_does_not_count(
    made: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    begun: int,
    boot: str,
    attempts: list[int],
) -> None:
    member = made().serving().fetched(chunk("m0", "m1"))
    member.recovery.capacity = 2
    fail(member)
    fail(member)
    member.disk()
    member.told()
    member.wait(5.1)
    assert len(member.recovery.ready) == 2
    assert len(member.receive(begun) if begun else []) == begun
    if boot:
        monkeypatch.setattr(handed_out, "_BOOT_ID", tmp_path / "boot")
        (tmp_path / "boot").write_text(boot)
    now = member.now
    member = made()
    member.now = now
    member.joined(generation=2)
    member.disk()
    told = member.told()
    assert [attempt for _offset, _state, attempt in told] == attempts


def test_while_connected_only_what_the_broker_keeps_goes_to_handlers(made: Any) -> None:
    member = made().serving().fetched(chunk("m0", "m1"))
    fail(member, delay=0.0)
    fail(member, delay=0.0)
    member.wait(1)
    assert member.receive() == []
    member.told("kept", "elsewhere")
    member.wait(1)
    assert bodies(member.receive(5)) == ["m0"]
    assert member.recovery.counters().stored == 1


def test_a_message_that_is_elsewhere_is_taken_from_its_handler(made: Any) -> None:
    member = made().serving().fetched(chunk("m0"))
    message = fail(member, delay=0.0)
    member.disconnect()
    member.disk()
    [message] = member.receive()
    member.joined(generation=2)
    member.disk()
    member.told("elsewhere")
    member.disk()
    assert not message.in_hand
    member.operations.ack(message, member.now)
    member.disk()
    assert member.recovery.counters().stored == 0


@pytest.mark.parametrize("word", ["settled", "parked", "unknown"])
def test_what_the_broker_has_or_does_not_know_leaves_the_store(made: Any, word: str) -> None:
    member = made().serving().fetched(chunk("m0"))
    fail(member)
    member.disk()
    member.told(word)
    member.disk()
    assert member.recovery.counters().stored == 0
    assert not member.member.queue.unsettled()


def test_a_report_overtakes_no_ack_of_an_ordered_group(made: Any) -> None:
    member = made("ordered").serving().fetched(chunk(*keyed("aaa")))
    first, second, third = member.receive(3)
    member.operations.ack(first, member.now)
    member.now += 1
    assert member.args_of("ack").ranges == places((0, 1))  # in flight from here on
    member.operations.ack(second, member.now)
    member.operations.nack(third, None, KeyError("k"))
    member.disk()
    assert "consumer.stored" not in member.request_names()
    assert (member.member.wake_at() or 0.0) > member.now, "nothing to send before the answer"
    member.answer("ack", b"")
    assert [name for name in member.request_names() if name != "fetch"] == [
        "ack",
        "consumer.stored",
    ]
    assert member.told() == [(2, "stored", 1)]


def test_a_message_that_went_back_is_received_before_later_ones_of_its_key(made: Any) -> None:
    """The broker delivers it and later ones before it answers the report."""
    member = made("ordered").serving().fetched(chunk(*keyed("aa")))
    fail(member)
    member.disk()
    member.requests()
    later = chunk(*keyed("aaab"), lease=3)
    member.fetched(chunk(*keyed("a"), lease=2), later._replace(first_row=2, rows=2))
    assert bodies(member.receive(5)) == ["b3"]
    member.told("elsewhere", fences=(2,))
    assert (member.receive(5), member.member.needs_reconnect) == ([], True)
    member.disconnect()
    member.disk()
    member.serving(generation=2)
    claimed = [(one.start, one.end) for one in member.member.queue.unsettled()]
    assert claimed == [(3, 4)], "the broker delivers all others again"


def test_a_message_that_went_back_is_not_kept_from_the_others_of_its_group(made: Any) -> None:
    member = made().serving().fetched(chunk("m0"))
    fail(member)
    member.disk()
    member.requests()
    member.fetched(chunk("m0", "m1", lease=2))
    member.told("elsewhere")
    assert bodies(member.receive(5)) == ["m1"]
    assert member.args_of("consumer.return")["ranges"] == [["orders", 0, 0, 1]]


@pytest.mark.parametrize("word", ["elsewhere", "settled", "parked", "unknown", "kept"])
@pytest.mark.parametrize("on_disk", [True, False])
def test_a_verdict_on_an_old_copy_does_not_meet_the_next_delivery(
    made: Any, word: str, *, on_disk: bool
) -> None:
    member = made("ordered").serving().fetched(chunk(*keyed("a")))
    fail(member)
    member.disk()
    member.told()
    member.disconnect()
    member.joined(generation=2)
    member.disk()
    member.told()
    member.disk()
    member.fetched(chunk(*keyed("aa"), lease=2))  # after a reset, while its copy is reported
    fail(member)
    if on_disk:
        member.disk()
    assert member.told(word, fences=(9,)) == [(0, "stored", 1)]
    member.disk()
    assert "consumer.return" not in member.request_names(), "what follows waits for it here"
    assert member.told() == [(0, "stored", 1)]
    member.wait(5.1)
    [message] = member.receive()
    assert (message.offset, message.attempt) == (0, 2)


def test_an_order_for_an_old_copy_does_not_meet_the_next_delivery(made: Any) -> None:
    member = made().serving().fetched(chunk("m0", "m1"))
    fail(member)
    fail(member)
    member.disk()
    member.told()
    member.disk()
    member.fetched(chunk("m0", "m1", lease=2))  # after a reset
    fail(member)
    member.disk()
    fail(member)  # not told when the answer comes
    orders = [["orders", TOPIC_ID, 0, 1, "drop"]]
    assert member.told(orders=orders) == [(0, "stored", 1)]
    member.disk()
    assert member.told() == [(1, "stored", 1)]
    member.wait(5.1)
    assert bodies(member.receive(2)) == ["m0"]
    assert member.recovery.counters().stored == 2


@pytest.mark.parametrize("end", ["kept", "elsewhere", "unknown", "drop"])
def test_a_put_comes_after_what_was_to_be_done_to_the_old_copy(made: Any, end: str) -> None:
    member = made().serving().fetched(chunk("m0"))
    fail(member)
    member.disk()
    if end == "drop":
        member.told(orders=[["orders", TOPIC_ID, 0, 0, "drop"]])
    else:
        member.told(end)
    member.fetched(chunk("m0", lease=2))
    fail(member)
    member.disk()
    assert member.told() == [(0, "stored", 1)]
    assert member.recovery.counters().stored == 1


def test_an_old_copy_is_not_handed_out_while_the_next_delivery_is_put(made: Any) -> None:
    member = made().serving().fetched(chunk("m0"))
    fail(member)
    member.disk()
    member.told()
    member.disk()
    member.fetched(chunk("m0", lease=2))
    [again] = member.receive(1)
    member.now += 5.1
    [job] = member.recovery.jobs(member.now)
    result = member.stores.perform(job)
    assert len(result.taken) == 1
    member.operations.nack(again, None, KeyError("k"))
    member.recovery.finished(result, member.now)
    assert member.receive() == []


def test_a_key_waits_and_goes_back_behind_the_fence(made: Any) -> None:
    member = made("ordered").serving().fetched(chunk(*keyed("aba"), lease=3))
    assert bodies(member.receive(1)) == ["a0"]
    member.operations.nack(member_message(member, 0), None, KeyError("k"))
    assert bodies(member.receive(5)) == ["b1"]
    member.disk()
    assert member.receive(5) == []
    member.told("kept", fences=(4,))
    assert member.args_of("consumer.return")["ranges"] == [["orders", 0, 2, 3]]


def member_message(member: StoredMember, offset: int) -> Any:
    [batch] = member.member.queue.batches()
    from txmq.model.message import ReceivedMessage

    row = offset - batch.base
    return ReceivedMessage(
        "orders",
        0,
        offset,
        batch.view.keys[row],
        None,
        {},
        batch.view.bodies[row],
        batch.view.message_ids[row],
        1,
        7,
        9,
    )


def test_later_messages_of_a_key_follow_into_the_store_when_the_broker_goes(made: Any) -> None:
    member = made("ordered").serving().fetched(chunk(*keyed("abaa")))
    message = fail(member, delay=0.0)
    assert message.body == b"a0"
    member.disconnect()
    member.disk()
    assert member.recovery.counters().stored == 3
    for body in ("a0", "a2", "a3"):
        member.wait(0.1)
        [message] = member.receive(5)
        assert message.body.decode() == body
        member.operations.ack(message, member.now)
        member.disk()
    member.joined(generation=2)
    member.disk()
    assert [entry[:2] for entry in member.told(*["settled"] * 3)] == [
        (0, "acked"),
        (2, "acked"),
        (3, "acked"),
    ]


def test_a_full_store_stops_fetching_and_the_broker_takes_what_does_not_fit(made: Any) -> None:
    member = made(local_store_messages=1).serving().fetched(chunk("m0", "m1"))
    fail(member)
    member.disk()
    member.told()
    fail(member)
    member.disk()
    assert member.args_of("consumer.nack")["offset"] == 1
    assert member.recovery.counters().stores_full == 1
    assert not member.member.may_fetch()
    member.wait(5.1)
    [message] = member.receive()
    member.operations.ack(message, member.now)
    member.disk()
    member.told("settled")
    member.wait(5.1)
    assert member.recovery.counters().stores_full == 0


def test_what_does_not_fit_while_the_broker_is_away_waits_for_it(made: Any) -> None:
    member = made(local_store_messages=1).serving().fetched(chunk("m0", "m1"))
    first, second = member.receive(2)
    member.disconnect()
    member.operations.nack(first, None, "fits")
    member.disk()
    member.operations.nack(second, None, "does not")
    member.disk()
    assert (0, 2) in [(one.start, one.end) for one in member.member.queue.unsettled()]
    member.joined(generation=2)
    assert member.args_of("consumer.nack")["offset"] == 1


def test_orders_of_operators_are_obeyed(made: Any) -> None:
    member = made().serving().fetched(chunk("m0", "m1"))
    fail(member)
    fail(member)
    member.disk()
    orders = [
        ["orders", TOPIC_ID, 0, 0, "retry"],
        ["orders", TOPIC_ID, 0, 1, "drop"],
        ["orders", TOPIC_ID, 0, 9, "drop"],
    ]
    member.told(orders=orders)
    member.disk()
    told = member.told("kept", "elsewhere", "settled")
    assert sorted(entry[:2] for entry in told) == [(0, "stored"), (1, "returned"), (9, "returned")]
    member.wait(0.2)
    assert bodies(member.receive(5)) == ["m0"]
    assert member.recovery.counters().stored == 1


def test_an_order_for_a_message_that_is_lost_here_gives_it_back(made: Any) -> None:
    member = made().serving().fetched(chunk("m0"))
    fail(member)
    member.disk()
    member.told(orders=[["orders", TOPIC_ID, 0, 7, "retry"]])
    member.disk()
    assert (7, "returned", 0) in member.told()


def test_waits_are_bounded_where_the_clock_was_ahead(made: Any) -> None:
    ahead = made()
    ahead.now += 30 * 86_400
    ahead.serving().fetched(chunk("m0", "m1"))
    fail(ahead)
    ahead.disk()
    ahead.told()
    fail(ahead, delay=3_600.0)
    ahead.disk()
    ahead.told()
    behind = made().serving(generation=2)
    while "consumer.stored" in behind.request_names():
        behind.told()
        behind.disk()
    behind.wait(59)
    assert behind.receive(5) == []
    behind.wait(2)
    [first] = behind.receive(5)
    behind.operations.ack(first, behind.now)
    behind.wait(0.1)
    assert bodies([first, *behind.receive(5)]) == ["m0", "m1"]


def test_a_delay_that_was_asked_for_outlives_a_restart(made: Any) -> None:
    member = made().serving().fetched(chunk("m0"))
    fail(member, delay=3_600.0)
    member.disk()
    member.told()
    again = made()
    again.now = member.now
    again.serving(generation=2)
    again.wait(3_590)
    assert again.recovery.stores["orders"].next_due > again.wall_us()


@pytest.mark.parametrize("when", ["finished", "tick"])
def test_an_exception_of_the_stores_callback_ends_the_consumer(
    made: Any, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    member = made().serving().fetched(chunk("m0"))
    fail(member)
    [job] = member.recovery.jobs(member.now + 1)
    result = member.stores.perform(job)

    def broken(*_args: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(type(member.recovery), "_taken", broken)
    monkeypatch.setattr(member.recovery, "work_added", broken)
    if when == "finished":
        member.recovery.finished(result, member.now)
    else:
        member.recovery.tick(member.now)
    with pytest.raises(LocalProtocolError, match="the local store of topic 'orders' has failed"):
        member.receive()


def test_a_handler_that_exceeds_the_consume_timeout_has_failed(made: Any) -> None:
    member = made().serving().fetched(chunk("m0"))
    fail(member, delay=0.0)
    member.disk()
    member.told()
    member.wait(0.1)
    [message] = member.receive()
    member.operations.extend(message, 1_000.0, member.now)
    member.wait(950)
    assert message.in_hand
    member.wait(100)
    assert not message.in_hand


def test_a_close_takes_back_what_no_handler_has_begun(made: Any) -> None:
    member = made().serving().fetched(chunk("m0"))
    fail(member, delay=0.0)
    member.disk()
    member.told()
    member.wait(0.1)
    member.member.leave()
    member.disk()
    while "consumer.stored" in member.request_names():
        entries = member.told()
        member.disk()
    assert entries[-1] == (0, "stored", 1)


def test_orders_are_asked_for_now_and_then(made: Any) -> None:
    member = made().serving().fetched(chunk("m0"))
    fail(member)
    member.disk()
    member.told()
    member.disk()
    assert "consumer.stored" not in member.request_names()
    member.now += 10
    assert member.told() == []


def test_a_lost_report_is_told_again(made: Any) -> None:
    member = made().serving().fetched(chunk("m0"))
    fail(member)
    member.disk()
    assert member.args_of("consumer.stored")["entries"][0][3] == 0
    member.disconnect()
    member.joined(generation=2)
    member.disk()
    assert member.told() == [(0, "stored", 1)]


def test_columns_and_transactions_are_refused(made: Any) -> None:
    member = made().serving().fetched(chunk("m0", "m1"))
    with pytest.raises(LocalProtocolError, match="batches of columns"):
        member.operations.receive_batch(member.now)
    fail(member, delay=0.0)
    member.disk()
    member.told()
    member.wait(0.1)
    [message] = member.receive()
    with pytest.raises(LocalProtocolError, match="no transaction can ack it"):
        member.operations.add_to_transaction(message)


def test_the_second_process_is_told_who_has_the_store(made: Any, tmp_path: Path) -> None:
    made().serving()
    other = StoredMember(tmp_path)
    other.joined()
    other.disk()
    assert "DirectoryInUse" in type(other.member.failure).__name__


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"on_failure": "local"}, "name one that lasts"),
        ({"mode": "broadcast", "member": "one", "local_store": "d"}, "leave local_store out"),
        ({"local_store": 7}, "give a directory"),
        ({"on_failure": "elsewhere"}, "'broker', 'local'"),
        ({"local_store": "d", "local_store_bytes": 0}, "above 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: Any, hint: str) -> None:
    from txmq.client.protocol.consumer.settings import consumer_settings

    with pytest.raises(LocalProtocolError) as refused:
        consumer_settings("g", ["t"], **options)
    assert hint in str(refused.value.hint)


def test_a_message_of_another_epoch_is_not_handled(made: Any) -> None:
    member = made().serving().fetched(chunk("m0"))
    fail(member, delay=0.0)
    member.disk()
    member.told()
    reset = member.join_reply() | {"resets": [["orders", 0, 2, [[0, 9]]]]}
    member.disconnect()
    member.member.connected(member.now)
    member.answer("consumer.join", **reset)
    member.disk()
    member.told()
    for _ in range(3):
        member.wait(0.1)
        while "consumer.stored" in member.request_names():
            member.told()
            member.disk()
    assert member.receive() == []
    assert member.recovery.counters().stored == 0


def test_followers_of_a_message_that_others_have_wait_for_the_broker(made: Any) -> None:
    member = made("ordered").serving().fetched(chunk(*keyed("aab")))
    fail(member, delay=0.0)
    fail(member, delay=0.0)  # of another key
    member.disconnect()
    member.disk()
    assert member.recovery.counters().stored == 3
    for message in member.receive(9):
        member.operations.give_back(message, member.now)
    member.disk()
    member.joined(generation=2)
    member.disk()
    assert [entry[0] for entry in member.told("elsewhere", "kept", "kept")] == [0, 1, 2]
    member.recovery.stores["orders"].suspended.add("a")  # a later page is not told yet
    member.disconnect()
    member.wait(2)
    assert bodies(member.receive(9)) == ["b2"]


def test_a_damaged_store_is_reported(made: Any, tmp_path: Path) -> None:
    member = made().serving().fetched(chunk("m0", "m1"))
    fail(member)
    member.disk()
    member.told()
    member.disk()
    member.crash()
    [file] = tmp_path.glob("*/*/store.db")
    content = file.read_bytes()
    file.write_bytes(content[:-8192] + bytes(8192))
    again = made().joined(generation=2)
    again.disk()
    alarms = again.args_of("alarms.report")["alarms"]
    assert [alarm["name"] for alarm in alarms] == ["store.damaged"]


def test_a_damaged_body_is_given_back_to_the_broker(made: Any) -> None:
    member = made().serving().fetched(chunk("m0"))
    fail(member)
    member.disk()
    member.told()
    database = member.stores._stores["orders"]._database
    database.run(lambda connection: connection.execute("UPDATE content SET body = x'00'"))
    member.wait(5.1)
    assert member.receive() == []
    assert member.told("settled") == [(0, "returned", 1)]


def test_a_dead_message_is_stored_while_the_broker_is_away_and_told(made: Any) -> None:
    member = made().serving().fetched(chunk("m0", "m1"))
    first, second = member.receive(2)
    member.disconnect()
    member.operations.nack(first, None, "poisoned", dead=True)
    member.operations.postpone(second, 30.0)
    member.disk()
    member.joined(generation=2)
    member.disk()
    assert member.told("settled", "kept") == [(0, "dead", 1), (1, "stored", 0)]
    assert member.recovery.counters().postponed == 1


def full_disk() -> None:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    raise error


def test_a_consumer_goes_on_when_not_even_outcomes_have_space(made: Any) -> None:
    member = made(retry=RetryPolicy((5, 5), retries=100))
    member.serving().fetched(chunk("m0"))
    database = member.stores._stores["orders"]._database
    fail(member)
    member.disk()
    assert member.told() == [(0, "stored", 1)]
    attempts = 1
    full = 0  # rounds
    while full < 5 and member.member.failure is None:
        full += member.recovery.counters().stores_full
        database._commit = full_disk  # others take what is left
        member.wait(5.1)
        for message in member.receive():
            attempts = message.attempt
            member.operations.nack(message, None, "again")
        member.disk()
        if "consumer.stored" in member.request_names():
            member.told()
    assert member.member.failure is None
    del database._commit
    for _ in range(3):
        member.wait(5.1)
        if "consumer.stored" in member.request_names():
            member.told()
    [message] = member.receive()
    assert message.attempt > attempts, "each attempt was counted"
    member.operations.ack(message, member.now)
    member.disk()
    assert member.told("settled") == [(0, "acked", message.attempt)]


@pytest.mark.parametrize("connected", [True, False])
def test_a_message_is_not_stored_before_earlier_ones_of_its_key_are_settled(
    made: Any, *, connected: bool
) -> None:
    member = made("ordered").serving().fetched(chunk(*keyed("aa")))
    first, second = member.receive(2)
    member.operations.nack(second, None, KeyError("k"))
    if not connected:
        member.disconnect()
    member.wait(1)
    assert member.recovery.counters().stored == 0
    member.operations.ack(first, member.now)
    member.wait(1)
    assert member.recovery.counters().stored == 1

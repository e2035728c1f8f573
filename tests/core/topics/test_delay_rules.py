"""Delayed messages are published or recalled, never early, never lost, in the order of
their times and keys.
"""

from __future__ import annotations

from datetime import timedelta
from random import Random
from typing import Any

import pytest

from tests.core.driver import Driver, token
from txmq.batch import BatchView, encode, verify
from txmq.broker.engine.log_reader import published_batches
from txmq.core.retention.broker_time import NoteTime
from txmq.core.retention.log_floor import state_floor
from txmq.core.topics import delayed
from txmq.core.topics.delay_rules import (
    RECALL_RETENTION,
    ForgetRecalls,
    PublishDue,
    Recall,
    RecallReply,
)
from txmq.core.topics.sends import StoreBatch
from txmq.core.topics.topics import DeleteTopic
from txmq.core.transactions import decisions
from txmq.core.transactions.half_storage import BundleBatch, StorePart
from txmq.errors import MessageTooLarge, RecallTooLate, RequestRejected
from txmq.model import limits
from txmq.model.bundle import BundleState
from txmq.model.decider import ByBroker, ByPostgres, Decider
from txmq.model.message import Decision, Message
from txmq.model.units import DAY, SECOND
from txmq.store import tables as t
from txmq.wire.data_requests import SendReceipt

PRODUCER = b"p" * 16
POSTGRES = ByPostgres(1, 1, 5, 7, 1)


def send(core: Driver, *messages: Message, partition: int = 0) -> Any:
    sequence = core.sequences.get(PRODUCER, 0)
    data = encode(messages, producer_id=PRODUCER, epoch=0, sequence=sequence, born_at=1)
    reply = core.do(StoreBatch("t", 0, partition, data, verify(data)))
    if not isinstance(reply, RequestRejected):
        core.sequences[PRODUCER] = sequence + len(messages)
    return reply


def later(core: Driver, body: str, seconds: float, key: str | None = None) -> Message:
    return Message(body.encode(), key, deliver_at=core.now + round(seconds * SECOND))


def pass_time(core: Driver, seconds: float) -> None:
    core.now += round(seconds * SECOND)
    while core.do(PublishDue()):
        pass


def half(
    core: Driver,
    name: bytes,
    *messages: Message,
    decider: Decider = POSTGRES,
    **options: Any,
) -> Any:
    """Store a bundle in which each message is a batch of its own, as the broker splits
    batches with delays.
    """
    batches = []
    for place, message in enumerate(messages):
        data = encode([message], producer_id=name, epoch=0, sequence=place, born_at=1)
        batches.append(BundleBatch("t", 0, 0, data, verify(data)))
    fields: dict[str, Any] = {
        "part": 0,
        "sealed": True,
        "commit": decider == ByBroker(),
        "digest": b"d" * 32,
    }
    fields |= {"epoch": 0, "service": "s", "actions": (), "check_after": 6 * SECOND} | options
    return core.do(StorePart(token=name, batches=tuple(batches), decider=decider, **fields))


def ids(core: Driver, topic: str = "t") -> list[str]:
    topic_id = core.state.topics[topic].topic_id
    found = published_batches(core.state, topic_id, 0, 0, core.end)
    return [
        name
        for _base, entry in found
        for name in BatchView(core.read(entry.position, entry.length)).message_ids
    ]


def test_a_delayed_message_is_published_when_it_is_due_and_keeps_its_id(
    core: Driver,
) -> None:
    assert send(core, later(core, "late", 10)) == SendReceipt(-1, core.now)
    core.send("t", "now", producer=b"q" * 16)
    pass_time(core, 9.999_999)
    assert core.bodies("t") == ["now"]
    pass_time(core, 0.000_001)
    assert core.bodies("t") == ["now", "late"]
    assert ids(core)[1] == f"{PRODUCER.hex()}-0"
    assert core.state.delayed_count == 0
    assert not list(core.state.tables[t.DELAYED_IDS].range(b""))


def test_a_message_that_is_due_already_is_published_at_once(core: Driver) -> None:
    assert send(core, later(core, "x", 0)).offset == 0
    assert core.bodies("t") == ["x"]


def test_messages_of_one_batch_are_published_each_at_its_own_time(core: Driver) -> None:
    send(core, later(core, "c", 3), Message(b"a"), later(core, "b", 1))
    pass_time(core, 0)
    assert core.bodies("t") == ["a"]
    pass_time(core, 2)
    assert core.bodies("t") == ["a", "b"]
    pass_time(core, 1)
    assert core.bodies("t") == ["a", "b", "c"]
    assert ids(core) == [f"{PRODUCER.hex()}-{n}" for n in (1, 2, 0)]


def test_a_delay_counts_from_the_storing_of_the_message(core: Driver) -> None:
    send(core, Message(b"x", delay=timedelta(seconds=5)))
    pass_time(core, 4.999_999)
    assert core.bodies("t") == []
    pass_time(core, 0.000_001)
    assert core.bodies("t") == ["x"]


def test_messages_of_one_time_are_published_in_the_order_of_sending(core: Driver) -> None:
    for n in range(5):
        send(core, later(core, str(n), 1, "k"))
    pass_time(core, 1)
    assert core.bodies("t") == ["0", "1", "2", "3", "4"]


def test_a_repeated_send_of_a_delayed_message_gets_its_receipt_and_is_stored_once(
    core: Driver,
) -> None:
    data = encode([later(core, "x", 1)], producer_id=PRODUCER, epoch=0, sequence=0, born_at=1)
    command = StoreBatch("t", 0, 0, data, verify(data))
    core.do(command)
    assert core.do(command).duplicate
    pass_time(core, 2)
    assert core.do(command).duplicate
    assert core.bodies("t") == ["x"]


def test_too_many_delayed_messages_in_one_batch_are_rejected(core: Driver) -> None:
    refused = send(core, *[later(core, "x", 1)] * (limits.DELAYED_ROWS + 1))
    assert type(refused) is MessageTooLarge
    assert core.state.delayed_count == 0


def test_a_due_message_waits_behind_an_undecided_half_of_its_key(core: Driver) -> None:
    send(core, later(core, "k", 1, "k"), later(core, "other", 1, "o"), later(core, "k2", 1, "k"))
    name = token(core, 1)
    half(core, name, Message(b"half", "k"))
    pass_time(core, 1)
    assert core.bodies("t") == ["other"]
    core.do(decisions.DecideTransaction(name, Decision.COMMIT, "producer"))
    assert core.bodies("t") == ["other", "half", "k", "k2"]


def test_a_delayed_message_blocks_no_other_before_it_is_due(core: Driver) -> None:
    send(core, later(core, "late", 5, "k"))
    core.send("t", "now", key="k", producer=b"q" * 16)
    name = token(core, 1)
    half(core, name, Message(b"half", "k"))
    core.do(decisions.DecideTransaction(name, Decision.COMMIT, "producer"))
    assert core.bodies("t") == ["now", "half"]


def test_in_a_transaction_a_span_counts_from_the_commit_and_a_time_is_absolute(
    core: Driver,
) -> None:
    name = token(core, 1)
    half(
        core,
        name,
        Message(b"span", delay=10),
        Message(b"now"),
        later(core, "time", 5),
        later(core, "past", 2),
    )
    core.now += 3 * SECOND
    assert core.state.delayed_count == 0
    decided = core.do(decisions.DecideTransaction(name, Decision.COMMIT, "producer"))
    assert decided.state is BundleState.PUBLISHED
    pass_time(core, 0)
    assert core.bodies("t") == ["now", "past"]
    pass_time(core, 2)
    assert core.bodies("t") == ["now", "past", "time"]
    pass_time(core, 7.999_999)
    assert core.bodies("t") == ["now", "past", "time"]
    pass_time(core, 0.000_001)
    assert core.bodies("t") == ["now", "past", "time", "span"]
    assert ids(core) == [f"{name.hex()}-{n}" for n in (1, 3, 2, 0)]


def test_a_rolled_back_transaction_leaves_no_delayed_message(core: Driver) -> None:
    name = token(core, 1)
    half(core, name, Message(b"x", "k", delay=1))
    core.do(decisions.DecideTransaction(name, Decision.ROLLBACK, "producer"))
    pass_time(core, 5)
    assert core.bodies("t") == []
    assert core.state.delayed_count == 0


def test_delayed_messages_of_a_large_bundle_wait_until_all_of_it_is_published(core: Driver) -> None:
    name = token(core, 1)
    messages = [
        Message(str(n).encode(), f"k{n}", delay=1 if n % 3 == 0 else None) for n in range(400)
    ]
    for part, start in enumerate((0, 200)):
        half(core, name, *messages[start : start + 200], part=part, sealed=part == 1)
    core.do(decisions.DecideTransaction(name, Decision.COMMIT, "producer"))
    while core.state.delayed_count == 0:
        assert core.advance()
    core.now += 10 * SECOND
    core.do(PublishDue())
    assert core.bodies("t") == []
    core.work_off()
    pass_time(core, 1)
    bodies = core.bodies("t")
    assert bodies == [str(n) for n in range(400) if n % 3] + [
        str(n) for n in range(400) if n % 3 == 0
    ]
    assert core.state.delayed_count == 0


def test_a_recalled_message_is_never_published_and_the_recall_can_be_repeated(core: Driver) -> None:
    send(core, later(core, "a", 1), later(core, "b", 1))
    assert core.do(Recall(((PRODUCER, 0),))) == RecallReply(1)
    assert core.do(Recall(((PRODUCER, 0),))) == RecallReply(0)
    pass_time(core, 2)
    assert core.bodies("t") == ["b"]
    assert core.do(Recall(((PRODUCER, 0),))) == RecallReply(0)


def test_a_message_of_a_transaction_is_recalled_by_its_token(core: Driver) -> None:
    name = token(core, 1)
    half(core, name, Message(b"a", delay=5), Message(b"b", delay=5), decider=ByBroker())
    assert core.do(Recall(((name, 1),))) == RecallReply(1)
    pass_time(core, 5)
    assert core.bodies("t") == ["a"]


@pytest.mark.parametrize("found", [(PRODUCER, 0), (PRODUCER, 7), (b"?" * 16, 0)])
def test_a_recall_that_is_too_late_is_rejected_and_recalls_nothing(
    core: Driver, found: tuple[bytes, int]
) -> None:
    send(core, later(core, "a", 1), later(core, "b", 100))
    pass_time(core, 2)
    refused = core.do(Recall(((PRODUCER, 1), found)))
    assert type(refused) is RecallTooLate
    assert refused.detail == {"late": [f"{found[0].hex()}-{found[1]}"]}
    assert core.state.delayed_count == 1


def test_recalls_are_forgotten_after_a_week(core: Driver) -> None:
    send(core, later(core, "a", 30 * 24 * 3_600), later(core, "b", 30 * 24 * 3_600))
    core.do(Recall(((PRODUCER, 0),)))
    core.now += RECALL_RETENTION
    core.do(Recall(((PRODUCER, 1),)))
    core.do(ForgetRecalls())
    assert core.do(Recall(((PRODUCER, 1),))) == RecallReply(0)
    core.now += SECOND
    core.do(ForgetRecalls())
    assert type(core.do(Recall(((PRODUCER, 0),)))) is RecallTooLate
    assert len(list(core.state.tables[t.RECALLED].range(b""))) == 1


def test_the_log_floor_covers_delayed_messages_and_those_queued_behind_a_key(
    core: Driver,
) -> None:
    send(core, later(core, "a", 1, "k"))
    [waiting] = delayed.scan(core.state)
    core.send("t", *("x" for _ in range(50)), producer=b"q" * 16)
    name = token(core, 1)
    half(core, name, Message(b"half", "k"))
    assert state_floor(core.state) == waiting.position
    pass_time(core, 1)
    assert core.state.delayed_count == 0
    assert state_floor(core.state) == waiting.position
    core.do(decisions.DecideTransaction(name, Decision.COMMIT, "producer"))
    assert state_floor(core.state) > waiting.position


def test_delayed_messages_of_a_deleted_topic_are_dropped(core: Driver) -> None:
    send(core, later(core, "a", 1))
    core.do(DeleteTopic("t"))
    pass_time(core, 2)
    assert core.state.delayed_count == 0


def test_a_thousand_messages_due_at_once_are_published_in_steps_in_their_order(
    core: Driver,
) -> None:
    due = [core.now + n % 7 for n in range(1_000)]
    send(core, *[Message(str(n).encode(), deliver_at=due[n] + SECOND) for n in range(1_000)])
    core.now += 2 * SECOND
    before = len(core.log)
    assert core.do(PublishDue()) is True
    assert len(core.bodies("t")) < 1_000
    while core.do(PublishDue()):
        pass
    assert len(core.log) - before == 4
    assert core.bodies("t") == [str(n) for n in sorted(range(1_000), key=lambda n: due[n])]


@pytest.mark.parametrize("seed", range(20))
def test_random_work_publishes_each_message_once_when_due_and_recovery_agrees(
    core: Driver, seed: int
) -> None:
    rng = Random(seed)
    dues: dict[str, int] = {}
    recalled: set[str] = set()
    seen: dict[str, int] = {}
    for step in range(60):
        body, key = f"{step}", rng.choice(("a", "b", None))
        message = Message(body.encode(), key, deliver_at=core.now + rng.randint(-1, 8) * SECOND)
        if rng.random() < 0.3:
            name = token(core, step + 1)
            half(core, name, message)
            outcome = rng.choice((Decision.COMMIT, Decision.ROLLBACK))
            core.do(decisions.DecideTransaction(name, outcome, "producer"))
            if outcome is Decision.ROLLBACK:
                continue
        else:
            send(core, message)
        assert isinstance(message.deliver_at, int)
        dues[body] = message.deliver_at
        waiting = list(delayed.scan(core.state))
        if waiting and rng.random() < 0.2:
            chosen = rng.choice(waiting)
            core.do(Recall(((chosen.message.producer, chosen.message.sequence),)))
            recalled.add(
                BatchView(core.read(chosen.position, chosen.message.length)).bodies[0].decode()
            )
        core.now += rng.randint(0, SECOND)
        core.do(PublishDue())
        for published_body in core.bodies("t"):
            seen.setdefault(published_body, core.now)
    pass_time(core, 100)
    bodies = core.bodies("t")
    assert sorted(bodies) == sorted(dues.keys() - recalled)
    assert all(at >= dues[body] for body, at in seen.items())
    again = core.replayed()
    left, left_again = (
        list(state.tables[t.DELAYED_IDS].range(b"")) for state in (core.state, again)
    )
    assert left == left_again
    assert again.delayed_count == core.state.delayed_count == 0
    assert again.topics["t"].end_offsets == core.state.topics["t"].end_offsets


def test_a_time_set_back_shortens_only_spans_that_began_in_it(core: Driver) -> None:
    send(core, Message(b"before", delay=40 * DAY / SECOND))
    true = core.now
    core.now += 30 * DAY
    name = token(core, 1)
    half(core, name, Message(b"of a bundle", delay=10))
    core.do(decisions.DecideTransaction(name, Decision.COMMIT, "producer"))
    send(core, Message(b"span", delay=5), later(core, "time", 8))
    core.do(NoteTime(0, back=30 * DAY))
    core.now = true
    pass_time(core, 4.999_999)
    assert core.bodies("t") == []
    pass_time(core, 0.000_001)
    assert core.bodies("t") == ["span"]
    pass_time(core, 5)
    assert core.bodies("t") == ["span", "of a bundle"]
    pass_time(core, 30 * DAY / SECOND - 2)
    assert core.bodies("t") == ["span", "of a bundle", "time"]
    pass_time(core, 10 * DAY / SECOND)
    assert core.bodies("t") == ["span", "of a bundle", "time", "before"]
    again = core.replayed()
    assert again.delayed_count == 0
    assert dict(again.tables[t.DELAYED_AT].range(b"")) == {}

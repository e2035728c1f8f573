"""Consumers with a broker: every message arrives, if possible once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import pytest

from tests.client.real_consumers import drain, floors, receive, shown
from tests.client.scripted_member import fresh
from txmq.client.blocking.client import Client
from txmq.client.blocking.consumer.consumer import Consumer
from txmq.client.blocking.consumer.members import ThreadedMembers
from txmq.client.protocol.consumer.settings import MAX_FILTER
from txmq.errors import GroupMismatch, LocalProtocolError, NotLeased
from txmq.model.message import Message, ReceivedMessage
from txmq.model.retry import RetryPolicy
from txmq.testing.wait import PATIENCE_S, wait_until

AT_ONCE = RetryPolicy((0,), retries=50)
LONG: dict[str, float] = {"session": 3_600, "lease": 3_600}  # no heartbeat comes meanwhile


def test_messages_arrive_with_all_that_was_sent_and_acked_ones_do_not_come_again(
    client: Client, joined: Callable[..., Consumer]
) -> None:
    topic, group = fresh("t"), fresh("g")
    receipt = client.send(topic, b"body", key="k", tag="t", headers={"h": "v"})
    [message] = receive(joined(group, topic), 1)
    assert (message.topic, message.partition, message.offset) == (
        topic,
        receipt.partition,
        receipt.offset,
    )
    assert (message.key, message.tag, message.headers, message.body) == (
        "k",
        "t",
        {"h": "v"},
        b"body",
    )
    assert (message.message_id, message.attempt) == (receipt.message_id, 1)
    wait_until(lambda: floors(client, group) == 1, what="the ack")


def test_a_join_that_is_interrupted_leaves_no_thread(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_members: ThreadedMembers) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadedMembers, "join_is_over", interrupt)
    client.send(topic := fresh("t"), b"x")
    with pytest.raises(KeyboardInterrupt):
        client.consumer(group := fresh("g"), [topic])
    assert f"txmq-{group}" not in {thread.name for thread in threading.enumerate()}


def test_receive_waits_for_messages_and_no_longer_than_its_timeout(
    client: Client, joined: Callable[..., Consumer]
) -> None:
    topic = fresh("t")
    consumer = joined(fresh("g"), topic)
    assert consumer.receive(0.05) is None
    received: list[ReceivedMessage] = []
    thread = threading.Thread(target=lambda: received.extend(receive(consumer, 1)))
    thread.start()
    client.send(topic, b"x")
    thread.join()
    assert [message.body for message in received] == [b"x"]


def test_an_event_loop_is_told_when_messages_have_come(
    client: Client, joined: Callable[..., Consumer]
) -> None:
    topic, told = fresh("t"), threading.Event()
    consumer = joined(fresh("g"), topic)
    consumer.tell(told.set)
    assert consumer.settled
    client.send(topic, b"x")
    while (message := consumer.receive(0)) is None:
        assert told.wait(PATIENCE_S)
        told.clear()
    consumer.ack(message)
    assert not consumer.settled, "acks are sent together"
    wait_until(lambda: consumer.settled, what="the ack")


def test_the_messages_of_a_member_that_was_lost_are_redelivered(
    client: Client, joined: Callable[..., Consumer]
) -> None:
    """What was only given back is not."""
    topic, group = fresh("t"), fresh("g")
    client.send_many(topic, [b"a", b"b"])
    first = joined(group, topic, session=1)
    took = list(islice(first, 2))
    assert not any(message.fetched.redelivered for message in took)
    first._members.members[0].abandon()  # as its process ends
    second = joined(group, topic)
    again = list(islice(second, 2))
    assert all(message.fetched.redelivered for message in again)
    assert {message.attempt for message in again} == {1}
    second.ack_many(again)
    client.send(topic, b"c")
    wait_until(lambda: shown(client, group)["leased"] == 1, what="it is fetched")
    second.close()
    [last] = islice(joined(group, topic), 1)
    assert not last.fetched.redelivered


def test_batches_carry_columns(client: Client, joined: Callable[..., Consumer]) -> None:
    topic, group = fresh("t"), fresh("g")
    bodies = [b"%d" % number for number in range(500)]
    client.send_many(topic, bodies, keys=[f"k{number % 7}" for number in range(500)])
    consumer = joined(group, topic)
    received: list[bytes] = []
    for batch in consumer.batches():
        assert len(batch.bodies) == len(batch.keys) == len(batch.offsets)
        received += batch.bodies
        consumer.ack_batch(batch)
        if len(received) == 500:
            break
    assert sorted(received) == sorted(bodies)
    wait_until(lambda: floors(client, group) == 500, what="the acks")


def test_the_rest_of_a_batch_is_acked_soon(client: Client, joined: Callable[..., Consumer]) -> None:
    topic, group = fresh("t"), fresh("g")
    client.send_many(topic, [b"%d" % number for number in range(5)])
    consumer = joined(group, topic, retry=RetryPolicy((1_000,)), **LONG)
    batch = consumer.receive_batch(PATIENCE_S)
    assert batch is not None
    consumer.nack(batch.messages()[2], error="no")
    consumer.ack_batch(batch)
    wait_until(lambda: floors(client, group) == 5, what="the acks, long before the next heartbeat")


def test_an_outstanding_message_outlives_its_lease_while_its_consumer_is_alive(
    client: Client, joined: Callable[..., Consumer]
) -> None:
    topic, group = fresh("t"), fresh("g")
    client.send(topic, b"x")
    slow = joined(group, topic, lease=6.0)
    message = slow.receive(PATIENCE_S)
    assert message is not None
    other = joined(group, topic, lease=6.0)
    assert other.receive(8.0) is None
    slow.ack(message, wait=True)
    assert floors(client, group) == 1


def test_only_messages_with_a_wanted_tag_come_and_others_block_nothing(
    client: Client, joined: Callable[..., Consumer]
) -> None:
    topic, group = fresh("t"), fresh("g")
    client.send_batch(
        topic, [Message(b"%d" % number, "k", ("paid", "new")[number % 2]) for number in range(10)]
    )
    consumer = joined(group, topic, tags={"paid"})
    assert [message.body for message in receive(consumer, 5)] == [b"0", b"2", b"4", b"6", b"8"]
    wait_until(lambda: floors(client, group) == 10, what="the position passes what is not wanted")


def test_a_selector_leaves_out_the_rest_and_the_position_passes_it(
    client: Client, joined: Callable[..., Consumer]
) -> None:
    topic, group = fresh("t"), fresh("g")
    headers = [{"region": "eu", "price": f"{n}"} if n % 2 else {"price": "8"} for n in range(10)]
    client.send_batch(
        topic, [Message(b"%d" % n, "k", headers=pairs) for n, pairs in enumerate(headers)]
    )
    consumer = joined(group, topic, selector="region = 'eu' AND price BETWEEN 3 AND 7")
    assert [message.body for message in receive(consumer, 3)] == [b"3", b"5", b"7"]
    wait_until(lambda: floors(client, group) == 10, what="the position passes what is not wanted")


def test_a_member_says_what_it_takes(client: Client, joined: Callable[..., Consumer]) -> None:
    topic, group = fresh("t"), fresh("g")
    wanted: list[dict[str, Any]] = [
        {},
        {"tags": {"sent", "paid"}},
        {"selector": "price > 9"},
        {"tags": ["paid"], "selector": "price > 9"},
        {"selector": " OR ".join(f"price = {n}" for n in range(99))},
        {"selector": "name = '\ud800'"},
    ]
    for number, options in enumerate(wanted):
        joined(group, topic, member=f"m-{number}", **options)
    members = client.call("group.show", group=group)["member_list"]
    told = {one["member"]: one["filter"] for one in members}
    assert list(told.values())[:4] == [
        "",
        "tags 'paid', 'sent'",
        "selector price > 9",
        "tags 'paid'; selector price > 9",
    ]
    assert len(told["m-4"]) == MAX_FILTER
    assert told["m-5"] == r"selector name = '\ud800'"
    raised = client.call("broker.alarms")["alarms"]
    [text] = [one["text"] for one in raised if one["name"] == "group.filters_differ"]
    assert "take different messages of topic" in text


@pytest.mark.parametrize("by_batch", [False, True])
def test_an_edited_letter_reaches_the_consumer_whose_filter_does_not_want_it(
    client: Client,
    joined: Callable[..., Consumer],
    by_batch: bool,  # noqa: FBT001
) -> None:
    topic, group = fresh("t"), fresh("g")
    rows = [Message(b"%d" % n, "k", "paid", {"region": "eu"}) for n in range(3)]
    client.send_batch(topic, rows)
    consumer = joined(group, topic, tags={"paid"}, selector="region = 'eu'")

    def received() -> ReceivedMessage:
        if by_batch:
            batch = consumer.receive_batch(PATIENCE_S)
            assert batch is not None
            return batch.messages()[0]
        message = consumer.receive(PATIENCE_S)
        assert message is not None
        return message

    first = received()
    consumer.dead_letter(first, "no such region")
    wait_until(lambda: list(client.letters(group)), what="the letter")
    [letter] = client.letters(group)
    client.edit_letter(letter, headers={"region": "us"}, operator="ada", reason="moved")
    place = [letter.topic, letter.partition, letter.offset]
    client.call("dlq.replay", group=group, letters=[place], operator="ada")
    while (again := received()).offset != first.offset:
        pass
    assert again.headers["region"] == "us"


def test_batches_without_a_wanted_tag_do_not_leave_the_broker(
    client: Client, joined: Callable[..., Consumer]
) -> None:
    topic, group = fresh("t"), fresh("g")
    for number in range(20):
        client.send(topic, b"%d" % number, key="k", tag="paid" if number % 5 == 4 else "new")
    consumer = joined(group, topic, tags={"paid"})
    assert [message.body for message in receive(consumer, 4)] == [b"4", b"9", b"14", b"19"]
    wait_until(lambda: floors(client, group) == 20, what="the position passes what is not wanted")
    assert (consumer.stats.delivered, consumer.stats.filtered) == (4, 0)


def test_a_failed_message_comes_again_with_a_higher_attempt(
    client: Client, joined: Callable[..., Consumer]
) -> None:
    topic = fresh("t")
    client.send(topic, b"x")
    consumer = joined(fresh("g"), topic)
    first = consumer.receive(PATIENCE_S)
    assert first is not None
    consumer.nack(first, delay=0.0, error=ValueError("not yet"))
    [second] = receive(consumer, 1)
    assert (second.offset, second.message_id, second.attempt) == (first.offset, first.message_id, 2)


def test_a_message_held_for_too_long_has_failed(
    client: Client, joined: Callable[..., Consumer]
) -> None:
    topic = fresh("t")
    client.send(topic, b"x")
    consumer = joined(fresh("g"), topic, consume_timeout=1.0, retry=AT_ONCE)
    held = consumer.receive(PATIENCE_S)
    again = consumer.receive(PATIENCE_S)
    assert held is not None
    assert again is not None
    assert (again.offset, again.attempt) == (held.offset, 2)
    with pytest.raises(NotLeased):
        consumer.ack(held, wait=True)


def test_a_dead_letter_keeps_its_reason(client: Client, joined: Callable[..., Consumer]) -> None:
    topic, group = fresh("t"), fresh("g")
    client.send(topic, b"x", key="k")
    consumer = joined(group, topic)
    message = consumer.receive(PATIENCE_S)
    assert message is not None
    consumer.dead_letter(message, "no such customer")
    wait_until(lambda: client.call("dlq.list", group=group)["letters"], what="the letter")
    [letter] = client.call("dlq.list", group=group)["letters"]
    assert (letter["offset"], letter["key"], letter["error_text"]) == (
        message.offset,
        "k",
        "no such customer",
    )


def test_waiting_for_an_ack_ends_when_the_broker_has_it(
    client: Client, joined: Callable[..., Consumer]
) -> None:
    topic, group = fresh("t"), fresh("g")
    client.send(topic, b"x")
    consumer = joined(group, topic)
    message = consumer.receive(PATIENCE_S)
    assert message is not None
    consumer.ack(message, wait=True)
    assert floors(client, group) == 1
    with pytest.raises(NotLeased):
        consumer.ack(message, wait=True)


def test_closing_returns_what_waits_without_counting_an_attempt(
    client: Client, joined: Callable[..., Consumer]
) -> None:
    topic, group = fresh("t"), fresh("g")
    client.send_many(topic, [b"%d" % number for number in range(20)])
    first = joined(group, topic)
    kept = receive(first, 3)
    first.close()
    assert first.receive() is None
    attempts = {message.offset: message.attempt for message in receive(joined(group, topic), 17)}
    assert set(attempts.values()) == {1}
    assert not attempts.keys() & {message.offset for message in kept}


def test_members_share_a_topic_and_get_the_partitions_of_one_that_leaves(
    client: Client, joined: Callable[..., Consumer]
) -> None:
    topic, group = fresh("t"), fresh("g")
    client.call("topic.create", name=topic, partitions=4)
    first, second = joined(group, topic), joined(group, topic)
    wait_until(
        lambda: len(first.assignment) == len(second.assignment) == 2,
        what="a fair share",
    )
    assert not first.assignment & second.assignment
    first.close()
    for partition in range(4):
        client.send(topic, b"x", partition=partition)
    assert {message.partition for message in receive(second, 4)} == {0, 1, 2, 3}


def test_every_member_of_a_broadcast_group_gets_everything_and_a_named_one_remembers_where_it_was(
    client: Client, joined: Callable[..., Consumer]
) -> None:
    topic, group = fresh("t"), fresh("g")
    client.send(topic, b"before")
    first = joined(group, topic, mode="broadcast", member="one")
    unnamed = joined(group, topic, mode="broadcast")
    assert [message.body for message in receive(first, 1)] == [b"before"]
    client.send(topic, b"now")
    for consumer in (first, unnamed):
        assert [message.body for message in receive(consumer, 1)] == [b"now"]
    first.close()
    client.send(topic, b"missed")
    assert [
        message.body for message in receive(joined(group, topic, mode="broadcast", member="one"), 1)
    ] == [b"missed"]


def test_settings_of_a_group_are_agreed_by_all_members(
    client: Client, joined: Callable[..., Consumer]
) -> None:
    topic, group = fresh("t"), fresh("g")
    joined(group, topic, mode="ordered")
    with pytest.raises(GroupMismatch):
        joined(group, topic, mode="concurrent")


def test_an_outage_makes_no_dead_letters_and_all_is_processed_when_it_is_over(
    client: Client, joined: Callable[..., Consumer]
) -> None:
    topic, group, messages = fresh("t"), fresh("g"), 200
    back, stop, seen = threading.Event(), threading.Event(), set[int]()
    client.send_many(
        topic,
        [b"%d" % number for number in range(messages)],
        keys=[f"k{n}" for n in range(messages)],
    )
    consumer = joined(group, topic, retry=RetryPolicy((0.01,), retries=1))

    def handle(message: ReceivedMessage) -> None:
        if not back.is_set():
            raise ConnectionError("no database")
        seen.add(int(message.body))

    work = threading.Thread(
        target=consumer.run, args=(handle,), kwargs={"workers": 4, "stop": stop}
    )
    work.start()
    wait_until(lambda: shown(client, group)["state"] == "guarded", what="the guard")
    back.set()
    wait_until(lambda: shown(client, group)["state"] == "active", what="the probe")
    wait_until(lambda: len(seen) == messages, what="everything")
    stop.set()
    work.join()
    assert (shown(client, group)["letters"], shown(client, group)["floods"]) == (0, 1)


def test_handlers_get_lists_with_batch(client: Client, joined: Callable[..., Consumer]) -> None:
    topic, group = fresh("t"), fresh("g")
    client.send_many(topic, [b"%d" % number for number in range(30)])
    sizes: list[int] = []
    consumer = joined(group, topic)
    wait_until(lambda: consumer._members.members[0].member.queue.ready == 30)
    drain(client, consumer, lambda messages: sizes.append(len(messages)), batch=8)
    assert (sum(sizes), max(sizes)) == (30, 8)
    assert floors(client, group) == 30


def test_run_ends_when_it_is_stopped(client: Client, joined: Callable[..., Consumer]) -> None:
    topic, stop = fresh("t"), threading.Event()
    client.send(topic, b"x")
    joined(fresh("g"), topic).run(lambda _message: stop.set(), stop=stop)
    assert stop.is_set()


def test_an_ack_in_a_transaction_takes_effect_with_it(
    client: Client, joined: Callable[..., Consumer]
) -> None:
    topic, other, group = fresh("t"), fresh("t"), fresh("g")
    client.send_batch(topic, [Message(b"%d" % number, "k") for number in range(2)])
    consumer = joined(group, topic)
    first, second = consumer.receive(PATIENCE_S), consumer.receive(PATIENCE_S)
    assert first is not None
    assert second is not None
    with client.transaction() as tx:
        tx.ack(first)
        tx.send(other, b"made of it")
    with suppress(ZeroDivisionError), client.transaction() as tx:
        tx.ack(second)
        tx.send(other, b"never")
        raise ZeroDivisionError
    wait_until(lambda: floors(client, group) == 1, what="the ack of the first")
    assert [message.body for message in receive(joined(fresh("g"), other), 1)] == [b"made of it"]
    consumer.ack(second, wait=True)
    assert floors(client, group) == 2


async def _coroutine(*_arguments: object) -> None: ...


def _generator(*_arguments: object) -> Iterator[None]:
    yield


def _returning(function: Callable[..., object]) -> Any:
    """Return an ordinary function with the results of `function`."""

    def handle(*arguments: object) -> object:
        return function(*arguments)

    return handle


@pytest.mark.parametrize("handler", [_coroutine, _generator])
@pytest.mark.parametrize("inbox", [None, lambda: pytest.fail("no connection is needed")])
def test_a_handler_that_a_call_would_not_run_is_refused_at_once(
    client: Client, joined: Callable[..., Consumer], handler: Any, inbox: Any
) -> None:
    with pytest.raises(LocalProtocolError, match="a call runs nothing of it"):
        joined(fresh("g"), fresh("t")).run(handler, inbox=inbox)


@pytest.mark.parametrize("batch", [None, 5])
@pytest.mark.parametrize("handler", [_coroutine, _generator])
def test_a_message_whose_handler_returns_work_to_be_done_is_no_success(
    client: Client, joined: Callable[..., Consumer], handler: Any, batch: Any
) -> None:
    topic, group = fresh("t"), fresh("g")
    client.send_many(topic, [b"1", b"2"])
    consumer = joined(group, topic, retry=RetryPolicy((0,), retries=0))
    drain(client, consumer, _returning(handler), batch=batch)
    letters = client.call("dlq.list", group=group)["letters"]
    assert {letter["error_type"] for letter in letters} == {"txmq.errors.base.LocalProtocolError"}
    assert (len(letters), consumer.stats.acked) == (2, 0)

"""Handlers with an inbox: the effect of each message comes exactly once, whatever
happens around its commit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any

import psycopg2
import pytest

from tests.client.effects import (
    effects,
    have_come,
    lose_effects,
    numbered_effects,
    take_effect,
    with_effects,
)
from tests.client.real_consumers import drain, run_until, shown
from tests.client.scripted_member import fresh
from tests.client.world import ApplicationError
from txmq.client.blocking.client import Client
from txmq.client.blocking.consumer import inbox
from txmq.client.blocking.consumer.consumer import Consumer
from txmq.client.blocking.consumer.inbox import Inbox, InboxWorker
from txmq.client.protocol.awaited import inbox_opening
from txmq.errors import Conflict, LocalProtocolError
from txmq.model.message import Message, ReceivedMessage
from txmq.model.retry import RetryPolicy
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.tx.postgres.blocking import applied
from txmq.tx.postgres.driver import Driver
from txmq.tx.postgres.identity import Server, read_server
from txmq.tx.postgres.inbox import Position
from txmq.tx.postgres.session import Connection


@pytest.fixture
def connect(database: str) -> Callable[[], Connection]:
    return with_effects(database)


def send(client: Client, topic: str, count: int) -> list[str]:
    """Send so many messages with few keys. Return their bodies, in the database's
    order.
    """
    bodies = [f"m{number:02}" for number in range(count)]
    client.send_batch(
        topic, [Message(body.encode(), f"k{number % 3}") for number, body in enumerate(bodies)]
    )
    return bodies


def consumer_of(client: Client, group: str, topic: str, **options: Any) -> Consumer:
    return client.consumer(group, [topic], **{"retry": RetryPolicy((0,), retries=50), **options})


def test_each_message_takes_effect_and_is_acked(
    client: Client, connect: Callable[[], Connection]
) -> None:
    topic, group = fresh("t"), fresh("g")
    bodies = send(client, topic, 20)
    with consumer_of(client, group, topic) as consumer:
        drain(client, consumer, take_effect, inbox=connect, workers=3)
    assert effects(connect) == bodies
    assert client.call("group.show", group=group)["unsettled"] == 0


def test_what_was_committed_but_never_acked_does_not_take_effect_again(
    client: Client, connect: Callable[[], Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, group = fresh("t"), fresh("g")
    bodies = send(client, topic, 10)
    with consumer_of(client, group, topic) as consumer:
        monkeypatch.setattr(consumer._members, "ack_many", lambda _messages: None)
        run_until(consumer, take_effect, have_come(connect, len(bodies)), inbox=connect)
    assert effects(connect) == bodies
    with consumer_of(client, group, topic) as consumer:
        drain(client, consumer, take_effect, inbox=connect)
        assert (consumer.stats.duplicates, consumer.stats.acked) == (10, 10)
    assert effects(connect) == bodies


def test_effects_that_a_failover_behind_a_pooler_has_lost_come_again(
    client: Client, connect: Callable[[], Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pooler leads the connections, which stay open, to the new primary."""
    topic, group = fresh("t"), fresh("g")
    timelines, looks = [0], list[int]()

    async def server(driver: Driver) -> Server:
        found = await read_server(driver)
        looks.append(timelines[-1])
        identity = found.identity._replace(timeline=found.identity.timeline + timelines[-1])
        return replace(found, identity=identity)

    monkeypatch.setattr(inbox_opening, "read_server", server)
    monkeypatch.setattr(inbox, "EVERY_S", 0.05)
    bodies, stop = send(client, topic, 5), threading.Event()
    with consumer_of(client, group, topic) as consumer:
        running = threading.Thread(
            target=lambda: consumer.run(take_effect, inbox=connect, stop=stop)
        )
        running.start()
        try:
            wait_until(lambda: consumer.stats.acked == len(bodies) and looks, what="all effects")
            wait_until(
                lambda: client.call("group.show", group=group)["unsettled"] == 0, what="all acks"
            )
            with closing(connect()) as connection, connection, connection.cursor() as cursor:
                cursor.execute(
                    "DELETE FROM effects; DELETE FROM txmq_inbox_recent; "
                    "UPDATE txmq_inbox SET applied = '{}'"
                )
            timelines.append(1)
            wait_until(lambda: effects(connect) == bodies, what="the effects are back")
        finally:
            stop.set()
            running.join()


def test_what_fails_is_rolled_back_and_tried_again_later(
    client: Client, connect: Callable[[], Connection]
) -> None:
    topic, group = fresh("t"), fresh("g")
    bodies = send(client, topic, 6)

    def handle(message: ReceivedMessage, connection: Connection) -> None:
        take_effect(message, connection)
        if message.attempt == 1 and message.body != b"m03":
            raise ValueError("later")

    with consumer_of(client, group, topic, mode="ordered") as consumer:
        drain(client, consumer, handle, inbox=connect, workers=2)
        assert consumer.stats.nacked == 5
    assert effects(connect) == bodies


def test_a_conflict_is_run_again_in_place(
    client: Client, connect: Callable[[], Connection]
) -> None:
    topic, group, tries = fresh("t"), fresh("g"), []
    bodies = send(client, topic, 1)

    def handle(message: ReceivedMessage, connection: Connection) -> None:
        take_effect(message, connection)
        tries.append(message.attempt)
        if len(tries) < 3:
            with connection.cursor() as cursor:
                cursor.execute("DO $$ BEGIN RAISE SQLSTATE '40001'; END $$")

    with consumer_of(client, group, topic) as consumer:
        drain(client, consumer, handle, inbox=connect)
        assert (tries, consumer.stats.retried, consumer.stats.nacked) == ([1, 1, 1], 2, 0)
    assert effects(connect) == bodies


@pytest.mark.parametrize("fails", [1, 2])
def test_a_failed_commit_does_not_harm_the_message_claimed_with_it(
    client: Client, connect: Callable[[], Connection], fails: int
) -> None:
    """Once it is in doubt, and run again in place; the second time it has certainly
    failed.
    """
    topic, group, runs = fresh("t"), fresh("g"), [0]
    with closing(connect()) as connection, connection, connection.cursor() as cursor:
        cursor.execute("ALTER TABLE effects ADD UNIQUE (body) DEFERRABLE INITIALLY DEFERRED")
    bodies = send(client, topic, 6)

    def handle(message: ReceivedMessage, connection: Connection) -> None:
        take_effect(message, connection)
        if message.body == b"m01" and runs[0] < fails:
            runs[0] += 1
            take_effect(message, connection)

    with consumer_of(client, group, topic) as consumer:
        wait_until(
            lambda: consumer._members.members[0].member.queue.ready == 6,
            what="all wait here, to be taken ahead",
        )
        drain(client, consumer, handle, inbox=connect)
        assert (consumer.stats.retried, consumer.stats.nacked, consumer.stats.acked) == (
            1,
            fails - 1,
            6,
        )
    assert effects(connect) == bodies


def test_a_connection_lost_in_a_handler_is_replaced(
    client: Client, connect: Callable[[], Connection]
) -> None:
    topic, group, tries = fresh("t"), fresh("g"), []
    bodies = send(client, topic, 1)

    def handle(message: ReceivedMessage, connection: Connection) -> None:
        take_effect(message, connection)
        tries.append(connection)
        if len(tries) == 1:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    with consumer_of(client, group, topic) as consumer:
        drain(client, consumer, handle, inbox=connect)
        assert consumer.stats.nacked == 0
    assert effects(connect) == bodies


def test_a_swallowed_error_of_a_statement_counts_as_the_failure_that_it_is(
    client: Client, connect: Callable[[], Connection]
) -> None:
    topic, group = fresh("t"), fresh("g")
    bodies = send(client, topic, 1)

    def handle(message: ReceivedMessage, connection: Connection) -> None:
        take_effect(message, connection)
        if message.attempt == 1:
            with pytest.raises(psycopg2.Error), connection.cursor() as cursor:
                cursor.execute("SELECT 1/0")

    with consumer_of(client, group, topic) as consumer:
        drain(client, consumer, handle, inbox=connect)
        assert consumer.stats.nacked == 1
    assert effects(connect) == bodies


def test_a_failed_list_is_split_so_that_only_the_message_at_fault_fails(
    client: Client, connect: Callable[[], Connection]
) -> None:
    topic, group = fresh("t"), fresh("g")
    bodies = send(client, topic, 12)
    sizes: list[int] = []

    def handle(messages: list[ReceivedMessage], connection: Connection) -> None:
        sizes.append(len(messages))
        for message in messages:
            take_effect(message, connection)
            if message.body == b"m04" and message.attempt == 1:
                raise ValueError("not m04")

    with consumer_of(client, group, topic, mode="ordered") as consumer:
        drain(client, consumer, handle, inbox=connect, batch=12)
        assert consumer.stats.nacked == 1
    assert max(sizes) > 1
    assert effects(connect) == bodies


def test_two_members_and_lost_acks_still_make_one_effect_each(
    client: Client, connect: Callable[[], Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One member commits and loses every second ack, then goes; the other one gets
    those messages again.
    """
    topic, group, dropped = fresh("t"), fresh("g"), list[int]()
    first, second = (consumer_of(client, group, topic) for _ in range(2))
    ack_many = first._members.ack_many

    def sometimes(messages: Sequence[ReceivedMessage]) -> None:
        dropped.extend(message.offset for message in messages if message.offset % 2)
        ack_many(message for message in messages if not message.offset % 2)

    monkeypatch.setattr(first._members, "ack_many", sometimes)
    bodies = send(client, topic, 40)
    with ThreadPoolExecutor() as threads, closing(first):
        runs = [
            threads.submit(lambda: first.run(take_effect, inbox=connect, workers=2)),
            threads.submit(drain, client, second, take_effect, inbox=connect, workers=2),
        ]
        wait_until(lambda: len(effects(connect)) == len(bodies), what="all effects")
    for ended in runs:
        ended.result()
    assert second.stats.duplicates == len(dropped)
    assert effects(connect) == bodies


def test_reprocessing_lets_every_message_take_effect_once_more(
    client: Client, connect: Callable[[], Connection]
) -> None:
    topic, group = fresh("t"), fresh("g")
    bodies = send(client, topic, 5)
    with consumer_of(client, group, topic) as consumer:
        drain(client, consumer, take_effect, inbox=connect)
    client.call("group.reset", group=group, topic=topic, to="first", reprocess=True)
    with consumer_of(client, group, topic) as consumer:
        drain(client, consumer, take_effect, have_come(connect, 10), inbox=connect)
    assert effects(connect) == sorted(bodies * 2)


@pytest.mark.parametrize("mode", ["concurrent", "ordered"])
def test_a_group_is_rewound_to_the_end_of_a_restored_inbox(
    client: Client, connect: Callable[[], Connection], mode: str
) -> None:
    topic, group = fresh("t"), fresh("g")
    client.call("topic.create", name=topic, partitions=1)
    bodies = send(client, topic, 8)
    with consumer_of(client, group, topic, mode=mode) as consumer:
        drain(client, consumer, take_effect, inbox=connect)
        [place] = client.call("group.show", group=group)["positions"]
        position = Position(group, str(client.log_id), place["topic_id"], 0, consumer.epoch)
    with (
        closing(connect()) as connection,
        connection,
        connection.cursor() as cursor,
    ):  # back to when it had five
        cursor.execute("DELETE FROM effects WHERE body > 'm04'")
        cursor.execute(
            "UPDATE public.txmq_inbox SET applied = applied * '{[0,5)}' WHERE grp = %s", (group,)
        )
        cursor.execute(
            'DELETE FROM public.txmq_inbox_recent WHERE grp = %s AND "offset" > 4', (group,)
        )
    with consumer_of(client, group, topic, mode=mode) as consumer:
        drain(client, consumer, take_effect, have_come(connect, 8), inbox=connect)
    assert effects(connect) == bodies
    with closing(connect()) as connection:
        assert applied(connection, position).ranges == ((0, 8),)


def test_an_inbox_that_cannot_be_opened_is_tried_less_often_each_time(
    client: Client, connect: Callable[[], Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind each try, all that the member has comes again."""
    topic, group, pauses = fresh("t"), fresh("g"), list[float]()
    bodies = send(client, topic, 3)
    open_position = inbox_opening.InboxOpenings.open_position

    async def refused(self: Any, *args: Any) -> int:
        if len(pauses) < 7:
            raise Conflict("a reset is under way")
        return await open_position(self, *args)

    monkeypatch.setattr(inbox_opening.InboxOpenings, "open_position", refused)

    async def pause(_self: InboxWorker, seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(InboxWorker, "_pause", pause)
    with consumer_of(client, group, topic, mode="ordered") as consumer:
        drain(client, consumer, take_effect, inbox=connect)
    assert pauses == [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0]
    assert effects(connect) == bodies


def test_restored_messages_of_an_ordered_group_come_before_later_ones_of_their_keys(
    client: Client, connect: Callable[[], Connection]
) -> None:
    """Whoever opens the partition, a handler or the upkeep of the inbox."""
    topic, group = fresh("t"), fresh("g")
    client.call("topic.create", name=topic, partitions=1)
    send(client, topic, 9)
    with consumer_of(client, group, topic, mode="ordered") as consumer:
        drain(client, consumer, take_effect, inbox=connect)
    lose_effects(connect, group)
    later = [Message(f"n{number:02}".encode(), f"k{number % 3}") for number in range(9)]
    client.send_batch(topic, later)

    with consumer_of(client, group, topic, mode="ordered") as consumer:
        drain(
            client,
            consumer,
            take_effect,
            have_come(connect, 18),
            inbox=connect,
            workers=2,
        )
    found = numbered_effects(connect)
    for key in range(3):
        own = [body for body in found if int(body[1:]) % 3 == key]
        assert own == [f"{letter}{number:02}" for letter in "mn" for number in range(key, 9, 3)]


def test_a_dead_letter_takes_no_effect_until_it_is_replayed(
    client: Client, connect: Callable[[], Connection]
) -> None:
    topic, group = fresh("t"), fresh("g")
    bodies = send(client, topic, 6)

    def handle(message: ReceivedMessage, connection: Connection) -> None:
        take_effect(message, connection)
        if message.body == b"m05":
            consumer.dead_letter(message, "poison")

    with consumer_of(client, group, topic) as consumer:
        drain(client, consumer, handle, inbox=connect)
    assert effects(connect) == bodies[:5]
    client.send(topic, b"m06", key="k2")  # behind it, in its partition
    with consumer_of(client, group, topic) as other:
        drain(client, other, take_effect, inbox=connect)
        assert other.stats.delivered == 1, "a gap is no sign of a restored database"
    [letter] = client.call("dlq.list", group=group)["letters"]
    client.call("dlq.replay", group=group, letters=[[topic, letter["partition"], letter["offset"]]])
    with consumer_of(client, group, topic) as other:
        drain(client, other, take_effect, have_come(connect, 7), inbox=connect)
    assert effects(connect) == [*bodies, "m06"]


def test_an_edited_letter_is_the_same_message_to_the_inbox(
    client: Client, connect: Callable[[], Connection]
) -> None:
    topic, group = fresh("t"), fresh("g")
    bodies = send(client, topic, 2)

    def handle(message: ReceivedMessage, connection: Connection) -> None:
        take_effect(message, connection)
        if message.body == bodies[1].encode():
            consumer.dead_letter(message, "poison")

    with consumer_of(client, group, topic) as consumer:
        drain(client, consumer, handle, inbox=connect)
    [letter] = client.letters(group)
    client.edit_letter(letter, body=b"mended", operator="ada", reason="poison")
    place = [letter.topic, letter.partition, letter.offset]
    client.call("dlq.replay", group=group, letters=[place])
    with consumer_of(client, group, topic) as consumer:
        drain(client, consumer, handle, have_come(connect, 2), inbox=connect)
    assert effects(connect) == [bodies[0], "mended"]
    # what was published comes again, and the inbox has that message
    client.call("group.reset", group=group, topic=topic, to="first")
    with consumer_of(client, group, topic) as consumer:
        drain(client, consumer, handle, lambda: consumer.stats.acked >= 2, inbox=connect)
        assert consumer.stats.delivered == 2
    assert effects(connect) == [bodies[0], "mended"]


@pytest.mark.parametrize(
    "options",
    [{"batch": 0}, {"workers": 0}, {"batch_wait": 1.0}, {"batch": 5, "batch_wait": -1.0}],
    ids=str,
)
def test_invalid_options_are_refused_with_a_hint(client: Client, options: dict[str, Any]) -> None:
    with (
        consumer_of(client, fresh("g"), fresh("t")) as consumer,
        pytest.raises(LocalProtocolError) as refusal,
    ):
        consumer.run(print, **options)
    assert refusal.value.hint


def test_the_rest_of_a_list_is_applied_without_what_its_handler_nacked_and_later_ones_of_its_key(
    client: Client, connect: Callable[[], Connection]
) -> None:
    topic, group, sizes = fresh("t"), fresh("g"), []
    bodies = send(client, topic, 6)

    def handle(messages: list[ReceivedMessage], connection: Connection) -> None:
        sizes.append(len(messages))
        for message in messages:
            take_effect(message, connection)
            if message.body == b"m02":
                consumer.dead_letter(message, "poison")

    with consumer_of(client, group, topic, mode="ordered") as consumer:
        drain_parked(client, consumer, handle, connect)
    assert sizes == [6, 4]
    # both are of key k2
    assert effects(connect) == [body for body in bodies if body not in {"m02", "m05"}]
    assert client.call("group.show", group=group)["parked"] == 1


def drain_parked(
    client: Client,
    consumer: Consumer,
    handler: Callable[..., object],
    connect: Callable[[], Connection],
) -> None:
    """Run a handler of lists of six until one message is parked and the rest is
    done.
    """
    drain(
        client,
        consumer,
        handler,
        lambda: shown(client, consumer.group)["parked"],
        inbox=connect,
        batch=6,
        batch_wait=PATIENCE_S,
    )


@pytest.mark.parametrize("alone", [False, True])
def test_a_list_that_fails_is_applied_one_by_one_without_later_ones_of_a_nacked_key(
    client: Client, connect: Callable[[], Connection], *, alone: bool
) -> None:
    """Its handler nacks a message with the others, or when it gets it alone."""
    topic, group = fresh("t"), fresh("g")
    bodies = send(client, topic, 6)

    def handle(messages: list[ReceivedMessage], connection: Connection) -> None:
        for message in messages:
            take_effect(message, connection)
            if message.body == b"m02" and alone is (len(messages) == 1):
                consumer.dead_letter(message, "poison")
        if len(messages) > 1:
            raise ApplicationError

    with consumer_of(client, group, topic, mode="ordered") as consumer:
        drain_parked(client, consumer, handle, connect)
    # both are of key k2
    assert effects(connect) == [body for body in bodies if body not in {"m02", "m05"}]
    assert client.call("group.show", group=group)["parked"] == 1


def test_the_inbox_is_folded_to_ranges_when_the_work_ends(
    client: Client, connect: Callable[[], Connection]
) -> None:
    topic, group = fresh("t"), fresh("g")
    send(client, topic, 10)
    with consumer_of(client, group, topic) as consumer:
        drain(client, consumer, take_effect, inbox=connect)
    with closing(connect()) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM public.txmq_inbox_recent WHERE grp = %s", (group,))
        assert cursor.fetchone() == (0,)
        cursor.execute(
            "SELECT sum(upper(r) - lower(r)) FROM public.txmq_inbox, unnest(applied) r"
            " WHERE grp = %s",
            (group,),
        )
        assert cursor.fetchone() == (10,)


def test_a_database_that_is_away_costs_nothing_but_time(
    client: Client, connect: Callable[[], Connection]
) -> None:
    topic, group, tries = fresh("t"), fresh("g"), []
    bodies = send(client, topic, 3)

    def flaky() -> Connection:
        tries.append(1)
        if len(tries) < 4:
            raise psycopg2.OperationalError("connection refused")
        return connect()

    with consumer_of(client, group, topic) as consumer:
        drain(client, consumer, take_effect, inbox=flaky)
        assert consumer.stats.nacked == 0
    assert effects(connect) == bodies


def test_stopping_while_the_database_is_away_returns_the_messages_uncounted(
    client: Client, connect: Callable[[], Connection]
) -> None:
    topic, group, stop = fresh("t"), fresh("g"), threading.Event()
    send(client, topic, 1)

    def away() -> Connection:
        stop.set()
        raise psycopg2.OperationalError("connection refused")

    with consumer_of(client, group, topic) as consumer:
        consumer.run(take_effect, inbox=away, stop=stop)
    with consumer_of(client, group, topic) as consumer:
        message = consumer.receive(PATIENCE_S)
        assert message is not None
        assert message.attempt == 1


def test_upkeep_that_cannot_reach_the_database_does_not_stop_the_work(
    client: Client, connect: Callable[[], Connection]
) -> None:
    with consumer_of(client, fresh("g"), fresh("t")) as consumer:
        keeper = Inbox(
            consumer._members.members[0],
            lambda: psycopg2.connect("host=127.0.0.1 port=1 connect_timeout=1"),
            died=(died := list[BaseException]()).append,
        )
        keeper.start()
        keeper.stop()
    assert died == []


@pytest.mark.parametrize("workers", [1, 3])
def test_the_end_of_the_inboxs_thread_ends_the_run_with_its_error(
    client: Client, connect: Callable[[], Connection], workers: int
) -> None:
    def broken() -> Connection:
        if threading.current_thread().name.endswith("-inbox"):
            raise RuntimeError("no password for it")
        return connect()

    with (
        consumer_of(client, fresh("g"), fresh("t")) as consumer,
        pytest.raises(RuntimeError, match="no password for it"),
    ):
        consumer.run(take_effect, inbox=broken, workers=workers)


def test_work_left_in_a_handlers_result_rolls_its_transaction_back(
    client: Client, connect: Callable[[], Connection]
) -> None:
    topic, group = fresh("t"), fresh("g")
    send(client, topic, 2)

    def handle(message: ReceivedMessage, connection: Connection) -> Iterator[None]:
        take_effect(message, connection)
        return (None for _ in ())

    with client.consumer(group, [topic], retry=RetryPolicy((0,), retries=0)) as consumer:
        drain(client, consumer, handle, inbox=connect)
    assert effects(connect) == []
    assert len(client.call("dlq.list", group=group)["letters"]) == 2

"""The client on asyncio with a real broker."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

import txmq.aio
from tests.client.aio.running import LOOPS, bodies, receive, run
from tests.client.real import RealBroker
from tests.client.scripted_member import fresh
from tests.freezing import freeze
from txmq.aio import Client, Consumer, outcome_of
from txmq.client.aio.consumer.group_member import LoopMember
from txmq.client.protocol.offsets import FileOffsets
from txmq.errors import (
    BrokerUnavailable,
    ClientClosed,
    LocalProtocolError,
    MessageTooLarge,
    NotLeased,
    RequestTimeout,
    Throttled,
)
from txmq.model.message import COMMIT, ROLLBACK, Decision, Message, ReceivedMessage
from txmq.testing.wait import PATIENCE_S

DECIDED = ("COMMITTED", "PUBLISHED", "ROLLED_BACK")


def connected(real: RealBroker, **options: Any) -> Client:
    return txmq.aio.connect(real.url, **{"service": "tests", "timeout": PATIENCE_S, **options})


async def disconnected(client: Client) -> None:
    """Wait until the client has noticed that its broker is away."""
    while True:
        if client._core.is_disconnected:
            return
        await asyncio.sleep(0.001)


async def decided(client: Client, token: UUID) -> None:
    """Wait until the broker knows the outcome."""
    while True:
        if (await client.call("tx.show", token=token.hex))["state"] in DECIDED:
            return
        await asyncio.sleep(0.01)


def test_its_import_loads_no_twisted() -> None:
    code = (
        "import sys, txmq.aio; from txmq.aio import *; "
        "print([name for name in sys.modules if name.split('.')[0] in ('twisted', 'zope')])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


@pytest.mark.parametrize("loop", LOOPS)
def test_messages_are_sent_read_and_consumed(real: RealBroker, loop: str) -> None:
    async def story() -> None:
        topic = fresh("t")
        async with connected(real) as client:
            receipt = await client.send(topic, b"body", key="k", tag="t", headers={"h": "v"})
            [message] = (await client.read(topic, receipt.partition, receipt.offset or 0)).messages
            assert (message.key, message.tag, message.headers, message.body) == (
                "k",
                "t",
                {"h": "v"},
                b"body",
            )
            batch = await client.send_batch(topic, [Message(b"%d" % n) for n in range(50)])
            assert len({found.message_id for found in batch}) == 50
            columns = await client.send_many(topic, [b"c"] * 1_000, [f"k{n}" for n in range(1_000)])
            assert sum(stored.count for stored in columns) == 1_000
            client.send_one_way(topic, b"one way")
            await client.flush()
            async with await client.consumer(fresh("g"), [topic]) as consumer:
                found = await receive(consumer, 1_052)
            assert {message.body for message in found} >= {b"body", b"one way", b"49", b"c"}
            assert consumer.stats.acked == 1_052

    run(story(), loop)


def test_pipelined_sends_keep_order_and_wait_for_room(real: RealBroker) -> None:
    async def story() -> None:
        topic = fresh("t")
        async with connected(real, window=16) as client:
            futures = [await client.send_async(topic, b"%d" % n, partition=0) for n in range(200)]
            receipts = await asyncio.gather(*futures)
            assert [receipt.offset for receipt in receipts] == list(range(200))
            many = (client.send(topic, b"%d" % n, partition=0) for n in range(200, 300))
            await asyncio.gather(*many)
            assert await bodies(client, topic) == [b"%d" % n for n in range(300)]

    run(story())


def test_a_full_window_throttles_after_a_while(own_broker: RealBroker) -> None:
    async def story() -> None:
        topic = fresh("t")
        async with connected(own_broker, window=2, delivery_timeout=5) as client:
            await client.send(topic, b"known")
            freeze(own_broker.pid)
            try:
                futures = [await client.send_async(topic, b"x") for _ in range(2)]
                with pytest.raises(Throttled) as refused:
                    await client.send_async(topic, b"too many", timeout=0.05)
                assert outcome_of(refused.value) == "not done"
            finally:
                os.kill(own_broker.pid, signal.SIGCONT)
            await asyncio.gather(*futures)

    run(story())


def test_a_message_that_is_refused_harms_no_other(real: RealBroker) -> None:
    async def story() -> None:
        topic = fresh("t")
        async with connected(real) as client:
            ends = await asyncio.gather(
                client.send(topic, b"before"),
                client.send(topic, b"x" * (5 << 20)),
                client.send(topic, b"after"),
                return_exceptions=True,
            )
            assert isinstance(ends[1], MessageTooLarge)
            assert not isinstance(ends[0], Exception)
            assert not isinstance(ends[2], Exception)

    run(story())


def test_sends_survive_a_restart_of_the_broker_once_each(own_broker: RealBroker) -> None:
    async def story() -> None:
        topic = fresh("t")
        async with connected(own_broker) as client:
            await client.send(topic, b"0", partition=0)
            sends = [await client.send_async(topic, b"%d" % n, partition=0) for n in range(1, 50)]
            await asyncio.sleep(0)
            await asyncio.to_thread(own_broker.kill)
            sends += [await client.send_async(topic, b"%d" % n, partition=0) for n in range(50, 99)]
            await asyncio.to_thread(own_broker.start)
            await asyncio.gather(*sends)
            assert await bodies(client, topic) == [b"%d" % n for n in range(99)]

    run(story())


def test_without_a_broker_calls_say_so(tmp_path: Path) -> None:
    async def story() -> None:
        async with txmq.aio.connect("txmq://127.0.0.1:1", timeout=0.2) as client:
            with pytest.raises(BrokerUnavailable) as refused:
                await client.send("t", b"x")
            assert outcome_of(refused.value) == "not done"
            with pytest.raises(BrokerUnavailable):
                await client.consumer("g", ["t"])
            with pytest.raises(BrokerUnavailable):
                await client.reader("r", ["t"], FileOffsets(tmp_path))
            client.send_one_way("t", b"lost")
        with pytest.raises(ClientClosed):
            await client.send("t", b"x")
        await client.close()

    run(story())


def test_a_send_that_has_not_gone_out_is_taken_back(own_broker: RealBroker) -> None:
    async def story() -> None:
        topic = fresh("t")
        async with connected(own_broker) as client:
            await client.send(topic, b"first", partition=0)
            await asyncio.to_thread(own_broker.kill)
            await disconnected(client)
            sends = [
                asyncio.create_task(client.send(topic, b"%d" % n, partition=0)) for n in range(4)
            ]
            await asyncio.sleep(0.01)
            for n in (1, 2):
                sends[n].cancel()
                with pytest.raises(asyncio.CancelledError) as error:
                    await sends[n]
                assert outcome_of(error.value) == "not done"
            await asyncio.to_thread(own_broker.start)
            await sends[0]
            await sends[3]
            assert await bodies(client, topic) == [b"first", b"0", b"3"]

    run(story())


def test_a_send_without_an_answer_may_be_stored(own_broker: RealBroker) -> None:
    async def story() -> None:
        topic = fresh("t")
        async with connected(own_broker) as client:
            await client.send(topic, b"first", partition=0)
            freeze(own_broker.pid)
            try:
                with pytest.raises(TimeoutError) as late:
                    async with asyncio.timeout(0.05):
                        await client.send(topic, b"second", partition=0)
                assert outcome_of(late.value) == "unknown"
                with pytest.raises(TimeoutError) as late:
                    await asyncio.wait_for(client.send(topic, b"third", partition=0), 0.05)
                assert outcome_of(late.value) == "unknown"
            finally:
                os.kill(own_broker.pid, signal.SIGCONT)
            await client.send(topic, b"fourth", partition=0)
            assert await bodies(client, topic) == [b"first", b"second", b"third", b"fourth"]

    run(story())


def test_a_send_that_waits_for_its_broker_is_not_done() -> None:
    async def story() -> None:
        async with txmq.aio.connect("txmq://127.0.0.1:1", timeout=5) as client:
            with pytest.raises(TimeoutError) as late:
                async with asyncio.timeout(0.02):
                    await client.send("t", b"x")
            assert outcome_of(late.value) == "not done"

    run(story())


@pytest.mark.parametrize("step", range(0, 40, 3))
def test_a_cancelled_life_leaves_nothing_behind(real: RealBroker, step: int) -> None:
    """Cancel at the n-th turn of the loop, wherever the client waits then."""

    async def life() -> None:
        topic = fresh("t")
        async with connected(real) as client:
            await client.send(topic, b"x")
            async with await client.consumer(fresh("g"), [topic]) as consumer:
                async for message in consumer:
                    await consumer.ack(message, wait=True)
                    break
            async with client.transaction() as tx:
                tx.send(topic, b"y")

    async def story() -> None:
        task = asyncio.create_task(life())
        for _ in range(step):
            await asyncio.sleep(0.001 if step > 6 else 0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    run(story())


@pytest.mark.parametrize("turns", range(6))
def test_a_join_that_is_cancelled_when_it_succeeds_leaves_nothing_behind(
    real: RealBroker, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancel so many turns of the loop after the member has joined."""
    when_serving = LoopMember.when_serving

    async def story() -> None:
        joined = asyncio.Event()

        async def served(member: LoopMember) -> None:
            await when_serving(member)
            joined.set()

        monkeypatch.setattr(LoopMember, "when_serving", served)
        async with connected(real) as client:
            await client.send(topic := fresh("t"), b"x")
            joining = asyncio.create_task(client.consumer(fresh("g"), [topic]))
            await joined.wait()
            for _ in range(turns):
                await asyncio.sleep(0)
            joining.cancel()
            with suppress(asyncio.CancelledError):
                await joining

    run(story())


def test_another_loop_is_refused(real: RealBroker) -> None:
    client = connected(real)

    async def send() -> None:
        await client.send(fresh("t"), b"x")

    async def story() -> None:
        await send()

        def in_another_loop() -> None:
            with pytest.raises(LocalProtocolError, match="another event loop"):
                asyncio.run(send())

        await asyncio.to_thread(in_another_loop)
        await client.close()

    run(story())


def test_a_thread_without_a_loop_is_refused(real: RealBroker) -> None:
    async def story() -> None:
        async with connected(real) as client:
            await client.send(topic := fresh("t"), b"x")
            errors: list[Exception] = []

            def work() -> None:
                try:
                    client.send_one_way(topic, b"x")
                except LocalProtocolError as error:
                    errors.append(error)

            thread = threading.Thread(target=work)
            thread.start()
            await asyncio.to_thread(thread.join)
            assert "without a running event loop" in str(errors[0])

    run(story())


def test_the_child_of_a_fork_is_refused(real: RealBroker) -> None:
    async def story() -> None:
        async with connected(real) as client:
            await client.send(topic := fresh("t"), b"x")
            child = os.fork()
            if not child:
                try:
                    client.send_one_way(topic, b"x")
                except LocalProtocolError as error:
                    os._exit(0 if "forked" in str(error) else 1)
                os._exit(2)
            _pid, status = await asyncio.to_thread(os.waitpid, child, 0)
            assert status == 0
            await client.send(topic, b"the parent goes on")

    run(story())


async def handle_all(
    consumer: Consumer, handle: Callable[[ReceivedMessage], Any], count: int, **options: Any
) -> None:
    """Run a handler until so many of its calls have ended; then close the consumer."""
    done, left = asyncio.Event(), count

    async def counted(message: ReceivedMessage) -> None:
        nonlocal left
        try:
            await handle(message)
        finally:
            left -= 1
            if not left:
                done.set()

    work = asyncio.create_task(consumer.run(counted, **options))
    await done.wait()
    await consumer.close()
    await work


@asynccontextmanager
async def filled(
    real: RealBroker, count: int, **options: Any
) -> AsyncIterator[tuple[Client, Consumer]]:
    topic = fresh("t")
    async with connected(real) as client:
        await client.send_batch(topic, [Message(b"%d" % n, key=f"k{n % 4}") for n in range(count)])
        async with await client.consumer(fresh("g"), [topic], **options) as consumer:
            yield client, consumer


def test_workers_handle_messages_at_once(real: RealBroker) -> None:
    async def story() -> None:
        handled: list[bytes] = []
        running = most = 0

        async def handle(message: ReceivedMessage) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.001)
            handled.append(message.body)
            running -= 1

        async with filled(real, 60) as (_client, consumer):
            await handle_all(consumer, handle, 60, workers=8)
        assert sorted(map(int, handled)) == list(range(60))
        assert 4 <= most <= 8

    run(story())


def test_an_ordered_group_runs_one_message_of_a_key_at_a_time(real: RealBroker) -> None:
    async def story() -> None:
        by_key: dict[str | None, list[int]] = {}
        busy: set[str | None] = set()

        async def handle(message: ReceivedMessage) -> None:
            assert message.key not in busy
            busy.add(message.key)
            await asyncio.sleep(0.001)
            busy.remove(message.key)
            by_key.setdefault(message.key, []).append(int(message.body))

        async with filled(real, 60, mode="ordered") as (_client, consumer):
            await handle_all(consumer, handle, 60, workers=8)
        assert by_key == {f"k{n}": list(range(n, 60, 4)) for n in range(4)}

    run(story())


def test_a_failed_handler_is_retried(real: RealBroker) -> None:
    async def story() -> None:
        attempts: list[int] = []

        async def handle(message: ReceivedMessage) -> None:
            attempts.append(message.attempt)
            if len(attempts) == 1:
                raise ValueError("once")
            if len(attempts) == 2:
                never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                never.cancel()
                await never  # somebody else's cancellation is a failure, too

        retry = txmq.RetryPolicy((0.01, 0.01), retries=5)
        async with filled(real, 1, retry=retry) as (_client, consumer):
            await handle_all(consumer, handle, 3)
        assert attempts == [1, 2, 3]

    run(story())


def test_a_cancelled_run_gives_its_messages_back(real: RealBroker) -> None:
    async def story() -> None:
        began = asyncio.Event()

        async def handle(message: ReceivedMessage) -> None:
            began.set()
            await asyncio.sleep(PATIENCE_S)

        async with filled(real, 3) as (_client, consumer):
            work = asyncio.create_task(consumer.run(handle, workers=2))
            await began.wait()
            work.cancel()
            with pytest.raises(asyncio.CancelledError):
                await work
            again = [await consumer.receive(PATIENCE_S) for _ in range(3)]
            assert {message.body for message in again if message} == {b"0", b"1", b"2"}
            assert {message.attempt for message in again if message} == {1}
            for message in again:
                assert message is not None
                consumer.ack(message)

    run(story())


def test_a_cancelled_receive_loses_nothing(real: RealBroker) -> None:
    async def story() -> None:
        async with filled(real, 20) as (_client, consumer):
            found: list[bytes] = []
            while len(found) < 20:
                receives = [asyncio.create_task(consumer.receive(1.0)) for _ in range(3)]
                await asyncio.sleep(0)
                receives[0].cancel()
                for end in await asyncio.gather(*receives, return_exceptions=True):
                    if not isinstance(end, BaseException) and end is not None:
                        consumer.ack(end)
                        found.append(end.body)
            assert sorted(map(int, found)) == list(range(20))

    run(story())


def test_an_ack_can_be_waited_for(real: RealBroker) -> None:
    async def story() -> None:
        async with filled(real, 2) as (_client, consumer):
            message = await consumer.receive()
            assert message is not None
            await consumer.ack(message, wait=True)
            with pytest.raises(NotLeased):
                await consumer.ack(message, wait=True)
            await consumer.ack(message)
            assert (await consumer.receive_many(5, PATIENCE_S))[0].body != message.body

    run(story())


def test_a_consumer_that_its_user_has_dropped_leaves_with_the_client(real: RealBroker) -> None:
    async def story() -> None:
        topic, group = fresh("t"), fresh("g")
        async with connected(real) as client:
            await client.send(topic, b"x")
            async for message in await client.consumer(group, [topic]):
                assert message.body == b"x"
                break  # and it was not acked
        async with connected(real) as client, await client.consumer(group, [topic]) as consumer:
            assert await consumer.receive(PATIENCE_S) is not None  # the group is free at once

    run(story())


def test_close_ends_an_iteration(real: RealBroker) -> None:
    async def story() -> None:
        async with filled(real, 1) as (_client, consumer):

            async def consume() -> int:
                count = 0
                async for message in consumer:
                    consumer.ack(message)
                    count += 1
                    asyncio.get_running_loop().call_later(
                        0.05, lambda: asyncio.ensure_future(consumer.close())
                    )
                return count

            assert await consume() == 1
            await consumer.close()

    run(story())


def test_positions_are_kept(real: RealBroker, tmp_path: Path) -> None:
    async def story() -> None:
        topic = fresh("t")
        async with connected(real) as client:
            await client.send_batch(topic, [Message(b"%d" % n) for n in range(10)], partition=0)
            async with await client.reader("r", [topic], FileOffsets(tmp_path)) as reader:
                first = [(await reader.receive(PATIENCE_S)) for _ in range(4)]
            async with await client.reader("r", [topic], FileOffsets(tmp_path)) as reader:
                rest = [message.body async for message in _until(reader, 7)]
                assert await reader.receive(0.01) is None
            assert [message.body for message in first if message] == [b"%d" % n for n in range(4)]
            assert rest == [b"%d" % n for n in range(3, 10)]  # the last one was not done

    async def _until(reader: txmq.aio.Reader, most: int) -> AsyncIterator[ReceivedMessage]:
        while most and (message := await reader.receive(PATIENCE_S)) is not None:
            most -= 1
            yield message

    run(story())


def test_messages_and_acks_take_effect_together(real: RealBroker) -> None:
    async def story() -> None:
        orders, bills = fresh("orders"), fresh("bills")
        async with connected(real) as client:
            await client.send(orders, b"order")
            async with await client.consumer(fresh("g"), [orders]) as consumer:
                message = await consumer.receive()
                assert message is not None
                with suppress(ValueError):
                    async with client.transaction() as tx:
                        tx.send(bills, b"not sent")
                        tx.ack(message)
                        raise ValueError
                async with client.transaction() as tx:
                    tx.send(bills, b"bill", partition=0)
                    tx.ack(message)
            assert await bodies(client, bills) == [b"bill"]

    run(story())


@pytest.mark.parametrize(("answer", "published"), [(COMMIT, [b"half"]), (ROLLBACK, [])])
def test_a_coroutine_can_be_a_checker(
    real: RealBroker, answer: Decision, published: list[bytes]
) -> None:
    async def story() -> None:
        topic, name = fresh("t"), fresh("checker")
        asked = asyncio.Event()

        async def check(half: txmq.aio.Half) -> Decision:
            await asyncio.sleep(0)
            assert half.messages[0].body == b"half"
            asked.set()
            return answer

        async with connected(real) as client:
            client.register_checker(name, check)
            half = await client.half(topic, b"half", checker=name, partition=0, check_after=0.05)
            token = half.token
            del half  # its owner is gone: the checker decides
            await asyncio.wait_for(asked.wait(), PATIENCE_S)
            await decided(client, token)
            assert await bodies(client, topic) == published

    run(story())


def test_a_half_message_is_decided_by_its_owner(real: RealBroker) -> None:
    async def story() -> None:
        topic = fresh("t")
        async with connected(real) as client:
            first, second = await asyncio.gather(
                client.half(topic, b"committed", checker="c", partition=0),
                client.half(topic, b"rolled back", checker="c", partition=0),
            )
            await first.commit()
            await second.rollback()
            assert await bodies(client, topic) == [b"committed"]
            pipelined = [
                await client.half_async(topic, b"%d" % n, checker="c", partition=0)
                for n in range(20)
            ]
            for n, half in enumerate(await asyncio.gather(*pipelined)):
                await (half.rollback() if n % 2 else half.commit())
            wanted = [b"committed", *(b"%d" % n for n in range(0, 20, 2))]
            assert await bodies(client, topic) == wanted

    run(story())


def test_letters_and_calls_are_those_of_the_other_faces(real: RealBroker) -> None:
    async def story() -> None:
        topic, group = fresh("t"), fresh("g")
        async with connected(real) as client:
            await client.send(topic, b"bad", key="k")
            async with await client.consumer(group, [topic]) as consumer:
                message = await consumer.receive()
                assert message is not None
                consumer.dead_letter(message, "no use")
            [letter] = [letter async for letter in client.letters(group)]
            assert letter.key == "k"
            [found] = [found async for found in client.find(topic, key="k")]
            assert found.body == b"bad"
            assert (await client.call("topic.describe", names=[topic]))["topics"]

    run(story())


def test_a_silent_broker_times_out(own_broker: RealBroker) -> None:
    async def story() -> None:
        async with connected(own_broker, timeout=2.0) as client:
            await client.send(fresh("t"), b"x")
            freeze(own_broker.pid)
            try:
                with pytest.raises(RequestTimeout) as late:
                    await client.call("topic.describe", names=["t"])
                assert outcome_of(late.value) == "unknown"
            finally:
                os.kill(own_broker.pid, signal.SIGCONT)

    run(story())

"""Tasks of taskiq over txmq: with taskiq's own receiver, and with its workers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from contextvars import Context as Empty
from pathlib import Path
from typing import Any

import pytest
from taskiq import (
    Context,
    InMemoryBroker,
    SimpleRetryMiddleware,
    SmartRetryMiddleware,
    TaskiqDepends,
    TaskiqMessage,
    TaskiqMiddleware,
)
from taskiq.receiver import Receiver

from tests.client.real import RealBroker
from tests.client.scripted_member import fresh
from tests.frameworks.stories import run, until
from txmq.client.blocking.client import Client
from txmq.errors import LocalProtocolError
from txmq.model.message import Message
from txmq.model.retry import RetryPolicy
from txmq.taskiq import TxmqBroker
from txmq.testing.processes import whole_lines
from txmq.testing.wait import PATIENCE_S, wait_until


@pytest.fixture
def broker(real: RealBroker) -> TxmqBroker:
    """A broker with a queue of its own, and results in memory."""
    return make(real)


def make(real: RealBroker, **options: Any) -> TxmqBroker:
    name = fresh("queue")
    made = TxmqBroker(real.url, topic=name, group=name, timeout=PATIENCE_S, **options)
    return made.with_result_backend(InMemoryBroker().result_backend)


@asynccontextmanager
async def working(broker: TxmqBroker) -> AsyncIterator[None]:
    """Run taskiq's receiver in the block, as its worker does."""
    broker.is_worker_process = True
    finish = asyncio.Event()
    receiver = Receiver(broker, max_async_tasks=8)
    await broker.startup()
    listening = asyncio.create_task(receiver.listen(finish))
    try:
        yield
    finally:
        finish.set()
        await listening
        await broker.shutdown()


def test_tasks_run_and_their_results_come_back(broker: TxmqBroker, client: Client) -> None:
    @broker.task
    async def add(one: int, other: int = 1) -> int:
        return one + other

    @broker.task
    def plain(text: str) -> str:  # in a thread
        return text.upper()

    async def story() -> list[Any]:
        async with working(broker):
            kicked: list[Any] = [await add.kiq(1), await add.kiq(2, other=3), await plain.kiq("x")]
            return [(await task.wait_result(timeout=PATIENCE_S)).return_value for task in kicked]

    assert run(story) == [2, 5, "X"]
    [group] = [one for one in client.call("group.list")["groups"] if one["group"] == broker.group]
    wait_until(lambda: lag(client, broker) == 0, what="the acks")
    assert group["mode"] == "concurrent"


def lag(client: Client, broker: TxmqBroker) -> int:
    return int(client.call("group.show", group=broker.group)["unsettled"])


def test_labels_choose_topic_key_and_delay(broker: TxmqBroker, client: Client) -> None:
    other = fresh("t")

    @broker.task(task_name="here", key="k")
    async def here() -> None: ...

    async def story() -> None:
        await broker.startup()
        await here.kiq()
        await here.kicker().with_labels(topic=other).kiq()
        await here.kicker().with_labels(delay=900).kiq()
        await broker.shutdown()

    run(story)
    [stored] = client.find(broker.topic)
    assert (stored.key, stored.headers["taskiq-task"]) == ("k", "here")
    assert [one.key for one in client.find(other)] == ["k"]
    delayed = client.call("message.delayed", limit=100)["messages"]
    assert [one["topic"] for one in delayed if one["topic"] == broker.topic] == [broker.topic]


def test_what_a_task_sends_names_its_cause(broker: TxmqBroker, client: Client) -> None:
    topic = fresh("effects")

    @broker.task
    async def work() -> None:
        await broker.client.send(topic, b"effect")

    async def story() -> None:
        async with working(broker):
            await work.kiq()
            await until(lambda: topic in names(client) and list(client.find(topic)))

    run(story)
    [task], [effect] = client.find(broker.topic), client.find(topic)
    assert effect.headers["causation"] == task.message_id


def names(client: Client) -> list[str]:
    """Return the names of the topics."""
    return [one["name"] for one in client.call("topic.list")["topics"]]


def test_tasks_of_a_transaction_run_if_it_commits(broker: TxmqBroker, client: Client) -> None:
    ran = []

    @broker.task
    async def note(name: str) -> None:
        ran.append(name)

    async def story() -> None:
        async with working(broker):
            with suppress(ZeroDivisionError):
                async with broker.client.transaction() as tx:
                    with broker.within(tx):
                        await note.kiq("lost")
                    raise ZeroDivisionError
            async with broker.client.transaction() as tx:
                with broker.within(tx):
                    await note.kiq("kept")
                await note.kiq("outside")
            await until(lambda: len(ran) == 2)

    run(story)
    assert sorted(ran) == ["kept", "outside"]
    assert len(list(client.find(broker.topic))) == 2


def test_a_task_that_fails_is_taskiq_s_own_matter(broker: TxmqBroker, client: Client) -> None:
    broker.add_middlewares(SimpleRetryMiddleware(default_retry_count=3))
    runs = []

    @broker.task(retry_on_error=True)
    async def fail() -> None:
        runs.append(1)
        raise ZeroDivisionError

    async def story() -> Any:
        async with working(broker):
            return await (await fail.kiq()).wait_result(timeout=PATIENCE_S)

    assert run(story).is_err
    assert len(runs) == 3
    wait_until(lambda: lag(client, broker) == 0, what="the acks")
    assert not list(client.letters(broker.group))


def test_the_delay_of_retries_delays_retries_alone(broker: TxmqBroker, client: Client) -> None:
    broker.add_middlewares(SmartRetryMiddleware(default_retry_count=3))
    runs = list[str]()

    @broker.task(retry_on_error=True, delay=900)
    async def fail(context: Context = TaskiqDepends()) -> None:  # noqa: B008  # taskiq's way
        labels = context.message.labels
        runs.append(f"{labels.get('_retries', 0)} {labels.get('X-Taskiq-requeue', 0)}")
        if len(runs) == 2:
            await context.requeue()
        raise ZeroDivisionError

    def delayed() -> list[dict[str, Any]]:
        found = client.call("message.delayed", limit=100)["messages"]
        return [one for one in found if one["topic"] == broker.topic]

    async def story() -> None:
        async with working(broker):
            await fail.kiq()  # at once
            await until(lambda: len(delayed()) == 1)
            await fail.kicker().with_labels(_retries=0).kiq()  # is sent once more, at once
            await until(lambda: len(delayed()) == 2)
            await fail.kicker().with_labels(delay=901).kiq()  # which this call asks for

    run(story)
    assert runs == ["0 0", "0 0", "0 1"]
    assert len(delayed()) == 3


def test_a_task_that_fails_can_be_the_group_s_matter(real: RealBroker, client: Client) -> None:
    broker = make(real, failed="nack", consumer={"retry": RetryPolicy((0,), retries=2)})
    runs = []

    @broker.task
    async def fail(context: Context = TaskiqDepends()) -> None:  # noqa: B008  # taskiq's way
        runs.append(context.message.task_id)
        raise ZeroDivisionError("no")

    @broker.task
    async def reject(context: Context = TaskiqDepends()) -> None:  # noqa: B008  # likewise
        runs.append("rejected")
        context.reject()

    async def story() -> None:
        async with working(broker):
            await fail.kiq()
            await until(lambda: len(runs) == 3)
            await reject.kiq()
            await until(lambda: len(list(client.letters(broker.group))) == 2)

    run(story)
    assert len(set(runs)) == 2
    assert len(runs) == 4
    [failed, rejected] = client.letters(broker.group)
    assert (failed.error_type, failed.attempts) == ("ZeroDivisionError", 3)
    assert "rejected" in rejected.error_text


def test_what_no_task_can_run_is_a_dead_letter(broker: TxmqBroker, client: Client) -> None:
    other = InMemoryBroker()

    @other.task(task_name="unknown")
    async def unknown() -> None: ...

    @broker.task
    async def known() -> int:
        return 1

    async def story() -> None:
        async with working(broker):
            await unknown.kicker().with_broker(broker).kiq()
            client.send_batch(broker.topic, [Message(b"no task")])
            assert not (await (await known.kiq()).wait_result(timeout=PATIENCE_S)).is_err
            await until(lambda: len(list(client.letters(broker.group))) == 2)

    other.global_task_registry.pop("unknown", None)
    other.local_task_registry.pop("unknown", None)
    run(story)


def test_what_taskiq_leaves_is_retried_by_the_group(real: RealBroker, client: Client) -> None:
    """Its receiver ends without a word to the broker where a middleware raises."""
    broker = make(real, consumer={"retry": RetryPolicy((0,), retries=1)})

    class Failing(TaskiqMiddleware):
        def post_execute(self, message: TaskiqMessage, result: Any) -> None:
            if message.labels.get("fails"):
                raise ZeroDivisionError("the middleware's")

    broker.add_middlewares(Failing())

    @broker.task
    async def fine(context: Context = TaskiqDepends()) -> None:  # noqa: B008  # taskiq's way
        if context.message.labels.get("ack_type") == "manual":
            loop = asyncio.get_running_loop()
            # In a context of its own, as by a thread that was there before.
            loop.call_soon(lambda: loop.create_task(context.ack()), context=Empty())

    async def story() -> None:
        async with working(broker):
            for labels in ({"fails": 1}, {"ack_type": "never"}, {"ack_type": "manual"}):
                await fine.kicker().with_labels(**labels).kiq()
            await until(lambda: len(list(client.letters(broker.group))) == 2)
            await until(lambda: lag(client, broker) == 0)

    run(story)
    errors = {letter.error_text for letter in client.letters(broker.group)}
    assert any("the middleware's" in error for error in errors)
    assert any("Invalid ack_type label 'never'" in error for error in errors)


def test_a_broker_that_was_not_started_says_so(broker: TxmqBroker) -> None:
    @broker.task
    async def nothing() -> None: ...

    async def story() -> None:
        with pytest.raises(Exception, match=r"await broker.startup\(\) first") as told:
            await broker.kick(broker.formatter.dumps(nothing.kicker()._prepare_message()))
        assert isinstance(told.value, LocalProtocolError)

    run(story)
    with pytest.raises(LocalProtocolError, match="failed is 'drop'"):
        TxmqBroker("txmq://127.0.0.1:1", failed="drop")  # type: ignore[arg-type]  # the mistake


def test_the_task_of_a_killed_worker_is_run_by_another(
    real: RealBroker, client: Client, tmp_path: Path
) -> None:
    topic, out = fresh("queue"), tmp_path / "out"
    client.call("topic.create", name=topic, partitions=1)
    environment = os.environ | {"BROKER": real.url, "TOPIC": topic, "OUT": str(out)}

    def started() -> subprocess.Popen[bytes]:
        module = "tests.frameworks.taskiq_app:broker"
        command = [sys.executable, "-m", "taskiq", "worker", "--workers", "1", module]
        return subprocess.Popen(
            command, env=environment, start_new_session=True, stderr=subprocess.DEVNULL
        )

    async def kick() -> None:
        broker = TxmqBroker(real.url, topic=topic)

        @broker.task(task_name="tests.frameworks.taskiq_app:work")
        def task(name: str) -> None: ...

        await broker.startup()
        await task.kiq("one")
        await broker.shutdown()

    run(kick)
    workers = [started()]
    try:
        wait_until(lambda: whole_lines(out), what="the first run")
        os.killpg(workers[0].pid, signal.SIGKILL)
        Path(f"{out}.go").touch()
        workers.append(started())
        wait_until(lambda: len(whole_lines(out)) == 2, what="the second run")
        wait_until(
            lambda: client.call("group.show", group=topic)["unsettled"] == 0, what="the second ack"
        )
    finally:
        for worker in workers:
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGTERM)
            worker.wait(PATIENCE_S)
    names = [line.split() for line in whole_lines(out)]
    assert [name for name, _pid in names] == ["one", "one"]
    assert len({pid for _name, pid in names}) == 2

"""A broker of taskiq whose queues are topics.

    broker = TxmqBroker("txmq://127.0.0.1:7650")

    @broker.task
    async def charge(order: str) -> None: ...

    await charge.kiq("o-1")
    await charge.kicker().with_labels(key="o-1", delay=60).kiq("o-1")

    async with broker.client.transaction() as tx:
        with broker.within(tx):
            await charge.kiq("o-1")  # if the transaction commits

Workers are started as with any broker: `taskiq worker module:broker`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, Unpack

from txmq.errors.extras import require

require("taskiq", "taskiq")

from taskiq import AckableMessage, AsyncBroker, BrokerMessage, TaskiqMessage, TaskiqMiddleware
from taskiq.exceptions import NoResultError, TaskRejectedError
from taskiq.result import TaskiqResult

from txmq.aio import Client, Cluster, Consumer, Consumers, connect
from txmq.client.protocol.consumer.fetched import DeliveredMessage
from txmq.client.protocol.consumer.settings import ConsumerOptions
from txmq.client.protocol.sender.rows import Fields
from txmq.client.protocol.settings import Options
from txmq.errors import LocalProtocolError

HEADER_TASK, HEADER_ID = "taskiq-task", "taskiq-id"
NOT_RUN = "no task of this worker can run it: its name is not known, or its body not readable"
NOT_STARTED = "await broker.startup() first; `taskiq worker` does it by itself"


class SendsInto(Protocol):
    """A transaction, of any face."""

    def send(self, topic: str, body: bytes, **fields: Unpack[Fields]) -> object: ...


@dataclass(slots=True)
class _Run:
    """What became of the task that runs in this context."""

    error: BaseException | None = None


_run: ContextVar[_Run | None] = ContextVar("txmq_taskiq_run", default=None)
_transaction: ContextVar[SendsInto | None] = ContextVar("txmq_taskiq_transaction", default=None)


class TxmqBroker(AsyncBroker):
    """Sends tasks to a topic, and receives them as a member of a consumer group.

    A task is acked when taskiq says so, by default when its result is saved. One whose
    worker dies before is delivered to another worker. What no task can run is a dead
    letter, and not dropped.

    Labels: `topic` sends a task elsewhere, `key` keeps the order of its topic's
    partition, `delay` is in seconds.
    """

    client: Client | Cluster

    def __init__(
        self,
        url: str | list[str],
        *,
        topic: str = "taskiq",
        topics: tuple[str, ...] = (),
        group: str = "taskiq",
        service: str = "taskiq",
        failed: Literal["ack", "nack"] = "ack",
        consumer: ConsumerOptions | None = None,
        **options: Unpack[Options],
    ) -> None:
        """Workers take tasks of `topics`, by default of `topic`.

        `failed`: "ack" leaves tasks that raise to taskiq and its retry middlewares;
        "nack" has them retried by the policy of the group, and dead-lettered at its
        end. `consumer` are options of `client.consumer`, `options` those of
        `txmq.aio.connect`.
        """
        super().__init__()
        if failed not in {"ack", "nack"}:
            raise LocalProtocolError(f"failed is {failed!r}", hint='use "ack" or "nack"')
        self._url, self._service, self._options = url, service, options
        self.topic, self.group, self._topics = topic, group, topics or (topic,)
        self._failed, self._consumer_options = failed, consumer or ConsumerOptions()
        self._consumer: Consumer | Consumers | None = None
        self._connected = False
        self.add_middlewares(_Outcomes())

    async def startup(self) -> None:
        """Make the client; a worker joins the group when it begins to listen."""
        if not self._connected:
            self.client = connect(self._url, service=self._service, **self._options)
            self._connected = True
        await super().startup()

    async def shutdown(self) -> None:
        """Leave the group and close the client: messages in hand go to others."""
        await super().shutdown()
        if self._consumer is not None:
            consumer, self._consumer = self._consumer, None
            await consumer.close()
        if self._connected:
            self._connected = False
            await self.client.close()

    @contextmanager
    def within(self, transaction: SendsInto) -> Iterator[None]:
        """Send the tasks of the block if the transaction commits."""
        token = _transaction.set(transaction)
        try:
            yield
        finally:
            _transaction.reset(token)

    async def kick(self, message: BrokerMessage) -> None:
        """Send a task: it is stored on return, or belongs to the transaction."""
        labels = message.labels
        topic = str(labels.get("topic") or self.topic)
        fields: Fields = {"headers": {HEADER_TASK: message.task_name, HEADER_ID: message.task_id}}
        if labels.get("key") is not None:
            fields["key"] = str(labels["key"])
        if labels.get("delay") is not None:
            fields["delay"] = float(labels["delay"])
        transaction = _transaction.get()
        if transaction is not None:
            transaction.send(topic, message.message, **fields)
            return
        if not self._connected:
            raise LocalProtocolError("the broker was not started", hint=NOT_STARTED)
        await self.client.send(topic, message.message, **fields)

    async def listen(self) -> AsyncGenerator[bytes | AckableMessage, None]:
        """Yield tasks, each with its ack."""
        if not self._connected:
            raise LocalProtocolError("the broker was not started", hint=NOT_STARTED)
        if self._consumer is None:
            self._consumer = await self.client.consumer(
                self.group, self._topics, **self._consumer_options
            )
        async for message in self._consumer:
            yield AckableMessage(
                data=message.body, ack=partial(self._settle, self._consumer, message)
            )

    def _settle(self, consumer: Consumer | Consumers, message: DeliveredMessage) -> None:
        """Settle a task, in the context in which it has run."""
        run = _run.get()
        _run.set(None)
        if not message.in_hand:
            return  # it took too long, and is delivered again
        if run is None:
            consumer.dead_letter(message, NOT_RUN)
        elif isinstance(run.error, TaskRejectedError):
            consumer.dead_letter(message, "the task has rejected it")
        elif run.error is not None and self._failed == "nack":
            consumer.nack(message, error=run.error)
        else:
            consumer.ack(message)


class _Outcomes(TaskiqMiddleware):
    """Notes what becomes of each task, in the context in which taskiq acks it."""

    def pre_execute(self, message: TaskiqMessage) -> TaskiqMessage:
        _run.set(_Run())
        return message

    def on_error(
        self, message: TaskiqMessage, result: TaskiqResult[Any], exception: BaseException
    ) -> None:
        run = _run.get()
        # NoResultError: it was sent once more, by a retry middleware or `requeue`.
        if run is not None and not isinstance(result.error, NoResultError):
            run.error = exception

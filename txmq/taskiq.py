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

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, Unpack

from txmq.errors.extras import require

require("taskiq", "taskiq")

from taskiq import (
    AckableMessage,
    AsyncBroker,
    BrokerMessage,
    SmartRetryMiddleware,
    TaskiqMessage,
    TaskiqMiddleware,
)
from taskiq.exceptions import NoResultError, TaskRejectedError
from taskiq.result import TaskiqResult

from txmq.aio import Client, Cluster, Consumer, Consumers, connect
from txmq.client.log import get_logger
from txmq.client.protocol.consumer.fetched import DeliveredMessage
from txmq.client.protocol.consumer.settings import ConsumerOptions
from txmq.client.protocol.sender.rows import Fields
from txmq.client.protocol.settings import Options
from txmq.errors import LocalProtocolError
from txmq.model.causation import current_cause

HEADER_TASK, HEADER_ID = "taskiq-task", "taskiq-id"
NOT_RUN = "no task of this worker can run it: its name is not known, or its body not readable"
NOT_STARTED = "await broker.startup() first; `taskiq worker` does it by itself"
log = get_logger()


class SendsInto(Protocol):
    """A transaction, of any face."""

    def send(self, topic: str, body: bytes, **fields: Unpack[Fields]) -> object: ...


@dataclass(slots=True)
class _Delivery:
    """A delivered message, and what became of its task."""

    consumer: Consumer | Consumers
    message: DeliveredMessage
    task_id: str
    started: bool = False
    retries: int = 0
    error: BaseException | None = None


_delivery: ContextVar[_Delivery | None] = ContextVar("txmq_taskiq_delivery", default=None)
_transaction: ContextVar[SendsInto | None] = ContextVar("txmq_taskiq_transaction", default=None)


class TxmqBroker(AsyncBroker):
    """Sends tasks to a topic, and receives them as a member of a consumer group.

    A task is acked when taskiq says so, by default when its result is saved. One whose
    worker dies before is delivered to another worker. What no task can run is a dead
    letter, and not dropped.

    Labels: `topic` sends a task elsewhere, `key` keeps the order of its topic's
    partition, `delay` is in seconds. With taskiq's SmartRetryMiddleware the `delay` of
    the task itself is that of its retries.
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
        self._waiting = defaultdict[str, deque[_Delivery]](deque)  # not started, by task id
        self.add_middlewares(_Outcomes(self))

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
        delay = self._delay(message)
        if delay is not None:
            fields["delay"] = float(delay)
        transaction = _transaction.get()
        if transaction is not None:
            transaction.send(topic, message.message, **fields)
            return
        if not self._connected:
            raise LocalProtocolError("the broker was not started", hint=NOT_STARTED)
        await self.client.send(topic, message.message, **fields)

    def _delay(self, message: BrokerMessage) -> Any:  # noqa: ANN401  # a label
        """Return the seconds to delay a task by, None = none."""
        delay, running = message.labels.get("delay"), _delivery.get()
        smart = any(isinstance(one, SmartRetryMiddleware) for one in self.middlewares)
        if running is not None and running.task_id == message.task_id:
            # It is sent once more: by a retry middleware, or at once by `requeue`.
            return delay if smart and _retries(message.labels) > running.retries else None
        task = self.find_task(message.task_name) if smart else None
        # Labels are texts where they are sent.
        is_of_retries = task is not None and str(delay) == str(task.labels.get("delay"))
        return None if is_of_retries else delay

    async def listen(self) -> AsyncGenerator[bytes | AckableMessage, None]:
        """Yield tasks, each with its ack."""
        if not self._connected:
            raise LocalProtocolError("the broker was not started", hint=NOT_STARTED)
        if self._consumer is None:
            self._consumer = await self.client.consumer(
                self.group, self._topics, **self._consumer_options
            )
        async for message in self._consumer:
            delivery = _Delivery(self._consumer, message, self._id_of(message))
            self._waiting[delivery.task_id].append(delivery)
            yield AckableMessage(data=message.body, ack=partial(self._settle, delivery))

    def _id_of(self, message: DeliveredMessage) -> str:
        """Return the id of the message's task; "" where it is none."""
        found = message.headers.get(HEADER_ID)
        if found is None:  # other programs may send tasks, too
            with suppress(Exception):
                found = self.formatter.loads(message.body).task_id
        return found or ""

    def begin(self, task: TaskiqMessage) -> None:
        """Note that the delivered task begins to run, in the current task of
        asyncio.
        """
        task_id = task.task_id
        if not self._waiting[task_id]:
            return  # taskiq's receiver was given the message by somebody else
        delivery = self._waiting[task_id].popleft()
        self._forget_id(task_id)
        delivery.started, delivery.retries = True, _retries(task.labels)
        _delivery.set(delivery)
        current_cause.set(delivery.message)  # of what the task sends
        running = asyncio.current_task()
        if running is not None:
            running.add_done_callback(partial(_give_up, delivery))

    def _forget_id(self, task_id: str) -> None:
        if not self._waiting[task_id]:
            del self._waiting[task_id]

    def _settle(self, delivery: _Delivery) -> None:
        """Settle a task as its run has ended."""
        consumer, message, error = delivery.consumer, delivery.message, delivery.error
        if not delivery.started:
            self._waiting[delivery.task_id].remove(delivery)
            self._forget_id(delivery.task_id)
        if not message.in_hand:
            return  # it took too long, and is delivered again
        if not delivery.started:
            consumer.dead_letter(message, NOT_RUN)
        elif isinstance(error, TaskRejectedError):
            consumer.dead_letter(message, "the task has rejected it")
        elif error is not None and self._failed == "nack":
            consumer.nack(message, error=error)
        else:
            consumer.ack(message)


def _retries(labels: dict[str, Any]) -> int:
    """Return how often a retry middleware has sent a task."""
    return int(labels.get("_retries", 0))


def _give_up(delivery: _Delivery, running: asyncio.Task[object]) -> None:
    """Nack a task that taskiq has left: a middleware has raised, or `ack_type` is not
    one of its own.
    """
    if running.cancelled():
        return
    try:
        running.result()
    except Exception as error:
        log.exception("taskiq.failed", task=delivery.task_id)
        if delivery.message.in_hand:
            delivery.consumer.nack(delivery.message, error=error)


class _Outcomes(TaskiqMiddleware):
    """Notes what becomes of each task. It is the first middleware of its broker."""

    def __init__(self, owner: TxmqBroker) -> None:
        super().__init__()
        self._owner = owner

    def pre_execute(self, message: TaskiqMessage) -> TaskiqMessage:
        self._owner.begin(message)
        return message

    def on_error(
        self, message: TaskiqMessage, result: TaskiqResult[Any], exception: BaseException
    ) -> None:
        delivery = _delivery.get()
        # NoResultError: it was sent once more, by a retry middleware or `requeue`.
        if delivery is not None and not isinstance(result.error, NoResultError):
            delivery.error = exception

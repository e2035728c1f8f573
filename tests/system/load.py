"""Producers of every kind, each a thread with a client, that keep sending over all
faults.

The patient ones send again through any outage, and fail if that does not help. The
others give up soon, do not know the outcome of their sends, and continue with the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, cycle, islice
from threading import Event, Thread
from typing import NamedTuple

from tests.system.send_history import SendHistory
from txmq import Message, Receipt, connect
from txmq.client.blocking.client import Client
from txmq.client.protocol.settings import Options
from txmq.errors import TxmqError
from txmq.testing.wait import PATIENCE_S

SHORT_S = 0.3
AT_ONCE = 8  # messages of a batch, of a bundle, and of one asynchronous burst
PATIENT = Options(timeout=PATIENCE_S, retries=100, delivery_timeout=PATIENCE_S)
HASTY = Options(timeout=SHORT_S, retries=0, delivery_timeout=SHORT_S)


class LoadMessage(NamedTuple):
    """A message to send; the body is unique."""

    key: str
    body: str


@dataclass(frozen=True, slots=True)
class LoadProducer:
    """A producer: its client, its messages, and the history of its sends."""

    client: Client
    topic: str
    history: SendHistory
    messages: Iterator[LoadMessage]
    patient: bool

    def next_messages(self, number: int) -> list[LoadMessage]:
        """Return the next messages, which may be in the topic from now on."""
        messages = list(islice(self.messages, number))
        self.history.attempted.update(sent.body for sent in messages)
        return messages

    def stored(self, sent: LoadMessage, receipt: Receipt) -> None:
        place = None if receipt.offset is None else (receipt.partition, receipt.offset)
        self.history.acknowledged[sent.body] = place
        self.history.duplicates += receipt.duplicate

    def failed(self, sent: LoadMessage, error: TxmqError) -> None:
        """Note the outcome of a failed send. A patient producer must not fail."""
        assert not self.patient, f"{sent.body} was not sent: {error!r}"
        (self.history.refused if error.outcome == "not done" else self.history.unknown).add(
            sent.body
        )


def send_one(producer: LoadProducer) -> None:
    [sent] = producer.next_messages(1)
    try:
        receipt = producer.client.send(producer.topic, sent.body.encode(), key=sent.key)
    except TxmqError as error:
        producer.failed(sent, error)
    else:
        producer.stored(sent, receipt)


def send_asynchronously(producer: LoadProducer) -> None:
    sent_futures: list[tuple[LoadMessage, Future[Receipt]]] = []
    for sent in producer.next_messages(AT_ONCE):
        try:  # the first call reads the metadata of the topic
            sent_futures.append(
                (sent, producer.client.send_async(producer.topic, sent.body.encode(), key=sent.key))
            )
        except TxmqError as error:
            producer.failed(sent, error)
    for sent, future in sent_futures:
        try:
            receipt = future.result()
        except TxmqError as error:
            producer.failed(sent, error)
        else:
            producer.stored(sent, receipt)


def send_batch(producer: LoadProducer) -> None:
    messages = producer.next_messages(AT_ONCE)
    receipts = producer.client.send_batch(
        producer.topic, [Message(sent.body.encode(), key=sent.key) for sent in messages]
    )
    for sent, receipt in zip(messages, receipts, strict=True):
        producer.stored(sent, receipt)


def send_transaction(producer: LoadProducer) -> None:
    """Send a broker-local transaction: all of its messages, or none."""
    messages = producer.next_messages(AT_ONCE)
    producer.history.bundles.append(tuple(sent.body for sent in messages))
    try:
        with producer.client.transaction() as transaction:
            for sent in messages:
                transaction.send(producer.topic, sent.body.encode(), key=sent.key)
    except TxmqError as error:
        for sent in messages:
            producer.failed(sent, error)
    else:
        _transaction_stored(producer, messages, transaction.receipts() if producer.patient else ())


def _transaction_stored(
    producer: LoadProducer, messages: Sequence[LoadMessage], receipts: Sequence[Receipt]
) -> None:
    for sent in messages:
        producer.history.acknowledged[sent.body] = None
    for sent, receipt in zip(messages, receipts, strict=False):
        producer.stored(sent, receipt)


class ProducerKind(NamedTuple):
    """A way of sending, with or without patience."""

    step: Callable[[LoadProducer], None]
    patient: bool


KINDS = (
    ProducerKind(send_one, patient=True),
    ProducerKind(send_asynchronously, patient=True),
    ProducerKind(send_batch, patient=True),
    ProducerKind(send_transaction, patient=True),
    ProducerKind(send_one, patient=False),
    ProducerKind(send_asynchronously, patient=False),
    ProducerKind(send_transaction, patient=False),
)


@contextmanager
def load(url: str, topic: str, history: SendHistory) -> Iterator[None]:
    """Run producers of all kinds for the block. The broker must serve at its end.

    Raises the error of a producer.
    """
    stop, errors = Event(), list[BaseException]()

    def run(kind: ProducerKind, name: str) -> None:
        try:
            with connect(url, **(PATIENT if kind.patient else HASTY)) as client:
                producer = LoadProducer(
                    client, topic, history, _messages(f"{name}a", f"{name}b"), kind.patient
                )
                while not stop.is_set():
                    kind.step(producer)
        except BaseException as error:  # noqa: BLE001  # raised below, in the test's own thread
            errors.append(error)

    producers = [
        Thread(target=run, args=(kind, f"p{at}"), daemon=True) for at, kind in enumerate(KINDS)
    ]
    for producer in producers:
        producer.start()
    try:
        yield
    finally:
        stop.set()  # if the block has failed, the threads of the patient ones are left behind
    for producer in producers:
        producer.join()
    if errors:
        raise errors[0]


def _messages(*keys: str) -> Iterator[LoadMessage]:
    numbers = count()
    for key in cycle(keys):
        yield LoadMessage(key, f"{key}/{next(numbers)}")

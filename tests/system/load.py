"""Producers of every kind, each a thread with a client of its own, that go on sending
whatever happens to the broker.

Half of them are patient: they send again through any outage, and fail if that does not
help. The others give up soon, do not know what became of their messages, and go on with
the next ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, cycle, islice
from threading import Event, Thread
from typing import NamedTuple

from tests.system.history import History
from txmq import Message, Receipt, connect
from txmq.client import Client
from txmq.client.protocol.settings import Options
from txmq.errors import TxmqError

LONG_S, SHORT_S = 90.0, 0.3
AT_ONCE = 8  # messages of a batch, of a group, and of what is sent without waiting
PATIENT = Options(timeout=LONG_S, retries=100, delivery_timeout=LONG_S)
HASTY = Options(timeout=SHORT_S, retries=0, delivery_timeout=SHORT_S)


class Sent(NamedTuple):
    """A message to send; the body is unique."""

    key: str
    body: str


@dataclass(frozen=True, slots=True)
class Sender:
    """What all kinds of producers need: a client, messages that nobody else sends, and
    the history to write down.
    """

    client: Client
    topic: str
    history: History
    messages: Iterator[Sent]
    patient: bool

    def take(self, number: int) -> list[Sent]:
        """The next messages; from now on they may be in the topic."""
        taken = list(islice(self.messages, number))
        self.history.attempted.update(sent.body for sent in taken)
        return taken

    def stored(self, sent: Sent, receipt: Receipt) -> None:
        place = None if receipt.offset is None else (receipt.partition, receipt.offset)
        self.history.acknowledged[sent.body] = place
        self.history.duplicates += receipt.duplicate

    def failed(self, sent: Sent, error: TxmqError) -> None:
        """Patience must help; without it, the error says what is known."""
        assert not self.patient, f"{sent.body} was not sent: {error!r}"
        (self.history.refused if error.outcome == "not done" else self.history.unknown).add(
            sent.body
        )


def one_by_one(sender: Sender) -> None:
    [sent] = sender.take(1)
    try:
        receipt = sender.client.send(sender.topic, sent.body.encode(), key=sent.key)
    except TxmqError as error:
        sender.failed(sent, error)
    else:
        sender.stored(sent, receipt)


def without_waiting(sender: Sender) -> None:
    under_way: list[tuple[Sent, Future[Receipt]]] = []
    for sent in sender.take(AT_ONCE):
        try:  # the first of all asks for the topic's shape
            under_way.append(
                (sent, sender.client.send_async(sender.topic, sent.body.encode(), key=sent.key))
            )
        except TxmqError as error:
            sender.failed(sent, error)
    for sent, future in under_way:
        try:
            receipt = future.result()
        except TxmqError as error:
            sender.failed(sent, error)
        else:
            sender.stored(sent, receipt)


def in_batches(sender: Sender) -> None:
    taken = sender.take(AT_ONCE)
    receipts = sender.client.send_batch(
        sender.topic, [Message(sent.body.encode(), key=sent.key) for sent in taken]
    )
    for sent, receipt in zip(taken, receipts, strict=True):
        sender.stored(sent, receipt)


def together(sender: Sender) -> None:
    """A transaction of the broker's own: all of its messages, or none."""
    taken = sender.take(AT_ONCE)
    sender.history.groups.append(tuple(sent.body for sent in taken))
    try:
        with sender.client.transaction() as transaction:
            for sent in taken:
                transaction.send(sender.topic, sent.body.encode(), key=sent.key)
    except TxmqError as error:
        for sent in taken:
            sender.failed(sent, error)
    else:
        _stored_together(sender, taken, transaction.receipts() if sender.patient else ())


def _stored_together(sender: Sender, taken: Sequence[Sent], receipts: Sequence[Receipt]) -> None:
    for sent in taken:
        sender.history.acknowledged[sent.body] = None
    for sent, receipt in zip(taken, receipts, strict=False):
        sender.stored(sent, receipt)


class Kind(NamedTuple):
    """One of the producers."""

    step: Callable[[Sender], None]
    patient: bool


KINDS = (
    Kind(one_by_one, patient=True),
    Kind(without_waiting, patient=True),
    Kind(in_batches, patient=True),
    Kind(together, patient=True),
    Kind(one_by_one, patient=False),
    Kind(without_waiting, patient=False),
    Kind(together, patient=False),
)


@contextmanager
def load(url: str, topic: str, history: History) -> Iterator[None]:
    """Producers of all kinds for the block; the broker must serve at its end. Raises
    what a producer met.
    """
    stop, troubles = Event(), list[BaseException]()

    def run(kind: Kind, name: str) -> None:
        try:
            with connect(url, **(PATIENT if kind.patient else HASTY)) as client:
                sender = Sender(
                    client, topic, history, _messages(f"{name}a", f"{name}b"), kind.patient
                )
                while not stop.is_set():
                    kind.step(sender)
        except BaseException as error:  # raised below, in the test's own thread
            troubles.append(error)

    producers = [
        Thread(target=run, args=(kind, f"p{at}"), daemon=True) for at, kind in enumerate(KINDS)
    ]
    for producer in producers:
        producer.start()
    try:
        yield
    finally:
        stop.set()  # and if the block has failed, nobody waits for the patient ones
    for producer in producers:
        producer.join()
    if troubles:
        raise troubles[0]


def _messages(*keys: str) -> Iterator[Sent]:
    numbers = count()
    for key in cycle(keys):
        yield Sent(key, f"{key}/{next(numbers)}")

"""Sends of a client with a spool on an event loop, which a thread's sender makes.

A disk needs threads anyway, and so there is one queue for all: that of the blocking
client. The messages of one turn of the loop go to the thread together, and receipts
come back together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from threading import Lock
from typing import Generic, NamedTuple, TypeVar

from txmq.model.message import Message, Receipt

A = TypeVar("A")
SendMessage = Callable[[str, Message, int | None], "Future[Receipt]"]


class Unsent(NamedTuple, Generic[A]):
    """A message on its way to the thread."""

    topic: str
    message: Message
    partition: int | None
    answer: A


class SpoolQueue(ABC, Generic[A]):
    """The messages of a turn, and the receipts of others: an answer `A` for each."""

    def __init__(self, send: SendMessage) -> None:
        """`send` is the blocking client's, for the thread."""
        self._send = send
        self._unsent: list[Unsent[A]] = []
        self._scheduled = False
        self._lock = Lock()
        self._answered: list[tuple[A, Future[Receipt] | Exception]] = []

    @abstractmethod
    def _soon(self, call: Callable[[], None]) -> None:
        """Make a call at the end of this turn."""

    @abstractmethod
    def _in_thread(self, call: Callable[[], None]) -> None:
        """Make a call in the thread, after those before it."""

    @abstractmethod
    def _on_loop(self, call: Callable[[], None]) -> None:
        """Make a call on the loop. Called in any thread."""

    @abstractmethod
    def _resolve(self, answer: A, receipt: Receipt) -> None:
        """Give the receipt, unless the caller has cancelled it."""

    @abstractmethod
    def _fail(self, answer: A, error: BaseException) -> None:
        """Give the error, unless the caller has cancelled it."""

    def add(self, topic: str, message: Message, partition: int | None, answer: A) -> None:
        """Send a message with the others of this turn."""
        self._unsent.append(Unsent(topic, message, partition, answer))
        if not self._scheduled:
            self._scheduled = True
            self._soon(self.send_now)

    def send_now(self) -> None:
        """Give the messages of this turn to the thread, in their order."""
        self._scheduled = False
        unsent, self._unsent = self._unsent, []
        if unsent:
            self._in_thread(partial(self._send_all, unsent))

    def _send_all(self, unsent: Sequence[Unsent[A]]) -> None:
        for topic, message, partition, answer in unsent:
            try:
                sent = self._send(topic, message, partition)
            except Exception as error:  # noqa: BLE001  # of the user's partitioner, too
                self._bring_back(answer, error)
            else:
                sent.add_done_callback(partial(self._bring_back, answer))

    def _bring_back(self, answer: A, result: Future[Receipt] | Exception) -> None:
        """Bring an answer back to the loop, from any thread."""
        with self._lock:
            first = not self._answered
            self._answered.append((answer, result))
        if first:
            self._on_loop(self._give_answers)

    def _give_answers(self) -> None:
        with self._lock:
            answered, self._answered = self._answered, []
        for answer, result in answered:
            error = result if isinstance(result, Exception) else result.exception()
            if error is not None:
                self._fail(answer, error)
            elif isinstance(result, Future):
                self._resolve(answer, result.result())

"""`client.spool`: what a client has on local disk, and where it is now."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Protocol

from txmq.client.protocol.conversation import client_closed
from txmq.client.protocol.message_search import FoundMessage
from txmq.client.protocol.sender.spool_chain import SpoolChain
from txmq.errors import RequestRejected, RequestTimeout, TxmqError
from txmq.model.durations import Duration, seconds_of
from txmq.model.measures import counted
from txmq.model.message import Receipt, parse_message_id

LOOK_EVERY_S = 0.25  # at the spools, or for a message at the broker, while none is drained


class Finds(Protocol):
    """A client that finds messages."""

    def find(
        self, topic: str | None = None, *, message_id: Receipt | str | None = None
    ) -> Iterator[FoundMessage]: ...


class SpoolFigures:
    """Figures of the messages of a client that wait on local disk, for all faces and
    any number of threads.

    Messages of processes that ended before, which this client has taken over, count
    too. `own_chain` returns the spools of this process: a child of a fork has its own.
    """

    def __init__(self, own_chain: Callable[[], SpoolChain]) -> None:
        self._own_chain = own_chain

    @property
    def _chain(self) -> SpoolChain:
        return self._own_chain()

    @property
    def waiting(self) -> int:
        """Messages that wait for the broker."""
        return self._chain.waiting

    @property
    def bytes(self) -> int:
        """Bytes on disk that they occupy."""
        return self._chain.size

    @property
    def oldest_at(self) -> int:
        """The time at which the oldest of them was stored here, in microseconds; 0 =
        none.
        """
        chain = self._chain
        if chain.closed:
            return 0
        times = [at for spool in chain.spools if (at := spool.oldest_at)]
        return min(times, default=0)

    @property
    def refused(self) -> int:
        """Messages that the broker refused for good: `txmq recover` lists them."""
        return self._chain.refused


class ClientSpool(SpoolFigures):
    """The messages of a client that wait on local disk. For any number of threads."""

    def __init__(self, own_chain: Callable[[], SpoolChain], client: Finds) -> None:
        super().__init__(own_chain)
        self._client = client

    def wait(self, timeout: Duration | None = None) -> None:
        """Wait until everything is at the broker, or among the refused.

        Raises RequestTimeout; what waits then stays on disk.
        """
        seconds = seconds_of(timeout, "timeout")
        deadline = None if seconds is None else time.monotonic() + seconds
        chain = self._chain
        with chain.changed:
            while not chain.empty:
                _require_open(chain)
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise _timeout(
                        f"still in the spool: {counted(self.waiting, 'message')}", seconds
                    )
                _wait_for_change(chain, left)

    def place(self, receipt: Receipt, timeout: Duration | None = None) -> Receipt:
        """Wait until a spooled message is at the broker, and return its receipt there.

        The receipt of any other message is returned as it is. The id stays the same.
        Raises RequestTimeout, and RequestRejected for a message that was refused.
        """
        if not receipt.spooled:
            return receipt
        seconds = seconds_of(timeout, "timeout")
        deadline = None if seconds is None else time.monotonic() + seconds
        chain = self._chain
        while True:
            _require_open(chain)
            found = self._search(receipt)
            if found is not None:
                return found
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise _timeout(f"message {receipt.message_id} is not at the broker yet", seconds)
            with chain.changed:
                _wait_for_change(chain, left)

    def _search(self, receipt: Receipt) -> Receipt | None:
        refused = self._chain.own.refusal_of(*parse_message_id(receipt.message_id))
        if refused is not None:
            raise RequestRejected(
                f"the broker refused the message {receipt.message_id} for good: {refused}",
                hint="it is among the refused of its spool: txmq recover list",
            )
        try:
            found = next(self._client.find(receipt.topic, message_id=receipt), None)
        except TxmqError as error:
            if not error.retriable and not isinstance(error, RequestRejected):
                raise
            return None
        if found is None or found.partition is None:
            return None
        return Receipt(found.message_id, receipt.topic, found.partition, found.offset, False)


def _require_open(chain: SpoolChain) -> None:
    if chain.closed:
        raise client_closed()


def _wait_for_change(chain: SpoolChain, left: float | None) -> None:
    chain.changed.wait(LOOK_EVERY_S if left is None else min(left, LOOK_EVERY_S))


def _timeout(what: str, seconds: float | None) -> TxmqError:
    error: TxmqError = RequestTimeout(
        f"{what} after {seconds:.3g} s", hint="it stays on disk: wait again, or let it be"
    )
    error.outcome = "not done"
    return error

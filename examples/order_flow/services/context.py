"""The context of a service, and settings that the services share."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import psycopg2
from psycopg2.extensions import connection as Connection  # noqa: N812  # a class, whatever its name

from examples.order_flow.journal import Journal
from txmq import ReceivedMessage, RetryPolicy
from txmq.client.blocking.consumer.consumer import Consumer

Batch = Sequence[ReceivedMessage]
Handler = Callable[[Batch, Connection, Callable[[ReceivedMessage, Exception], None]], None]

TIMEOUT_S, PAUSE_S = 30.0, 0.2
BATCH_MESSAGES, BATCH_WAIT_S = 50, 0.1  # messages per transaction, and the wait for so many
# The default retries take hours, which is too long for a demonstration.
RETRY = RetryPolicy((0.1, 0.3, 1, 3))


@dataclass(frozen=True, slots=True)
class ServiceContext:
    """Addresses of broker and database, and the input.

    `instance` numbers the processes of one service. `local` is the directory for what
    this process keeps on the disk of its machine; its next life finds it there.
    """

    broker: str
    dsn: str
    data: Path
    journal: Journal
    local: Path
    instance: int
    instances: int

    def connect(self) -> Connection:
        """Return a new connection to the database; wait for a server that is
        starting.
        """
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                return psycopg2.connect(self.dsn, connect_timeout=10)
            except psycopg2.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(PAUSE_S)

    def handler(
        self, function: Handler, consumer: Consumer, *, refused: str = "refused"
    ) -> Callable[[Batch, Connection], None]:
        """Return the handler for the consumer, which counts the calls before they
        begin, and as `refused` what it nacks.
        """

        def refuse(message: ReceivedMessage, error: Exception) -> None:
            self.journal.count(refused)
            consumer.nack(message, error=error)

        def handle(messages: Batch, connection: Connection) -> None:
            self.journal.count_to("duplicates", consumer.stats.duplicates)
            self.journal.count("deliveries", len(messages))
            if retries := sum(message.attempt > 1 for message in messages):
                self.journal.count("retries", retries)
            function(messages, connection, refuse)

        return handle


def on_term(stop: Callable[[], None]) -> None:
    """Call `stop` at SIGTERM.

    It runs in a thread, because the interrupted one may hold a lock that `stop` waits
    for.
    """
    signal.signal(signal.SIGTERM, lambda _number, _frame: Thread(target=stop).start())

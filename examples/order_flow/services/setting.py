"""What every service is started with."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import psycopg2
from psycopg2.extensions import connection as Connection  # a class, whatever its name

from examples.order_flow.journal import Journal
from txmq import ReceivedMessage, RetryPolicy
from txmq.client.blocking.consumer.consumer import Consumer

Batch = Sequence[ReceivedMessage]
Handler = Callable[[Batch, Connection, Callable[[ReceivedMessage, Exception], None]], None]

PATIENCE_S, PAUSE_S = 30.0, 0.2
AT_ONCE, BATCH_WAIT_S = 50, 0.1  # orders in a transaction, and how long one waits for so many
RETRY = RetryPolicy.table(
    0.1, 0.3, 1, 3
)  # a demonstration cannot wait for the hours of the default


@dataclass(frozen=True, slots=True)
class Setting:
    """Where broker, database and input are; `instance` tells the processes of one
    service apart.
    """

    broker: str
    dsn: str
    data: Path
    journal: Journal
    instance: int
    instances: int

    def connect(self) -> Connection:
        """A new connection to the shop's database; waits for a server that is
        starting.
        """
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return psycopg2.connect(self.dsn, connect_timeout=10)
            except psycopg2.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(PAUSE_S)

    def handler(self, function: Handler, consumer: Consumer) -> Callable[[Batch, Connection], None]:
        """What the consumer runs: the function, its calls noted before they begin."""

        def refuse(message: ReceivedMessage, error: Exception) -> None:
            consumer.nack(message, error=error)

        def handle(messages: Batch, connection: Connection) -> None:
            self.journal.note("deliveries", len(messages))
            if retries := sum(message.attempt > 1 for message in messages):
                self.journal.note("retries", retries)
            function(messages, connection, refuse)

        return handle


def on_term(stop: Callable[[], None]) -> None:
    """Lets SIGTERM end a service in order: in a thread, because the one interrupted may
    hold what `stop` waits for.
    """
    signal.signal(signal.SIGTERM, lambda _number, _frame: Thread(target=stop).start())

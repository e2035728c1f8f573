"""Consumers that stop themselves while they process a message."""

from __future__ import annotations

import os
import signal
from threading import Event, Thread
from typing import Any

import psycopg2

from txmq import connect
from txmq.client.blocking.consumer.consumer import Consumer
from txmq.errors import TxmqError
from txmq.testing.wait import PATIENCE_S, wait_until

SESSION_S = 3.0  # longer than a busy machine stands still
TABLE = "CREATE TABLE effects (place text NOT NULL, pid int NOT NULL)"


def print_line(*words: object) -> None:
    """Write a line to the standard output at once."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def receive_once(url: str, group: str, topic: str, mode: str) -> None:
    """Receive one message, stop until SIGCONT, then acknowledge it and print the
    answer.
    """
    options: Any = {"mode": mode, "session": SESSION_S}
    with (
        connect(url, timeout=PATIENCE_S) as client,
        client.consumer(group, [topic], **options) as consumer,
    ):
        message = consumer.receive(PATIENCE_S)
        assert message is not None
        print_line(message.offset, message.attempt)
        signal.raise_signal(signal.SIGSTOP)
        try:
            consumer.ack(message, wait=True)
            print_line("acked")
        except TxmqError as error:
            print_line(type(error).__name__)
        print_line(consumer.stats.rejoined, consumer.stats.refused)


def apply_once(url: str, group: str, topic: str, dsn: str) -> None:
    """Apply one message in the transaction of the inbox, and stop until SIGCONT before
    it ends.
    """
    over = Event()

    def handle(message: Any, connection: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute(
                "INSERT INTO effects VALUES (%s, %s)", (str(message.offset), os.getpid())
            )
        print_line(message.offset, message.attempt)
        signal.raise_signal(signal.SIGSTOP)

    with connect(url, timeout=PATIENCE_S) as client:
        with client.consumer(group, [topic], session=SESSION_S, start="first") as consumer:
            Thread(target=stop_when_settled, args=(consumer, over), daemon=True).start()
            consumer.run(handle, inbox=lambda: psycopg2.connect(dsn), stop=over)
        print_line("duplicates", consumer.stats.duplicates)


def stop_when_settled(consumer: Consumer, over: Event) -> None:
    """Set `over` when the consumer has had its one message, in whatever way."""

    def settled() -> bool:
        stats = consumer.stats
        return bool(stats.acked or stats.refused or stats.duplicates)

    wait_until(settled)
    over.set()

"""A member that is frozen while it has a message in hand, and does not know it when it
goes on.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import psycopg2

from txmq import connect
from txmq.errors import TxmqError

SESSION_S = 1.0
PATIENCE_S = 60.0
TABLE = "CREATE TABLE effects (place text NOT NULL, pid int NOT NULL)"


def say(*words: object) -> None:
    """A line for whoever watches the process."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def member(url: str, group: str, topic: str, mode: str) -> None:
    """Takes one message and stops itself; when it goes on, it acks, and prints what the
    broker says to that.
    """
    options: Any = {"mode": mode, "session_s": SESSION_S}
    with (
        connect(url, timeout=PATIENCE_S) as client,
        client.consumer(group, [topic], **options) as consumer,
    ):
        message = consumer.receive(PATIENCE_S)
        assert message is not None
        say(message.offset, message.attempt)
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            consumer.ack(message, wait=True)
            say("acked")
        except TxmqError as error:
            say(type(error).__name__)
        say(consumer.stats.rejoined, consumer.stats.refused)


def charging(url: str, group: str, topic: str, dsn: str) -> None:
    """Has an effect for one message, in the transaction of its inbox, and stops itself
    before it ends.
    """

    def handle(message: Any, connection: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute(
                "INSERT INTO effects VALUES (%s, %s)", (str(message.offset), os.getpid())
            )
        say(message.offset, message.attempt)
        os.kill(os.getpid(), signal.SIGSTOP)

    with connect(url, timeout=PATIENCE_S) as client:
        consumer = client.consumer(group, [topic], session_s=SESSION_S, start="first")
        consumer.run(handle, inbox=lambda: psycopg2.connect(dsn), idle_exit=2 * SESSION_S)
        say("duplicates", consumer.stats.duplicates)

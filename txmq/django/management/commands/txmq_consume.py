"""`manage.py txmq_consume GROUP TOPIC... --handler shop.orders.charge`: a consumer."""

from __future__ import annotations

import signal
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any, Literal, get_args

from django.core.management.base import BaseCommand, CommandError
from django.db import close_old_connections, transaction
from django.utils.module_loading import import_string

import txmq.django
from txmq.model.message import ReceivedMessage

Mode = Literal["concurrent", "ordered"]


class Command(BaseCommand):  # type: ignore[misc]  # Django has no types
    """Each message is handled in `atomic()`. The rows that the handler writes, what it
    sends by `txmq.django.send`, and the ack of the message are one decision.
    """

    help = (
        "Call a function for each message of the topics. The rows that it writes, what it sends "
        "by txmq.django.send, and the ack of the message are one decision."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("group", help="the consumer group")
        parser.add_argument("topics", nargs="+", metavar="topic")
        parser.add_argument(
            "--handler", required=True, help="dotted name of a function of one message"
        )
        parser.add_argument("--mode", choices=get_args(Mode), default="concurrent")
        parser.add_argument("--database", default=txmq.django.DEFAULT, help="alias of DATABASES")
        parser.add_argument("--workers", type=int, default=1, help="threads")
        parser.add_argument(
            "--idle-exit", type=float, metavar="SECONDS", help="end after so long without a message"
        )

    def handle(self, **options: Any) -> None:  # noqa: ANN401  # Django's
        """Run until SIGTERM or SIGINT."""
        try:
            handler = import_string(options["handler"])
        except ImportError as error:
            raise CommandError(f"--handler {options['handler']}: {error}") from error
        stop = Event()
        consumer = txmq.django.client().consumer(
            options["group"], options["topics"], mode=options["mode"]
        )
        with set_by_signals(stop), consumer:
            consumer.run(
                in_transaction(handler, options["database"]),
                workers=options["workers"],
                idle_exit=options["idle_exit"],
                stop=stop,
            )


@contextmanager
def set_by_signals(stop: Event) -> Iterator[None]:
    """Let SIGTERM and SIGINT set an event during the block."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def in_transaction(
    handler: Callable[[ReceivedMessage], object], using: str
) -> Callable[[ReceivedMessage], None]:
    """Return a handler whose rows, messages and ack are one decision."""

    def handle(message: ReceivedMessage) -> None:
        close_old_connections()
        with transaction.atomic(using=using, durable=True):
            txmq.django.enlist(using).ack(message)
            handler(message)

    return handle

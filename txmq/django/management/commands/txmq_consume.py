"""`manage.py txmq_consume GROUP TOPIC... --handler shop.orders.charge`: a consumer."""

from __future__ import annotations

import logging
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import Any, Literal, TextIO, get_args

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
        consumer = txmq.django.client().consumer(
            options["group"], options["topics"], mode=options["mode"]
        )
        with logged(self.stderr), consumer:
            if current_thread() is main_thread():
                consumer.stop_on_signals()
            consumer.run(
                in_transaction(handler, options["database"]),
                workers=options["workers"],
                idle_exit=options["idle_exit"],
            )


@contextmanager
def logged(stream: TextIO) -> Iterator[None]:
    """Log what consumers say to a stream during the block, unless the project logs it
    itself. Else nobody would see why a handler fails.
    """
    structlog, root, log = (
        sys.modules.get("structlog"),
        logging.getLogger(),
        logging.getLogger("txmq"),
    )
    own = [one for one in (*log.handlers, *root.handlers) if type(one) is not logging.NullHandler]
    if own or (structlog is not None and structlog.is_configured()):
        yield
        return
    handler, level = logging.StreamHandler(stream), log.level
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(level or logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


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

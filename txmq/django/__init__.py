"""Messages in Django's transactions.

    INSTALLED_APPS = [..., "txmq.django"]
    DATABASES = {"default": {"ENGINE": "txmq.django.backend", ...}}
    TXMQ = {"URL": "txmq://127.0.0.1:7650", "SERVICE": "shop"}

    with transaction.atomic():
        Order.objects.create(id=1)
        txmq.django.send("orders", body, key="c-7")

`migrate` makes txmq's tables. The outermost `atomic()` takes the messages
along with its COMMIT; inner ones are savepoints, also for messages.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import TYPE_CHECKING, Any, Unpack

from txmq.client.protocol.sender.rows import Fields
from txmq.client.protocol.transaction.options import TransactionOptions
from txmq.errors import ConfigError, LocalProtocolError
from txmq.errors.extras import require

if TYPE_CHECKING:
    from txmq.client.blocking.client import Client
    from txmq.client.blocking.cluster import Cluster
    from txmq.client.blocking.transaction.enlisted import EnlistedTransaction

require("django", "django")
DEFAULT = "default"
_connecting = threading.Lock()
BACKEND_HINT = 'use ENGINE = "txmq.django.backend" in DATABASES'


def client() -> Client | Cluster:
    """Return the client of this process, made by the setting TXMQ.

    It connects when it is first used. Raises ConfigError.
    """
    with _connecting:  # of two that are made at once, one would fence the other's `instance`
        return _client()


def forget_client() -> None:
    """Have `client()` make another one, by settings that have changed."""
    _client.cache_clear()


@cache
def _client() -> Client | Cluster:
    # Django is set up by then, and programs that only send need not load the client.
    from django.conf import settings  # noqa: PLC0415

    from txmq.client.blocking.connect import connect  # noqa: PLC0415

    given: dict[str, Any] = getattr(settings, "TXMQ", {})
    unknown = given.keys() - {"URL", "SERVICE", "OPTIONS"}
    if "URL" not in given or unknown:
        what = f"there is no {min(unknown)!r}" if unknown else "there is no 'URL'"
        raise ConfigError(
            "TXMQ", what, hint='TXMQ = {"URL": "txmq://host:port", "SERVICE": …, "OPTIONS": {…}}'
        )
    made: Client | Cluster = connect(
        given["URL"], service=given.get("SERVICE"), **given.get("OPTIONS", {})
    )
    return made


def enlist(using: str = DEFAULT, **options: Unpack[TransactionOptions]) -> EnlistedTransaction:
    """Return the messages of the open `atomic()` block of a database.

    The options are those of `client.transaction`. Raises LocalProtocolError outside of
    such a block.
    """
    from django.db import connections  # noqa: PLC0415  # as above

    from txmq.tx.postgres.drivers import driver_of  # noqa: PLC0415

    wrapper = connections[using]
    if not wrapper.in_atomic_block:
        raise LocalProtocolError(
            f"No transaction.atomic() block is open on database {using!r}",
            hint="send inside of one, or by txmq.django.client().send(...) without a transaction",
        )
    connection = wrapper.connection
    if not driver_of(connection).enlists:
        raise LocalProtocolError(
            f"The connections of database {using!r} take no messages along", hint=BACKEND_HINT
        )
    return client().enlist(connection, **options)


def send(
    topic: str,
    body: bytes,
    *,
    using: str = DEFAULT,
    partition: int | None = None,
    **fields: Unpack[Fields],
) -> None:
    """Send a message if the open `atomic()` block of a database commits.

    Raises LocalProtocolError outside of such a block, or MessageTooLarge.
    """
    enlist(using).send(topic, body, partition=partition, **fields)

"""Messages that travel as logical messages in PostgreSQL's log.

They need no broker at the time of the call and no row of their own. The relay (`txmq
relay run`) finds them in the log, in the order of the commits. Messages of a
transaction that is rolled back, or goes back to a savepoint before the call, do not
exist.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from txmq.errors import WalLevelTooLow
from txmq.faces import run
from txmq.model.causation import with_cause
from txmq.model.message import Message
from txmq.tx.postgres.caller import require_open
from txmq.tx.postgres.driver import Driver
from txmq.tx.postgres.drivers import async_driver, blocking_driver
from txmq.tx.postgres.errors import translated
from txmq.wire.logical_message import PREFIX, EmittedMessage, pack_emitted

# Where the level is too low, nothing is written, and the transaction stays as it was.
_EMIT: Final = """
SELECT level, CASE level WHEN 'logical' THEN pg_logical_emit_message(true, %s::text, %s::bytea) END
FROM current_setting('wal_level') AS level
"""


def emit(
    connection: object,
    topic: str,
    body: bytes,
    *,
    key: str | None = None,
    tag: str | None = None,
    headers: Mapping[str, str] | None = None,
    partition: int | None = None,
) -> None:
    """Send a message if the open transaction of `connection` commits: one of a driver
    that blocks.

    Messages of one `key` keep their order. Without a relay the message stays in the
    database's log. Raises WalLevelTooLow, LocalProtocolError where no transaction is
    open or the message is invalid, MessageTooLarge, TransactionAborted, DatabaseError.
    """
    payload = _packed(topic, Message(body, key, tag, headers), partition)
    run(write_emitted(blocking_driver(connection), payload))


async def emit_async(
    connection: object,
    topic: str,
    body: bytes,
    *,
    key: str | None = None,
    tag: str | None = None,
    headers: Mapping[str, str] | None = None,
    partition: int | None = None,
) -> None:
    """Send a message if the open transaction of `connection` commits: one of psycopg 3
    (AsyncConnection) or asyncpg. The rest is as for `txmq.emit`.
    """
    payload = _packed(topic, Message(body, key, tag, headers), partition)
    await write_emitted(async_driver(connection), payload)


def _packed(topic: str, message: Message, partition: int | None) -> bytes:
    message = with_cause(message)
    return pack_emitted(EmittedMessage(topic, message, partition, time.time_ns() // 1_000))


async def write_emitted(driver: Driver, payload: bytes) -> None:
    """Write a packed message into the log. Raises as `emit`."""
    require_open(driver)
    with translated("emitting a message"):
        [(level, place)] = await driver.execute(_EMIT, (PREFIX, payload))
    if place is None:
        raise WalLevelTooLow(level)

"""The database outbox: messages wait there while their broker is away.

With `on_unavailable="outbox"` the business transaction itself writes the messages to
table `txmq_outbox`. The broker, or `txmq resolver`, publishes each row as one bundle,
in the order of `seq`, and then deletes the row. The reasons why the messages of a key
keep their order are in docs/PROTOCOL.md 2.3. This module contributes two of them:

- It reads the outbox at the end of the block, under the row locks of the transaction,
  in a statement with a fresh snapshot. So a transaction sees the row of the one that it
  has waited for, and queues behind that row.
- A bundle that the broker may have already gets a new token for its row. The old token
  is fenced in the same transaction, so that the bundle can only be rolled back. Until
  then its order ticket holds its keys, and later transactions on them wait.

A transaction without that policy queues only behind rows that have one of its keys. It
has to look before its bundle is stored: later the broker may have published and
deleted such a row behind the bundle. The look costs no round trip where the INSERT of
the token finds the stamp of the outbox that this client knew before. No row was there
in between then. Another stamp is a conflict, and the next transactions look first: in a
database whose outbox is always in use, each would be a conflict.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar
from uuid import UUID

from txmq.client.log import get_logger
from txmq.client.protocol.awaited.bundle import StoringBundle
from txmq.client.protocol.transaction.outbox_entries import order_keys, outbox_entries
from txmq.errors import (
    BrokerUnavailable,
    ConnectionLost,
    DatabaseConflict,
    ReadOnly,
    RequestTimeout,
    TxmqError,
)
from txmq.tx.outbox_entry import pack_entries
from txmq.tx.postgres.driver import Driver
from txmq.tx.postgres.identity import ServerIdentity
from txmq.tx.postgres.outbox import (
    NewOutboxRow,
    OutboxStatus,
    enqueue,
    read_key_status,
    read_readers,
    read_status,
)
from txmq.tx.postgres.tokens import SeenBroker

UNAVAILABLE = (BrokerUnavailable, ConnectionLost, RequestTimeout, ReadOnly)
NO_QUEUE = OutboxStatus(fetched=False, waiting=False)
AnyBundle = StoringBundle[Any]
B = TypeVar("B", bound=AnyBundle)
P = ParamSpec("P")
log = get_logger()


class OutboxFallback:
    """The bundles of one transaction that go to the outbox.

    Those of brokers that are away go there only if it is `enabled`; those with earlier
    transactions before them go there in any case.
    """

    def __init__(self, driver: Driver, *, enabled: bool) -> None:
        self._driver, self._enabled = driver, enabled
        self._queues: dict[UUID, OutboxStatus] = {}
        # With the token that the row's new one replaces, if any.
        self._outbox_bundles: dict[AnyBundle, UUID | None] = {}
        self._database = (0, 0)
        # Of brokers at whose queues this transaction has not looked.
        self._expected_stamps: dict[UUID, int] = {}

    async def check_queues(
        self, bundles: Sequence[AnyBundle], server: ServerIdentity
    ) -> list[UUID]:
        """Queue the bundles behind earlier transactions that wait for their broker.
        Return the log of each one's broker.

        Raises BrokerUnavailable if that is unknown or impossible, DatabaseConflict if a
        snapshot hides it, LocalProtocolError or DatabaseError.
        """
        if self._enabled:
            logs = [await self._log_of(bundle) for bundle in bundles]
            self._queues = await read_status(self._driver, logs)
            for bundle, log_id in zip(bundles, logs, strict=True):
                if self._queues[log_id].waiting:
                    await self._move_to_outbox(
                        bundle, BrokerUnavailable("Earlier transactions wait for the broker")
                    )
            return logs
        self._database = server.system_id, server.database_oid
        logs = [await bundle.log_id() for bundle in bundles]
        for bundle, log_id in zip(bundles, logs, strict=True):
            known = bundle.core.outbox_stamps[self._database]
            if known.stamp is None or known.looks:
                await self._queue_behind_keys(bundle, log_id)
            else:
                self._expected_stamps[log_id] = known.stamp
        return logs

    def check_stamps(
        self, bundles: Sequence[AnyBundle], logs: Sequence[UUID], seen: Mapping[UUID, SeenBroker]
    ) -> None:
        """Check that no rows came or went unseen, as the token's rows show.

        Raises DatabaseConflict.
        """
        if self._enabled:
            return
        for bundle, log_id in zip(bundles, logs, strict=True):
            known, stamp = bundle.core.outbox_stamps[self._database], seen[log_id].outbox_stamp
            bundle.core.outbox_stamps[self._database] = known.seen(stamp)
        for log_id, expected in self._expected_stamps.items():
            if seen[log_id].outbox_stamp != expected:
                raise DatabaseConflict(
                    f"The outbox for the broker of log {log_id} came into use or was emptied "
                    "during the transaction",
                    hint="run the transaction again",
                )

    def forget_stamps(self, bundles: Sequence[AnyBundle]) -> None:
        """Let the next transaction look at the outbox before it sends anything."""
        for bundle in bundles:
            known = bundle.core.outbox_stamps[self._database]
            bundle.core.outbox_stamps[self._database] = known._replace(stamp=None)

    async def _queue_behind_keys(self, bundle: AnyBundle, log_id: UUID) -> None:
        keys = order_keys(bundle.buffer.items)
        self._queues[log_id] = queue = await read_key_status(self._driver, log_id, keys)
        if queue.waiting:
            # Where the broker is away, the transaction fails.
            await bundle.ping()
            await self._move_to_outbox(
                bundle, BrokerUnavailable("Earlier transactions on the same keys wait")
            )

    def sent_directly(self, bundles: list[B]) -> list[B]:
        """Return the bundles that do not go to the outbox."""
        return [bundle for bundle in bundles if not bundle.in_outbox]

    async def cover(
        self,
        bundle: AnyBundle,
        call: Callable[P, Awaitable[object]],
        *args: P.args,
        **options: P.kwargs,
    ) -> None:
        """Make a call of the broker, unless the bundle is in the outbox; it goes there
        if the broker is away.
        """
        if bundle.in_outbox:
            return
        try:
            await call(*args, **options)
        except UNAVAILABLE as error:
            if not self._enabled:
                raise
            bundle.abandon()
            await self._move_to_outbox(bundle, error)

    async def write_rows(self) -> None:
        """Write the rows of the outbox. Raises MessageTooLarge or DatabaseError."""
        if not self._outbox_bundles:
            return
        rows = []
        for bundle, replaced in self._outbox_bundles.items():
            entries, messages = outbox_entries(
                bundle.buffer.items, bundle.core.topics, bundle.token
            )
            rows.append(
                NewOutboxRow(
                    await bundle.log_id(),
                    bundle.token,
                    replaced,
                    bundle.core.settings.service or "",
                    messages,
                    order_keys(bundle.buffer.items),
                    pack_entries(entries),
                )
            )
        await enqueue(self._driver, rows)

    async def _log_of(self, bundle: AnyBundle) -> UUID:
        """Return the log of a bundle's broker. Where that is away and was never met, it
        is the only one that works on the database, as in SQL's txmq.send.
        """
        try:
            return await bundle.log_id()
        except UNAVAILABLE as error:
            logs = await read_readers(self._driver)
            if len(logs) != 1:
                raise BrokerUnavailable(
                    f"{error.message}; {len(logs)} brokers work on this database, and the "
                    "outbox needs the id of its log",
                    hint="give it to a client that may start before its broker, as "
                    'connect(url, log_id="…"); `txmq schema brokers DSN` lists it',
                ) from error
            bundle.core.expect_log(logs[0])  # unless it was met meanwhile
            return await bundle.log_id()

    async def _move_to_outbox(self, bundle: AnyBundle, error: TxmqError) -> None:
        log_id = await bundle.log_id()
        if not self._queues.get(log_id, NO_QUEUE).fetched:
            raise BrokerUnavailable(
                f"{error.message}; no broker of log {log_id} reads this outbox",
                hint="name this database under [[resolver]] in the broker's settings",
            )
        if bundle.buffer.actions:
            raise BrokerUnavailable(
                f"{error.message}; acks cannot wait in the outbox",
                hint="run the transaction again when the broker delivers the message again",
            )
        self._outbox_bundles[bundle] = bundle.token if bundle.sent else None
        bundle.move_to_outbox()
        log.warning(
            "transaction.queued",
            token=str(bundle.token),
            log_id=str(log_id),
            reason=error.message,
        )

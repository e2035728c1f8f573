"""The token row: proof of a commit, written in the business transaction.

The caller sends the bundle to the broker first and calls `insert_token` while the
broker's answer is under way: the two need no order between them, because row and fence
alone decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple
from uuid import UUID

from txmq.errors import DatabaseError, SynchronousCommitOff, TokenFenced, TransactionAborted
from txmq.tx.postgres.caller import failure, require_open
from txmq.tx.postgres.caller_block import CallerBlock
from txmq.tx.postgres.driver import Driver
from txmq.tx.postgres.errors import (
    CHECK_VIOLATION,
    NO_SAVEPOINT,
    UNIQUE_VIOLATION,
    DriverError,
    translated,
)
from txmq.tx.postgres.identity import SeenServer, parse_lsn

# under these, COMMIT returns before the row is on disk here, or at the standby
WEAK: Final = ("off", "local")
# Row and circumstances by a function, in schema.sql: its plans are kept.
_INSERT: Final = (
    "SELECT pg_catalog.array_to_string(public.txmq_token_insert(%s::uuid, %s::uuid), ' ', '-')"
)
# `remote_write` trusts the standby's kernel; `remote_apply` is stronger than `on`.
_STRENGTHEN: Final = "SELECT set_config('synchronous_commit', 'on', true)"

# A snapshot that is older than this statement could hide the report.
_MAY_HAVE_REPORTED: Final = """
SELECT current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted')
    OR EXISTS (SELECT FROM public.txmq_broker WHERE log_id = %s::uuid AND boot_epoch >= %s::int8)
"""


class SeenBroker(NamedTuple):
    """What the transaction's database shows of a broker."""

    boot_epoch: int  # in which it has last reported; 0 = never
    outbox_stamp: int | None  # None = rows wait in its outbox, or may


class InsertedToken(NamedTuple):
    """The transaction's circumstances when it wrote its token rows.

    `brokers` has, by its log, what is shown of each broker.
    """

    server: SeenServer
    brokers: dict[UUID, SeenBroker]


async def insert_token(
    driver: Driver,
    token: UUID,
    log_ids: Sequence[UUID],
    *,
    allow_weak_commit: bool = False,
    block: CallerBlock | None = None,
) -> InsertedToken:
    """Write a row per participating broker's log into the open transaction.

    It takes one round trip. It is the last statement before `guarded_commit`. After any
    error the transaction must be rolled back: TokenFenced where a resolver was faster;
    SynchronousCommitOff under `off` or `local` unless `allow_weak_commit` accepts that
    a crash may undo what was published; TransactionAborted where a statement had failed
    before; TransactionEnded where this is not the transaction of `block` any more;
    DatabaseError.
    """
    if block is None:
        require_open(driver)
    else:
        block.require_open()
    # Sorted, so that no two writers of several rows can wait for one another.
    ordered = sorted(log_ids)
    statement = " UNION ALL ".join([_INSERT] * len(ordered))
    if block is not None:
        statement = block.proof + statement
    name, brokers = str(token), dict[UUID, SeenBroker]()
    values = [text for log_id in ordered for text in (name, str(log_id))]
    try:
        rows = await driver.execute(statement, values)
        for log_id, (row,) in zip(ordered, rows, strict=True):
            setting, mark, epoch, stamp, system_id, timeline, position = row.split()
            brokers[log_id] = SeenBroker(_number(epoch) or 0, _number(stamp))
        if block is not None:
            block.require_same(mark)
        if setting == "remote_write":
            [(setting,)] = await driver.execute(_STRENGTHEN)
    except DriverError as error:
        if block is not None and error.sqlstate in NO_SAVEPOINT:
            raise block.ended() from None
        raise _refusal(error, token) from None
    if setting in WEAK and not allow_weak_commit:
        raise SynchronousCommitOff(
            f"synchronous_commit is {setting}",
            hint="SET synchronous_commit = on, or allow it and accept the risk",
        )
    server = SeenServer(int(system_id), int(timeline, 16), parse_lsn(position))
    return InsertedToken(server, brokers)


async def may_have_reported(driver: Driver, log_id: UUID, boot_epoch: int) -> bool:
    """Return whether the log's broker has reported here in that boot epoch or a later
    one, or the caller's snapshot may hide that.

    Raises DatabaseError.
    """
    with translated("reading a broker's report"):
        [(may,)] = await driver.execute(_MAY_HAVE_REPORTED, (str(log_id), boot_epoch))
    return bool(may)


def _number(text: str) -> int | None:
    return None if text == "-" else int(text)


def _refusal(error: DriverError, token: UUID) -> TokenFenced | DatabaseError | TransactionAborted:
    if error.sqlstate == UNIQUE_VIOLATION:
        return TokenFenced(
            f"transaction {token} was decided as rolled back before it could commit",
            hint="roll back",
        )
    refused = failure(error, "writing the token")
    if error.sqlstate == CHECK_VIOLATION:
        refused = DatabaseError(
            refused.message,
            hint="the token is too old: check this machine's clock",
            sqlstate=error.sqlstate,
        )
    return refused

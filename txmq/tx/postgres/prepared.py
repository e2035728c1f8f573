"""Two-phase commit: PREPARE with proof that it happened, and the end of branches.

Drivers' `tpc_prepare()` returns without an error when the server answered ROLLBACK,
because a statement had failed and its error was swallowed. So each driver looks at what
the server has done: `Driver.prepare`.

Branches are begun as `CallerBlock`: `commit()` and `rollback()` would tear a branch out
of its transaction. PREPARE gives them their gids.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from txmq.errors import (
    DatabaseError,
    InDoubt,
    LocalProtocolError,
    TransactionAborted,
    TwoPhaseFull,
    TwoPhaseOff,
)
from txmq.tx.postgres.caller import require_healthy, roll_back
from txmq.tx.postgres.caller_block import CallerBlock
from txmq.tx.postgres.commit import NOT_REPLICATED
from txmq.tx.postgres.driver import Driver, Status
from txmq.tx.postgres.errors import CONFLICTS, DriverError, describe, translate, translated
from txmq.tx.postgres.identity import Server, ServerIdentity, parse_lsn
from txmq.tx.xid import XaBranch

NOT_SUPPORTED: Final = "0A000"
UNKNOWN_GID: Final = "42704"
SWITCHED_OFF: Final = "55000"
FULL: Final = "53200"
SWITCH_ON: Final = (
    "set max_prepared_transactions above the number of connections and restart the server"
)

# A weak PREPARE would be on disk here, and not at a synchronous standby. PREPARE warns
# where none has confirmed it.
# The COMMIT of a serializable transaction may be refused, even if it only read: with an
# id it is prepared, which decides that before the vote.
_LOOK: Final = """
SELECT CASE current_setting('transaction_isolation') WHEN 'serializable' THEN pg_current_xact_id()
            ELSE pg_current_xact_id_if_assigned() END::text,
       current_user::text, current_setting('transaction_deferrable'),
       (SELECT system_identifier FROM pg_control_system()),
       left(pg_walfile_name(pg_current_wal_insert_lsn()), 8),
       (SELECT oid::int8 FROM pg_database WHERE datname = current_database()),
       pg_current_wal_insert_lsn()::text,
       to_regprocedure('public.txmq_outbox_waits(uuid, int8[])') IS NOT NULL,
       CASE WHEN current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')
            THEN set_config('synchronous_commit', 'on', true) END,
       CASE current_setting('client_min_messages')
            WHEN 'error' THEN set_config('client_min_messages', 'warning', true) END
"""


class NotReplicated(InDoubt):
    """The branch is prepared, and no synchronous standby has confirmed it: a failover
    would lose it.
    """


class Work(NamedTuple):
    """The work of a branch.

    `xid` is its transaction id, None where it has nothing to prepare. What it wrote is
    in the write-ahead log of `server` before `position`, and PREPARE behind it.
    `has_outbox`: the database has txmq's tables, which it need not have.
    """

    xid: int | None
    owner: str
    server: ServerIdentity
    position: int
    has_outbox: bool = False


class Ending(Enum):
    """The result of ending a prepared branch."""

    DONE = "by this call"
    FOUND = "somebody else had ended it that way"
    OTHERWISE = "somebody ended it the other way"
    UNKNOWN = "it is not there, and how it ended cannot be told"


BY_OTHERS: Final = (Ending.FOUND, Ending.OTHERWISE)  # told by the status of an id


def require_two_phase(server: Server) -> None:
    """Raises TwoPhaseOff where the server has two-phase commit switched off."""
    if server.max_prepared_transactions == 0:
        raise TwoPhaseOff("the server's max_prepared_transactions is 0", hint=SWITCH_ON)


async def look(driver: Driver, block: CallerBlock) -> Work:
    """Return the work of the open branch, which may write nothing from here on.

    It proves in the same round trip that the transaction is still that of `block`, and
    releases its savepoint. Raises TransactionEnded where it is not; as `prepare`.
    """
    block.require_open()
    try:
        [row] = await driver.execute(block.proof + _LOOK)
    except DriverError as error:
        raise block.refusal(error, "looking at a branch") from None
    xid, owner, mark, system_id, timeline, oid, position, has_outbox, *_settings = row
    block.require_same(mark)
    server = ServerIdentity(system_id, int(timeline, 16), oid)
    number = None if xid is None else int(xid)
    return Work(number, owner, server, parse_lsn(position), has_outbox)


async def prepare(driver: Driver, branch: XaBranch) -> None:
    """Prepare the open branch; return only if it is prepared.

    Afterwards the connection is ready for other work. Raises NotReplicated, and InDoubt
    where nobody knows. Every other error means that it certainly is not prepared:
    TransactionAborted, DatabaseConflict, TwoPhaseFull, TwoPhaseOff.
    """
    _require_open(driver, branch)
    try:
        with driver.noted() as notices:
            prepared = await driver.prepare(branch.gid)
    except DriverError as error:
        raise await _refusal(driver, error, branch) from None
    if not prepared:
        raise TransactionAborted(
            "the server answered ROLLBACK to PREPARE: a statement of the transaction had failed"
        )
    if any(NOT_REPLICATED in notice for notice in notices):
        raise NotReplicated(
            f"no synchronous standby has confirmed PREPARE of branch {branch.number}",
            token=str(branch.token),
            hint="run the transaction again when a standby is back",
        )


async def commit_prepared(driver: Driver, gid: str, xid: int | None) -> Ending:
    """Commit a prepared branch of this database, over any idle connection of its owner.

    A missing gid proves nothing by itself: the status of the transaction `xid`, as it
    was prepared, does. Raises DatabaseError where the branch stands as before, or
    nobody knows: try again later.
    """
    return await _finish(driver, gid, xid, commit=True)


async def roll_back_prepared(driver: Driver, gid: str, xid: int | None) -> Ending:
    """Roll back a prepared branch, as `commit_prepared` commits it."""
    return await _finish(driver, gid, xid, commit=False)


def _require_open(driver: Driver, branch: XaBranch) -> None:
    """Guard against PREPARE of a failed transaction, which is a silent rollback."""
    status = driver.status
    if status is Status.OPEN:
        return
    require_healthy(driver)
    if status is Status.UNKNOWN:
        raise TransactionAborted("the connection was lost before PREPARE was sent")
    if status is Status.IDLE:
        hint = "nobody may commit or roll back inside the block"
        raise InDoubt(
            f"somebody ended branch {branch.number} before its end",
            token=str(branch.token),
            hint=hint,
        )
    raise LocalProtocolError(
        "the connection is busy", hint="use one connection per thread and transaction"
    )


async def _refusal(
    driver: Driver, error: DriverError, branch: XaBranch
) -> DatabaseError | TransactionAborted | InDoubt:
    """Return the error to raise for a failed PREPARE.

    An ERROR with the server idle again is PREPARE's own; the query after it fails
    inside a transaction.
    """
    certain = driver.status is Status.IDLE and error.severity == "ERROR"
    await roll_back(driver)
    text = f"PREPARE of branch {branch.number}: {describe(error)}"
    if not certain:
        return InDoubt(
            f"{text}: it was sent and not answered",
            token=str(branch.token),
            hint="recovery finds out",
        )
    if error.sqlstate == SWITCHED_OFF:
        return TwoPhaseOff(text, hint=SWITCH_ON, sqlstate=error.sqlstate)
    if error.sqlstate == FULL:
        return TwoPhaseFull(
            text,
            hint="raise max_prepared_transactions, or look for orphans",
            sqlstate=error.sqlstate,
        )
    if error.sqlstate in CONFLICTS:
        return translate(error, "PREPARE")
    if error.sqlstate == NOT_SUPPORTED:
        hint = "use no temporary tables, LISTEN, NOTIFY, WITH HOLD cursors or exported snapshots"
        return TransactionAborted(f"{text}: such work cannot be prepared", hint=hint)
    return TransactionAborted(f"the server refused: {text}")


async def _finish(driver: Driver, gid: str, xid: int | None, *, commit: bool) -> Ending:
    try:
        await driver.finish_prepared(gid, commit=commit)
    except DriverError as error:
        if error.sqlstate != UNKNOWN_GID:
            raise translate(error, f"{'COMMIT' if commit else 'ROLLBACK'} PREPARED") from None
        return await _ended(driver, xid, commit=commit)
    return Ending.DONE


async def _ended(driver: Driver, xid: int | None, *, commit: bool) -> Ending:
    """Return the end of a prepared transaction.

    PREPARE wrote its id to disk, so no other transaction has that id.
    """
    if xid is None:
        return Ending.UNKNOWN
    with translated("asking how a branch ended"):
        [(status,)] = await driver.execute("SELECT pg_xact_status(%s::text::xid8)", (str(xid),))
        await driver.roll_back()
    if status not in ("committed", "aborted"):
        return Ending.UNKNOWN
    return Ending.FOUND if (status == "committed") == commit else Ending.OTHERWISE

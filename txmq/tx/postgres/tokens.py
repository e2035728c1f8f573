"""The token row: proof of a commit, written in the business transaction.

The caller sends the bundle to the broker first and calls `insert_token` while the
broker's answer is under way: the two need no order between them, because row and fence
alone decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final, NamedTuple
from uuid import UUID

import psycopg2

from txmq.errors import DatabaseError, SynchronousCommitOff, TokenFenced
from txmq.tx.postgres.caller import require_open
from txmq.tx.postgres.caller_block import NO_SAVEPOINT, CallerBlock
from txmq.tx.postgres.errors import CHECK_VIOLATION, UNIQUE_VIOLATION, translate
from txmq.tx.postgres.identity import NAMED_SERVER, NamedServer
from txmq.tx.postgres.session import Connection

# under these, COMMIT returns before the row is on disk here, or at the standby
WEAK: Final = ("off", "local")
# The statement returns the setting of synchronous_commit, but NULL for `on`: decoding
# text costs more than writing it. The mark is that of a caller's block. COMMIT itself
# warns that no synchronous standby has confirmed it, so warnings are let through.
_INSERT: Final = """
INSERT INTO public.txmq_token AS token (tok, log_id) VALUES {}
    RETURNING nullif(current_setting('synchronous_commit'), 'on'), log_id::text,
    (SELECT boot_epoch FROM public.txmq_broker broker WHERE broker.log_id = token.log_id),
    public.txmq_outbox_stamp(log_id), current_setting('transaction_deferrable'),
    CASE current_setting('client_min_messages') WHEN 'error'
        THEN set_config('client_min_messages', 'warning', true) END,
"""
# `remote_write` trusts the standby's kernel; `remote_apply` is stronger than `on`.
_STRENGTHEN: Final = "SELECT set_config('synchronous_commit', 'on', true)"


class InsertedToken(NamedTuple):
    """The transaction's circumstances when it wrote its token rows.

    `boot_epochs` has, by log, the boot epoch in which the broker has last reported to
    this database; None = never. `outbox_stamps` has, by log, the stamp of its outbox;
    None = rows wait there, or may.
    """

    synchronous_commit: str  # that the transaction will commit under
    server: NamedServer
    boot_epochs: dict[UUID, int | None]
    outbox_stamps: dict[UUID, int | None]


def insert_token(
    connection: Connection,
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
        require_open(connection)
    else:
        block.require_open()
    statement = _insert(len(log_ids))
    # Sorted, so that no two writers of several rows can wait for one another.
    values = [text for log_id in sorted(log_ids) for text in (str(token), str(log_id))]
    try:
        with connection.cursor() as cursor:
            cursor.execute(statement if block is None else block.proof + statement, values)
            rows = cursor.fetchall()
            setting, *_, mark, _level, system_id, timeline, position = rows[0]
            if block is not None:
                block.require_same(mark)
            if setting == "remote_write":
                cursor.execute(_STRENGTHEN)
                [(setting,)] = cursor.fetchall()
    except psycopg2.Error as error:
        if block is not None and error.pgcode in NO_SAVEPOINT:
            raise block.ended() from None
        raise _refusal(error, token) from None
    if setting in WEAK and not allow_weak_commit:
        raise SynchronousCommitOff(
            f"synchronous_commit is {setting}",
            hint="SET synchronous_commit = on, or allow it and accept the risk",
        )
    return InsertedToken(
        setting or "on",
        NamedServer.read(system_id, timeline, position),
        {UUID(log_id): epoch for _setting, log_id, epoch, *_ in rows},
        {UUID(log_id): stamp for _setting, log_id, _epoch, stamp, *_ in rows},
    )


@cache
def _insert(rows: int) -> str:
    return _INSERT.format(", ".join(["(%s, %s)"] * rows)) + NAMED_SERVER


def _refusal(error: psycopg2.Error, token: UUID) -> TokenFenced | DatabaseError:
    if error.pgcode == UNIQUE_VIOLATION:
        return TokenFenced(
            f"transaction {token} was decided as rolled back before it could commit",
            hint="roll back",
        )
    refused = translate(error, "writing the token")
    if error.pgcode == CHECK_VIOLATION:
        refused = DatabaseError(
            refused.message,
            hint="the token is too old: check this machine's clock",
            sqlstate=error.pgcode,
        )
    return refused

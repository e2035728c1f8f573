"""`txmq tx`: undecided transactions, and decisions of operators."""

from __future__ import annotations

import time
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer

from txmq.cli.command import CommandSession, broker_command
from txmq.cli.commands.audit import brief_entries
from txmq.cli.database import Dsn, open_database
from txmq.cli.options import Bodies, ByForReason, Limit, Token
from txmq.cli.output import FAILED, format_time
from txmq.cli.parsers import parse_moment, parse_token
from txmq.cli.rows import with_decoded_body
from txmq.model.decider import branch_in_words, decided_by
from txmq.model.units import DAY, MILLISECOND

app = typer.Typer(
    name="tx", no_args_is_help=True, help="List, show, decide and check transactions."
)
COLUMNS = (
    "token",
    "state",
    "service",
    "messages",
    "stored_at",
    "tries",
    "in_doubt",
    "check_reason",
)


LOST_COLUMNS = ("token", "service", "messages", "stored_at", "decided_at", "by")


class TransactionFilter(StrEnum):
    """State of the transactions to list."""

    UNDECIDED = "undecided"
    IN_DOUBT = "in-doubt"
    WAITING = "waiting"
    OPEN = "open"
    CONFLICTS = "conflicts"


OptionalToken = Annotated[
    str | None,
    typer.Argument(
        metavar="TOKEN",
        parser=parse_token,
        help="Token of the transaction; without it, all undecided transactions.",
    ),
]


@broker_command(app, "list", example="txmq tx list --state in-doubt")
def list_(
    session: CommandSession,
    *,
    state: Annotated[
        TransactionFilter,
        typer.Option(
            help="State to list. waiting: committed, but behind earlier transactions of its "
            "keys; open: not all parts are stored; conflicts: refused opposite decisions.",
        ),
    ] = TransactionFilter.UNDECIDED,
    limit: Limit = 100,
) -> None:
    """List transactions, the oldest first. Conflicts: the newest first."""
    columns = () if state is TransactionFilter.CONFLICTS else COLUMNS
    session.show("tx.list", columns=columns, state=state.value, limit=limit)


@broker_command(app, "show", example="txmq tx show 019a0000000070008000000000000001 --bodies")
def show(
    session: CommandSession,
    token: Token,
    *,
    bodies: Bodies = False,
    after: Annotated[
        int, typer.Option(min=0, help="Skip this many messages: `next` of the page before.")
    ] = 0,
    limit: Limit = 100,
) -> None:
    """Show a transaction: its decider, outcome, messages, and the transactions ahead of
    it.
    """
    args = {"token": token, "detail": True, "after": after, "limit": limit, "bodies": bodies}
    reply = session.client.call("tx.show", **args)
    shown = reply | {"rows": [with_decoded_body(row) for row in reply.get("rows", ())]}
    if not session.out.as_json:
        shown["operations"] = brief_entries(shown.get("operations", ()))
        shown = _in_words(shown)
    session.out.show(shown)


def _in_words(shown: Mapping[str, Any]) -> dict[str, Any]:
    """Return a transaction with its decider and participants as people read them."""
    words: dict[str, Any] = {}
    if shown.get("decider"):
        words["decider"] = decided_by(shown["decider"])
    if shown.get("participants"):
        words["participants"] = [{"branch": branch_in_words(one)} for one in shown["participants"]]
    return {**shown, **words}


Force = Annotated[
    bool,
    typer.Option(
        "--force", help="Decide though the database that decides it does not know the outcome."
    ),
]


@broker_command(
    app, "commit", example="txmq tx commit 019a0000000070008000000000000001 --reason 'has a row'"
)
def commit(session: CommandSession, token: Token, *, by: ByForReason, force: Force = False) -> None:
    """Commit an undecided transaction by hand, and publish its messages. There is no
    undo.
    """
    _decide(session, token, "COMMIT", by, force=force)


@broker_command(
    app, "rollback", example="txmq tx rollback 019a0000000070008000000000000001 --reason 'no row'"
)
def rollback(
    session: CommandSession, token: Token, *, by: ByForReason, force: Force = False
) -> None:
    """Roll back an undecided transaction by hand, and drop its messages. There is no
    undo.
    """
    _decide(session, token, "ROLLBACK", by, force=force)


def _decide(
    session: CommandSession, token: str, outcome: str, by: ByForReason, *, force: bool
) -> None:
    reply = session.client.call(
        "tx.decide", token=token, outcome=outcome, **by._asdict(), force=force
    )
    session.out.show(reply)


@broker_command(app, "lost", example="txmq tx lost postgresql://db/shop --since 2d")
def lost(
    session: CommandSession,
    dsn: Dsn,
    *,
    since: Annotated[
        int | None,
        typer.Option(
            parser=parse_moment,
            metavar="TIME|AGO",
            help="Start, as 2026-07-01T12:00:00Z, or so long ago, as 2d; at most a week ago.",
            show_default="a day ago",
        ),
    ] = None,
) -> None:
    """Show committed transactions whose rows the database lacks, as after a failover
    that has lost commits. Exit status 1: there are some.
    """
    from txmq.client.protocol.transaction.tokens import first_token_at
    from txmq.recover.lost_commits import find_lost

    start = time.time_ns() // 1_000 - DAY if since is None else since
    with open_database(dsn, "tx lost") as connection:
        report = find_lost(session.client, connection, first_token_at(start))
    session.out.show(
        {
            "compared": report.compared,
            "since": format_time((report.since.int >> 80) * MILLISECOND),
            "transactions": [
                {column: row[column] for column in LOST_COLUMNS} for row in report.lost
            ],
        }
    )
    if report.lost:
        raise typer.Exit(FAILED)


@broker_command(app, "check", example="txmq tx check")
def check(session: CommandSession, token: OptionalToken = None) -> None:
    """Check back on undecided transactions now, without waiting for the next scheduled
    check.
    """
    session.show("tx.check", token=token)

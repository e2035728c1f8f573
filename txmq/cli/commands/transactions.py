"""`txmq tx`: transactions that are undecided, and the decisions of operators."""

from __future__ import annotations

from base64 import b64decode
from enum import StrEnum
from typing import Annotated, Any

import typer

from txmq.cli.command import Session, remote
from txmq.cli.options import Operator, Reason, Token, token_of
from txmq.cli.output import body_fields

app = typer.Typer(no_args_is_help=True, help="Transactions.")
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


class State(StrEnum):
    """Which transactions to list."""

    UNDECIDED = "undecided"
    IN_DOUBT = "in-doubt"
    WAITING = "waiting"
    OPEN = "open"
    CONFLICTS = "conflicts"


OneOrAll = Annotated[
    str | None,
    typer.Argument(
        metavar="TOKEN", parser=token_of, help="Token of the transaction; all undecided without it."
    ),
]


@remote(app, "list")
def list_(
    session: Session,
    *,
    state: Annotated[
        State,
        typer.Option(help="Which; waiting: committed, behind others; open: parts are missing."),
    ] = State.UNDECIDED,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="How many at most.")] = 100,
) -> None:
    """List transactions, the oldest first; of conflicts, the newest."""
    columns = () if state is State.CONFLICTS else COLUMNS
    session.show("tx.list", columns=columns, state=state.value, limit=limit)


@remote(app, "show")
def show(
    session: Session,
    token: Token,
    *,
    bodies: Annotated[
        bool, typer.Option("--bodies", help="With the bodies of the messages.")
    ] = False,
    after: Annotated[
        int, typer.Option(min=0, help="Go on behind so many messages: `next` of the page before.")
    ] = 0,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="How many messages at most.")] = 100,
) -> None:
    """Show a transaction: who decides it, what became of it, whom it waits for, and the
    messages that it holds.
    """
    args = {"token": token, "detail": True, "after": after, "limit": limit, "bodies": bodies}
    reply = session.client.call("tx.show", **args)
    session.out.show(reply | {"rows": [_readable(row) for row in reply.get("rows", ())]})


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    """The message with its body, where it has come along, as text if it is text."""
    body = row.pop("body", None)
    return row | body_fields(b64decode(body)) if body is not None else row


@remote(app, "commit")
def commit(session: Session, token: Token, *, reason: Reason, operator: Operator) -> None:
    """Commit an undecided transaction by hand: its messages go out. Nothing takes this
    back.
    """
    session.show("tx.decide", token=token, outcome="COMMIT", operator=operator, reason=reason)


@remote(app, "rollback")
def rollback(session: Session, token: Token, *, reason: Reason, operator: Operator) -> None:
    """Roll an undecided transaction back by hand: its messages are gone. Nothing takes
    this back.
    """
    session.show("tx.decide", token=token, outcome="ROLLBACK", operator=operator, reason=reason)


@remote(app, "check")
def check(session: Session, token: OneOrAll = None) -> None:
    """Ask now what became of an undecided transaction, instead of when it is due."""
    session.show("tx.check", token=token)

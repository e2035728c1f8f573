"""`txmq tx`: transactions that are undecided, and the decisions of operators."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from txmq.cli.command import Session, remote
from txmq.cli.options import Operator, Reason, Token, token_of

app = typer.Typer(no_args_is_help=True, help="Transactions.")
COLUMNS = ("token", "state", "service", "messages", "stored_at", "tries", "in_doubt")  # as many as a line holds


class State(StrEnum):
    """Which transactions to list."""

    UNDECIDED = "undecided"
    IN_DOUBT = "in-doubt"
    WAITING = "waiting"
    CONFLICTS = "conflicts"


OneOrAll = Annotated[
    str | None,
    typer.Argument(metavar="TOKEN", parser=token_of, help="Token of the transaction; all undecided without it."),
]


@remote(app, "list")
def list_(
    session: Session,
    *,
    state: Annotated[State, typer.Option(help="Which; waiting: committed, behind an undecided one.")] = State.UNDECIDED,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="How many at most.")] = 100,
) -> None:
    """List transactions, the oldest first."""
    columns = () if state is State.CONFLICTS else COLUMNS
    session.show("tx.list", columns=columns, state=state.value, limit=limit)


@remote(app, "show")
def show(session: Session, token: Token) -> None:
    """Show a transaction: its batches, who decides it, what became of it."""
    session.show("tx.show", token=token)


@remote(app, "commit")
def commit(session: Session, token: Token, *, reason: Reason, operator: Operator) -> None:
    """Commit an undecided transaction by hand: its messages go out. Nothing takes this back."""
    session.show("tx.decide", token=token, outcome="COMMIT", operator=operator, reason=reason)


@remote(app, "rollback")
def rollback(session: Session, token: Token, *, reason: Reason, operator: Operator) -> None:
    """Roll an undecided transaction back by hand: its messages are gone. Nothing takes this back."""
    session.show("tx.decide", token=token, outcome="ROLLBACK", operator=operator, reason=reason)


@remote(app, "check")
def check(session: Session, token: OneOrAll = None) -> None:
    """Ask now what became of an undecided transaction, instead of when it is due."""
    session.show("tx.check", token=token)

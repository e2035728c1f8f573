"""`txmq user token`: tokens by which programs log in to the broker's HTTP."""

from __future__ import annotations

import hashlib
import secrets
from typing import Annotated

import typer

from txmq.cli.command import CommandSession, broker_command
from txmq.cli.options import By, User
from txmq.cli.parsers import parse_name
from txmq.model.units import DAY, SECOND

app = typer.Typer(
    name="token",
    no_args_is_help=True,
    help="Make, list and revoke tokens for the broker's HTTP (Bearer).",
)
PREFIX = "txmq_"  # scanners of repositories find it
BYTES = 32

Token = Annotated[str, typer.Argument(metavar="NAME", parser=parse_name, help="Token's name.")]


@broker_command(app, "add", example="txmq user token add ada scripts --days 30")
def add(
    session: CommandSession,
    user: User,
    name: Token,
    *,
    days: Annotated[
        int, typer.Option(min=1, max=3_650, help="Days for which the token is valid.")
    ] = 90,
    by: By,
) -> None:
    """Make a token with the rights of a user, and show it: this once. The broker has
    its digest only.
    """
    token = PREFIX + secrets.token_urlsafe(BYTES)
    digest = hashlib.sha256(token.encode()).hexdigest()
    session.client.call(
        "token.add", name=user, token=name, digest=digest, expire_s=days * DAY // SECOND,
        **by._asdict(),
    )  # fmt: skip
    session.out.show({"user": user, "name": name, "days": days, "token": token})


@broker_command(app, "revoke", example="txmq user token revoke ada scripts")
def revoke(session: CommandSession, user: User, name: Token, *, by: By) -> None:
    """Take a token back, at once."""
    session.show("token.revoke", name=user, token=name, **by._asdict())


@broker_command(app, "list", example="txmq user token list")
def list_(
    session: CommandSession,
    user: Annotated[
        str | None, typer.Argument(metavar="USER", help="Only the tokens of this user.")
    ] = None,
) -> None:
    """List tokens: their users and names, and until when they are valid."""
    found = session.read_pages("user.list", "users", name=user)["users"]
    tokens = [{"user": one["user"], **row} for one in found for row in one["tokens"]]
    session.out.show({"tokens": tokens})

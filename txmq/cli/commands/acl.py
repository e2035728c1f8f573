"""`txmq acl`: what the users of a broker may do."""

from __future__ import annotations

from typing import Annotated

import typer

from txmq.cli.command import CommandSession, broker_command
from txmq.cli.options import By, User
from txmq.model.access import ALL_VERBS, ROLES, what_is_wrong

app = typer.Typer(
    name="acl", no_args_is_help=True, help="Grant permissions to users, and take them back."
)
What = Annotated[
    str,
    typer.Argument(
        metavar="VERB", help=f"Verb ({', '.join(ALL_VERBS)}), or a role ({', '.join(ROLES)})."
    ),
]
Resource = Annotated[
    str,
    typer.Argument(
        metavar="RESOURCE",
        help="cluster, topic:NAME, group:NAME or service:NAME; NAME* = all names that begin so.",
    ),
]


@broker_command(app, "grant", example="txmq acl grant ada read topic:orders")
def grant(session: CommandSession, user: User, verb: What, resource: Resource, *, by: By) -> None:
    """Let a user do something. Whatever nobody has granted is denied."""
    _change(session, "acl.grant", user, verb, resource, by)


@broker_command(app, "revoke", example="txmq acl revoke ada read topic:orders")
def revoke(session: CommandSession, user: User, verb: What, resource: Resource, *, by: By) -> None:
    """Take a grant back. It holds for open connections, too."""
    _change(session, "acl.revoke", user, verb, resource, by)


@broker_command(app, "list", example="txmq acl list ada")
def list_(
    session: CommandSession,
    user: Annotated[
        str | None, typer.Argument(metavar="USER", help="Only the grants of this user.")
    ] = None,
) -> None:
    """List the grants, and the roles, which are grants on everything of a kind."""
    found = session.read_pages("user.list", "users", name=user)["users"]
    rows = [
        {"user": one["user"], "what": what, "resource": resource}
        for one in found
        for what, resource in (
            *((role, "*") for role in one["roles"]),
            *(text.split(" ", 1) for text in one["grants"]),
        )
    ]
    session.out.show({"grants": rows})


def _change(
    session: CommandSession, call: str, user: str, verb: str, resource: str, by: By
) -> None:
    if wrong := what_is_wrong(verb, resource):
        raise typer.BadParameter(wrong)
    session.show(call, name=user, what=verb, resource=resource, **by._asdict())

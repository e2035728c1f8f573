"""`txmq user`: who may log in to a broker."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from txmq.cli.command import CommandSession, broker_command, local_command
from txmq.cli.commands import user_tokens
from txmq.cli.options import By, DataDir, SettingsPath, User, data_directory
from txmq.cli.output import Output
from txmq.cli.parsers import parse_name, parse_named_limit
from txmq.cli.passwords import PasswordFile, new_verifier
from txmq.errors import UnknownUser
from txmq.model.access import ROLES
from txmq.model.quota import Quota

app = typer.Typer(name="user", no_args_is_help=True, help="Add, list and delete users of a broker.")
app.add_typer(user_tokens.app)
COLUMNS = ("user", "roles", "password", "grants", "by")
ROLE_NAMES = ", ".join(ROLES)

Roles = Annotated[
    list[str] | None,
    typer.Option("--role", metavar="ROLE", help=f"Role: {ROLE_NAMES}; can be repeated."),
]


def _known_roles(roles: list[str] | None) -> list[str]:
    for role in roles or ():
        if role not in ROLES:
            raise typer.BadParameter(f"there is no role {role!r}: use {ROLE_NAMES}")
    return roles or []


@broker_command(app, "add", example="txmq user add ada --role operator")
def add(
    session: CommandSession,
    user: User,
    *,
    role: Roles = None,
    password_file: PasswordFile = None,
    no_password: Annotated[
        bool,
        typer.Option(
            "--no-password", help="The user logs in by a certificate, or over HTTP with a token."
        ),
    ] = False,
    by: By,
) -> None:
    """Add a user. The first one must be an admin: from then on the broker asks every
    client for a login.
    """
    roles = _known_roles(role)
    password = None if no_password else _password(session.out, password_file)
    session.show(
        "user.set", name=user, roles=roles, password=password, new=True, **by._asdict(),
    )  # fmt: skip


@broker_command(app, "password", example="txmq user password ada")
def password(
    session: CommandSession, user: User, *, password_file: PasswordFile = None, by: By
) -> None:
    """Give a user a new password. Connections that are logged in stay."""
    session.show(
        "user.set", name=user, password=_password(session.out, password_file), new=False,
        **by._asdict(),
    )  # fmt: skip


@broker_command(app, "roles", example="txmq user roles ada --role operator --role auditor")
def roles(session: CommandSession, user: User, *, role: Roles = None, by: By) -> None:
    """Set the roles of a user; without --role it has none any more. Grants stay."""
    session.show(
        "user.set", name=user, roles=_known_roles(role), new=False, **by._asdict(),
    )  # fmt: skip


@broker_command(
    app, "quota", example="txmq user quota shop --set bytes_per_s=10MiB --set topics=50"
)
def quota(
    session: CommandSession,
    user: User,
    *,
    limits: Annotated[
        list[str],
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Limit; can be repeated: bytes_per_s=10MiB (of sends and half messages), "
            "requests_per_s=100 (but for decisions, acks and check-backs), topics=50 (that the "
            "user makes), undecided=1000 (half messages), connections=20; 0 = no limit.",
        ),
    ],
    by: By,
) -> None:
    """Set limits of a user; what is not named stays. They hold for open connections,
    but for the number of these.
    """
    named: dict[str, Any] = dict(parse_named_limit(text, Quota._fields) for text in limits)
    session.show("user.quota", name=user, **by._asdict(), **named)


@broker_command(app, "show", example="txmq user show ada")
def show(session: CommandSession, user: User) -> None:
    """Show a user: roles, grants, limits, and what was refused beyond them."""
    found = session.client.call("user.list", name=user)["users"]
    if not found:
        raise UnknownUser(f"there is no user {user!r}", hint="see the users: txmq user list")
    session.out.show(found[0])


@broker_command(app, "delete", example="txmq user delete ada")
def delete(session: CommandSession, user: User, *, by: By) -> None:
    """Delete a user with all grants, and end its connections."""
    session.show("user.delete", name=user, **by._asdict())


@broker_command(app, "list", example="txmq user list")
def list_(session: CommandSession) -> None:
    """List the users, with their roles and grants."""
    session.show_list("user.list", "users", columns=COLUMNS)


@broker_command(app, "me", example="txmq user me")
def me(session: CommandSession) -> None:
    """Show who you are to the broker, and what you may do."""
    session.show("user.me")


@local_command(app, "init-admin", example="txmq user init-admin --data /var/lib/txmq")
def init_admin(
    out: Output,
    user: Annotated[
        str, typer.Argument(metavar="USER", parser=parse_name, help="Name of the admin.")
    ] = "admin",
    *,
    data: DataDir = None,
    config: SettingsPath = None,
    password_file: PasswordFile = None,
) -> None:
    """Make an admin in the data directory of a stopped broker: the first one, or again
    when all admins have lost their passwords.
    """
    from txmq.broker.data_directory.first_admin import make_admin
    from txmq.store.filesystem import RealFileSystem

    directory = data_directory(data, config)
    make_admin(RealFileSystem(), directory, user, new_verifier(out, password_file))
    out.show({"user": user, "roles": ["admin"]})


def _password(out: Output, file: str | None) -> dict[str, object]:
    from txmq.wire.calls.users import VerifierArgs

    return VerifierArgs.of(new_verifier(out, file))

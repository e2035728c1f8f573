"""Arguments of control calls of users and grants (docs/FORMATS.md 2.3)."""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from txmq.model.access import Grant, is_grant
from txmq.model.quota import Quota
from txmq.wire import scram
from txmq.wire.calls.arguments import Args, ListArgs, Name, Text

Role = Literal["producer", "consumer", "operator", "auditor", "admin"]
ResourceText = Annotated[str, StringConstraints(min_length=1, max_length=140)]


Limit = Annotated[int, Field(ge=0, le=1_000_000_000_000)]


def _key(text: str) -> str:
    try:
        if len(b64decode(text, validate=True)) <= 64:
            return text
    except ValueError:
        pass
    raise ValueError("not base64 of at most 64 bytes")


Key = Annotated[str, StringConstraints(min_length=16, max_length=88), AfterValidator(_key)]


class VerifierArgs(Args):
    """Verifier of a password, made by the client (`txmq.wire.scram`)."""

    salt: Key
    iterations: Annotated[int, Field(ge=scram.MIN_ITERATIONS, le=scram.MAX_ITERATIONS)]
    stored_key: Key
    server_key: Key

    @classmethod
    def of(cls, verifier: scram.Verifier) -> dict[str, object]:
        """Return the arguments for a verifier."""
        salt, iterations, stored_key, server_key = verifier
        keys = {"salt": salt, "stored_key": stored_key, "server_key": server_key}
        return {"iterations": iterations} | {
            name: b64encode(value).decode() for name, value in keys.items()
        }

    def verifier(self) -> scram.Verifier:
        """Return the verifier."""
        return scram.Verifier(
            b64decode(self.salt),
            self.iterations,
            b64decode(self.stored_key),
            b64decode(self.server_key),
        )


class UserActs(Args):
    """An admin's change of a user; operator and reason are stored in the log."""

    name: Name
    operator: Name | None = None
    reason: Text = ""


class UserSetArgs(UserActs):
    """A user to add (`new`), or to change. Roles or password null = as they are; for a
    new user none. A user without a password logs in by a certificate.
    """

    roles: Annotated[tuple[Role, ...], Field(max_length=5)] | None = None
    password: VerifierArgs | None = None
    new: bool | None = None


class UserQuota(UserActs):
    """Limits of a user; null = as it is, 0 = none."""

    bytes_per_s: Limit | None = None
    requests_per_s: Limit | None = None
    topics: Limit | None = None
    undecided: Limit | None = None
    connections: Limit | None = None

    def changes(self) -> dict[str, int]:
        """Return the limits to set."""
        return {name: value for name in Quota._fields if (value := getattr(self, name)) is not None}


class UserDelete(UserActs):
    """A user to delete, with all grants."""


class TokenAdd(UserActs):
    """A token for HTTP: its name, its SHA-256 digest in hexadecimal, and the seconds
    for which it is valid. The token itself stays with the client.
    """

    token: Name
    digest: Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
    expire_s: Annotated[int, Field(ge=60, le=10 * 366 * 86_400)]


class TokenRevoke(UserActs):
    """A token to take back."""

    token: Name


class UserList(ListArgs):
    """The users by name, with their roles, grants and limits; `name`: only this one."""

    name: Name | None = None


class AclChange(UserActs):
    """A grant to give or to take back: a verb or a role on a resource."""

    what: Annotated[str, StringConstraints(min_length=1, max_length=32)]
    resource: ResourceText

    @model_validator(mode="after")
    def _gives_something(self) -> Self:
        if not is_grant(self.what, self.resource):
            raise ValueError(
                "no such permission: use a verb or a role, and cluster, topic:NAME, group:NAME or"
                " service:NAME, with * at the end for all names that begin so"
            )
        return self

    def grant(self) -> Grant:
        """Return the grant."""
        return Grant(self.what, self.resource)

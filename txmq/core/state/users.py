"""Users of a broker, with their roles, grants and verifiers of passwords."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.model.access import Grant
from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.store.tables import Tables

SECRET_ROW = b"login secret"  # of table `meta`


class User(NamedTuple):
    """A row of table `users`, by name. See `UserSet` for the verifier."""

    roles: tuple[str, ...]
    verifier: tuple[bytes, int, bytes, bytes] | tuple[()]
    set_at: int
    by: str
    grants: tuple[Grant, ...] = ()

    def __repr__(self) -> str:
        """Leave the verifier out."""
        return f"User(roles={self.roles}, grants={self.grants})"


class UserRegistry:
    """All users by name. A broker without users asks nobody for a login."""

    def __init__(self) -> None:
        self.by_name: dict[str, User] = {}
        self.secret = b""

    def put(self, tables: dict[str, Any], name: str, user: User | None) -> None:
        """Set a user, or remove it."""
        key = name.encode()
        if user is None:
            del self.by_name[name]
            tables[t.USERS].delete(key)
        else:
            self.by_name[name] = user
            tables[t.USERS].put(key, (*user[:4], tuple(tuple(grant) for grant in user.grants)))

    def put_secret(self, tables: dict[str, Any], secret: bytes) -> None:
        """Keep the secret of the broker's logins."""
        self.secret = secret
        tables[t.META].put(SECRET_ROW, (secret,))

    def load(self, tables: Tables) -> None:
        """Read all rows."""
        rows: Any = tables[t.USERS].range(b"")
        for key, row in rows:
            roles, verifier, set_at, by, grants = row
            self.by_name[key.decode()] = User(
                tuple(roles), tuple(verifier), set_at, by, tuple(Grant(*grant) for grant in grants)
            )
        secret: Any = tables[t.META].get(SECRET_ROW)
        if secret is not None:
            self.secret = secret[0]

    @property
    def admins(self) -> set[str]:
        """The users who may change users."""
        return {name for name, user in self.by_name.items() if "admin" in user.roles}

"""Users of a broker, with their roles, grants and verifiers of passwords."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.model.access import ADMIN, Grant, allows
from txmq.model.quota import NO_QUOTA, Quota
from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.store.tables import Tables

SECRET_ROW = b"login secret"  # of table `meta`
OWNER_ROW = b"\0"  # of table `users`: and a topic's id; no name begins so


class Token(NamedTuple):
    """A token by which a user logs in to HTTP. The broker knows its digest only."""

    name: str
    digest: bytes
    expire_at: int
    made_at: int
    by: str


class User(NamedTuple):
    """A row of table `users`, by name. See `UserSet` for the verifier."""

    roles: tuple[str, ...]
    verifier: tuple[bytes, int, bytes, bytes] | tuple[()]
    set_at: int
    by: str
    grants: tuple[Grant, ...] = ()
    quota: Quota = NO_QUOTA
    tokens: tuple[Token, ...] = ()

    def __repr__(self) -> str:
        """Leave the verifier out."""
        return f"User(roles={self.roles}, grants={self.grants})"


class UserRegistry:
    """All users by name. A broker without users asks nobody for a login."""

    def __init__(self) -> None:
        self.by_name: dict[str, User] = {}
        self.secret = b""
        self.topic_owners: dict[int, str] = {}  # of topics that users have made
        self.topic_counts: Counter[str] = Counter()  # of these, by user

    def put(self, tables: dict[str, Any], name: str, user: User | None) -> None:
        """Set a user, or remove it."""
        key = name.encode()
        if user is None:
            del self.by_name[name]
            tables[t.USERS].delete(key)
            for topic_id in [one for one, owner in self.topic_owners.items() if owner == name]:
                self.own(tables, topic_id, None)
        else:
            self.by_name[name] = user
            grants = tuple(tuple(grant) for grant in user.grants)
            tokens = tuple(tuple(token) for token in user.tokens)
            tables[t.USERS].put(key, (*user[:4], grants, tuple(user.quota), tokens))

    def own(self, tables: dict[str, Any], topic_id: int, name: str | None) -> None:
        """Note who has made a topic; None = it counts for nobody any more."""
        key = OWNER_ROW + topic_id.to_bytes(8, "big")
        if name is not None:
            self.topic_owners[topic_id] = name
            self.topic_counts[name] += 1
            tables[t.USERS].put(key, (name,))
        elif (before := self.topic_owners.pop(topic_id, None)) is not None:
            self.topic_counts[before] -= 1
            tables[t.USERS].delete(key)

    def put_secret(self, tables: dict[str, Any], secret: bytes) -> None:
        """Keep the secret of the broker's logins."""
        self.secret = secret
        tables[t.META].put(SECRET_ROW, (secret,))

    def load(self, tables: Tables) -> None:
        """Read all rows."""
        rows: Any = tables[t.USERS].range(b"")
        for key, row in rows:
            if key.startswith(OWNER_ROW):
                [owner] = row
                self.topic_owners[int.from_bytes(key[len(OWNER_ROW) :], "big")] = owner
                self.topic_counts[owner] += 1
                continue
            roles, verifier, set_at, by, grants, quota, tokens = row
            self.by_name[key.decode()] = User(
                tuple(roles),
                tuple(verifier),
                set_at,
                by,
                tuple(Grant(*grant) for grant in grants),
                Quota(*quota),
                tuple(Token(*each) for each in tokens),
            )
        secret: Any = tables[t.META].get(SECRET_ROW)
        if secret is not None:
            self.secret = secret[0]

    @property
    def admins(self) -> set[str]:
        """The users who may change users."""
        return {name for name, user in self.by_name.items() if "admin" in user.roles}

    def may_act_for(self, user: str, owner: str) -> bool:
        """Return whether a user may change what belongs to `owner`: the owner and
        admins may, and everybody where the owner was deleted. `user` is "" where there
        are none, and for the broker's own parts.
        """
        if not user or user == owner or owner not in self.by_name:
            return True
        known = self.by_name.get(user)
        return known is not None and allows(known.roles, known.grants, ADMIN)

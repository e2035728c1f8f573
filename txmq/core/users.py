"""Rules of users, their roles and their grants.

The first user must be an admin, and the last admin stays while there are other users:
nobody could manage them. When the last user is gone, the broker asks for no login any
more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.events.users import (
    AccessGranted,
    AccessRevoked,
    DenialNoted,
    LoginSecretMade,
    QuotaSet,
    TokenMade,
    TokenRevoked,
    TopicOwned,
    UserDeleted,
    UserSet,
)
from txmq.core.state.users import Token, User
from txmq.errors import BadRequest, NotPermitted, UnknownUser
from txmq.model.access import Grant
from txmq.model.quota import Quota

if TYPE_CHECKING:
    from txmq.core.events.base import RecordContext
    from txmq.core.state.state import State

MAX_USERS = 10_000
MAX_GRANTS = 1_000  # of a user
MAX_TOKENS = 20  # of a user


class SetUser(NamedTuple):
    """Add a user, or change it; None leaves roles or verifier as they are.

    `new`: only if there is none of the name; False = only if there is one; None = both.
    `secret` is for the first user of the broker.
    """

    name: str
    roles: tuple[str, ...] | None
    verifier: tuple[bytes, int, bytes, bytes] | tuple[()] | None
    by: str
    secret: bytes
    new: bool | None = None


class DeleteUser(NamedTuple):
    """Remove a user and all its grants."""

    name: str
    by: str


class GrantAccess(NamedTuple):
    """Give a user a verb or a role on a resource."""

    user: str
    grant: Grant
    by: str


class RevokeAccess(NamedTuple):
    """Take a grant back."""

    user: str
    grant: Grant
    by: str


class SetQuota(NamedTuple):
    """Set limits of a user: field names of `Quota` and their new values."""

    user: str
    changes: dict[str, int]
    by: str


class MakeToken(NamedTuple):
    """Give a user a token of this digest, for a duration in microseconds."""

    user: str
    token: str
    digest: bytes
    duration: int
    by: str


class RevokeToken(NamedTuple):
    """Take a token back."""

    user: str
    token: str
    by: str


class NoteDenial(NamedTuple):
    """Have the audit topic know of a denial."""

    user: str
    verb: str
    resource: str


class Changed(NamedTuple):
    """A reply: whether anything is other than before."""

    changed: bool


def find_user(state: State, name: str) -> User:
    """Return a user."""
    user = state.users.by_name.get(name)
    if user is None:
        raise _unknown_user(name)
    return user


def _unknown_user(name: str) -> UnknownUser:
    return UnknownUser(f"there is no user {name!r}", hint="see the users: txmq user list")


def decide_set(state: State, command: SetUser, _now: int) -> Outcome:
    users = state.users
    before = users.by_name.get(command.name)
    if before is None and command.new is False:
        raise _unknown_user(command.name)
    if before is not None and command.new:
        hint = "change the password: txmq user password; or the roles: txmq user roles"
        raise BadRequest(f"there is a user {command.name!r} already", hint=hint)
    if before is None and len(users.by_name) >= MAX_USERS:
        raise BadRequest(f"there are {MAX_USERS} users already", hint="delete some")
    roles = command.roles if command.roles is not None else before.roles if before else ()
    if "admin" not in roles and not users.admins - {command.name}:
        hint = "add a user with --role admin first"
        raise BadRequest(f"without {command.name!r} there is no admin", hint=hint)
    verifier = command.verifier
    if verifier is None:
        verifier = () if before is None else before.verifier
    if before is not None and (before.roles, before.verifier) == (roles, verifier):
        return Outcome(reply=Changed(changed=False))
    secret = () if users.secret else (LoginSecretMade(command.secret),)
    return Outcome(
        (UserSet(command.name, roles, verifier, command.by), *secret),
        reply=Changed(changed=True),
    )


def decide_delete(state: State, command: DeleteUser, _now: int) -> Outcome:
    find_user(state, command.name)
    users = state.users
    if users.admins == {command.name} and len(users.by_name) > 1:
        message = f"{command.name!r} is the last admin"
        raise BadRequest(message, hint="add another admin, or delete the other users first")
    return Outcome((UserDeleted(command.name, command.by),), reply=Changed(changed=True))


def decide_grant(state: State, command: GrantAccess, _now: int) -> Outcome:
    user = find_user(state, command.user)
    if command.grant in user.grants:
        return Outcome(reply=Changed(changed=False))
    if len(user.grants) >= MAX_GRANTS:
        message = f"user {command.user!r} has {MAX_GRANTS} grants already"
        raise BadRequest(message, hint="grant prefixes (topic:orders.*), or a role")
    return Outcome(
        (AccessGranted(command.user, *command.grant, command.by),), reply=Changed(changed=True)
    )


def decide_revoke(state: State, command: RevokeAccess, _now: int) -> Outcome:
    user = find_user(state, command.user)
    if command.grant not in user.grants:
        message = f"user {command.user!r} has no grant {' '.join(command.grant)!r}"
        raise BadRequest(message, hint="see the grants: txmq acl list; roles are no grants")
    return Outcome(
        (AccessRevoked(command.user, *command.grant, command.by),), reply=Changed(changed=True)
    )


def decide_quota(state: State, command: SetQuota, _now: int) -> Outcome:
    user = find_user(state, command.user)
    quota = user.quota._replace(**command.changes)
    if quota == user.quota:
        return Outcome(reply=Changed(changed=False))
    return Outcome((QuotaSet(command.user, tuple(quota), command.by),), reply=Changed(changed=True))


def decide_token(state: State, command: MakeToken, now: int) -> Outcome:
    user = find_user(state, command.user)
    if any(command.token == token.name for token in user.tokens):
        message = f"user {command.user!r} has a token {command.token!r} already"
        raise BadRequest(message, hint="use another name, or revoke it: txmq user token")
    if len(user.tokens) >= MAX_TOKENS:
        message = f"user {command.user!r} has {MAX_TOKENS} tokens already"
        raise BadRequest(message, hint="revoke some: txmq user token revoke")
    made = TokenMade(
        command.user, command.token, command.digest, now + command.duration, command.by
    )
    return Outcome((made,), reply=Changed(changed=True))


def decide_revoke_token(state: State, command: RevokeToken, _now: int) -> Outcome:
    user = find_user(state, command.user)
    if all(command.token != token.name for token in user.tokens):
        message = f"user {command.user!r} has no token {command.token!r}"
        raise BadRequest(message, hint="see the tokens: txmq user token list")
    return Outcome((TokenRevoked(*command),), reply=Changed(changed=True))


def check_topics(state: State, user: str) -> None:
    """Reject a further topic of a user who has as many as the quota allows."""
    found = state.users.by_name.get(user)
    most = 0 if found is None else found.quota.topics
    if not most or state.users.topic_counts[user] < most:
        return
    raise NotPermitted(
        f"user {user!r} has made {most} topics, as many as the quota allows",
        hint="delete some; or an admin raises it: txmq user quota",
    )


def decide_note(_state: State, command: NoteDenial, _now: int) -> Outcome:
    return Outcome((DenialNoted(*command),))


def apply_set(state: State, event: UserSet, context: RecordContext) -> None:
    before = state.users.by_name.get(event.name)
    made = (tuple(event.roles), event.verifier, context.stored_at, event.by)
    user = User(*made) if before is None else User(*made, *before[4:])
    state.users.put(state.tables, event.name, user)


def apply_deleted(state: State, event: UserDeleted, _context: RecordContext) -> None:
    state.users.put(state.tables, event.name, None)


def apply_granted(state: State, event: AccessGranted, _context: RecordContext) -> None:
    user = state.users.by_name[event.user]
    grants = (*user.grants, Grant(event.what, event.resource))
    state.users.put(state.tables, event.user, user._replace(grants=grants))


def apply_revoked(state: State, event: AccessRevoked, _context: RecordContext) -> None:
    user = state.users.by_name[event.user]
    gone = Grant(event.what, event.resource)
    grants = tuple(grant for grant in user.grants if grant != gone)
    state.users.put(state.tables, event.user, user._replace(grants=grants))


def apply_quota(state: State, event: QuotaSet, _context: RecordContext) -> None:
    user = state.users.by_name[event.name]
    state.users.put(state.tables, event.name, user._replace(quota=Quota(*event.quota)))


def apply_token(state: State, event: TokenMade, context: RecordContext) -> None:
    user = state.users.by_name[event.user]
    made = Token(event.token, event.digest, event.expire_at, context.stored_at, event.by)
    state.users.put(state.tables, event.user, user._replace(tokens=(*user.tokens, made)))


def apply_token_revoked(state: State, event: TokenRevoked, _context: RecordContext) -> None:
    user = state.users.by_name[event.user]
    left = tuple(token for token in user.tokens if token.name != event.token)
    state.users.put(state.tables, event.user, user._replace(tokens=left))


def apply_owned(state: State, event: TopicOwned, _context: RecordContext) -> None:
    state.users.own(state.tables, event.topic_id, event.user)


def apply_secret(state: State, event: LoginSecretMade, _context: RecordContext) -> None:
    state.users.put_secret(state.tables, event.secret)


def apply_noted(state: State, event: DenialNoted, context: RecordContext) -> None:
    """Change nothing: the audit message beside it is what counts."""


DECIDERS: Deciders = {
    SetUser: decide_set,
    DeleteUser: decide_delete,
    GrantAccess: decide_grant,
    RevokeAccess: decide_revoke,
    SetQuota: decide_quota,
    MakeToken: decide_token,
    RevokeToken: decide_revoke_token,
    NoteDenial: decide_note,
}
APPLIERS: Appliers = {
    UserSet: apply_set,
    UserDeleted: apply_deleted,
    AccessGranted: apply_granted,
    AccessRevoked: apply_revoked,
    QuotaSet: apply_quota,
    TokenMade: apply_token,
    TokenRevoked: apply_token_revoked,
    TopicOwned: apply_owned,
    LoginSecretMade: apply_secret,
    DenialNoted: apply_noted,
}

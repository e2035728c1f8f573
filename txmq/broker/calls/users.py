"""Control calls of users and grants."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from txmq.broker.calls.dispatcher import CallContext, Handler, unless_refused
from txmq.broker.calls.operators import audited
from txmq.broker.calls.pages import page_of
from txmq.core import users as rules
from txmq.model.access import VERBS, Need
from txmq.model.units import SECOND

if TYPE_CHECKING:
    from collections.abc import Callable

    from txmq.broker.access.guard import Guard
    from txmq.broker.engine.engine import Engine
    from txmq.core.state.users import User
    from txmq.wire.calls import users
    from txmq.wire.calls.arguments import NoArgs


class UserCalls:
    """Calls about users. `changed` is called once a change is durable."""

    def __init__(self, engine: Engine, guard: Guard, changed: Callable[[], None]) -> None:
        self._engine, self._guard, self._changed = engine, guard, changed
        self.handlers: dict[str, Handler] = {
            "user.set": self.set_user,
            "user.delete": self.delete,
            "user.quota": self.set_quota,
            "user.list": self.list_users,
            "user.me": self.me,
            "token.add": self.add_token,
            "token.revoke": self.revoke_token,
            "acl.grant": self.grant,
            "acl.revoke": self.revoke,
        }

    def set_user(self, call: CallContext, args: users.UserSetArgs) -> None:
        verifier = None if args.password is None else tuple(args.password.verifier())
        by, secret = args.operator or "", secrets.token_bytes(32)
        command = rules.SetUser(args.name, args.roles, verifier, by, secret, args.new)  # type: ignore[arg-type]  # a plain tuple
        self._submit(call, args, command)

    def delete(self, call: CallContext, args: users.UserDelete) -> None:
        self._submit(call, args, rules.DeleteUser(args.name, args.operator or ""))

    def set_quota(self, call: CallContext, args: users.UserQuota) -> None:
        command = rules.SetQuota(args.name, args.changes(), args.operator or "")
        self._submit(call, args, command)

    def add_token(self, call: CallContext, args: users.TokenAdd) -> None:
        digest, by = bytes.fromhex(args.digest), args.operator or ""
        command = rules.MakeToken(args.name, args.token, digest, args.expire_s * SECOND, by)
        self._submit(call, args, command)

    def revoke_token(self, call: CallContext, args: users.TokenRevoke) -> None:
        command = rules.RevokeToken(args.name, args.token, args.operator or "")
        self._submit(call, args, command)

    def grant(self, call: CallContext, args: users.AclChange) -> None:
        command = rules.GrantAccess(args.name, args.grant(), args.operator or "")
        self._submit(call, args, command)

    def revoke(self, call: CallContext, args: users.AclChange) -> None:
        command = rules.RevokeAccess(args.name, args.grant(), args.operator or "")
        self._submit(call, args, command)

    def _submit(self, call: CallContext, args: users.UserActs, command: object) -> None:
        def answer(reply: rules.Changed) -> None:
            call.answer({"user": args.name, "changed": reply.changed})
            if reply.changed:
                self._changed()

        acted = audited(call.name, f"user:{args.name}", args, command)
        self._engine.submit(acted, unless_refused(call.answer, answer))

    def list_users(self, call: CallContext, args: users.UserList) -> dict[str, Any]:
        by_name = self._engine.state.users.by_name
        known = by_name.keys() if args.name is None else by_name.keys() & {args.name}
        page = page_of(known, args, "users")
        meters, now = self._guard.meters, self._guard.seconds()
        topics = self._engine.state.users.topic_counts
        found = [
            view(name, by_name[name])
            | {
                "topics": topics[name],
                "throttled": meters[name].view(now) if name in meters else None,
            }
            for name in page.names
        ]
        return {"users": found, "next": page.following}

    def me(self, call: CallContext, args: NoArgs) -> None:
        """Answer who the caller is, and what the caller may do."""
        rights = call.rights if call.caller is None else call.caller.rights
        if rights is None:
            every = sorted(f"{verb} {kind}" for kind, verbs in VERBS.items() for verb in verbs)
            call.answer(
                {"user": None, "login": False, "roles": [], "grants": [], "permissions": every}
            )
            return
        permissions = {
            f"{verb} {kind}" if kind == "cluster" else f"{verb} {kind}:*"
            for kind, verbs in VERBS.items()
            for verb in verbs
            if rights.allows(Need(verb, kind))
        }
        grants = [" ".join(grant) for grant in rights.grants]
        call.answer(
            {
                "user": rights.user,
                "login": True,
                "roles": list(rights.roles),
                "grants": grants,
                "permissions": sorted(permissions | set(grants)),
            }
        )


def view(name: str, user: User) -> dict[str, Any]:
    """Return a user for a list, without what is kept of the password."""
    return {
        "user": name,
        "roles": list(user.roles),
        "password": bool(user.verifier),
        "grants": [" ".join(grant) for grant in user.grants],
        "quota": {name: value for name, value in user.quota._asdict().items() if value},
        "tokens": [
            {
                "token": one.name,
                "made_at": one.made_at,
                "expire_at": one.expire_at,
                "by": one.by,
            }
            for one in user.tokens
        ],
        "set_at": user.set_at,
        "by": user.by,
    }

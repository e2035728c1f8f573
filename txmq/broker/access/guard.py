"""Rights of users, compiled once for all sessions of a user, and logins.

Without users a session has no rights object, and nothing is looked up.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from base64 import b64decode
from collections import Counter, OrderedDict
from copy import copy
from typing import TYPE_CHECKING, Any

import structlog

from txmq.broker.access.meter import Meter
from txmq.broker.access.needs import BODIES, CALLS, FRAMES_OF, NOT_JUDGED, REQUESTS, judging
from txmq.broker.reactor.bounded_log import BoundedLog
from txmq.broker.reactor.connection_limits import network_of
from txmq.core.audit import Audited, AuditEntry
from txmq.core.state.users import Token, User
from txmq.core.token_bucket import TokenBucket
from txmq.core.users import NoteDenial
from txmq.errors import AccessDenied, LoginFailed, Throttled
from txmq.model.access import Need, allows
from txmq.model.quota import NO_QUOTA, Quota
from txmq.wire import scram
from txmq.wire.calls import registry
from txmq.wire.data_requests import Opcode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from txmq.broker.engine.engine import Engine
    from txmq.broker.reactor.interfaces import Clock
    from txmq.core.state.state import State

# Users whom nobody has made: the broker's own parts in this process, and other nodes of
# its log. No user can have such a name.
OWN_USER, NODES = BUILT_IN = (".broker", ".nodes")
CALLS_OF_NODES = {"log.hold", "log.read", "log.release"}
WINDOW_S = 60.0  # in which failed logins are counted
MAX_FAILURES = 10  # of a user from one host in this time
HASHES_PER_S = 20  # of passwords that come by HTTP, of all peers: a tenth of a processor
HASHES_OF_PEER = 5  # of these, of one host: it does not keep others out
HASHES_OF_STRANGERS = 15  # of all hosts that nobody has logged in from
MAX_PEERS = 10_000  # users of hosts that are remembered
DENIAL_S = 60.0  # between two entries of the audit topic about the same denial
MAX_DENIALS = 100  # that are remembered, and so may be stored in this time
MAX_DENIALS_OF_USER = 20  # of these: one user's do not hide those of others
MAX_CACHED = 10_000  # answers about resources, of one user
OPERATOR_IS_SOUGHT = {"audit.list"}  # there it is not who calls
log = structlog.get_logger()


class Rights:
    """Rights of one user, as of now."""

    def __init__(self, guard: Guard, name: str, user: User) -> None:
        self.user = name
        self.until: int | None = None  # a time, where the login was by a token
        self.roles, self.grants = user.roles, user.grants
        self._guard = guard
        self.meter = None if user.quota == NO_QUOTA else guard.meter_of(name, user.quota)
        self.most_connections = user.quota.connections
        self._quota = user.quota
        self._cache: dict[Need, bool] = {}

    def check_quota(self, state: State, opcode: int, payload: bytes) -> None:
        """Raise Throttled for a request beyond the user's quota."""
        if self.meter is not None:
            self.meter.check_request(state, opcode, payload, self._guard.seconds())

    def check_call_quota(self, name: str) -> None:
        """Raise Throttled for a call beyond the user's quota."""
        if self.meter is not None:
            self.meter.check_call(name, self._guard.seconds())

    def refused_connection(self) -> Throttled:
        """Return the error of a connection beyond the user's quota."""
        return self._guard.meter_of(self.user, self._quota).refused_connection(
            self._guard.seconds()
        )

    def allows(self, need: Need) -> bool:
        """Return whether the user may do this."""
        found = self._cache.get(need)
        if found is None:
            if len(self._cache) >= MAX_CACHED:
                self._cache.clear()
            found = self._cache[need] = allows(self.roles, self.grants, need)
        return found

    def require(self, needs: Iterable[Need]) -> None:
        """Raise AccessDenied unless the user may do all of this."""
        for need in needs:
            if not self.allows(need):
                raise self._guard.denial(self.user, need)

    def missing(self, needs: Iterable[Need]) -> Need | None:
        """Return what the user may not do of this, if anything. Nothing is audited."""
        return next((need for need in needs if not self.allows(need)), None)

    def check(self, state: State, opcode: int, payload: bytes) -> None:
        """Raise AccessDenied for a request that the user may not make. Frames of
        several requests pass: each request is judged when it is taken out.
        """
        if opcode not in NOT_JUDGED and opcode not in FRAMES_OF:
            needs = REQUESTS.get(opcode)
            if needs is not None:
                self.require(needs(state, payload))

    def judge_call(self, state: State, name: str, args: Any) -> Any:  # noqa: ANN401  # the call's own model
        """Return the arguments of a call as the user may give them: the operator is the
        user, and bodies are left out where the user may not see them. Raises
        AccessDenied.
        """
        self.require(CALLS[name](state, args))
        changes: dict[str, object] = {}
        fields = type(args).model_fields
        if "operator" in fields and name not in OPERATOR_IS_SOUGHT:
            changes["operator"] = self.user
        if getattr(args, "bodies", False):
            needs = tuple(BODIES[name](state, args))
            if "bodies" in args.model_fields_set:
                self.require(needs)
            elif not all(map(self.allows, needs)):
                changes["bodies"] = False
        self.require(judging(state, name, args))
        return args.model_copy(update=changes) if changes else args


class _EveryRight(Rights):
    """The rights of the broker's own parts."""

    def allows(self, need: Need) -> bool:
        return True

    def judge_call(self, state: State, name: str, args: Any) -> Any:  # noqa: ANN401
        return args


class _NodesRights(Rights):
    """The rights of other nodes: to copy the log."""

    def allows(self, need: Need) -> bool:
        return False

    def judge_call(self, state: State, name: str, args: Any) -> Any:  # noqa: ANN401
        return args if name in CALLS_OF_NODES else super().judge_call(state, name, args)


class Guard:
    """Logins and rights of a broker. All methods belong to the reactor's thread."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        missing = (registry.CALLS.keys() ^ CALLS.keys()) | {
            opcode for opcode in Opcode if opcode not in {*REQUESTS, *FRAMES_OF, *NOT_JUDGED}
        }
        assert not missing, f"requests without a row in the table of permissions: {missing}"
        self._engine, self._clock = engine, clock
        self._rights: dict[str, Rights] = {}
        self.meters: dict[str, Meter] = {}  # of users with a quota
        self.seconds = clock.seconds
        # by network and user: who guesses must not lock others out that share a host
        self._failures: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()
        # as many as there may be: other guesses do not push them out
        self._locked: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()
        self._log = BoundedLog(clock)
        self._denials: OrderedDict[tuple[str, Need], float] = OrderedDict()
        self.denied: Counter[str] = Counter()  # by verb, since the start
        self.logins: Counter[str] = Counter()  # by outcome, since the start
        # of a client, where there is TLS and certificates are asked for
        self.certificate_name: Callable[[object], str | None] = lambda _transport: None
        self.own_password = secrets.token_urlsafe(32)
        self._own = scram.make_verifier(self.own_password, iterations=scram.MIN_ITERATIONS)
        self._nodes: scram.Verifier | None = None  # None = no node copies from here
        self._fallback = secrets.token_bytes(32)
        self._hashes = TokenBucket(HASHES_PER_S, clock.seconds())
        self._strangers = TokenBucket(HASHES_OF_STRANGERS, clock.seconds())
        self._hashes_of: OrderedDict[str, TokenBucket] = OrderedDict()  # by network
        # networks that a password was right from: the newest last
        self._known_hosts: OrderedDict[str, None] = OrderedDict()
        self._http_logins: set[bytes] = set()  # sealed names and passwords that were right
        self._tokens: dict[bytes, tuple[str, Token]] | None = None  # by digest; None = not yet

    @property
    def has_users(self) -> bool:
        """Return whether clients must log in."""
        return bool(self._engine.state.users.by_name)

    def admit_nodes(self, password: str) -> None:
        """Let nodes log in that know a password which only nodes can know."""
        self._nodes = scram.make_verifier(password, iterations=scram.MIN_ITERATIONS)

    def asks(self, login: dict[str, str] | None) -> bool:
        """Return whether a client has to log in, or does as nobody's user."""
        own = tuple(f"n,,n={name}," for name in BUILT_IN)
        return self.has_users or (login or {}).get("message", "").startswith(own)

    def rights_of(self, name: str) -> Rights | None:
        """Return what a user may do; None = there is no such user."""
        rights = self._rights.get(name)
        if rights is None:
            if name == OWN_USER:
                rights = _EveryRight(self, name, User(("admin",), (), 0, ""))
            elif name == NODES:
                rights = _NodesRights(self, name, User((), (), 0, ""))
            else:
                user = self._engine.state.users.by_name.get(name)
                if user is None:
                    return None
                rights = Rights(self, name, user)
            self._rights[name] = rights
        return rights

    def renewed(self, rights: Rights) -> Rights | None:
        """Return a user's rights as they are now; None = the user is gone, or the token
        is over.
        """
        found = self.rights_of(rights.user)
        if found is None or rights.until is None:
            return found
        return None if self._engine.now() >= rights.until else _until(found, rights.until)

    def meter_of(self, name: str, quota: Quota) -> Meter:
        """Return the meter of a user, which goes on when the quota changes."""
        meter = self.meters.get(name)
        if meter is None:
            meter = self.meters[name] = Meter(name, quota, self.seconds())
        elif meter.quota != quota:
            meter.change(quota, self.seconds())
        return meter

    def certified(self, transport: object) -> Rights | None:
        """Return the rights of the user that a client's certificate names, if any. The
        broker's own parts and nodes have no certificate: none may have their rights.
        """
        name = self.certificate_name(transport)
        return None if name is None or name in BUILT_IN else self.rights_of(name)

    def forget(self) -> None:
        """Compile rights anew: users have changed."""
        self._http_logins.clear()
        self._rights.clear()
        self._tokens = None
        users = self._engine.state.users.by_name
        for name in [one for one in self.meters if one not in users]:
            del self.meters[name]

    def verifier_of(self, name: str) -> scram.Verifier:
        """Return a user's verifier; for others a false one that looks the same."""
        if name == OWN_USER:
            return self._own
        if name == NODES and self._nodes is not None:
            return self._nodes
        users = self._engine.state.users
        user = users.by_name.get(name)
        fake = scram.fake_verifier(users.secret or self._fallback, name)
        return scram.Verifier(*user.verifier) if user is not None and user.verifier else fake

    def begin(self, peer: str, message: str) -> scram.ScramServer:
        """Begin a login by SCRAM. Raises LoginFailed, and Throttled for a user with too
        many failures.
        """
        first = scram.parse_client_first(message)
        self.check_login(peer, first.user)
        return scram.ScramServer(first, self.verifier_of(first.user))

    def rights_after(self, login: scram.ScramServer) -> Rights | None:
        """Return the rights of a user whose proof was right; None = the user or the
        password is another one by now.
        """
        is_current = self.verifier_of(login.user) == login.verifier
        return self.rights_of(login.user) if is_current else None

    def log_in_by_http(self, peer: str, authorization: str | None) -> Rights | None:
        """Return the rights of the user in an Authorization header (Basic, or Bearer
        with a token); None = the broker has no users. Each request counts for the
        user's quota. Raises LoginFailed, and Throttled.

        A password that was right is not hashed again until users change.
        """
        if not self.has_users:
            return None
        if authorization is None:
            raise LoginFailed("this broker asks for a login", hint="give user and password")
        if authorization[:7].lower() == "bearer ":
            # without a limit of failures: there is nothing to guess
            by_token = self._log_in_by_token(peer, authorization[7:].strip())
            by_token.check_call_quota("http")
            return by_token
        user, password = _basic(authorization)
        self.check_login(peer, user)
        verifier = self.verifier_of(user)
        seal = hmac.digest(self._fallback, repr((user, password)).encode(), "sha256")
        known = seal in self._http_logins and user in self._engine.state.users.by_name
        if not known:
            self._check_hashes(peer, max(1.0, verifier.iterations / scram.ITERATIONS))
        rights = self.rights_of(user) if known or scram.is_password(verifier, password) else None
        if rights is None or user in BUILT_IN:
            raise self.failed(peer, user)
        if len(self._http_logins) < MAX_CACHED:
            self._http_logins.add(seal)
        self.note_host(peer)
        rights.check_call_quota("http")
        return rights

    def _log_in_by_token(self, peer: str, token: str) -> Rights:
        """Return the rights of the user whose token it is. Raises LoginFailed."""
        digest = hashlib.sha256(token.encode("utf-8", "replace")).digest()
        if self._tokens is None:
            users = self._engine.state.users.by_name.items()
            self._tokens = {one.digest: (name, one) for name, user in users for one in user.tokens}
        user, known = self._tokens.get(digest, ("", None))
        rights = None if known is None else self.rights_of(user)
        if rights is None or known is None:
            self._note_failure(peer, "(token)")
            raise LoginFailed("the token is not valid", hint="see: txmq user token list")
        if self._engine.now() >= known.expire_at:
            self._note_failure(peer, user)
            raise LoginFailed(
                f"the token {known.name!r} has expired",
                hint=f"an admin makes another: txmq user token add {user} NAME",
            )
        return _until(rights, known.expire_at)

    def _check_hashes(self, peer: str, cost: float) -> None:
        """Count a hash of a password, over all peers: each costs the reactor's thread
        milliseconds. Raises Throttled beyond `HASHES_PER_S`, and for a host beyond
        `HASHES_OF_PEER`: it may try many names. Hosts that nobody has logged in from
        leave some to the others. `cost` is more than 1 where a verifier has more rounds
        than txmq gives it.
        """
        network, now = network_of(peer), self._clock.seconds()
        own = self._hashes_of.pop(network, None) or TokenBucket(HASHES_OF_PEER, now)
        self._hashes_of[network] = own
        if len(self._hashes_of) > MAX_PEERS:
            self._hashes_of.popitem(last=False)
        of_all = [own, self._hashes]
        if network not in self._known_hosts:
            of_all.append(self._strangers)
        if wait_s := max(bucket.wait_s(now) for bucket in of_all):
            raise Throttled.after(wait_s, "too many logins at a time", hint="try again")
        for bucket in of_all:
            bucket.take(cost)

    def note_host(self, peer: str) -> None:
        """Remember a host that a user has logged in from with a password."""
        network = network_of(peer)
        self._known_hosts[network] = None
        self._known_hosts.move_to_end(network)
        if len(self._known_hosts) > MAX_PEERS:
            self._known_hosts.popitem(last=False)

    def check_login(self, peer: str, user: str) -> None:
        """Raise Throttled for a user with too many failures from a host. It is asked
        again before a proof is verified: many logins may have begun at a time.
        """
        since, count = self._locked.get((network_of(peer), user), (0.0, 0))
        left = since + WINDOW_S - self._clock.seconds()
        if count >= MAX_FAILURES and left > 0:
            message = f"too many failed logins of {user[:128]!r} from {peer}"
            raise Throttled.after(left, message, hint=f"wait {left:.0f} s, then try again")

    def failed(self, peer: str, user: str) -> LoginFailed:
        """Count a failed login, and return its error: the same for every cause."""
        self._note_failure(peer, user)
        if user not in BUILT_IN:  # there is nothing to guess, and the broker needs them
            self._count_failure((network_of(peer), user))
        return LoginFailed(scram.WRONG, hint=scram.WRONG_HINT)

    def _count_failure(self, key: tuple[str, str]) -> None:
        now = self._clock.seconds()
        since, count = self._failures.pop(key, (now, 0))
        if since + WINDOW_S <= now:
            since, count = now, 0
        known = self._locked if count + 1 >= MAX_FAILURES else self._failures
        known.pop(key, None)
        known[key] = (since, count + 1)
        if len(known) > MAX_PEERS:
            known.popitem(last=False)

    def _note_failure(self, peer: str, user: str) -> None:
        self.logins["failed"] += 1
        self._log.warn(log, "login.failed", peer=peer, user=user[:128])

    def denial(self, user: str, need: Need) -> AccessDenied:
        """Count a denial, have the audit topic know of it, and return its error."""
        self.denied[need.verb] += 1
        now = self._clock.seconds()
        last = self._denials.get((user, need))
        if last is not None and now >= last + DENIAL_S:
            del self._denials[user, need]
            last = None
        while self._denials and next(iter(self._denials.values())) + DENIAL_S <= now:
            self._denials.popitem(last=False)
        own = sum(name == user for name, _need in self._denials)
        if last is None and own < MAX_DENIALS_OF_USER and len(self._denials) < MAX_DENIALS:
            self._denials[user, need] = now
            self._note(user, need)
        return AccessDenied(
            f"user {user!r} may not {need.verb} {need.resource}",
            hint=f"an admin can allow it: txmq acl grant {user} {need.verb} {need.resource}",
            detail={"user": user, "verb": need.verb, "resource": need.resource},
        )

    def _note(self, user: str, need: Need) -> None:
        entry = AuditEntry(user, "access.denied", f"user:{user}", "", {
            "verb": need.verb, "resource": need.resource})  # fmt: skip
        command = Audited(NoteDenial(user, need.verb, need.resource), entry)
        # in a turn of its own: this is within a request, whose errors are the client's
        self._clock.callLater(0, self._engine.submit, command)


class FollowersGuard(Guard):
    """The same of a node that writes nothing. It is not told when users change: it
    looks at each login.
    """

    _users: Mapping[str, User] = {}

    def asks(self, login: dict[str, str] | None) -> bool:
        self._look()
        return super().asks(login)

    def log_in_by_http(self, peer: str, authorization: str | None) -> Rights | None:
        self._look()
        return super().log_in_by_http(peer, authorization)

    def _look(self) -> None:
        users = self._engine.state.users.by_name
        if users != self._users:
            self._users = dict(users)
            self.forget()

    def _note(self, user: str, need: Need) -> None: ...


def _until(rights: Rights, until: int) -> Rights:
    """Return the same rights, which end at a time."""
    limited = copy(rights)
    limited.until = until
    return limited


def _basic(header: str) -> tuple[str, str]:
    """Return user and password of a header. Raises LoginFailed."""
    scheme, _, text = header.partition(" ")
    try:
        user, colon, password = b64decode(text.strip(), validate=True).decode().partition(":")
    except ValueError:
        user = colon = password = ""
    if scheme.lower() != "basic" or not colon:
        raise LoginFailed("the login is not valid", hint="use Basic, or Bearer with a token")
    return user, password

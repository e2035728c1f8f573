"""Alarms: what an operator has to know of without having asked.

A fixed list of named conditions is looked at every second, from the state, the disk and
the resolvers. One that holds is raised, one that holds no more is cleared; both are
logged once. Nothing is kept over a restart: what still holds is raised again. What only
others can see, they report (`reported`).
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import structlog

from txmq.broker.alarms.alarm import SECOND, Alarm
from txmq.broker.alarms.reported import Reported
from txmq.broker.data_directory.retention_service import TRANSACTIONS
from txmq.core.consumers.key_fences import stopped
from txmq.core.transactions import listed, undecided
from txmq.core.transactions.listed import Kind
from txmq.core.transactions.model import get
from txmq.core.transactions.queries import contradictions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from txmq.broker.checkback.listeners import Watching
    from txmq.broker.checkback.resolver_service import ResolverStatus, Resolves
    from txmq.broker.data_directory.disk_space import Disk
    from txmq.broker.data_directory.retention_service import Retaining
    from txmq.broker.engine import Engine
    from txmq.config.broker import Alarms as Limits
    from txmq.core.state.state import State
    from txmq.store.scan import Damage

log = structlog.get_logger()


class Seen(NamedTuple):
    """What the conditions are judged by. `passed` are the messages that retention took
    from groups, and when last.
    """

    state: State
    read_only: bool
    quarantined: Sequence[Damage]
    disk: Disk
    passed: tuple[int, int]
    held: int  # bytes of log, for the sake of transactions
    now: int
    resolvers: Sequence[ResolverStatus]
    unresolvable_at: int
    limits: Limits

    def longer(self, since: int, seconds: float) -> bool:
        """Whether that time is further back than so many seconds; 0 is no time."""
        return since > 0 and self.now - since > seconds * SECOND

    def ago(self, since: int) -> str:
        return str(timedelta(seconds=(self.now - since) // SECOND))


class Rule(NamedTuple):
    """A condition: `look` gives what is to be told while it holds, else ""."""

    name: str
    severity: str
    look: Callable[[Seen], str]
    action: str


def _disk_full(seen: Seen) -> str:
    if seen.read_only:
        return "the disk is full: nothing is stored, only read"
    return (
        f"only {seen.disk.free_mib} MiB are free: writes are refused" if seen.disk.refusing else ""
    )


def _disk_low(seen: Seen) -> str:
    return (
        f"only {seen.disk.free_mib} MiB are free"
        if seen.disk.low and not seen.disk.refusing
        else ""
    )


def _trouble(seen: Seen) -> str:
    return "; ".join(f"{what}: {why}" for what, why in sorted(seen.disk.troubles.items()))


def _damaged(seen: Seen) -> str:
    if not seen.quarantined:
        return ""
    worst = seen.quarantined[0]
    return f"{len(seen.quarantined)} spans of the log cannot be read; {worst.path}, {worst.position}: {worst.reason}"


def _passed(seen: Seen) -> str:
    messages, at = seen.passed
    if not messages or seen.longer(at, seen.limits.conflict_s):
        return ""
    return f"retention took {messages} messages that consumer groups had not processed, the last {seen.ago(at)} ago"


def _held(seen: Seen) -> str:
    mib = seen.held >> 20
    return (
        f"{mib} MiB of the log are kept because of {TRANSACTIONS}"
        if mib > seen.limits.held_mib
        else ""
    )


def _in_doubt(seen: Seen) -> str:
    count = seen.state.listed[Kind.IN_DOUBT]
    if not count:
        return ""
    token = next(listed.tokens(seen.state, Kind.IN_DOUBT))
    return f"{count} transactions are undecided though asked about again and again; the oldest is {token.hex()}"


def _oldest(seen: Seen) -> str:
    return _aged(
        seen, next(undecided.tokens(seen.state), None), seen.limits.undecided_s, "undecided"
    )


def _open(seen: Seen) -> str:
    token = next(listed.tokens(seen.state, Kind.OPEN), None)
    return _aged(seen, token, seen.limits.open_s, "waiting for its missing parts")


def _aged(seen: Seen, token: bytes | None, limit_s: float, what: str) -> str:
    row = None if token is None else get(seen.state, token)
    if token is None or row is None or not seen.longer(row.stored_at, limit_s):
        return ""
    of = f" of service {row.service}" if row.service else ""
    return f"transaction {token.hex()}{of} has been {what} for {seen.ago(row.stored_at)}"


def _conflict(seen: Seen) -> str:
    last = next(contradictions(seen.state), None)
    if last is None or seen.longer(last.at, seen.limits.conflict_s):
        return ""
    return f"{last.by} asked to {last.asked.name} transaction {last.token.hex()}, which was decided otherwise"


def _heuristic(seen: Seen) -> str:
    count = seen.state.listed[Kind.HEURISTIC]
    if not count:
        return ""
    token = next(listed.tokens(seen.state, Kind.HEURISTIC))
    return f"{count} transactions were decided by hand or found mixed; the oldest is {token.hex()}"


def _unreachable(seen: Seen) -> str:
    down = [one for one in seen.resolvers if seen.longer(one.failing_since, seen.limits.resolver_s)]
    return "; ".join(
        f"{one.name}, for {seen.ago(one.failing_since)}: {one.trouble}" for one in down
    )


def _missing(seen: Seen) -> str:
    recent = seen.unresolvable_at and not seen.longer(seen.unresolvable_at, seen.limits.conflict_s)
    return (
        "transactions are refused, because no resolver leads to the database that decides them"
        if recent
        else ""
    )


def _outbox(seen: Seen) -> str:
    stuck = [one for one in seen.resolvers if one.stuck]
    return "; ".join(f"{one.name}, for {seen.ago(one.stuck_since)}: {one.stuck}" for one in stuck)


def _stuck(seen: Seen) -> str:
    kept = [one for one in seen.resolvers if seen.longer(one.kept_since, seen.limits.cleanup_s)]
    return "; ".join(f"{one.name}, for {seen.ago(one.kept_since)}: {one.kept}" for one in kept)


def _full(seen: Seen) -> str:
    found = [(group, spot) for group in seen.state.consumers.by_id.values() for spot in group.stops]
    stuck = [(group, spot) for group, spot in found if stopped(group, spot)]
    if not stuck:
        return ""
    group, (topic_id, partition) = stuck[0]
    place = f"{seen.state.topics_by_id[topic_id].name}/{partition}"
    parked = f"{group.settings.max_parked} messages wait behind one failed key"
    return f"{len(stuck)} partitions stand still, as {place} for group {group.name}: {parked}"


def _slow(seen: Seen) -> str:
    groups = seen.state.consumers.by_id.values()
    first = (
        (group, next(iter(group.leases.values()))) for group in groups if group.leases
    )  # in the order of grants
    oldest = min(
        ((lease.granted_at, group.name, lease.member) for group, lease in first), default=None
    )
    if oldest is None or not seen.longer(oldest[0], seen.limits.slow_s):
        return ""
    return f"member {oldest[2]} of group {oldest[1]} has had messages for {seen.ago(oldest[0])}"


def _fenced(seen: Seen) -> str:
    groups = (group for group in seen.state.consumers.by_id.values() if group.fences)
    oldest = min(
        ((fence.since, group.name) for group in groups for fence in group.oldest_fences()),
        default=None,
    )
    if oldest is None or not seen.longer(oldest[0], seen.limits.fence_s):
        return ""
    return f"a key of group {oldest[1]} has been waiting for {seen.ago(oldest[0])}, and later messages of it behind it"


def _guarded(seen: Seen) -> str:
    found = [
        (group.flood, group.name)
        for group in seen.state.consumers.by_id.values()
        if group.flood is not None
    ]
    if not found:
        return ""
    flood, name = min(found, key=lambda item: item[0].since)
    what = (
        f"many keys failed alike ({flood.error_type or 'no type'}, fingerprint {flood.fingerprint})"
    )
    return f"{len(found)} groups are guarded, as {name} for {seen.ago(flood.since)}: {what}; {flood.probes} probes failed"


RULES = (
    Rule("disk.full", "critical", _disk_full, "free space on the broker's disk: it goes on by itself"),
    Rule("disk.low", "warning", _disk_low, "free space on the broker's disk, or keep messages for less long"),
    Rule(
        "log.damaged", "critical", _damaged,
        "stop the broker and restore the segment from a backup; what it holds is not delivered meanwhile",
    ),
    Rule("disk.trouble", "critical", _trouble, "mend the disk, or free space on it: it is tried again by itself"),
    Rule("retention.passed_group", "critical", _passed, "txmq group show GROUP: passed; keep messages for longer"),
    Rule("retention.held", "warning", _held, "txmq tx list: mend what decides the oldest; segments go by themselves"),
    Rule(
        "transaction.in_doubt", "critical", _in_doubt,
        "txmq tx list --state in-doubt says why nobody could tell; decide by txmq tx commit or rollback only where the"
        " decider is lost",
    ),
    Rule("transaction.oldest_undecided", "warning", _oldest, "txmq tx show TOKEN: who decides it, and what it said"),
    Rule("transaction.open", "warning", _open, "if its producer is gone for good: txmq tx rollback TOKEN"),
    Rule(
        "transaction.conflict", "warning", _conflict,
        "txmq tx list --state conflicts; compare the rows with the messages by token",
    ),
    Rule("heuristic.mixed", "critical", _heuristic, "txmq xa list --heuristic; put it right, then txmq xa forget"),
    Rule("resolver.unreachable", "critical", _unreachable, "mend the database or the DSN of its [[resolver]] section"),
    Rule("resolver.missing", "warning", _missing, "name the database under [[resolver]] in the broker's settings"),
    Rule(
        "fence.full", "critical", _full,
        "txmq group show GROUP names the key; replay or abandon its letter, or txmq group alter --max-parked",
    ),
    Rule(
        "group.guarded", "critical", _guarded,
        "mend what the handlers need: the group goes on by itself; or txmq group resume GROUP",
    ),
    Rule(
        "group.slow", "warning", _slow,
        "txmq group show GROUP says what stands still; its handlers hang, or take more ahead than they can do",
    ),
    Rule("fence.old", "warning", _fenced, "txmq dlq list GROUP; replay or abandon the letter"),
    Rule(
        "outbox.stuck", "critical", _outbox,
        "txmq outbox list DSN; make it possible, or take the row out: it holds up all transactions behind it",
    ),
    Rule("token.cleanup_stuck", "warning", _stuck, "remove the reason: old token rows stay until then"),
)  # fmt: skip


class Alarms:
    """Looks at all conditions. All methods belong to the reactor's thread."""

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        resolving: Resolves,
        watching: Watching,
        retaining: Retaining,
    ) -> None:
        self._engine, self._limits, self._resolving, self._watching = (
            engine,
            limits,
            resolving,
            watching,
        )
        self._retaining = retaining
        self._raised: dict[str, Alarm] = {}
        self.reported = Reported(engine.now)

    def tick(self) -> None:
        """Timer: raise and clear."""
        seen = self._look()
        for rule in RULES:
            self._judge(rule, rule.look(seen), seen.now)

    def raised(self) -> list[Alarm]:
        """All that hold now, the critical ones first, and of these the oldest."""
        self.tick()
        return sorted(
            (*self._raised.values(), *self.reported.raised()),
            key=lambda alarm: (alarm.severity, alarm.since),
        )

    def _look(self) -> Seen:
        engine, store = self._engine, self._engine.store
        resolvers, unresolvable = self._resolving.status(), self._watching.unresolvable_at
        passed = (self._retaining.passed, self._retaining.passed_at)
        return Seen(
            engine.state, store.read_only, store.quarantined, engine.disk, passed, self._retaining.held,
            engine.now(), resolvers, unresolvable, self._limits,
        )  # fmt: skip

    def _judge(self, rule: Rule, text: str, now: int) -> None:
        known = self._raised.get(rule.name)
        if text:
            since = now if known is None else known.since
            self._raised[rule.name] = Alarm(rule.name, rule.severity, since, text, rule.action)
            if known is None:
                log.error(
                    "alarm.raised",
                    alarm=rule.name,
                    severity=rule.severity,
                    text=text,
                    action=rule.action,
                )
        elif known is not None:
            del self._raised[rule.name]
            log.info("alarm.cleared", alarm=rule.name, after_s=(now - known.since) // SECOND)

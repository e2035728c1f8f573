"""Resolvers inside the broker: token rows of the configured databases, asked in threads
of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from uuid import UUID

import structlog

from txmq.crashpoints import crashpoint
from txmq.model.message import Decision
from txmq.tx.postgres.identity import ServerIdentity
from txmq.tx.postgres.resolver import Answer, Check, ResolverPolicy, TokenResolver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from twisted.internet.defer import Deferred
    from twisted.python.failure import Failure

    from txmq.broker.checkback.outbox_publisher import Publishes
    from txmq.broker.reactor.protocols import InThread
    from txmq.config.broker import Resolver as ResolverSettings
    from txmq.core.transactions.model import Transaction
    from txmq.tx.postgres.outbox import Queued
    from txmq.tx.postgres.partitions import MaintenanceReport

PATIENCE = 8  # looks at an outbox that are left out after one row could not be published
AT_ONCE = 1_000  # tokens in one call of a resolver: their answers take one turn of the reactor
PROBE_US = 30_000_000  # a database that nobody had to ask for so long is asked whether it is there
log = structlog.get_logger()


class ResolverStatus(NamedTuple):
    """How a resolver fares. Times are microseconds since the epoch, 0 = never or not at
    all.
    """

    name: str
    seen_at: int  # its database answered
    failing_since: int
    trouble: str  # why it is failing
    kept_since: int  # its token table could not be cleaned up
    kept: str  # and why not
    stuck_since: int = 0  # the next row of its outbox could not be published
    stuck: str = ""  # and why not


class Resolves(Protocol):
    """Whoever finds out what a database decided."""

    def knows(self, decider: tuple[Any, ...]) -> bool: ...

    def ask(
        self, token: bytes, row: Transaction, answered: Callable[[bytes, Decision, str, str], None]
    ) -> None: ...

    def status(self) -> Sequence[ResolverStatus]: ...


class Resolving:
    """Gathers the checks of each database and has them answered in one call after the
    other.

    A database is recognised by its system id and oid (only databases in the settings
    are ever asked); which of the resolvers leads to it is found out by asking them,
    because that is known only once they have connected.
    """

    def __init__(
        self,
        settings: Iterable[ResolverSettings],
        log_id: UUID,
        in_thread: InThread,
        now: Callable[[], int],
        *,
        name: str = "",
        publish: Publishes | None = None,
    ) -> None:
        """`now` gives microseconds since the epoch; `name` is the broker's; `publish`
        takes what waits in the outboxes, None = nothing is fetched.
        """
        self._lanes = [_Lane(one, log_id, name, in_thread, now, publish) for one in settings]

    def knows(self, decider: tuple[Any, ...]) -> bool:
        """Whether one of the databases is, or may be for all that is known yet, the one
        that decides.
        """
        return any(lane.may_know(decider) for lane in self._lanes)

    def upkeep(self, oldest: bytes | None) -> None:
        """Timer: report this broker and keep the token tables in order; `oldest` is the
        oldest undecided token here, None = there is none.
        """
        for lane in self._lanes:
            lane.upkeep(None if oldest is None else UUID(bytes=oldest))

    @property
    def upkeep_owed(self) -> bool:
        """Whether an upkeep came to nothing, and another one should not wait for its
        time.
        """
        return any(lane.upkeep_owed for lane in self._lanes)

    def probe(self) -> None:
        """Timer: find out about databases that failed, or that nobody has asked for a
        while.
        """
        for lane in self._lanes:
            lane.probe()

    def status(self) -> Sequence[ResolverStatus]:
        """How each resolver fares."""
        return [lane.status() for lane in self._lanes]

    def fetch(self) -> None:
        """Timer: publish what waits in the databases' outboxes."""
        for lane in self._lanes:
            lane.fetch()

    def ask(
        self, token: bytes, row: Transaction, answered: Callable[[bytes, Decision, str, str], None]
    ) -> None:
        """Find out about a transaction; `answered` is called once, later, with UNKNOWN
        where no resolver could tell.
        """
        lanes = [lane for lane in self._lanes if lane.may_know(row.decider)]
        if not lanes:
            answered(
                token, Decision.UNKNOWN, "resolver", "no resolver is configured for its database"
            )
            return
        _first_that_knows(lanes, token, row, answered)


def _first_that_knows(
    lanes: list[_Lane],
    token: bytes,
    row: Transaction,
    answered: Callable[[bytes, Decision, str, str], None],
) -> None:
    """Most brokers have one database; with several, those that turn out to be another
    one answer UNKNOWN.
    """
    lane, rest = lanes[0], lanes[1:]

    def next_one(answer: Answer) -> None:
        if answer.verdict is Decision.UNKNOWN and rest:
            _first_that_knows(rest, token, row, answered)
        else:
            answered(token, answer.verdict, f"resolver {lane.name}", answer.reason)

    lane.ask(token, row, next_one)


class _Lane:
    """One resolver: one call at a time, everything that came up meanwhile in the next
    one.
    """

    def __init__(
        self,
        settings: ResolverSettings,
        log_id: UUID,
        broker: str,
        in_thread: InThread,
        now: Callable[[], int],
        publish: Publishes | None,
    ) -> None:
        self.name = settings.name
        self._log_id, self._broker, self._in_thread, self._now, self._publish = (
            log_id,
            broker,
            in_thread,
            now,
            publish,
        )
        self._fetch_due = self._publishing = False
        self._skip = 0  # looks at the outbox left out, after a row that could not be published
        self._done: list[int] = []  # rows of the outbox that are published and not deleted yet
        policy = ResolverPolicy(end_stuck_after_s=settings.end_backend_after_s)
        self._resolver = TokenResolver(settings.dsn, policy=policy)
        self._pending: dict[Check, tuple[bytes, Callable[[Answer], None]]] = {}
        self._busy = False
        self._upkeep: tuple[UUID, str, UUID | None] | None = None  # that is due
        self.upkeep_owed = self._probing = False
        self._seen_at = self._failing_since = self._kept_since = 0
        self._stuck_since = 0
        self._kept = self._stuck = ""

    def may_know(self, decider: tuple[Any, ...]) -> bool:
        """Whether this is the database that decides, or it is not known yet which one
        this is.
        """
        found = self._resolver.identity
        return found is None or (found.system_id, found.database_oid) == (decider[1], decider[3])

    def ask(self, token: bytes, row: Transaction, answered: Callable[[Answer], None]) -> None:
        decider: tuple[Any, ...] = row.decider
        _kind, system_id, timeline, database_oid, xid = decider
        check = Check(
            UUID(bytes=token), self._log_id, ServerIdentity(system_id, timeline, database_oid), xid
        )
        self._pending[check] = (token, answered)
        self._go()

    def upkeep(self, oldest: UUID | None) -> None:
        self._upkeep = (self._log_id, self._broker, oldest)
        self._go()

    def probe(self) -> None:
        self._probing = self._resolver.failing or self._seen_at + PROBE_US <= self._now()
        self._go()

    def status(self) -> ResolverStatus:
        trouble = (
            (self._resolver.trouble or "it failed: see the broker's log")
            if self._failing_since
            else ""
        )
        kept = (self._kept_since, self._kept, self._stuck_since, self._stuck)
        return ResolverStatus(self.name, self._seen_at, self._failing_since, trouble, *kept)

    def _back(self) -> None:
        """A call has come back from its thread, so that the resolver can be looked
        at.
        """
        self._busy = False
        if self._resolver.failing:
            self._failing_since = self._failing_since or self._now()
        else:
            self._seen_at, self._failing_since = self._now(), 0

    def _note_upkeep(self, report: MaintenanceReport | None) -> None:
        self.upkeep_owed = report is None
        kept = [self._resolver.trouble] if report is None else list(report.put_off.values())
        self._kept = next(iter(kept), "")
        self._kept_since = (self._kept_since or self._now()) if kept else 0

    def _maintained(self, report: MaintenanceReport | None) -> None:
        self._back()
        self._note_upkeep(report)
        if report is None:
            log.warning("resolver.no_upkeep", resolver=self.name, reason=self._resolver.trouble)
        elif any(report):
            log.info("resolver.upkeep", resolver=self.name, **report._asdict())
        self._go()

    def _go(self) -> None:
        if self._busy:
            return
        if self._upkeep is not None:
            self._busy, what, self._upkeep = True, self._upkeep, None
            self._in_thread(self._resolver.maintain, *what).addCallbacks(
                self._maintained, self._failed, errbackArgs=([],)
            )
        elif self._pending:
            self._busy = True
            self._resolve()
        elif self._probing:
            self._busy, self._probing = True, False
            self._in_thread(self._resolver.probe).addCallbacks(
                self._probed, self._failed, errbackArgs=([],)
            )
        elif self._fetch_due:
            self._busy, self._fetch_due = True, False
            self._in_thread(self._resolver.fetch, self._log_id, self._done).addCallbacks(
                self._fetched, self._failed, errbackArgs=([],)
            )

    def _probed(self, _nothing: None) -> None:
        self._back()
        self._go()

    def fetch(self) -> None:
        """Look for what waits in the outbox, unless what was found last is not
        published yet.
        """
        self._skip = max(0, self._skip - 1)
        if (
            self._publish is not None
            and self._resolver.has_outbox
            and not (self._publishing or self._skip)
        ):
            self._fetch_due = True
            self._go()

    def _fetched(self, rows: list[Queued] | None) -> None:
        self._back()
        if rows is not None:
            if self._done:
                crashpoint("outbox.after_delete")
            self._done = []
        if rows == []:  # what was stuck has been taken out
            self._stuck, self._stuck_since = "", 0
        if rows and self._publish is not None:
            self._publishing = True
            self._publish(rows, self.name, lambda count, why: self._published(rows, count, why))
        self._go()

    def _published(self, rows: list[Queued], count: int, trouble: str) -> None:
        crashpoint("outbox.after_publish")
        self._publishing, self._fetch_due = False, True
        self._done = [row.seq for row in rows[:count]]
        if count < len(rows):
            self._fetch_due, self._skip = count > 0, PATIENCE
        self._stuck = f"row {rows[count].seq}: {trouble}" if trouble else ""
        self._stuck_since = (self._stuck_since or self._now()) if trouble else 0
        self._go()

    def _resolve(self) -> None:
        checks = list(self._pending)[:AT_ONCE]
        asked = [(check, self._pending.pop(check)[1]) for check in checks]
        work: Deferred[list[Answer]] = self._in_thread(self._resolver.resolve, checks)
        work.addCallbacks(self._answered, self._failed, callbackArgs=(asked,), errbackArgs=(asked,))

    def _answered(
        self, answers: list[Answer], asked: list[tuple[Check, Callable[[Answer], None]]]
    ) -> None:
        self._back()
        for (_check, answered), answer in zip(asked, answers, strict=True):
            answered(answer)
        self._go()

    def _failed(
        self, failure: Failure, asked: list[tuple[Check, Callable[[Answer], None]]]
    ) -> None:
        """Not the database's doing, which is an answer: a bug. It decides nothing, and
        the next check comes in its time.
        """
        log.error("resolver.failed", resolver=self.name, error=failure.getTraceback())
        self._answered([Answer(Decision.UNKNOWN, "the resolver failed")] * len(asked), asked)
        self._failing_since = self._failing_since or self._now()

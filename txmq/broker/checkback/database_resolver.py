"""The resolver of one database: checks, upkeep, probes and its outbox, one call at a
time in a thread.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import UUID

import structlog

from txmq.broker.checkback.resolvers import ResolverStatus
from txmq.crashpoints import crashpoint
from txmq.model.decider import ByPostgres, DatabaseId
from txmq.model.message import Decision
from txmq.model.units import MILLISECOND, SECOND
from txmq.tx.postgres.identity import ServerIdentity
from txmq.tx.postgres.outbox import SetAside
from txmq.tx.postgres.partitions import CallerTime
from txmq.tx.postgres.resolver import Answer, Check, ResolverPolicy, TokenResolver

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from twisted.python.failure import Failure

    from txmq.broker.checkback.resolvers import DatabaseBack, PublishRows
    from txmq.broker.reactor.interfaces import RunInThread
    from txmq.config.broker import ResolverSettings
    from txmq.core.transactions.model import Transaction
    from txmq.tx.postgres.brokers import DatabaseLease
    from txmq.tx.postgres.outbox import OutboxRow, PublishedRow
    from txmq.tx.postgres.partitions import MaintenanceReport
    from txmq.tx.postgres.resolver import ReportMemory

TOKENS_PER_CALL = 1_000  # their answers take one turn of the reactor
RECHECKED_TOKENS = 8  # at each probe: their locks may take 50 ms each
MAX_BLOCKED_TOKENS = 1_000  # others wait for their time
CONFIRM_US = 5 * SECOND  # between reports while bundles arrive
RETRY_US = 4 * SECOND  # between attempts at rows that could not be published
PROBE_US = 30 * SECOND  # a database without checks for so long is probed
log = structlog.get_logger()
_Waiting: TypeAlias = "Sequence[tuple[Check, Callable[[Answer], None]]]"
# log, name and oldest undecided tokens of this broker, and its time
_Upkeep: TypeAlias = "tuple[UUID, str, Callable[[ServerIdentity], UUID | None], CallerTime | None]"


class DatabaseResolver:
    """The resolver of one database, which makes one call at a time. Checks that arrive
    meanwhile go with the next call.
    """

    def __init__(
        self,
        settings: ResolverSettings,
        log_id: UUID,
        broker: str,
        in_thread: RunInThread,
        now: Callable[[], int],
        publish: PublishRows | None,
        lease: DatabaseLease | None,
        memory: ReportMemory | None,
    ) -> None:
        self.name = settings.name
        self.others: Sequence[DatabaseResolver] = ()
        self._log_id, self._broker, self._publish = log_id, broker, publish
        self._in_thread, self._now = in_thread, now
        self._fetch_due = self._publishing = False
        self._aside, self._outbox_stopped = SetAside(), False
        self._retry_at = 0  # to publish what is set aside, or has stopped the work
        self._published_rows: list[PublishedRow] = []  # of the outbox, and not deleted yet
        policy = ResolverPolicy(end_stuck_after_s=settings.end_backend_after_s)
        self._resolver = TokenResolver(settings.dsn, policy=policy, lease=lease, memory=memory)
        self._pending: dict[Check, tuple[bytes, Callable[[Answer], None]]] = {}
        self._busy_since = 0  # the call under way; 0 = none
        self._blocked_since, self._blocked = 0, ""
        self._blocked_tokens: dict[bytes, None] = {}
        self.back: DatabaseBack = _nobody
        self.recheck: Callable[[bytes], object] = _nobody
        self._due_upkeep: _Upkeep | None = None
        self.upkeep_owed = self._probing = self._unconfirmed = False
        self._confirmed_at = 0
        self._timeline = 0  # of the server that answered last; 0 = none has
        self._seen_at = self._compared_at = 0
        self._failing_since = self._cleanup_failing_since = 0
        self._outbox_stuck_since = 0
        self._cleanup_error = self._outbox_error = ""

    def may_resolve(self, decider: ByPostgres) -> bool:
        """Return whether this database is the decider, or is not identified yet."""
        return self._resolver.identity is None or self.identifies(decider)

    def left_behind(self, decider: ByPostgres) -> str:
        """Return why the server of a transaction that runs now is not the one that
        answers here; "" where it may be.
        """
        found = self._resolver.identity
        if found is None or not self.identifies(decider) or decider.timeline >= found.timeline:
            return ""
        return (
            f"the transaction runs on timeline {decider.timeline} of its database, and resolver "
            f"{self.name} leads to {found.timeline}: a failover has left that server behind"
        )

    @property
    def database(self) -> DatabaseId | None:
        """The database that answers here; None = not identified yet."""
        found = self._resolver.identity
        return None if found is None else DatabaseId(found.system_id, found.database_oid)

    def identifies(self, database: DatabaseId | ByPostgres) -> bool:
        """Return whether this database is known to be `database`, or the decider."""
        found = self._resolver.identity
        return (
            found is not None
            and found.system_id == database.system_id
            and found.database_oid == database.database_oid
        )

    @property
    def holds_lease(self) -> bool:
        """Return whether this broker may decide and publish here."""
        return self._resolver.holds_lease and not self._twins()

    def note_bundle(self) -> None:
        """Plan a report, so that a copy of the database made before now can be told.

        There is one in CONFIRM_US at most.
        """
        self._unconfirmed = True
        if self._confirmed_at + CONFIRM_US <= self._now():
            self._next_call()

    def _twins(self) -> str:
        """Return the reason why nothing may be decided here while another resolver
        leads to a server with the same identity; "" where none does.
        """
        if self.database is None:
            return ""
        twins = [one.name for one in self.others if one.database == self.database]
        return (
            f"resolvers {', '.join([self.name, *twins])} lead to servers with one identity, of "
            "which one is a copy: remove its [[resolver]] section"
            if twins
            else ""
        )

    def resolve(self, token: bytes, row: Transaction, answered: Callable[[Answer], None]) -> None:
        """Plan the check of a transaction. `answered` is called once, later."""
        decider = row.decider
        assert isinstance(decider, ByPostgres), "only databases are asked here"
        server = ServerIdentity(decider.system_id, decider.timeline, decider.database_oid)
        check = Check(UUID(bytes=token), self._log_id, server, decider.xid, decider.position)
        self._pending[check] = (token, answered)
        self._next_call()

    def upkeep(self, oldest: Mapping[DatabaseId, bytes], certain: int | None) -> None:
        """Plan to register this broker and to maintain the token table."""

        def oldest_of(found: ServerIdentity) -> UUID | None:
            token = oldest.get(DatabaseId(found.system_id, found.database_oid))
            return None if token is None else UUID(bytes=token)

        caller = None
        if certain is not None:
            caller = CallerTime(self._now() // MILLISECOND, certain // MILLISECOND)
        self._due_upkeep = (self._log_id, self._broker, oldest_of, caller)
        self._next_call()

    def probe(self) -> None:
        """Plan a probe where one is due, and check some blocked tokens again."""
        self._probing = self._resolver.failing or not (
            0 <= self._now() - self._compared_at < PROBE_US  # unless the time was set back
        )
        for token in list(self._blocked_tokens)[:RECHECKED_TOKENS]:
            del self._blocked_tokens[token]  # it comes back last, if it is blocked again
            self.recheck(token)
        self._next_call()

    def status(self) -> ResolverStatus:
        """Return the health of the resolver."""
        trouble = (
            (self._resolver.trouble or "it failed: see the broker's log")
            if self._failing_since
            else ""
        )
        problems = (
            self._cleanup_failing_since,
            self._cleanup_error,
            self._outbox_stuck_since,
            self._outbox_error,
            self._resolver.database_time(),
            self._busy_since,
            self._blocked_since,
            self._blocked,
        )
        refusal = self._twins() or self._resolver.refusal
        return ResolverStatus(
            self.name, self._seen_at, self._failing_since, trouble, *problems, refusal
        )

    def _call_ended(self, *, compared: bool = True) -> None:
        """Note the resolver's health after a call came back from its thread.

        `compared`: the call has read which server answers, and its clock.
        """
        self._busy_since = 0
        self._blocked = "; ".join(self._resolver.blocked.values())
        self._blocked_since = (self._blocked_since or self._now()) if self._blocked else 0
        if self._resolver.failing:
            self._failing_since = self._failing_since or self._now()
            return
        self._note_timeline()
        is_back = self._failing_since or not self._seen_at
        self._seen_at, self._failing_since = self._now(), 0
        if compared:
            self._compared_at = self._now()
        if is_back:
            self.back(self.may_resolve)

    def _note_timeline(self) -> None:
        before, found = self._timeline, self._resolver.identity
        if found is not None and found.timeline != before:
            self._timeline = found.timeline
            if before:
                log.warning(
                    "resolver.failed_over",
                    resolver=self.name,
                    timeline=found.timeline,
                    before=before,
                    hint="txmq tx lost DSN names transactions whose rows the failover has lost",
                )

    def _note_upkeep(self, report: MaintenanceReport | None) -> None:
        self.upkeep_owed = report is None
        problems = [self._resolver.trouble] if report is None else list(report.put_off.values())
        self._cleanup_error = next(iter(problems), "")
        self._cleanup_failing_since = (
            (self._cleanup_failing_since or self._now()) if problems else 0
        )

    def _maintained(self, report: MaintenanceReport | None) -> None:
        self._call_ended()
        self._note_upkeep(report)
        if report is None:
            log.warning("resolver.no_upkeep", resolver=self.name, reason=self._resolver.trouble)
        elif any(report):
            log.info("resolver.upkeep", resolver=self.name, **report._asdict())
        self._next_call()

    def _next_call(self) -> None:
        if self._busy_since:
            return
        if self._due_upkeep is not None:
            what, self._due_upkeep = self._due_upkeep, None
            self._begin(self._maintained, self._resolver.maintain, *what)
        elif self._pending:
            self._resolve_pending()
        elif self._unconfirmed and self._confirmed_at + CONFIRM_US <= self._now():
            self._unconfirmed, self._confirmed_at = False, self._now()
            self._begin(self._confirmed, self._resolver.confirm)
        elif self._probing:
            self._probing = False
            self._begin(self._probed, self._resolver.probe)
        elif self._fetch_due:
            self._fetch_due = False
            done, aside = self._published_rows, self._aside
            self._begin(
                partial(self._fetched, aside), self._resolver.fetch, self._log_id, done, aside
            )

    def _begin(
        self,
        done: Callable[[Any], None],
        call: Callable[..., Any],
        *args: object,
        waiting: _Waiting = (),
    ) -> None:
        """Make a call in the thread. `waiting` are the checks that it answers."""
        self._busy_since = self._now()
        work = self._in_thread(call, *args)
        work.addCallbacks(done, self._failed, errbackArgs=(waiting,))

    def _confirmed(self, _nothing: None) -> None:
        self._call_ended(compared=False)  # without a lease it asks nothing
        self._next_call()

    def _probed(self, _nothing: None) -> None:
        self._call_ended()
        self._next_call()

    def fetch_outbox(self) -> None:
        """Plan to read the outbox, unless the last rows are still being published."""
        if self._publish is None or self._publishing or self._twins():
            return
        if self._retry_at <= self._now():
            self._aside = SetAside()
        elif self._outbox_stopped or self._aside.full:
            return
        self._fetch_due = True
        self._next_call()

    def _fetched(self, aside: SetAside, rows: list[OutboxRow] | None) -> None:
        """Publish rows that were fetched without those in `aside`."""
        self._call_ended(compared=False)
        if rows is not None:
            if self._published_rows:
                crashpoint("outbox.after_delete")
            self._published_rows = []
        if rows == []:
            self._note_outbox("")
        if rows and self._publish is not None:
            self._publishing = True
            self._publish(rows, self.name, aside, self._published)
        self._next_call()

    def _published(self, done: list[PublishedRow], trouble: str) -> None:
        crashpoint("outbox.after_publish")
        self._publishing, self._published_rows = False, done
        self._note_outbox(trouble)
        self._fetch_due = bool(done) or not (trouble or self._aside.full)
        self._next_call()

    def _note_outbox(self, trouble: str) -> None:
        """Note the health of the outbox; `trouble` has stopped the work on it."""
        self._outbox_stopped = bool(trouble)
        self._outbox_error = trouble or str(self._aside)
        now = self._now()
        self._outbox_stuck_since = (self._outbox_stuck_since or now) if self._outbox_error else 0
        if self._outbox_error and self._retry_at <= now:
            self._retry_at = now + RETRY_US

    def _resolve_pending(self) -> None:
        checks = list(self._pending)[:TOKENS_PER_CALL]
        waiting = [(check, self._pending.pop(check)[1]) for check in checks]
        if reason := self._twins():
            for _check, answered in waiting:
                answered(Answer(Decision.UNKNOWN, reason))
            self._next_call()
            return
        done = partial(self._answered, waiting)
        self._begin(done, self._resolver.resolve, checks, waiting=waiting)

    def _answered(self, waiting: _Waiting, answers: list[Answer]) -> None:
        self._call_ended()
        for (check, answered), answer in zip(waiting, answers, strict=True):
            if answer.blocked and len(self._blocked_tokens) < MAX_BLOCKED_TOKENS:
                self._blocked_tokens[check.token.bytes] = None
            answered(answer)
        self._next_call()

    def _failed(self, failure: Failure, waiting: _Waiting) -> None:
        """Answer UNKNOWN after a bug (a failing database is an answer). Nothing is
        decided, and the next check comes in its time.
        """
        log.error("resolver.failed", resolver=self.name, error=failure.getTraceback())
        self._busy_since = 0
        self._failing_since = self._failing_since or self._now()
        for _check, answered in waiting:
            answered(Answer(Decision.UNKNOWN, "the resolver failed"))
        self._next_call()


def _nobody(_what: object) -> None:
    """Stand in for who would check again."""

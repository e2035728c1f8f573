"""The resolver: finds out the outcome of transactions that a database decides.

Three steps (docs/PROTOCOL.md 2). The transaction's id is only a hint that it still
runs: after a crash another transaction may have the number. The token's row proves the
commit. A fence in the row's place makes the commit impossible and proves the rollback.
Any failure on the way leaves the answer UNKNOWN: absence proves nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple, Protocol
from uuid import UUID

from txmq.errors import DatabaseError, DatabaseUnavailable, LeaseRefused
from txmq.model.decider import DatabaseId
from txmq.model.message import Decision
from txmq.model.units import SECOND
from txmq.tx.postgres.blockers import end_blockers, oldest_holder
from txmq.tx.postgres.blocking import fetch, read_history, read_server
from txmq.tx.postgres.bounds import BoundedCursor
from txmq.tx.postgres.brokers import (
    UNBOUNDED,
    UNKNOWN,
    DatabaseLease,
    KnownReports,
    confirm,
    holds,
    lacks_reports,
    report,
    report_with_lease,
)
from txmq.tx.postgres.errors import is_busy
from txmq.tx.postgres.evidence import FENCE, PROVE, Limits, Written, end_stuck, running, write
from txmq.tx.postgres.identity import Server, ServerIdentity, TimelineHistory
from txmq.tx.postgres.outbox import OutboxRow, PublishedRow, SetAside
from txmq.tx.postgres.partitions import CallerTime, MaintenanceReport, maintain
from txmq.tx.postgres.session import Connection, connect


class Check(NamedTuple):
    """A question: token and log of the bundle, its database, the xid where it is known,
    and the position in the database's log.
    """

    token: UUID
    log_id: UUID
    decider: ServerIdentity
    xid: int | None
    position: int


class Answer(NamedTuple):
    """COMMIT and ROLLBACK are final and durable; `reason` explains UNKNOWN.

    `blocked`: others hold the lock of the token's row, and may let go of it any time.
    """

    verdict: Decision
    reason: str = ""
    blocked: bool = False


# Proof before fence, twice: the second proof sees a row that was committed between the
# first proof and the fence.
_STEPS: Final = ((PROVE, Decision.COMMIT), (FENCE, Decision.ROLLBACK)) * 2
TIME_READ_S: Final = 120.0  # for which a reading of the database's clock counts
_LARGEST_XID: Final = 2**63 - 1
ENDED_PER_CALL: Final = 4  # tokens whose blockers are ended, a second at most each


class ReportMemory(Protocol):
    """The reports that each database is known to hold, durably."""

    def get(self, database: DatabaseId) -> KnownReports: ...

    def put(self, database: DatabaseId, known: KnownReports) -> None: ...

    def stored(self) -> Mapping[DatabaseId, int]: ...


class _Report(NamedTuple):
    """The arguments of the last `maintain`."""

    log_id: UUID
    name: str
    oldest_undecided: Callable[[ServerIdentity], UUID | None]


@dataclass(frozen=True, slots=True)
class ResolverPolicy:
    """Limits of the resolver.

    `end_stuck_after_s` lets it end backends that have been in a transaction for longer.
    """

    limits: Limits = field(default_factory=Limits)
    batch: int = 1000  # tokens in one statement
    end_stuck_after_s: float | None = None
    first_pause_s: float = 0.5  # after a failure, then twice as long each time
    longest_pause_s: float = 15.0


class TokenResolver:
    """Resolver of one database, for one thread at a time.

    It connects when it is first asked, and again after a failure. `database` is its
    DSN, or a callable that returns a connection in autocommit mode or raises
    DatabaseError.
    """

    def __init__(
        self,
        database: str | Callable[[], Connection],
        *,
        policy: ResolverPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        lease: DatabaseLease | None = None,
        memory: ReportMemory | None = None,
    ) -> None:
        """With a `lease`, nothing is written while the database does not hold it.

        The first `maintain` takes it. `memory` knows the reports that the database
        holds when the broker starts anew.
        """
        self._database = database
        self._policy = policy or ResolverPolicy()
        self._clock = clock
        self._connection: Connection | None = None
        self._failures = 0
        self._pause_ends = clock()
        self._time_read = 0, clock() - 2 * TIME_READ_S  # by the database's clock, and by ours
        self.trouble = ""  # why the last attempt failed
        self._history: TimelineHistory | None = None
        self.lease = lease
        self.refusal = ""  # why the broker may not work on the database
        self._memory = memory
        self._reports = UNKNOWN  # by this process
        self._last_report: _Report | None = None
        self.identity: ServerIdentity | None = None  # of the database, known once it has been asked
        # by kind of call: who or what the last one of the kind found in its way
        self.blocked: dict[str, str] = {}

    def resolve(self, checks: Sequence[Check]) -> list[Answer]:
        """Return an answer for each check, in order.

        It never raises because of the database: that is UNKNOWN.
        """
        answers: dict[Check, Answer] = {}
        if self._clock() >= self._pause_ends:
            with self._noting("tokens"):
                self._ask(checks, answers)
        unknown = Answer(Decision.UNKNOWN, self.trouble)
        return [answers.get(check, unknown) for check in checks]

    def maintain(
        self,
        log_id: UUID,
        name: str,
        oldest_undecided: Callable[[ServerIdentity], UUID | None],
        caller: CallerTime | None = None,
    ) -> MaintenanceReport | None:
        """Report the broker with that log, and make and drop partitions of the token
        table.

        `oldest_undecided` returns the oldest token that a database is to decide, None =
        there is none. `caller` bounds the server's clock. The report is None where the
        database cannot be asked now, for the reason in `trouble`.
        """
        if self._clock() < self._pause_ends:
            return None
        with self._noting("upkeep"):
            connection = self._open()
            self.identity = self._read_server(connection).identity
            self._last_report = _Report(log_id, name, oldest_undecided)
            if not self._report(connection, self._last_report, self.identity):
                self.trouble = self.refusal
                return None
            return maintain(connection, caller=caller)
        return None

    def database_time(self) -> int:
        """Return the time by the database's clock in microseconds: as last read, and
        what has passed since. 0 = it was not read lately.
        """
        time_read, read_at = self._time_read
        passed = self._clock() - read_at
        return time_read + int(passed * SECOND) if passed <= TIME_READ_S else 0

    @property
    def holds_lease(self) -> bool:
        """Return whether the database is known to hold the broker's lease."""
        return self._reports.stored > 0 and not self.refusal

    def probe(self) -> None:
        """Try to reach the database; `failing` has the result."""
        if self._clock() >= self._pause_ends:
            with self._noting("probe"):
                self.identity = self._read_server(self._open()).identity

    @property
    def failing(self) -> bool:
        """Return whether the last attempt failed, for the reason in `trouble`."""
        return self._failures > 0

    def fetch(
        self, log_id: UUID, done: Sequence[PublishedRow], aside: SetAside
    ) -> list[OutboxRow] | None:
        """Delete rows of the outbox that are done, and return the next ones that need
        not wait for any set aside.

        None where the database cannot be asked now: pass `done` again.
        """
        if self._clock() < self._pause_ends:
            return None
        rows = None
        with self._noting("outbox"):
            connection = self._open()
            if self._keep_lease(connection):
                rows = fetch(connection, log_id, done, aside)
        return rows

    @contextmanager
    def _noting(self, kind: str) -> Iterator[None]:
        """Note how a call ends. After an error the database is left alone for a while,
        unless only other sessions were in the way.
        """
        try:
            yield
        except DatabaseError as error:
            if not is_busy(error):
                self._pause(error)
                return
            self._failures = 0
            self.trouble = self.blocked[kind] = self._in_the_way(str(error))
        else:
            self._failures = 0
            if kind != "tokens":
                self.blocked.pop(kind, None)

    def _in_the_way(self, reason: str) -> str:
        holder = "" if self._connection is None else oldest_holder(self._connection)
        return f"{reason}; {holder}" if holder else reason

    def close(self) -> None:
        """Close the connection; the next question opens one again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _read_server(self, connection: Connection) -> Server:
        server = read_server(connection)
        self._time_read = server.time, self._clock()
        return server

    def _ask(self, checks: Sequence[Check], answers: dict[Check, Answer]) -> None:
        connection = self._open()
        server = self._read_server(connection)
        self.identity = server.identity
        if not self._keep_lease(connection):
            answers |= dict.fromkeys(checks, Answer(Decision.UNKNOWN, self.refusal))
            return
        reasons = self._refusals(connection, server, checks)
        answers |= {
            check: Answer(Decision.UNKNOWN, reason) for check, reason in reasons.items() if reason
        }
        self.blocked.pop("tokens", None)
        for batch in self._batches([check for check, reason in reasons.items() if not reason]):
            try:
                answers |= self._decide(connection, batch)
            except DatabaseUnavailable:
                raise
            except DatabaseError as error:  # of this batch; the others may succeed
                answers |= dict.fromkeys(batch, Answer(Decision.UNKNOWN, str(error)))

    def _report(self, connection: Connection, what: _Report, found: ServerIdentity) -> bool:
        """Report the broker, and take or keep its lease; `refusal` says why not."""
        oldest = what.oldest_undecided(found)
        if self.lease is None:
            report(connection, what.log_id, what.name, oldest)
            return True
        known = self._known_reports(found)
        # A copy that is killed at each try would else allow for ever more reports.
        if self.holds_lease or not lacks_reports(connection, self.lease, known):
            self._begin_report(found)
        try:
            known = report_with_lease(connection, self.lease, what.name, oldest, known)
        except LeaseRefused as error:
            self._remember(found, known)
            self.refusal = str(error)
            return False
        self._note_report(known, found)
        return True

    def confirm(self) -> None:
        """Have the database hold another report, which a copy made before lacks."""
        if self._clock() < self._pause_ends or self.lease is None or not self.holds_lease:
            return
        with self._noting("lease"):
            connection = self._open()
            found = self._read_server(connection).identity
            known = self._begin_report(found)
            confirmed = confirm(connection, self.lease, known)
            if confirmed is None:
                self._remember(found, known)
                self._keep_lease(connection)
            else:
                self._note_report(confirmed, found)

    def _begin_report(self, found: ServerIdentity) -> KnownReports:
        """Return what is known, and remember that another report is on its way."""
        known = self._known_reports(found)
        self._remember(found, known.begun())
        return known

    def _known_reports(self, found: ServerIdentity) -> KnownReports:
        # Two sections may lead to one database, and share the memory.
        if self._memory is None:
            return self._reports
        return self._memory.get(DatabaseId(found.system_id, found.database_oid))

    def _remember(self, found: ServerIdentity, known: KnownReports) -> None:
        if self._memory is not None and known.most != UNBOUNDED:
            self._memory.put(DatabaseId(found.system_id, found.database_oid), known)

    def _note_report(self, known: KnownReports, found: ServerIdentity) -> None:
        self._reports, self.refusal = known, ""
        self._remember(found, known)

    def _keep_lease(self, connection: Connection) -> bool:
        """Return whether the database holds the broker's lease; `refusal` says why
        not.
        """
        if self.lease is None:
            return True
        found = self.identity or self._read_server(connection).identity
        known = self._known_reports(found)
        if self._reports.stored and holds(connection, self.lease, known):
            self.refusal = ""
        elif self._last_report is None:
            self.refusal = "the broker has not reported to this database yet"
        else:
            found = self._read_server(connection).identity
            self._report(connection, self._last_report, found)
        return not self.refusal

    def _refusals(
        self, connection: Connection, server: Server, checks: Sequence[Check]
    ) -> dict[Check, str]:
        """Return why the server may not answer, for each check; "" where it may."""
        own = server.identity.timeline
        known = self._history
        if (known is None or known.timeline != own or known.trouble) and any(
            check.decider.timeline < own for check in checks
        ):
            self._history = read_history(connection, own)
        return {
            check: check.decider.why_not(server, check.position, self._history) for check in checks
        }

    def _batches(self, checks: list[Check]) -> Iterator[list[Check]]:
        by_log: dict[UUID, list[Check]] = {}
        for check in checks:
            by_log.setdefault(check.log_id, []).append(check)
        size = self._policy.batch
        for of_log in by_log.values():
            yield from (of_log[start : start + size] for start in range(0, len(of_log), size))

    def _decide(self, connection: Connection, batch: list[Check]) -> dict[Check, Answer]:
        """Answer checks of one log: leave running ones alone, prove or fence the
        others.
        """
        waiting = self._running(connection, batch)
        tokens = {check.token for check in batch if check.xid not in waiting}
        verdicts = self._verdicts(connection, batch[0].log_id, sorted(tokens))
        in_progress = Answer(Decision.UNKNOWN, "the transaction is in progress", blocked=True)
        return {check: verdicts.get(check.token, in_progress) for check in batch}

    def _running(self, connection: Connection, batch: list[Check]) -> set[int]:
        # Ids come from clients: an impossible one is no hint.
        known = [
            check.xid for check in batch if check.xid is not None and 0 < check.xid <= _LARGEST_XID
        ]
        waiting = running(connection, known) if known else set()
        if waiting and self._policy.end_stuck_after_s is not None:
            end_stuck(connection, sorted(waiting), self._policy.end_stuck_after_s)
        return waiting

    def _verdicts(
        self, connection: Connection, log_id: UUID, tokens: list[UUID]
    ) -> dict[UUID, Answer]:
        verdicts: dict[UUID, Answer] = {}
        for statement, verdict in _STEPS:
            left = [token for token in tokens if token not in verdicts]
            if not left:
                return verdicts
            written = write(connection, statement, log_id, left, self._policy.limits)
            verdicts |= dict.fromkeys(written.done, Answer(verdict))
            ended = self._end_blockers(connection, statement, log_id, written)
            verdicts |= {
                token: Answer(Decision.UNKNOWN, reason, blocked=True)
                for token, reason in written.blocked.items()
                if token not in ended
            }
        return dict.fromkeys(tokens, Answer(Decision.UNKNOWN, "the row comes and goes")) | verdicts

    def _end_blockers(
        self, connection: Connection, statement: str, log_id: UUID, written: Written
    ) -> set[UUID]:
        """Note who stands in front of tokens, and end these backends if the policy says
        so. Return the tokens to try again.
        """
        if not written.blocked:
            return set()
        self.blocked["tokens"] = self._in_the_way(next(iter(written.blocked.values())))
        older_than_s = self._policy.end_stuck_after_s
        if older_than_s is None:
            return set()
        return {
            token
            for token in islice(written.blocked, ENDED_PER_CALL)
            if end_blockers(connection, self._connect, statement, log_id, token, older_than_s)
        }

    def _open(self) -> Connection:
        if self._connection is None or self._connection.closed:
            self._connection = self._connect()
        return self._connection

    def _connect(self) -> Connection:
        if callable(self._database):
            return self._database()
        return connect(
            self._database, application_name="txmq resolver", cursor_factory=BoundedCursor
        )

    def _pause(self, error: DatabaseError) -> None:
        """Drop the connection, whatever its state, and wait before the next one."""
        self.close()
        self.blocked.clear()
        self.trouble = str(error)
        pause = min(self._policy.first_pause_s * 2**self._failures, self._policy.longest_pause_s)
        self._failures += 1
        self._pause_ends = self._clock() + pause

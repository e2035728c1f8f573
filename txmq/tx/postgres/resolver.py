"""Finds out what became of transactions that a PostgreSQL database decides.

Three steps (PROTOCOLS 2). The transaction's id only hints that it still runs: after a
crash the number may be somebody else's. The token's row proves the commit. A fence in
the row's place makes the commit impossible and proves the rollback. Whatever goes wrong
on the way leaves the answer UNKNOWN: nothing is concluded from not seeing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple
from uuid import UUID

from txmq.errors import DatabaseError, DatabaseUnavailable, SchemaMissing
from txmq.model.message import Decision
from txmq.tx.postgres.brokers import report
from txmq.tx.postgres.evidence import FENCE, PROVE, Limits, end_stuck, running, write
from txmq.tx.postgres.identity import ServerIdentity, read_server
from txmq.tx.postgres.outbox import Queued, fetch
from txmq.tx.postgres.partitions import MaintenanceReport, maintain
from txmq.tx.postgres.session import Connection, connect


class Check(NamedTuple):
    """A question: token and log of the group, the database that its header names, and
    the xid where that is known.
    """

    token: UUID
    log_id: UUID
    decider: ServerIdentity
    xid: int | None = None


class Answer(NamedTuple):
    """COMMIT and ROLLBACK are final and durable in the database; `reason` is why it is
    UNKNOWN.
    """

    verdict: Decision
    reason: str = ""


# Proof before fence. Twice, for the row that was committed between the two: the second
# time it is seen.
_STEPS: Final = ((PROVE, Decision.COMMIT), (FENCE, Decision.ROLLBACK)) * 2
_LARGEST_XID: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class ResolverPolicy:
    """How hard to try. `end_stuck_after_s` lets the resolver end backends that are in a
    transaction for longer.
    """

    limits: Limits = field(default_factory=Limits)
    batch: int = 1000  # tokens in one statement
    end_stuck_after_s: float | None = None
    first_pause_s: float = 0.5  # after a failure, then twice as long each time
    longest_pause_s: float = 15.0


class TokenResolver:
    """Answers for one database. Connects when first asked and again after a failure.
    For one thread at a time.

    `database` is its DSN, or a callable that gives a connection in autocommit mode or
    raises DatabaseError.
    """

    def __init__(
        self,
        database: str | Callable[[], Connection],
        *,
        policy: ResolverPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._policy = policy or ResolverPolicy()
        self._clock = clock
        self._connection: Connection | None = None
        self._failures = 0
        self.has_outbox = True  # for all that is known: tables of an older version have none
        self._pause_ends = clock()
        self.trouble = ""  # why the last attempt came to nothing
        self.identity: ServerIdentity | None = None  # of the database, known once it has been asked

    def resolve(self, checks: Sequence[Check]) -> list[Answer]:
        """One answer for each check, in their order. Never raises because of the
        database: that is UNKNOWN.
        """
        answers: dict[Check, Answer] = {}
        if self._clock() >= self._pause_ends:
            try:
                self._ask(checks, answers)
                self._failures = 0
            except DatabaseError as error:
                self._pause(error)
        unknown = Answer(Decision.UNKNOWN, self.trouble)
        return [answers.get(check, unknown) for check in checks]

    def maintain(
        self, log_id: UUID, name: str, oldest_undecided: UUID | None
    ) -> MaintenanceReport | None:
        """Reports the broker with that log, makes partitions of the token table ahead
        and drops those outlived.

        None where the database cannot be asked now, for the reason that is in
        `trouble`: the next time will do.
        """
        if self._clock() < self._pause_ends:
            return None
        try:
            connection = self._open()
            self.identity = read_server(connection).identity
            report(connection, log_id, name, oldest_undecided)
            self.has_outbox = True
            done = maintain(connection)
        except DatabaseError as error:
            self._pause(error)
            return None
        self._failures = 0
        return done

    def probe(self) -> None:
        """Finds out whether the database can be asked; `failing` tells."""
        if self._clock() < self._pause_ends:
            return
        try:
            self.identity = read_server(self._open()).identity
        except DatabaseError as error:
            self._pause(error)
        else:
            self._failures = 0

    @property
    def failing(self) -> bool:
        """Whether the last attempt came to nothing, for the reason that is in
        `trouble`.
        """
        return self._failures > 0

    def fetch(self, log_id: UUID, done: Sequence[int]) -> list[Queued] | None:
        """Deletes rows of the outbox that are done, and gives the next ones; see
        `outbox.fetch`.

        None where the database cannot be asked now: `done` is to be told again. Tables
        of an older version have no outbox; whether they still are is looked at by
        `maintain`.
        """
        if not self.has_outbox or self._clock() < self._pause_ends:
            return None
        try:
            rows = fetch(self._open(), log_id, done)
        except SchemaMissing as error:
            self.has_outbox, self.trouble = False, str(error)
            return None
        except DatabaseError as error:
            self._pause(error)
            return None
        self._failures = 0
        return rows

    def close(self) -> None:
        """Closes the connection; the next question opens one again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, checks: Sequence[Check], answers: dict[Check, Answer]) -> None:
        connection = self._open()
        server = read_server(connection)
        self.identity = server.identity
        reasons = {check: check.decider.why_not(server) for check in checks}
        answers |= {
            check: Answer(Decision.UNKNOWN, reason) for check, reason in reasons.items() if reason
        }
        for batch in self._batches([check for check, reason in reasons.items() if not reason]):
            try:
                answers |= self._decide(connection, batch)
            except DatabaseUnavailable:
                raise
            except DatabaseError as error:  # of this batch: the others may fare better
                answers |= dict.fromkeys(batch, Answer(Decision.UNKNOWN, str(error)))

    def _batches(self, checks: list[Check]) -> Iterator[list[Check]]:
        by_log: dict[UUID, list[Check]] = {}
        for check in checks:
            by_log.setdefault(check.log_id, []).append(check)
        size = self._policy.batch
        for of_log in by_log.values():
            yield from (of_log[start : start + size] for start in range(0, len(of_log), size))

    def _decide(self, connection: Connection, batch: list[Check]) -> dict[Check, Answer]:
        """Answers for checks of one log. What still runs is left in peace, the rest is
        proved or fenced.
        """
        waiting = self._running(connection, batch)
        tokens = {check.token for check in batch if check.xid not in waiting}
        verdicts = self._verdicts(connection, batch[0].log_id, sorted(tokens))
        in_progress = Answer(Decision.UNKNOWN, "the transaction is in progress")
        return {check: verdicts.get(check.token, in_progress) for check in batch}

    def _running(self, connection: Connection, batch: list[Check]) -> set[int]:
        # Ids come from clients: what cannot be one is no hint.
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
            verdicts |= {
                token: Answer(Decision.UNKNOWN, reason) for token, reason in written.blocked.items()
            }
        return dict.fromkeys(tokens, Answer(Decision.UNKNOWN, "the row comes and goes")) | verdicts

    def _open(self) -> Connection:
        if self._connection is None or self._connection.closed:
            database = self._database
            self._connection = (
                connect(database, application_name="txmq resolver")
                if isinstance(database, str)
                else database()
            )
        return self._connection

    def _pause(self, error: DatabaseError) -> None:
        """Whatever state the connection is in, the next attempt starts with a new one,
        later.
        """
        self.close()
        self.trouble = str(error)
        pause = min(self._policy.first_pause_s * 2**self._failures, self._policy.longest_pause_s)
        self._failures += 1
        self._pause_ends = self._clock() + pause

"""Resolvers of the broker: the token rows of configured databases, read in threads of
their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.broker.checkback.database_resolver import DatabaseResolver
from txmq.broker.checkback.resolvers import LeaseStatus
from txmq.model.decider import ByPostgres
from txmq.model.message import Decision

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from uuid import UUID

    from txmq.broker.checkback.resolvers import DatabaseBack, PublishRows, ResolverStatus
    from txmq.broker.reactor.interfaces import RunInThread
    from txmq.config.broker import ResolverSettings
    from txmq.core.transactions.model import Transaction
    from txmq.model.decider import DatabaseId
    from txmq.tx.postgres.brokers import DatabaseLease
    from txmq.tx.postgres.resolver import Answer, ReportMemory


class ResolverService:
    """Collects checks per database, and resolves them in one call after the other.

    A system id and a database oid identify a database; only configured databases are
    ever asked. Each resolver learns which database it reaches once it has connected.
    """

    def __init__(
        self,
        settings: Iterable[ResolverSettings],
        log_id: UUID,
        in_thread: RunInThread,
        now: Callable[[], int],
        *,
        name: str = "",
        publish: PublishRows | None = None,
        lease: DatabaseLease | None = None,
        memory: ReportMemory | None = None,
    ) -> None:
        """`now` gives microseconds since the epoch. `name` is the broker's. `publish`
        takes rows of outboxes; None = no outbox is read. `lease` is what the databases
        have to grant; None = none is needed. `memory` knows earlier reports.
        """
        self._lease, self._memory = lease, memory
        self._databases = [
            DatabaseResolver(one, log_id, name, in_thread, now, publish, lease, memory)
            for one in settings
        ]
        for database in self._databases:
            database.others = [one for one in self._databases if one is not database]

    def may_resolve(self, decider: ByPostgres) -> bool:
        """Return whether one of the databases is the decider, or may be because it is
        not identified yet.
        """
        return any(database.may_resolve(decider) for database in self._databases)

    def left_behind(self, decider: ByPostgres) -> str:
        """Return why a transaction that runs now may not be decided by its server: a
        failover has left that behind. "" where it may.
        """
        return next(filter(None, (one.left_behind(decider) for one in self._databases)), "")

    def upkeep(self, oldest: Mapping[DatabaseId, bytes], certain: int | None = None) -> None:
        """Timer: register this broker and maintain the token tables. `oldest` has the
        oldest undecided token of each database; other deciders need no token rows.

        `certain` is a time that is past for this broker; None = databases' clocks are
        believed.
        """
        for database in self._databases:
            database.upkeep(oldest, certain)

    def on_recheck(self, back: DatabaseBack, recheck: Callable[[bytes], object]) -> None:
        """Call `back` when a database answers for the first time, or again; `recheck`
        with the tokens whose rows others had locked.
        """
        for database in self._databases:
            database.back, database.recheck = back, recheck

    @property
    def upkeep_owed(self) -> bool:
        """Return whether an upkeep failed, so that the next one must not wait for its
        time.
        """
        return any(database.upkeep_owed for database in self._databases)

    def probe(self) -> None:
        """Timer: probe databases that failed, or that have not been asked for a while
        who they are and what time it is. Reads of an empty outbox do not ask that.
        """
        for database in self._databases:
            database.probe()

    def status(self) -> Sequence[ResolverStatus]:
        """Return the health of each resolver."""
        return [database.status() for database in self._databases]

    def lease_of(self, database: DatabaseId) -> LeaseStatus:
        """Return whether a resolver holds this broker's lease of the database."""
        held = any(one.identifies(database) and one.holds_lease for one in self._databases)
        return LeaseStatus(held, None if self._lease is None else self._lease.directory)

    def fetch_outboxes(self) -> None:
        """Timer: publish the rows of the databases' outboxes."""
        for database in self._databases:
            database.fetch_outbox()

    def note_bundle(self, database: DatabaseId | ByPostgres) -> None:
        """Note that a bundle arrives which the database is to decide, or that the home
        of one with a branch there has committed it.
        """
        for one in self._databases:
            if one.identifies(database):
                one.note_bundle()

    def reports(self) -> Mapping[DatabaseId, int]:
        """Return the reports that each database is known to hold: one with fewer is a
        copy, or has lost commits.
        """
        return {} if self._memory is None else self._memory.stored()

    def resolve(
        self, token: bytes, row: Transaction, answered: Callable[[bytes, Decision, str, str], None]
    ) -> None:
        """Find the outcome of a transaction. `answered` is called once, later, with
        UNKNOWN if no resolver found it.
        """
        assert isinstance(row.decider, ByPostgres), "only databases are asked here"
        databases = [database for database in self._databases if database.may_resolve(row.decider)]
        if not databases:
            answered(
                token, Decision.UNKNOWN, "resolver", "no resolver is configured for its database"
            )
            return
        _resolve_in_turn(databases, token, row, answered)


def _resolve_in_turn(
    databases: list[DatabaseResolver],
    token: bytes,
    row: Transaction,
    answered: Callable[[bytes, Decision, str, str], None],
) -> None:
    """Ask one resolver after the other until one decides.

    Most brokers have one database. Of several, those that are not the decider answer
    UNKNOWN.
    """
    database, rest = databases[0], databases[1:]

    def forward(answer: Answer) -> None:
        if answer.verdict is Decision.UNKNOWN and rest:
            _resolve_in_turn(rest, token, row, answered)
        else:
            answered(token, answer.verdict, f"resolver {database.name}", answer.reason)

    database.resolve(token, row, forward)

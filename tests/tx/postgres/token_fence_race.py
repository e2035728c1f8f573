"""A race of producers, resolvers and killed backends for the same tokens.

Half of the bundles are stored before the token row, half after it. Some producers pause
in between, and some of these until a resolver asks: so it meets open transactions on a
busy machine as well. Some roll back. Resolvers ask about each bundle as soon as it is
stored, long before a broker would. The tokens cross the edge of a partition.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Protocol
from uuid import UUID

import psycopg2

from tests.tx.postgres.support import LOG, OTHER_LOG, identity_of, new_token, producer, rows
from txmq.errors import DatabaseError, InDoubt, TransactionError
from txmq.model.message import Decision
from txmq.testing.wait import PATIENCE_S
from txmq.tx.postgres.blocking import guarded_commit, insert_token
from txmq.tx.postgres.partitions import create, partitions
from txmq.tx.postgres.resolver import Answer, Check
from txmq.tx.postgres.session import Connection, connect

ASKED_AT_ONCE = 20
UNDECIDED = 100  # bundles for which resolvers have time, however slow they are
PAUSES_S = (0, 0, 0.003, 0.02)  # between the steps of a producer, for resolvers
ASKED, ANSWERED = "asked", "answered"  # a pause until a resolver does so, or has done so


class Resolver(Protocol):
    """The resolver under test."""

    def resolve(self, checks: Sequence[Check]) -> list[Answer]: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Race:
    """One run over the database at `dsn`.

    `resolver` makes a resolver for it; `hints` is the share of bundles with a known
    xid.
    """

    dsn: str
    resolver: Callable[[str], Resolver]
    hints: float = 0.5
    bundles: dict[UUID, Check] = field(default_factory=dict)
    decisions: dict[UUID, Decision] = field(default_factory=dict)
    flipped: set[UUID] = field(default_factory=set)
    reported: dict[UUID, str] = field(default_factory=dict)  # by guarded_commit
    counts: Counter[str] = field(default_factory=Counter)
    reached: set[tuple[UUID, str]] = field(default_factory=set)  # who was asked, and answered
    lock: threading.Condition = field(default_factory=threading.Condition)  # of `reached`, too
    stop: threading.Event = field(default_factory=threading.Event)
    stored: threading.Event = field(default_factory=threading.Event)  # no bundle comes any more
    drained_by: float = 0.0

    def run(
        self,
        seconds: float,
        *,
        at_least: Mapping[str, int] | None = None,
    ) -> None:
        """Run producers for `seconds`, and until the counts are `at_least` so many.

        They stop when something is wrong, and when no count that is too small has grown
        for PATIENCE_S. Resolvers go on until every bundle is decided.
        """
        rows(self.dsn, "CREATE TABLE business (tok uuid PRIMARY KEY)")
        self._create_edge(seconds / 2)
        writers = [threading.Thread(target=self._produce, args=(seed,)) for seed in range(8)]
        writers.append(threading.Thread(target=self._kill))
        readers = [threading.Thread(target=self._resolve, args=(seed,)) for seed in range(2)]
        for thread in (*writers, *readers):
            thread.start()
        began = grown_at = time.monotonic()
        lacking = self._lacking(at_least)
        while not self.wrong() and (now := time.monotonic()) - grown_at < PATIENCE_S:
            if (still := self._lacking(at_least)) != lacking:
                lacking, grown_at = still, now
            if not lacking and now - began >= seconds:
                break
            self.stop.wait(0.1)
        self.drained_by = time.monotonic() + PATIENCE_S
        with self.lock:
            self.stop.set()
            self.lock.notify_all()
        for thread in writers:
            thread.join()
        self.stored.set()
        for thread in readers:
            thread.join()

    def phantoms(self) -> set[UUID]:
        """Return the tokens decided as committed without a row: messages about
        nothing.
        """
        return self._decided(Decision.COMMIT) - self._business()

    def lost(self) -> set[UUID]:
        """Return the tokens with a row that are decided as rolled back: lost
        messages.
        """
        return self._decided(Decision.ROLLBACK) & self._business()

    def misreported(self) -> set[UUID]:
        """Return the tokens whose producers got a wrong report."""
        business = self._business()
        return {
            token
            for token, outcome in self.reported.items()
            if (outcome == "committed") is not (token in business)
        }

    def undecided(self) -> list[Check]:
        """Return the bundles without a decision."""
        with self.lock:
            return [check for token, check in self.bundles.items() if token not in self.decisions]

    def wrong(self) -> set[UUID]:
        with self.lock:
            return self.lost() | self.phantoms() | self.flipped

    def _lacking(self, at_least: Mapping[str, int] | None) -> int:
        """Return by how many the counts are too small."""
        least = (at_least or {}).items()
        return sum(max(0, wanted - self.counts[name]) for name, wanted in least)

    def _decided(self, decision: Decision) -> set[UUID]:
        return {token for token, found in self.decisions.items() if found is decision}

    def _business(self) -> set[UUID]:
        return {UUID(str(token)) for (token,) in rows(self.dsn, "SELECT tok::text FROM business")}

    def _create_edge(self, in_seconds: float) -> None:
        """Replace the partitions of yesterday, today and tomorrow by two, with their
        edge just ahead.
        """
        with (
            closing(connect(self.dsn, application_name="race")) as connection,
            connection.cursor() as cursor,
        ):
            days = [day for day in partitions(connection) if day.lower is not None][:3]
            for day in days:
                cursor.execute(f"DROP TABLE {day.name}")
            edge = time.time_ns() // 1_000_000 + int(in_seconds * 1000)
            starts = [day.lower.int >> 80 for day in days if day.lower is not None]
            assert create(connection, starts[0], edge)
            assert create(connection, edge, days[-1].upper.int >> 80)

    def _produce(self, seed: int) -> None:
        chance, decider = random.Random(seed), identity_of(self.dsn)
        connection = self._connected()
        while not self.stop.is_set():
            self._wait(lambda: len(self.bundles) - len(self.decisions) < UNDECIDED)
            token = new_token()
            try:
                self._transaction(connection, chance, Check(token, LOG, decider, None, 1))
            except TransactionError as error:
                self.counts[type(error).__name__] += 1
                if not isinstance(error, InDoubt):
                    self.reported[token] = "not done"
            except (DatabaseError, psycopg2.Error):
                self.counts["broken"] += 1
            with suppress(psycopg2.Error):
                connection.rollback()
            if connection.closed:
                connection = self._connected()
        connection.close()

    def _transaction(self, connection: Connection, chance: random.Random, check: Check) -> None:
        with connection.cursor() as cursor:
            cursor.execute(
                "INSERT INTO business VALUES (%s) RETURNING pg_current_xact_id()::text",
                (str(check.token),),
            )
            [(xid,)] = cursor.fetchall()
        if chance.random() < self.hints:
            check = check._replace(xid=int(xid))
        if chance.random() < 0.5:
            self._store(check)
            self._pause(chance, check, ASKED, ANSWERED)
            insert_token(connection, check.token, [LOG, OTHER_LOG])
        else:
            insert_token(connection, check.token, [LOG, OTHER_LOG])
            self._store(check)
        self._pause(chance, check, ASKED)
        if chance.random() < 0.1:
            connection.rollback()
            self.reported[check.token] = "not done"
        else:
            guarded_commit(connection, check.token)
            self.reported[check.token] = "committed"

    def _pause(self, chance: random.Random, check: Check, *until: str) -> None:
        """Sleep, or wait for what a resolver does."""
        pauses: tuple[float | str, ...] = (*PAUSES_S, *until)
        if not isinstance(pause := chance.choice(pauses), str):
            time.sleep(pause)
            return
        self._wait(lambda: (check.token, pause) in self.reached)

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Wait until resolvers have brought it about."""
        with self.lock:
            self.lock.wait_for(lambda: condition() or self.stop.is_set(), PATIENCE_S)

    def _reach(self, checks: list[Check], what: str) -> None:
        with self.lock:
            self.reached |= {(check.token, what) for check in checks}
            self.lock.notify_all()

    def _store(self, check: Check) -> None:
        with self.lock:
            self.bundles[check.token] = check

    def _resolve(self, seed: int) -> None:
        chance, resolver = random.Random(seed), self.resolver(self.dsn)
        while not self.stored.is_set() or (self.undecided() and time.monotonic() < self.drained_by):
            waiting = self.undecided()
            asked = chance.sample(waiting, min(len(waiting), ASKED_AT_ONCE))
            self._reach(asked, ASKED)
            self._note(asked, resolver.resolve(asked) if asked else [])
            self._reach(asked, ANSWERED)
            time.sleep(0.002)
        resolver.close()

    def _note(self, asked: list[Check], answers: list[Answer]) -> None:
        with self.lock:
            for check, answer in zip(asked, answers, strict=True):
                self.counts[answer.verdict.name] += 1
                if answer.verdict is Decision.UNKNOWN:
                    continue
                if self.decisions.setdefault(check.token, answer.verdict) is not answer.verdict:
                    self.flipped.add(check.token)

    def _kill(self) -> None:
        while not self.stop.wait(0.1):
            ended = rows(
                self.dsn,
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND backend_type = 'client backend'"
                " AND application_name <> 'test' ORDER BY random() LIMIT 1",
            )
            self.counts["killed"] += ended == [(True,)]

    def _connected(self) -> Connection:
        while True:
            try:
                return producer(self.dsn)
            except psycopg2.OperationalError:
                self.counts["refused"] += 1

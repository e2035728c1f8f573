"""Producers, resolvers and a killer at work on the same tokens, and the count of what
went wrong.

Half the producers store the group before the token row, half after it, some pause in
between, some roll back. Resolvers ask about every group as soon as it is stored, long
before a broker would. The tokens cross a partition's edge.
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

from tests.postgres.support import LOG, OTHER_LOG, identity_of, new_token, producer, rows
from txmq.errors import DatabaseError, InDoubt, TransactionError
from txmq.model.message import Decision
from txmq.tx.postgres.commit import guarded_commit
from txmq.tx.postgres.partitions import create, partitions
from txmq.tx.postgres.resolver import Answer, Check
from txmq.tx.postgres.session import Connection, connect
from txmq.tx.postgres.tokens import insert_token

ASKED_AT_ONCE = 20
DRAIN_S = 60.0  # after the last producer's last word a resolver needs no time to speak of
PAUSES_S = (0, 0, 0.003, 0.02)  # a slow producer, while a resolver may come between its steps


class Resolver(Protocol):
    """What is put to the test."""

    def resolve(self, checks: Sequence[Check]) -> list[Answer]: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Race:
    """One run over the database at `dsn`; `resolver` makes a resolver for it, `hints`
    is the share of known xids.
    """

    dsn: str
    resolver: Callable[[str], Resolver]
    hints: float = 0.5
    groups: dict[UUID, Check] = field(default_factory=dict)
    decisions: dict[UUID, Decision] = field(default_factory=dict)
    flipped: set[UUID] = field(default_factory=set)
    told: dict[UUID, str] = field(default_factory=dict)  # what guarded_commit said
    counts: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)
    stop: threading.Event = field(default_factory=threading.Event)
    drained_by: float = 0.0

    def run(
        self, seconds: float, *, at_least: Mapping[str, int] | None = None, limit: float = 120.0
    ) -> None:
        """Producers work for `seconds` and until `counts` are `at_least` so many; no
        longer than `limit`.

        They stop as soon as something is wrong. Resolvers go on until every group is
        decided.
        """
        rows(self.dsn, "CREATE TABLE business (tok uuid PRIMARY KEY)")
        self._lay_an_edge(seconds / 2)
        writers = [threading.Thread(target=self._produce, args=(seed,)) for seed in range(8)]
        writers.append(threading.Thread(target=self._kill))
        readers = [threading.Thread(target=self._resolve, args=(seed,)) for seed in range(2)]
        for thread in (*writers, *readers):
            thread.start()
        began = time.monotonic()
        while (spent := time.monotonic() - began) < limit and not self.wrong():
            if spent >= seconds and all(
                self.counts[name] >= least for name, least in (at_least or {}).items()
            ):
                break
            self.stop.wait(0.1)
        self.drained_by = time.monotonic() + DRAIN_S
        self.stop.set()
        for thread in (*writers, *readers):
            thread.join()

    def phantoms(self) -> set[UUID]:
        """Decided as committed without a row of business: messages about nothing."""
        return self._decided(Decision.COMMIT) - self._business()

    def lost(self) -> set[UUID]:
        """Committed with a row of business and decided as rolled back: messages that
        nobody will ever see.
        """
        return self._decided(Decision.ROLLBACK) & self._business()

    def lied_to(self) -> set[UUID]:
        """Producers that were told something else than what is in the database."""
        business = self._business()
        return {
            token
            for token, told in self.told.items()
            if (told == "committed") is not (token in business)
        }

    def undecided(self) -> list[Check]:
        """Groups that nobody has decided."""
        with self.lock:
            return [check for token, check in self.groups.items() if token not in self.decisions]

    def wrong(self) -> set[UUID]:
        with self.lock:
            return self.lost() | self.phantoms() | self.flipped

    def _decided(self, decision: Decision) -> set[UUID]:
        return {token for token, found in self.decisions.items() if found is decision}

    def _business(self) -> set[UUID]:
        return {UUID(str(token)) for (token,) in rows(self.dsn, "SELECT tok::text FROM business")}

    def _lay_an_edge(self, in_seconds: float) -> None:
        """Two partitions in place of those of yesterday, today and tomorrow, with the
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
            token = new_token()
            try:
                self._transaction(connection, chance, Check(token, LOG, decider))
            except TransactionError as error:
                self.counts[type(error).__name__] += 1
                if not isinstance(error, InDoubt):
                    self.told[token] = "not done"
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
            time.sleep(chance.choice(PAUSES_S))
            insert_token(connection, check.token, [LOG, OTHER_LOG])
        else:
            insert_token(connection, check.token, [LOG, OTHER_LOG])
            self._store(check)
        time.sleep(chance.choice(PAUSES_S))
        if chance.random() < 0.1:
            connection.rollback()
            self.told[check.token] = "not done"
        else:
            guarded_commit(connection, check.token)
            self.told[check.token] = "committed"

    def _store(self, check: Check) -> None:
        with self.lock:
            self.groups[check.token] = check

    def _resolve(self, seed: int) -> None:
        chance, resolver = random.Random(seed), self.resolver(self.dsn)
        while not self.stop.is_set() or (self.undecided() and time.monotonic() < self.drained_by):
            waiting = self.undecided()
            asked = chance.sample(waiting, min(len(waiting), ASKED_AT_ONCE))
            self._note(asked, resolver.resolve(asked) if asked else [])
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
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
                " AND backend_type = 'client backend' AND application_name <> 'test' ORDER BY random() LIMIT 1",
            )
            self.counts["killed"] += ended == [(True,)]

    def _connected(self) -> Connection:
        while True:
            try:
                return producer(self.dsn)
            except psycopg2.OperationalError:
                self.counts["refused"] += 1

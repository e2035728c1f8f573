"""Handlers with duplicates and rollbacks beside continuous compaction of the inbox.

Every message must have its effect exactly once.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from importlib import resources

import psycopg2
import pytest

from tests.tx.postgres.support import LOG, producer, rows
from txmq.errors import DatabaseConflict
from txmq.testing.wait import wait_until
from txmq.tx.postgres import blocking, inbox, inbox_compaction
from txmq.tx.postgres.session import connect

PARTITIONS = 2
LOG_ID = str(LOG)
RUNS = 20  # limit for finding a planted bug; the first or second run finds it
COPIES = 3  # deliveries of each message
FOLDS = 10  # at least, beside the handlers
EFFECT = """
INSERT INTO effects VALUES (%s, %s, 1)
ON CONFLICT (partition, "offset") DO UPDATE SET n = effects.n + 1
"""


@dataclass(slots=True)
class Deliveries:
    """Deliver `messages` of each partition to eight handlers, roughly in order."""

    dsn: str
    messages: int
    isolation: str = "READ COMMITTED"
    counts: Counter[str] = field(default_factory=Counter)
    handed_out: int = 0
    progress: threading.Condition = field(default_factory=threading.Condition)
    folded: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        rows(
            self.dsn,
            'CREATE TABLE effects (partition int, "offset" int8, n int,'
            ' PRIMARY KEY (partition, "offset"))',
        )
        chance = random.Random(1)
        work = [
            (partition, offset)
            for partition in range(PARTITIONS)
            for offset in range(self.messages)
        ] * COPIES
        queue = iter(sorted(work, key=lambda item: item[1] + chance.randint(0, 50)))
        handlers = [threading.Thread(target=self._handle, args=(queue, seed)) for seed in range(8)]
        folder = threading.Thread(target=self._fold)
        for thread in (*handlers, folder):
            thread.start()
        for thread in handlers:
            thread.join()
        self.folded.set()
        folder.join()

    def effects(self) -> Counter[int]:
        """Return the number of messages by the number of their effects."""
        return Counter(
            {
                int(str(n)): int(str(count))
                for n, count in rows(self.dsn, "SELECT n, count(*) FROM effects GROUP BY n")
            }
        )

    def _handle(self, queue: Iterator[tuple[int, int]], seed: int) -> None:
        chance = random.Random(seed)
        with closing(producer(self.dsn)) as connection:
            connection.set_session(isolation_level=self.isolation)
            while item := self._next(queue):
                while not self._apply(connection, *item, fails=chance.random() < 0.05):
                    connection.rollback()

    def _next(self, queue: Iterator[tuple[int, int]]) -> tuple[int, int] | None:
        """Return the next delivery, once the folds are not behind."""
        between = PARTITIONS * self.messages * COPIES // (FOLDS + 1)
        with self.progress:
            self.progress.wait_for(lambda: self.handed_out < (self.counts["folds"] + 1) * between)
            self.handed_out += 1
            return next(queue, None)

    def _apply(
        self,
        connection: psycopg2.extensions.connection,
        partition: int,
        offset: int,
        *,
        fails: bool,
    ) -> bool:
        """One delivery; False where it has to come again."""
        with connection.cursor() as cursor:
            try:
                if not blocking.claim(
                    connection, {inbox.Position("g", LOG_ID, 1, partition): [offset]}
                ):
                    self.counts["duplicate"] += 1
                    connection.commit()
                    return True
                cursor.execute(EFFECT, (partition, offset))
                if fails:
                    self.counts["rolled back"] += 1
                    return False
                connection.commit()
            except (DatabaseConflict, psycopg2.errors.SerializationFailure):
                self.counts["conflict"] += 1
                return False
        self.counts["applied"] += 1
        return True

    def _fold(self) -> None:
        with closing(connect(self.dsn, application_name="folder")) as connection:
            while not self.folded.is_set():
                self.counts["moved"] += blocking.compact(connection, "g", LOG_ID).moved
                with self.progress:
                    self.counts["folds"] += 1
                    self.progress.notify_all()
                time.sleep(0.005)
            wait_until(
                lambda: not blocking.compact(connection, "g", LOG_ID).moved,
                what="everything is folded",
            )


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ"])
def test_every_effect_exactly_once_beside_folds(database: str, isolation: str) -> None:
    run = Deliveries(database, messages=300, isolation=isolation)
    run.run()
    everything = PARTITIONS * run.messages
    assert run.effects() == {1: everything}
    assert (run.counts["applied"], run.counts["duplicate"]) == (
        everything,
        everything * (COPIES - 1),
    )
    assert run.counts["rolled back"] >= 10, run.counts
    assert run.counts["folds"] >= FOLDS, run.counts
    assert run.counts["moved"] >= everything / 2, run.counts
    ranges = rows(database, "SELECT partition, applied::text FROM txmq_inbox ORDER BY 1")
    assert ranges == [(partition, f"{{[0,{run.messages})}}") for partition in range(PARTITIONS)]


def test_a_fold_without_locks_is_found(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = resources.files("txmq.tx.postgres").joinpath("schema.sql").read_text("utf-8")
    claim = schema[schema.index("CREATE FUNCTION public.txmq_claim") :]
    function = claim[: claim.index("END $$;")] + "END $$;"
    function = function.replace("pg_advisory_xact_lock_shared", "abs").replace(
        "CREATE", "CREATE OR REPLACE"
    )
    rows(database, function)
    naive = inbox_compaction._COMPACT.replace("pg_advisory_xact_lock", "abs").replace(
        inbox_compaction._OLDEST_SNAPSHOT, "NULL"
    )
    monkeypatch.setattr(inbox_compaction, "_COMPACT", naive)
    for _ in range(RUNS):
        run = Deliveries(database, messages=300)
        run.run()
        if run.effects()[2]:
            return
        rows(database, "DROP TABLE effects; TRUNCATE txmq_inbox, txmq_inbox_recent")
    pytest.fail(f"{RUNS} runs without the locks had every effect once")

"""Two-phase commits while coordinators, brokers and servers die: the same orders in both databases and the topic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest

from tests.reporting import Report
from tests.system.farm import Lane
from tests.system.orders import Outcome, faults
from tests.system.placing import TABLES, told
from tests.system.shop import Farm, Shop, opened
from txmq.client.recovery.recoverer import XaRecoverer
from txmq.config import Xa, XaDatabase
from txmq.testing.postgres import OwnServer
from txmq.testing.wait import wait_until

pytestmark = pytest.mark.timeout(300)  # where the machine is busy
DEATHS = ("xa.between_prepares", "xa.after_prepares", "xa.after_decision", "xa.between_commits")
DIE = 3  # coordinators at each
ROUNDS = 2  # of kills of the broker and of a server
COMMITS = 15  # between two kills
KEYS = ("a", "b", "c", "d", "e")
SAFETY_S = 0.5
PATIENCE_S = 120.0
PREPARED = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"


class Books:
    """A shop whose orders are in two databases."""

    def __init__(self, shop: Shop, other: str) -> None:
        self.shop, self.dsns = shop, (shop.dsn, other)
        self.there = shop._replace(dsn=other)
        self.there.query(TABLES)

    @contextmanager
    def farm(self) -> Iterator[Farm]:
        """Coordinators for the block: some die, the others go on until the end."""
        lanes = [Lane(point, point, DIE, (self.dsns[1], *KEYS)) for point in DEATHS]
        lanes += [Lane(f"desk-{n}", arguments=(self.dsns[1], *KEYS)) for n in range(3)]
        with self.shop.farm(*lanes, work="booking") as farm:
            yield farm

    @contextmanager
    def recovering(self) -> Iterator[None]:
        """Recovery is at work all the while, whatever is down just now."""
        databases = tuple(XaDatabase(name=f"db{n}", dsn=dsn) for n, dsn in enumerate(self.dsns))
        settings = Xa(every_s=SAFETY_S, safety_s=SAFETY_S, database=databases)
        over = Event()
        with closing(XaRecoverer(settings, [self.shop.broker.url])) as recoverer:
            thread = Thread(target=recoverer.run, args=(over,))
            thread.start()
            try:
                yield
            finally:
                over.set()
                thread.join()

    def prepared(self) -> list[tuple[object, ...]]:
        """What stands prepared."""
        return [row for shop in (self.shop, self.there) for row in shop.query(PREPARED)]

    def commits(self) -> int:
        return sum(outcome is Outcome.COMMITTED for outcome in told(self.shop.journals).values())

    def judge(self) -> dict[str, int]:
        """Fails where the databases and the topic do not have the same orders."""
        wait_until(lambda: not self.prepared(), PATIENCE_S, what="nothing is prepared")
        self.shop.settle()
        rows, there, messages = self.shop.rows(), self.there.rows(), self.shop.messages()
        assert sorted(rows) == sorted(there)
        assert faults(told(self.shop.journals), rows, messages) == []
        return {"transactions": len(told(self.shop.journals)), "rows": len(rows), "messages": len(messages)}


@pytest.fixture
def books(tmp_path: Path, database: str, crashable_database: str) -> Iterator[Books]:
    with opened(tmp_path, database) as shop:
        yield Books(shop, crashable_database)


def test_coordinators_brokers_and_servers_die_and_both_databases_and_the_topic_agree(
    books: Books, crashable_postgres: OwnServer, report: Report
) -> None:
    with books.recovering():
        with books.farm() as farm:
            for _ in range(ROUNDS):
                wait_for_commits(books, farm)
                books.shop.broker.restart()
                wait_for_commits(books, farm)
                crashable_postgres.kill_server()
                crashable_postgres.start()
            wait_for_commits(books, farm)
            wait_until(lambda: all(farm.hits()[point] >= DIE for point in DEATHS), PATIENCE_S, what="all deaths")
        deaths = {point: farm.hits()[point] for point in DEATHS}
        report({"broker kills": ROUNDS, "server kills": ROUNDS} | deaths | books.judge())


def wait_for_commits(books: Books, farm: Farm) -> None:
    wanted = books.commits() + COMMITS

    def enough() -> bool:
        farm.dead()  # raises where a coordinator failed by itself
        return books.commits() >= wanted

    wait_until(enough, PATIENCE_S, what=f"{COMMITS} commits")

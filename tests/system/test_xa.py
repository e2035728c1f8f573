"""Two-phase commits while coordinators, brokers and servers die: the same orders in
both databases and the topic.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.reporting import Report
from tests.system.books import Books
from tests.system.farm import Lane
from tests.system.shop import Farm, opened
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


@contextmanager
def farmed(books: Books) -> Iterator[Farm]:
    """Coordinators for the block: some die, the others go on until the end."""
    other = books.there.dsn
    lanes = [Lane(point, point, DIE, (other, *KEYS)) for point in DEATHS]
    lanes += [Lane(f"desk-{n}", arguments=(other, *KEYS)) for n in range(3)]
    with books.shop.farm(*lanes, work="booking") as farm:
        yield farm


@pytest.fixture
def books(tmp_path: Path, database: str, crashable_database: str) -> Iterator[Books]:
    with opened(tmp_path, database) as shop:
        yield Books(shop, crashable_database)


def test_coordinators_brokers_and_servers_die_and_both_databases_and_the_topic_agree(
    books: Books, crashable_postgres: OwnServer, report: Report
) -> None:
    with books.recovering(SAFETY_S):
        with farmed(books) as farm:
            for _ in range(ROUNDS):
                wait_for_commits(books, farm)
                books.shop.broker.restart()
                wait_for_commits(books, farm)
                crashable_postgres.kill_server()
                crashable_postgres.start()
            wait_for_commits(books, farm)
            wait_until(
                lambda: all(farm.hits()[point] >= DIE for point in DEATHS),
                PATIENCE_S,
                what="all deaths",
            )
        deaths = {point: farm.hits()[point] for point in DEATHS}
        report({"broker kills": ROUNDS, "server kills": ROUNDS} | deaths | books.judge())


def wait_for_commits(books: Books, farm: Farm) -> None:
    wanted = books.commits() + COMMITS

    def enough() -> bool:
        farm.dead()  # raises where a coordinator failed by itself
        return books.commits() >= wanted

    wait_until(enough, PATIENCE_S, what=f"{COMMITS} commits")

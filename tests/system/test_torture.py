"""Torture: everything dies again and again under load, and rows and messages agree at
the end (`make soak`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures_postgres import with_tables
from tests.reporting import Report
from tests.system.books import Books
from tests.system.farm import Lane
from tests.system.orders import Token
from tests.system.placing import told
from tests.system.shop import Farm, Shop, opened, tills
from txmq.errors import UnknownTransaction
from txmq.testing.postgres import OwnServer, temporary_server
from txmq.testing.wait import wait_until

HALVES, SERVER_CRASHES, BROKER_KILLS = 20_000, 50, 20
ROUNDS = {"server crashes": SERVER_CRASHES, "broker kills": BROKER_KILLS}
BEGUN = 28_000  # transactions: some die, or change their minds, before their half message is stored
XA_TRANSACTIONS, XA_BEGUN = 2_000, 3_000
SAFETY_S = 3.0  # for branches whose server has just crashed
KEYS = tuple(f"customer-{number}" for number in range(24))
DEATHS = (
    "tx.after_group",
    "tx.after_token",
    "tx.before_commit",
    "tx.after_commit",
)  # where services die, too
XA_DEATHS = (
    "xa.after_group",
    "xa.after_prepares",
    "xa.before_decision",
    "xa.after_decision",
    "xa.after_commits",
)


@pytest.mark.soak
@pytest.mark.timeout(3_600)
def test_twenty_thousand_halves_under_fifty_crashes(
    tmp_path: Path, crashable_postgres: OwnServer, crashable_database: str, report: Report
) -> None:
    with opened(tmp_path, crashable_database) as shop:
        lanes = [*tills(8, *KEYS), *(Lane(point, point, 0, KEYS) for point in DEATHS)]
        with shop.farm(*lanes) as farm:
            _kill(shop, farm, BEGUN, crashable_postgres)
            _wait_for_transactions(shop, farm, BEGUN + len(lanes))
        deaths = {point: number for point, number in farm.hits().items() if point in DEATHS}
        halves = sum(_is_stored(shop, token) for token in told(shop.journals))
        report(ROUNDS | deaths | {"halves": halves} | shop.judge())
    assert halves >= HALVES
    assert min(deaths.values()) >= SERVER_CRASHES


@pytest.mark.soak
@pytest.mark.timeout(3_600)
def test_two_thousand_xa_transactions_under_fifty_crashes(
    tmp_path: Path, crashable_postgres: OwnServer, crashable_database: str, report: Report
) -> None:
    with temporary_server(fsync=False) as other, opened(tmp_path, crashable_database) as shop:
        books = Books(shop, other.dsn(with_tables(other)))
        points = [*[""] * 8, *XA_DEATHS]
        lanes = [
            Lane(point or f"desk-{n}", point, 0, (books.there.dsn, *_keys(n)))
            for n, point in enumerate(points)
        ]
        with shop.farm(*lanes, work="booking") as farm, books.recovering(SAFETY_S):
            _kill(shop, farm, XA_BEGUN, crashable_postgres, other)
            _wait_for_transactions(shop, farm, XA_BEGUN + len(lanes))
            farm.job.stop.touch()
            wait_until(lambda: not books.prepared(), 60, what="no branch is prepared")
        deaths = {point: number for point, number in farm.hits().items() if point in XA_DEATHS}
        counts = books.judge()
        report(ROUNDS | deaths | counts)
    assert counts["transactions"] >= XA_TRANSACTIONS
    assert min(deaths.values()) >= 10


def _keys(lane: int) -> tuple[str, ...]:
    """Some of the lane's own, which others seldom wait for, and some that it shares."""
    return (*(f"customer-{lane}-{number}" for number in range(12)), *KEYS[lane % 4 :: 4])


def _is_stored(shop: Shop, token: Token) -> bool:
    try:
        shop.client.call("tx.show", token=token)
    except UnknownTransaction:
        return False
    return True


def _kill(shop: Shop, farm: Farm, begun: int, *servers: OwnServer) -> None:
    """Servers in turn, and the broker now and then, while so many transactions are
    begun.
    """
    for round_ in range(1, SERVER_CRASHES + 1):
        _wait_for_transactions(shop, farm, begun * round_ // SERVER_CRASHES)
        server = servers[round_ % len(servers)]
        server.kill_server()
        server.start()
        if round_ * BROKER_KILLS % SERVER_CRASHES < BROKER_KILLS:
            shop.broker.kill()  # raises if it was not alive
            shop.broker.start()


def _wait_for_transactions(shop: Shop, farm: Farm, wanted: int) -> None:
    def enough() -> bool:
        farm.dead()  # raises where a service failed by itself
        return len(told(shop.journals)) >= wanted

    wait_until(enough, 120, what=f"{wanted} transactions")

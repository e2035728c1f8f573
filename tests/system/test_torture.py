"""Torture: everything dies again and again under load, and rows and messages agree at the end (`make soak`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reporting import Report
from tests.system.farm import Lane
from tests.system.orders import Token
from tests.system.placing import told
from tests.system.shop import Farm, Shop, opened, tills
from txmq.errors import UnknownTransaction
from txmq.testing.postgres import OwnServer
from txmq.testing.wait import wait_until

HALVES, SERVER_CRASHES, BROKER_KILLS = 20_000, 50, 20
BEGUN = 28_000  # transactions: some die, or change their minds, before their half message is stored
KEYS = tuple(f"customer-{number}" for number in range(24))
DEATHS = ("tx.after_group", "tx.after_token", "tx.before_commit", "tx.after_commit")  # where services die, too


@pytest.mark.soak
@pytest.mark.timeout(3_600)
def test_twenty_thousand_halves_under_fifty_crashes(
    tmp_path: Path, crashable_postgres: OwnServer, crashable_database: str, report: Report
) -> None:
    with opened(tmp_path, crashable_database) as shop:
        lanes = [*tills(8, *KEYS), *(Lane(point, point, 0, KEYS) for point in DEATHS)]
        with shop.farm(*lanes) as farm:
            for round_ in range(1, SERVER_CRASHES + 1):
                _wait_for_transactions(shop, farm, BEGUN * round_ // SERVER_CRASHES)
                crashable_postgres.kill_server()
                crashable_postgres.start()
                if round_ * BROKER_KILLS % SERVER_CRASHES < BROKER_KILLS:
                    shop.broker.kill()  # raises if it was not alive
                    shop.broker.start()
            _wait_for_transactions(shop, farm, BEGUN + len(lanes))
        kills = {"server crashes": SERVER_CRASHES, "broker kills": BROKER_KILLS}
        deaths = {point: number for point, number in farm.hits().items() if point in DEATHS}
        halves = sum(_is_stored(shop, token) for token in told(shop.journals))
        report(kills | deaths | {"halves": halves} | shop.judge())
    assert halves >= HALVES
    assert min(deaths.values()) >= SERVER_CRASHES


def _is_stored(shop: Shop, token: Token) -> bool:
    try:
        shop.client.call("tx.show", token=token)
    except UnknownTransaction:
        return False
    return True


def _wait_for_transactions(shop: Shop, farm: Farm, wanted: int) -> None:
    def enough() -> bool:
        farm.dead()  # raises where a service failed by itself
        return len(told(shop.journals)) >= wanted

    wait_until(enough, 120, what=f"{wanted} transactions")

"""Torture (`make soak`): everything is killed again and again under load.

Rows and messages must be the same orders at the end.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures_postgres import create_database
from tests.reporting import Report
from tests.system.order_system import OrderSystem, SupervisedWorkers, endless_workers, order_system
from tests.system.order_worker import reported_outcomes
from tests.system.orders import Token
from tests.system.supervisor import WorkerSpec
from tests.system.two_databases import TwoDatabaseSystem
from txmq.errors import UnknownTransaction
from txmq.testing.postgres_server import OwnServer, temporary_server
from txmq.testing.wait import wait_until

HALF_MESSAGES, SERVER_CRASHES, BROKER_KILLS = 20_000, 50, 20
ROUNDS = {"server crashes": SERVER_CRASHES, "broker kills": BROKER_KILLS}
BEGUN = 28_000  # transactions; some end before their half messages are stored
XA_TRANSACTIONS, XA_BEGUN = 2_000, 3_000
SAFETY_S = 3.0  # for branches whose server has just crashed
KEYS = tuple(f"customer-{number}" for number in range(24))
DEATHS = (
    "tx.after_group",
    "tx.after_token",
    "tx.before_commit",
    "tx.after_commit",
)  # where services die as well
XA_DEATHS = (
    "xa.after_group",
    "xa.after_prepares",
    "xa.before_decision",
    "xa.after_decision",
    "xa.after_commits",
)


@pytest.mark.soak
@pytest.mark.timeout(3_600)
def test_twenty_thousand_half_messages_under_fifty_crashes(
    tmp_path: Path, crashable_postgres: OwnServer, crashable_database: str, report: Report
) -> None:
    with order_system(tmp_path, crashable_database) as system:
        workers = [
            *endless_workers(8, *KEYS),
            *(WorkerSpec(point, point, 0, KEYS) for point in DEATHS),
        ]
        with system.run_workers(*workers) as running_workers:
            _kill(system, running_workers, BEGUN, crashable_postgres)
            _wait_for_transactions(system, running_workers, BEGUN + len(workers))
        deaths = {
            point: number for point, number in running_workers.deaths().items() if point in DEATHS
        }
        stored = sum(_is_stored(system, token) for token in reported_outcomes(system.journals))
        report(ROUNDS | deaths | {"half messages": stored} | system.check())
    assert stored >= HALF_MESSAGES
    assert min(deaths.values()) >= SERVER_CRASHES


@pytest.mark.soak
@pytest.mark.timeout(3_600)
def test_two_thousand_xa_transactions_under_fifty_crashes(
    tmp_path: Path, crashable_postgres: OwnServer, crashable_database: str, report: Report
) -> None:
    with (
        temporary_server(fsync=False) as other,
        order_system(tmp_path, crashable_database) as system,
    ):
        systems = TwoDatabaseSystem(system, other.dsn(create_database(other)))
        points = [*[""] * 8, *XA_DEATHS]
        workers = [
            WorkerSpec(point or f"coordinator-{n}", point, 0, (systems.second.dsn, *_keys(n)))
            for n, point in enumerate(points)
        ]
        with (
            system.run_workers(*workers, program="xa_order_worker") as running_workers,
            systems.recovering(SAFETY_S),
        ):
            _kill(system, running_workers, XA_BEGUN, crashable_postgres, other)
            _wait_for_transactions(system, running_workers, XA_BEGUN + len(workers))
            running_workers.config.stop.touch()
            wait_until(lambda: not systems.prepared(), what="no branch is prepared")
        deaths = {
            point: number
            for point, number in running_workers.deaths().items()
            if point in XA_DEATHS
        }
        counts = systems.check()
        report(ROUNDS | deaths | counts)
    assert counts["transactions"] >= XA_TRANSACTIONS
    assert min(deaths.values()) >= 10


def _keys(worker: int) -> tuple[str, ...]:
    """Return keys of the worker alone, for which it seldom waits, and shared ones."""
    return (*(f"customer-{worker}-{number}" for number in range(12)), *KEYS[worker % 4 :: 4])


def _is_stored(system: OrderSystem, token: Token) -> bool:
    try:
        system.client.call("tx.show", token=token)
    except UnknownTransaction:
        return False
    return True


def _kill(
    system: OrderSystem, running_workers: SupervisedWorkers, begun: int, *servers: OwnServer
) -> None:
    """Kill the servers in turn, and the broker now and then, while so many transactions
    begin.
    """
    for round_ in range(1, SERVER_CRASHES + 1):
        _wait_for_transactions(system, running_workers, begun * round_ // SERVER_CRASHES)
        server = servers[round_ % len(servers)]
        server.kill_server()
        server.start()
        if round_ * BROKER_KILLS % SERVER_CRASHES < BROKER_KILLS:
            system.broker.kill()  # raises if it was not alive
            system.broker.start()


def _wait_for_transactions(
    system: OrderSystem, running_workers: SupervisedWorkers, wanted: int
) -> None:
    def enough() -> bool:
        running_workers.dead_pids()  # raises where a service failed by itself
        return len(reported_outcomes(system.journals)) >= wanted

    wait_until(enough, what=f"{wanted} transactions")

"""Two-phase commits while coordinators, brokers and servers are killed.

Both databases and the topic have the same orders at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.reporting import Report
from tests.system.order_system import SupervisedWorkers, order_system
from tests.system.supervisor import WorkerSpec
from tests.system.two_databases import TwoDatabaseSystem
from txmq.testing.postgres_server import OwnServer
from txmq.testing.wait import wait_until

pytestmark = pytest.mark.timeout(300)  # where the machine is busy
DEATHS = ("xa.between_prepares", "xa.after_prepares", "xa.after_decision", "xa.between_commits")
DEATHS_EACH = 3  # of coordinators at each crash point
ROUNDS = 2  # of kills of the broker and of a server
COMMITS = 15  # between two kills
KEYS = ("a", "b", "c", "d", "e")
SAFETY_S = 0.5


@contextmanager
def running_coordinators(systems: TwoDatabaseSystem) -> Iterator[SupervisedWorkers]:
    """Run coordinators for the block: some are killed, the others go on until the
    end.
    """
    second_dsn = systems.second.dsn
    workers = [WorkerSpec(point, point, DEATHS_EACH, (second_dsn, *KEYS)) for point in DEATHS]
    workers += [WorkerSpec(f"coordinator-{n}", arguments=(second_dsn, *KEYS)) for n in range(3)]
    with systems.system.run_workers(*workers, program="xa_order_worker") as running_workers:
        yield running_workers


@pytest.fixture
def systems(tmp_path: Path, database: str, crashable_database: str) -> Iterator[TwoDatabaseSystem]:
    with order_system(tmp_path, database) as system:
        yield TwoDatabaseSystem(system, crashable_database)


def test_coordinators_brokers_and_servers_die_and_both_databases_and_the_topic_agree(
    systems: TwoDatabaseSystem, crashable_postgres: OwnServer, report: Report
) -> None:
    with systems.recovering(SAFETY_S):
        with running_coordinators(systems) as running_workers:
            for _ in range(ROUNDS):
                wait_for_commits(systems, running_workers)
                systems.system.broker.restart()
                wait_for_commits(systems, running_workers)
                crashable_postgres.kill_server()
                crashable_postgres.start()
            wait_for_commits(systems, running_workers)
            wait_until(
                lambda: all(running_workers.deaths()[point] >= DEATHS_EACH for point in DEATHS),
                what="all deaths",
            )
        deaths = {point: running_workers.deaths()[point] for point in DEATHS}
        report({"broker kills": ROUNDS, "server kills": ROUNDS} | deaths | systems.check())


def wait_for_commits(systems: TwoDatabaseSystem, running_workers: SupervisedWorkers) -> None:
    wanted = systems.commits() + COMMITS

    def enough() -> bool:
        running_workers.dead_pids()  # raises where a coordinator failed by itself
        return systems.commits() >= wanted

    wait_until(enough, what=f"{COMMITS} commits")

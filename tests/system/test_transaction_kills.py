"""Kills at every point of a transaction: a row and its message exist both, or
neither.
"""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from psycopg2.extensions import parse_dsn

import txmq
import txmq_spark
from tests.reporting import Report
from tests.system.commit_holds import HOLDS, TRIGGER, CommitHold
from tests.system.order_system import OrderSystem, endless_workers, order_system
from tests.system.order_worker import (
    DRIVERS,
    application_name,
    noted_driver,
    open_transaction,
    reported_outcomes,
)
from tests.system.orders import ReportedOutcome, Token
from tests.system.supervisor import WorkerSpec
from txmq.testing.postgres_server import OwnServer
from txmq.testing.wait import PATIENCE_S, wait_until

pytestmark = pytest.mark.timeout(300)  # where the machine is busy
HITS = 20  # confirmed, in each window
AT_ONCE = 10  # transactions in a window
BROKER_KILLS = 10
Kill = Callable[[OwnServer, Mapping[int, int]], None]
# processes with crash points; `commit_holds` serves for those of PostgreSQL
ROLES = {
    # clients: producers, coordinators, relays, consumers
    "tx", "half", "local", "xa", "relay", "inbox", "consumer",
    "checker", "resolver", "outbox", "recovery",  # those that find the outcome
    "spool", "local_store",  # producers without a broker, consumers, and both their disks
    "log",  # a broker, at each record
    "plan",  # a broker that replays dead letters, and the operator's command
    "adoption",  # a broker that gives a consumer's store to others
    "nack",  # a broker, around a message's death
    "edit", "redrive", "export", "import", "letters",  # who changes or copies letters
    "backup", "restore", "copy",  # of a log
    "spark",  # a task or the driver of a job in Spark
}  # fmt: skip
CLIENT = Path(txmq.__file__ or "").parent / "client"
AIO, SHARED = CLIENT / "aio", CLIENT / "protocol" / "awaited"  # by all faces, or those on loops
CRASHPOINTS = {  # True: the transaction is committed there
    "tx.before_group": False,
    "tx.after_group": False,
    "tx.after_token": False,
    "tx.before_commit": False,
    "tx.after_commit": True,
    "tx.after_decide": True,
}


@pytest.fixture
def system(tmp_path: Path, crashable_database: str) -> Iterator[OrderSystem]:
    with order_system(tmp_path, crashable_database) as system:
        yield system


def test_no_crash_point_is_left_out() -> None:
    """Each crash point has a literal name, and a test that names it.

    A step of a transaction has one name in the blocking client and on event loops.
    """
    blocking, on_asyncio, shared = Counter[str](), Counter[str](), Counter[str]()
    for package in (txmq, txmq_spark):
        for source in Path(package.__file__ or "").parent.rglob("*.py"):
            calls = re.findall(r"(?<!def )\bcrashpoint\((.*)", source.read_text("utf-8"))
            names = on_asyncio if source.is_relative_to(AIO) else blocking
            names = shared if source.is_relative_to(SHARED) else names
            names.update(call.removeprefix('"').removesuffix('")') for call in calls)
    assert {*blocking.values(), *on_asyncio.values(), *shared.values()} == {1}
    assert on_asyncio.keys() <= blocking.keys()
    found = blocking.keys() | shared.keys()
    assert [name for name in found if not re.fullmatch(r"[a-z_]+\.[a-z_]+", name)] == []
    tests = "".join(
        path.read_text("utf-8") for path in Path(__file__).parents[1].rglob("test_*.py")
    )
    assert CRASHPOINTS.keys() <= found
    assert [name for name in sorted(found) if not re.search(rf'"{name}(:\d+)?"', tests)] == []
    assert {name.partition(".")[0] for name in found} == ROLES


def test_services_killed_at_every_crash_point(system: OrderSystem, report: Report) -> None:
    keys = ("a", "b", "c", "d")
    with system.run_workers(
        *(WorkerSpec(point, point, HITS, keys) for point in CRASHPOINTS)
    ) as running_workers:
        wait_until(
            lambda: running_workers.deaths() == dict.fromkeys(CRASHPOINTS, HITS),
            2 * PATIENCE_S,
            what="all deaths",
        )
    dead = running_workers.dead_pids()
    hits = {
        open_transaction(system.journals, pid): CRASHPOINTS[point]
        for point, pids in dead.items()
        for pid in pids
    }
    drivers = Counter(noted_driver(system.journals, pid) for pids in dead.values() for pid in pids)
    assert drivers.keys() == {"psycopg2", "psycopg"}
    report(running_workers.deaths() | drivers | system.check(hits))


def kill_clients(server: OwnServer, held: Mapping[int, int]) -> None:
    """Kill the clients only; the server goes on with their COMMIT."""
    for worker in held:
        os.kill(worker, signal.SIGKILL)


def terminate_backends(server: OwnServer, held: Mapping[int, int]) -> None:
    for backend in held.values():
        server.execute(f"SELECT pg_terminate_backend({backend}, 10000)")


def kill_a_backend(server: OwnServer, held: Mapping[int, int]) -> None:
    """Kill one backend. The postmaster ends all others as well, and recovers."""
    server.kill_backend(next(iter(held.values())))
    wait_until(lambda: not any(map(is_alive, held.values())), what="the backends are gone")
    wait_until(server.accepts_connections, what="the server is back")


def kill_the_server(server: OwnServer, held: Mapping[int, int]) -> None:
    server.kill_server()
    server.start()


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


KILLS: tuple[Kill, ...] = (kill_clients, terminate_backends, kill_a_backend, kill_the_server)


def kill_held(
    system: OrderSystem, server: OwnServer, hold: CommitHold, kill: Kill, drivers: Counter[str]
) -> Mapping[Token, bool]:
    """Kill what is held in COMMIT. Return the transactions, each with whether it must
    be committed in the end; count their drivers.
    """
    held = hold.hold_commits(AT_ONCE)
    drivers.update(noted_driver(system.journals, worker) for worker in held)
    tokens = [open_transaction(system.journals, worker) for worker in held]
    kill(server, held)
    hold.release()
    wait_until(lambda: system.decided(tokens), what="the broker has decided")
    return dict.fromkeys(tokens, hold.committed or kill is kill_clients)


def test_clients_backends_and_servers_killed_in_a_commit(
    system: OrderSystem, crashable_postgres: OwnServer, report: Report
) -> None:
    system.query(TRIGGER)
    holds = [hold(crashable_postgres, parse_dsn(system.dsn)["dbname"]) for hold in HOLDS]
    hits: dict[Token, bool] = {}
    counts: dict[str, int] = {}
    drivers = Counter[str]()
    with system.run_workers(*endless_workers(AT_ONCE)):
        for hold in holds:
            for kill in KILLS:
                window = f"{kill.__name__}, {type(hold).__name__}"
                counts[window] = 0
                while counts[window] < HITS:
                    more = kill_held(system, crashable_postgres, hold, kill, drivers)
                    counts[window] += len(more)
                    hits |= more
    assert drivers.keys() == {*DRIVERS}
    report(counts | drivers | system.check(hits))


def test_brokers_killed_under_transactions(system: OrderSystem, report: Report) -> None:
    with system.run_workers(*endless_workers(6, "a", "b", "c")):
        for _ in range(BROKER_KILLS):
            wait_for_commits(system, 20)
            system.broker.kill()  # raises if it was not alive
            system.broker.start()
        wait_for_commits(system, 5)
    report({"kills": BROKER_KILLS} | system.check())


def wait_for_commits(system: OrderSystem, more: int) -> None:
    def committed() -> int:
        return sum(
            outcome is ReportedOutcome.COMMITTED
            for outcome in reported_outcomes(system.journals).values()
        )

    wanted = committed() + more
    wait_until(lambda: committed() >= wanted, what=f"{more} commits")


@contextmanager
def frozen_services(system: OrderSystem, point: str) -> Iterator[dict[int, Token]]:
    """Stop services at a crash point for the block; yield the transaction of each by
    its pid.
    """
    with system.run_workers(
        *(worker._replace(point=f"{point}:2:STOP") for worker in endless_workers(AT_ONCE))
    ):
        wait_until(lambda: len(stopped_pids(system)) == AT_ONCE, what="all services are stopped")
        pids = stopped_pids(system)
        try:
            yield {pid: open_transaction(system.journals, pid) for pid in pids}
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)


def stopped_pids(system: OrderSystem) -> list[int]:
    pids = [int(journal.stem) for journal in system.journals.glob("*.journal")]
    return [
        pid
        for pid in pids
        if Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("T")
    ]


def test_a_service_frozen_before_its_token_is_rolled_back(
    system: OrderSystem, report: Report
) -> None:
    with frozen_services(system, "tx.after_group") as services:
        wait_until(lambda: system.decided(services.values()), what="the broker has decided")
    report({"frozen": len(services)} | system.check(dict.fromkeys(services.values(), False)))
    assert {reported_outcomes(system.journals)[token] for token in services.values()} == {
        ReportedOutcome.ABORTED
    }


def test_a_service_frozen_before_its_commit_is_waited_for(
    system: OrderSystem, report: Report
) -> None:
    with frozen_services(system, "tx.before_commit") as services:
        wait_until(
            lambda: all(checked_three_times(system, token) for token in services.values()),
            what="three check-backs",
        )
        assert {row["token"] for row in system.transactions("undecided")} == {*services.values()}
    report({"frozen": len(services)} | system.check(dict.fromkeys(services.values(), True)))
    assert {reported_outcomes(system.journals)[token] for token in services.values()} == {
        ReportedOutcome.COMMITTED
    }


def test_a_service_frozen_before_its_commit_loses_its_backend(
    system: OrderSystem, crashable_postgres: OwnServer, report: Report
) -> None:
    with frozen_services(system, "tx.before_commit") as services:
        for pid in services:
            system.query(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
                " WHERE application_name = %s",
                application_name(pid),
            )
        wait_until(lambda: system.decided(services.values()), what="the broker has decided")
    report({"frozen": len(services)} | system.check(dict.fromkeys(services.values(), False)))
    assert ReportedOutcome.COMMITTED not in {
        reported_outcomes(system.journals)[token] for token in services.values()
    }


def checked_three_times(system: OrderSystem, token: Token) -> bool:
    """Return whether three check-backs have left the transaction undecided."""
    tries: int = system.client.call("tx.show", token=token)["tries"]
    return tries >= 3

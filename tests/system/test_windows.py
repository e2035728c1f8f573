"""Kills in every window of a transaction: row and message exist together or not at all,
and the broker finds out.
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
from tests.reporting import Report
from tests.system.farm import Lane
from tests.system.gates import GATES, TRIGGER, Gate
from tests.system.orders import Outcome, Token
from tests.system.placing import application, last_begun, told
from tests.system.shop import Shop, opened, tills
from txmq.testing.postgres import OwnServer
from txmq.testing.wait import wait_until

pytestmark = pytest.mark.timeout(300)  # where the machine is busy
HITS = 20  # confirmed, in each window
AT_ONCE = 10  # transactions in a window
PATIENCE_S = 60.0
BROKER_KILLS = 10
Kill = Callable[[OwnServer, Mapping[int, int]], None]
# who dies there; PostgreSQL's backends and servers have no crash points but gates
# (`gates`)
ROLES = {
    # clients: producers, coordinators, relays, consumers
    "tx", "half", "local", "xa", "relay", "inbox",
    "checker", "resolver", "outbox", "recovery",  # who finds out for them
    "log",  # a broker, at each record
}  # fmt: skip
CRASHPOINTS = {  # whether the transaction is committed there
    "tx.before_group": False,
    "tx.after_group": False,
    "tx.after_token": False,
    "tx.before_commit": False,
    "tx.after_commit": True,
    "tx.after_decide": True,
}


@pytest.fixture
def shop(tmp_path: Path, crashable_database: str) -> Iterator[Shop]:
    with opened(tmp_path, crashable_database) as shop:
        yield shop


def test_no_crash_point_is_left_out() -> None:
    """Those that are not tested here are named by another test; nobody's name is put
    together at run time.
    """
    found = Counter(
        call.removeprefix('"').removesuffix('")')
        for source in Path(txmq.__file__).parent.rglob("*.py")
        for call in re.findall(r"(?<!def )\bcrashpoint\((.*)", source.read_text("utf-8"))
    )
    assert [
        name
        for name, places in found.items()
        if places > 1 or not re.fullmatch(r"[a-z]+\.[a-z_]+", name)
    ] == []
    tests = "".join(
        path.read_text("utf-8") for path in Path(__file__).parents[1].rglob("test_*.py")
    )
    assert CRASHPOINTS.keys() <= found.keys()
    assert [name for name in sorted(found) if not re.search(rf'"{name}(:\d+)?"', tests)] == []
    assert {name.partition(".")[0] for name in found} == ROLES


def test_services_killed_at_every_crash_point(shop: Shop, report: Report) -> None:
    keys = ("a", "b", "c", "d")
    with shop.farm(*(Lane(point, point, HITS, keys) for point in CRASHPOINTS)) as farm:
        wait_until(lambda: farm.hits() == dict.fromkeys(CRASHPOINTS, HITS), 200, what="all deaths")
    dead = farm.dead()
    hits = {
        last_begun(shop.journals, pid): CRASHPOINTS[point]
        for point, pids in dead.items()
        for pid in pids
    }
    report(farm.hits() | shop.judge(hits))


def kill_clients(server: OwnServer, held: Mapping[int, int]) -> None:
    """The server goes on: COMMIT is on its way."""
    for worker in held:
        os.kill(worker, signal.SIGKILL)


def terminate_backends(server: OwnServer, held: Mapping[int, int]) -> None:
    for backend in held.values():
        server.execute(f"SELECT pg_terminate_backend({backend}, 10000)")


def kill_a_backend(server: OwnServer, held: Mapping[int, int]) -> None:
    """The postmaster throws out all others, too, and goes through recovery."""
    server.kill_backend(next(iter(held.values())))
    wait_until(lambda: not any(map(is_alive, held.values())), what="the backends are gone")
    wait_until(server.accepts, 60, what="the server is back")


def kill_the_server(server: OwnServer, held: Mapping[int, int]) -> None:
    server.kill_server()
    server.start()


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


KILLS: tuple[Kill, ...] = (kill_clients, terminate_backends, kill_a_backend, kill_the_server)


def hit(shop: Shop, server: OwnServer, gate: Gate, kill: Kill) -> Mapping[Token, bool]:
    """Kills whoever is held at the gate; gives their transactions, and whether each has
    to be committed in the end.
    """
    held = gate.hold(AT_ONCE)
    tokens = [last_begun(shop.journals, worker) for worker in held]
    kill(server, held)
    gate.open()
    wait_until(lambda: shop.decided(tokens), PATIENCE_S, what="the broker has found out")
    return dict.fromkeys(tokens, gate.stands or kill is kill_clients)


def test_clients_backends_and_servers_killed_in_a_commit(
    shop: Shop, crashable_postgres: OwnServer, report: Report
) -> None:
    shop.query(TRIGGER)
    gates = [gate(crashable_postgres, parse_dsn(shop.dsn)["dbname"]) for gate in GATES]
    hits: dict[Token, bool] = {}
    counts: dict[str, int] = {}
    with shop.farm(*tills(AT_ONCE)):
        for gate in gates:
            for kill in KILLS:
                window = f"{kill.__name__}, {type(gate).__name__}"
                counts[window] = 0
                while counts[window] < HITS:
                    more = hit(shop, crashable_postgres, gate, kill)
                    counts[window] += len(more)
                    hits |= more
    report(counts | shop.judge(hits))


def test_brokers_killed_under_transactions(shop: Shop, report: Report) -> None:
    with shop.farm(*tills(6, "a", "b", "c")):
        for _ in range(BROKER_KILLS):
            wait_for_commits(shop, 20)
            shop.broker.kill()  # raises if it was not alive
            shop.broker.start()
        wait_for_commits(shop, 5)
    report({"kills": BROKER_KILLS} | shop.judge())


def wait_for_commits(shop: Shop, more: int) -> None:
    def committed() -> int:
        return sum(outcome is Outcome.COMMITTED for outcome in told(shop.journals).values())

    wanted = committed() + more
    wait_until(lambda: committed() >= wanted, 60, what=f"{more} commits")


@contextmanager
def frozen(shop: Shop, point: str) -> Iterator[dict[int, Token]]:
    """Services that are stopped at a crash point during the block, by their pids, and
    the transaction of each.
    """
    with shop.farm(*(till._replace(point=f"{point}:2:STOP") for till in tills(AT_ONCE))):
        wait_until(
            lambda: len(stopped(shop)) == AT_ONCE, PATIENCE_S, what="all services are stopped"
        )
        pids = stopped(shop)
        try:
            yield {pid: last_begun(shop.journals, pid) for pid in pids}
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)


def stopped(shop: Shop) -> list[int]:
    pids = [int(journal.stem) for journal in shop.journals.glob("*.journal")]
    return [
        pid
        for pid in pids
        if Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("T")
    ]


def test_a_service_frozen_before_its_token_is_rolled_back(shop: Shop, report: Report) -> None:
    with frozen(shop, "tx.after_group") as services:
        wait_until(
            lambda: shop.decided(services.values()), PATIENCE_S, what="the broker has found out"
        )
    report({"frozen": len(services)} | shop.judge(dict.fromkeys(services.values(), False)))
    assert {told(shop.journals)[token] for token in services.values()} == {Outcome.ABORTED}


def test_a_service_frozen_before_its_commit_is_waited_for(shop: Shop, report: Report) -> None:
    with frozen(shop, "tx.before_commit") as services:
        wait_until(
            lambda: all(checked(shop, token) for token in services.values()),
            PATIENCE_S,
            what="three checks",
        )
        assert {row["token"] for row in shop.listed("undecided")} == {*services.values()}
    report({"frozen": len(services)} | shop.judge(dict.fromkeys(services.values(), True)))
    assert {told(shop.journals)[token] for token in services.values()} == {Outcome.COMMITTED}


def test_a_service_frozen_before_its_commit_loses_its_backend(
    shop: Shop, crashable_postgres: OwnServer, report: Report
) -> None:
    with frozen(shop, "tx.before_commit") as services:
        for pid in services:
            shop.query(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE application_name = %s",
                application(pid),
            )
        wait_until(
            lambda: shop.decided(services.values()), PATIENCE_S, what="the broker has found out"
        )
    report({"frozen": len(services)} | shop.judge(dict.fromkeys(services.values(), False)))
    assert Outcome.COMMITTED not in {told(shop.journals)[token] for token in services.values()}


def checked(shop: Shop, token: Token) -> bool:
    """Whether the resolver has asked about it three times, and is none the wiser."""
    tries: int = shop.client.call("tx.show", token=token)["tries"]
    return tries >= 3

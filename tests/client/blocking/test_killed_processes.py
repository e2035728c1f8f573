"""Brokers, resolvers, checkers and producers killed at their crash points."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import txmq
from tests.client.real import RealBroker
from tests.client.world import World, make_tables
from txmq.client.blocking.client import Client
from txmq.client.protocol.awaited import bundle, postgres
from txmq.client.protocol.transaction.checks import Half
from txmq.client.protocol.transaction.open_work import end_work
from txmq.errors import InDoubt, TxmqError
from txmq.testing.processes import run_script
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.tx.postgres.blocking import guarded_commit, roll_back

Connect = Callable[..., Client]
PRODUCERS = {  # whether the message is published in the end
    "half.after_group": False,
    "half.before_decide": True,
    "half.after_decide": True,
    "local.after_send": True,
    "local.after_group": True,
}
CHECKERS = ("checker.before_answer", "checker.after_answer")
BROKERS = (
    "log.before_write:4",
    "log.after_write:4",
    "resolver.before_write",
    "resolver.after_write",
)
CHILDREN = """
import os, sys, threading, json, txmq
from txmq.crashpoints import VARIABLE
url, topic, points = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
for point in points:
    pid = os.fork()
    if not pid:
        os.environ[VARIABLE] = point
        client = txmq.connect(url, service="killed", timeout=120)
        if point.startswith("checker."):
            client.register_checker("billing", lambda half: txmq.COMMIT)
            threading.Event().wait(120)
        kind = {"checker": "billing", "check_after": 0.3} if point.startswith("half.") else {}
        with client.transaction(**kind) as tx:
            tx.send(topic, point.encode(), key=point)
            if kind:
                tx.prepare()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9, point
"""


def kill_at(broker: RealBroker, topic: str, points: Iterable[str]) -> None:
    """Let a process work and die at each of the crash points."""
    run_script(CHILDREN, broker.url, topic, json.dumps(list(points)))


def published(broker: RealBroker, topic: str) -> set[str]:
    return {found.body.decode() for found in broker.read(topic)}


def test_producers_that_die_leave_what_their_checker_says(
    real: RealBroker, connect: Connect
) -> None:
    client = connect(real.url, service="killed", timeout=PATIENCE_S)
    client.call("topic.create", name="killed-producers", partitions=1)
    kill_at(real, "killed-producers", PRODUCERS)
    asked = set[str]()

    def check(half: Half) -> txmq.Decision:
        [message] = half.messages
        asked.add(message.body.decode())
        return txmq.COMMIT if PRODUCERS[message.body.decode()] else txmq.ROLLBACK

    client.register_checker("billing", check)
    wait_until(lambda: asked == {"half.after_group", "half.before_decide"})
    expected = {point for point, done in PRODUCERS.items() if done}
    wait_until(lambda: published(real, "killed-producers") == expected)
    assert len(real.read("killed-producers")) == len(expected)


def test_a_checker_that_dies_is_asked_again_elsewhere(real: RealBroker, connect: Connect) -> None:
    client = connect(real.url, service="killed", timeout=PATIENCE_S)
    tokens = []
    for _ in CHECKERS:
        tx = client.transaction(checker="billing", check_after=0.1)
        tx.__enter__()
        tx.send("killed-checkers", b"m")
        tx.prepare()
        end_work(tx.token)  # as if its process had died
        tokens.append(tx.token.hex)
    kill_at(real, "killed-checkers", CHECKERS)
    client.register_checker("billing", lambda _half: txmq.COMMIT)
    wait_until(
        lambda: all(client.call("tx.show", token=t)["state"] == "PUBLISHED" for t in tokens),
    )
    assert len(real.read("killed-checkers")) == len(tokens)


@pytest.fixture
def world(shared_database: str, tmp_path: Path, connect: Connect) -> Iterator[World]:
    make_tables(shared_database)
    broker = RealBroker(tmp_path / "killed", [shared_database])
    world = World(shared_database, broker, connect(broker.url, timeout=PATIENCE_S))
    yield world
    world.connection.close()
    broker.stop()


def test_a_broker_and_its_resolver_die_and_rows_decide(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transactions are left undecided, committed or not, to a resolver that dies."""
    committed = iter([True, False] * len(BROKERS))
    done = set[str]()

    async def lost(connection: Any, token: Any) -> None:
        if keep := next(committed):
            guarded_commit(connection, token)
        else:
            roll_back(connection)
        raise InDoubt(str(keep), token=str(token))

    monkeypatch.setattr(postgres, "guarded_commit", lost)

    async def unknown(*_args: Any, **_options: Any) -> None:
        return None

    monkeypatch.setattr(bundle, "await_state", unknown)

    def book(order: str) -> None:
        try:
            with world.client.transaction(
                world.connection, check_after=0.05, timeout=PATIENCE_S
            ) as tx:
                world.insert(order)
                tx.send(world.topic, order.encode(), key=order)
        except InDoubt as doubt:
            done.update({order} if doubt.message == "True" else ())
        except TxmqError:  # the broker died before it had stored the bundle
            world.connection.rollback()

    for point in BROKERS:
        world.broker.kill()
        world.broker.start(crash_at=point)
        with ThreadPoolExecutor(1) as pool:
            bookings = pool.map(book, [f"{point}-committed", f"{point}-rolled-back"])
            wait_until(world.broker.died, what=point)
            world.broker.start()
            list(bookings)
    wait_until(world.settled)
    assert world.orders() == world.messages() == done
    assert len(done) >= len(BROKERS) // 2

"""Several recoverers at once, beside live and killed coordinators."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from random import Random
from threading import Barrier, Event
from typing import Any

import psycopg2
import pytest
from structlog.testing import capture_logs

import txmq
from tests.client.blocking.test_xa_crashes import CRASHES
from tests.recover.coordinators import killed
from tests.recover.world import SAFETY_S, RecoveryWorld
from txmq.client.blocking.client import Client
from txmq.client.protocol.awaited import xa
from txmq.client.protocol.awaited.home_broker import request_decision
from txmq.client.protocol.transaction.home_decision import HomeDecision
from txmq.errors import BrokerUnavailable, Conflict, TxmqError
from txmq.model.message import COMMIT, ROLLBACK
from txmq.recover.recoverer import XaRecoverer
from txmq.testing.processes import running
from txmq.testing.wait import PATIENCE_S, wait_until

ROUNDS = 20


def some(world: RecoveryWorld, random: Random) -> None:
    """Return three transactions that their coordinators left at different steps."""
    for outcome in (COMMIT, ROLLBACK, None):
        stored = 2 if outcome is not None else random.choice([0, 1, 2])
        prepared = (
            random.choice([("a", "b"), ("a", "b"), ("b",)]) if outcome is not COMMIT else ("a", "b")
        )
        token = world.begin(stored=stored, prepared=prepared)
        if outcome is not None:
            with suppress(Conflict):  # recovery may have been faster
                world.decide(token, outcome)


def test_two_recoverers_at_once_agree_in_every_round(world: RecoveryWorld) -> None:
    random, recoverers = Random(7), [world.recoverer(), world.recoverer()]
    start = Barrier(len(recoverers))

    def one_pass(recoverer: XaRecoverer) -> None:
        start.wait(PATIENCE_S)
        recoverer.run_pass()

    with ThreadPoolExecutor(len(recoverers)) as threads, capture_logs() as logs:
        for _ in range(ROUNDS):
            some(world, random)
            for _pass in range(2):
                list(threads.map(one_pass, recoverers))
                world.clock.now += SAFETY_S
            list(threads.map(one_pass, recoverers))
        world.audit()
    assert [log for log in logs if log["event"] in {"xa.mixed", "xa.needs_operator"}] == []
    endings = [log["ending"] for log in logs if log["event"] == "xa.finished" and "ending" in log]
    assert len(endings) >= 2 * 2 * ROUNDS


def test_two_recovering_processes_agree_in_every_round(
    world: RecoveryWorld, tmp_path: Path
) -> None:
    config = tmp_path / "xa.toml"
    sections = [
        f"[[xa.database]]\nname = '{name}'\ndsn = '{dsn}'" for name, dsn in world.dsns.items()
    ]
    sections += [f"[[xa.broker]]\nurl = '{broker.url}'" for broker in world.brokers]
    config.write_text("\n".join(["[xa]\nevery_s = 0.05\nsafety_s = 0.1", *sections]))
    random = Random(8)
    with ExitStack() as stack:
        command = ("xa", "recover", "--watch", "--config", str(config))
        processes = [stack.enter_context(running(tmp_path / str(n), *command)) for n in range(2)]
        for process in processes:
            process.first_line()
        for _ in range(ROUNDS):
            some(world, random)
            wait_until(
                lambda: not world.standing("a") + world.standing("b"),
                what="nothing stands prepared",
            )
        own = {token.hex for token in world.tokens}
        wait_until(lambda: not own & listed(world.clients), what="no group is undecided")
        assert [process.terminate() for process in processes] == [0, 0]
    events = [event for process in processes for event in process.events()]
    assert "xa.finished" in {event["event"] for event in events}
    assert [
        event for event in events if event["event"] == "xa.mixed" and event["token"] in own
    ] == []
    world.audit()


def listed(clients: Sequence[Client]) -> set[str]:
    """Return the tokens of transactions that are undecided or need an operator."""
    return {
        row["token"]
        for client in clients
        for row in client.call("xa.list", limit=1_000)["transactions"]
    }


def test_coordinators_at_work_and_recoverers_without_patience_agree(
    world: RecoveryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With hardly a safety interval, recovery rolls slow live transactions back."""
    stop, passes, random = Event(), [0, 0], Random(9)

    def recover(number: int) -> None:
        while not stop.is_set():
            recoverers[number].run_pass()
            passes[number] += 1

    def wait_for_passes() -> None:
        enough = passes[0] + 2  # the first may have been under way
        wait_until(lambda: passes[0] >= enough, what="two more passes")

    async def slow(*args: Any) -> HomeDecision:
        if random.random() < 0.3:
            wait_for_passes()
            world.clock.now += 1.0  # whoever is slow beside it is rolled back, too
            wait_for_passes()
        return await request_decision(*args)

    monkeypatch.setattr(xa, "request_decision", slow)

    def coordinate(number: int) -> int:
        done = 0
        with txmq.connect(world.brokers[0].url, service="orders") as client, ExitStack() as stack:
            connections = [
                stack.enter_context(closing(psycopg2.connect(dsn))) for dsn in world.dsns.values()
            ]
            for _ in range(ROUNDS):
                done += transact(world, client, connections)
        return done

    recoverers = [world.recoverer(safety_s=0.5) for _ in range(2)]
    with ThreadPoolExecutor(4) as threads:
        recovering = [threads.submit(recover, number) for number in range(2)]
        done = sum(threads.map(coordinate, range(2)))
        stop.set()
        for future in recovering:
            future.result()
    for _ in range(3):
        world.clock.now += 1.0
        recoverers[0].run_pass()
    rolled_back = [token for token in world.tokens if world.state(token) != "PUBLISHED"]
    assert done + len(rolled_back) == len(world.tokens) == 2 * ROUNDS
    assert done
    assert rolled_back
    world.audit(stored=1)


def transact(
    world: RecoveryWorld, client: Client, connections: Sequence[psycopg2.extensions.connection]
) -> bool:
    """Run one transaction; return whether it is committed."""
    tx = client.xa(*connections)
    try:
        with tx:
            for connection in connections:
                with connection.cursor() as cursor:
                    cursor.execute("INSERT INTO effects VALUES (%s)", (tx.token.hex,))
            tx.send(world.topic, tx.token.hex.encode())
    except BrokerUnavailable:
        raise
    except TxmqError:
        world.tokens.append(tx.token)
        return False
    world.tokens.append(tx.token)
    return True


@pytest.mark.parametrize("recoverers", [1, 2])
def test_whatever_a_killed_coordinator_leaves_is_made_to_agree(
    world: RecoveryWorld, recoverers: int
) -> None:
    died = killed(world, CRASHES)
    several = [world.recoverer() for _ in range(recoverers)]
    for _ in range(2):
        for recoverer in several:
            recoverer.run_pass()
        world.clock.now += SAFETY_S
    committed = {died[point] for point, done in CRASHES.items() if done}
    assert (
        world.effects("a")
        == world.effects("b")
        == world.messages(0)
        == world.messages(1)
        == committed
    )
    assert world.standing("a") + world.standing("b") == []
    assert not set(died.values()) & listed(world.clients)

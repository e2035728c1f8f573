"""Processes on asyncio that are killed at the steps of their transactions.

Those of XA transactions: tests/client/blocking/test_xa_crashes.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import txmq
from tests.client.real import RealBroker
from tests.client.world import World
from txmq import Decision, Half
from txmq.client.blocking.client import Client
from txmq.client.protocol.transaction.open_work import end_work
from txmq.testing.processes import run_script
from txmq.testing.wait import PATIENCE_S, wait_until

Connect = Callable[..., Client]

CLIENT = Path(txmq.__file__ or "").parent / "client"
ON_A_LOOP = (CLIENT / "aio", CLIENT / "protocol" / "awaited")
CRASHES = {  # whether the transaction is committed there
    "tx.before_group": False,
    "tx.between_groups": False,
    "tx.after_group": False,
    "tx.after_token": False,
    "tx.before_commit": False,
    "tx.after_commit": True,
    "tx.between_decides": True,
    "tx.after_decide": True,
}
HALVES = {"half.after_group": False, "half.before_decide": True, "half.after_decide": True}
CHECKERS = ("checker.before_answer", "checker.after_answer")
# what is sent goes out at the next turn of the loop
LOCALS = {"local.after_send": False, "local.after_group": True}
# stated once for all faces: tests/system/test_letter_kills.py kills there
IMPORTS = ("import.before_decision", "import.after_decision")
PRODUCERS = """
import asyncio, json, os, sys, asyncpg, psycopg, txmq.aio, txmq.client.aio.transaction.postgres
import txmq.client.aio.consumer.inbox, txmq.asyncpg, txmq.psycopg
from pathlib import Path
from psycopg2.extensions import parse_dsn
from txmq.crashpoints import VARIABLE
plan = json.loads(sys.argv[1])
async def connect(driver):
    if driver == "psycopg":
        return await txmq.psycopg.AsyncEnlistConnection.connect(plan["dsn"])
    known = parse_dsn(plan["dsn"])
    kind = txmq.asyncpg.EnlistConnection
    return await asyncpg.connect(database=known.pop("dbname"), connection_class=kind, **known)
def client(url):
    return txmq.aio.connect(url, service="shop", timeout=120)
async def block(row, driver):
    connection = await connect(driver)
    async with client(plan["url"]) as one, client(plan["other"]) as other:
        async with one.transaction(connection, check_after=120) as tx:
            await connection.execute("INSERT INTO orders (id) VALUES ('%s')" % row)
            tx.send(plan["topic"], row.encode())
            (await tx.at(other)).send(plan["topic"], row.encode())
async def enlisted(row, driver):
    connection = await connect(driver)
    async with client(plan["url"]) as one, client(plan["other"]) as other:
        async with connection.transaction():
            await connection.execute("INSERT INTO orders (id) VALUES ('%s')" % row)
            tx = one.enlist(connection, check_after=120)
            tx.send(plan["topic"], row.encode())
            (await tx.at(other)).send(plan["topic"], row.encode())
async def half(row, driver):
    work = Path(plan["directory"], row)
    async with client(plan["url"]) as one:
        async with one.transaction(checker="work", check_after=120) as tx:
            tx.send(plan["topic"], row.encode(), headers={"row": row})
            await tx.prepare()
            work.touch()
async def local(row, driver):
    async with client(plan["url"]) as one:
        async with one.transaction() as tx:
            tx.send(plan["topic"], row.encode())
async def checking(row, driver):
    async with client(plan["url"]) as one:
        one.register_checker("work", lambda half: txmq.Decision.COMMIT)
        await asyncio.Event().wait()
async def inbox(row, driver):
    group = plan["topic"] + "-" + driver
    async def apply(message, connection):
        row = message.body.decode() + "-" + driver
        await connection.execute("INSERT INTO orders (id) VALUES ('%s')" % row)
    async with client(plan["url"]) as one:
        async with await one.consumer(group, [plan["topic"]], session=1) as consumer:
            work = asyncio.create_task(consumer.run(apply, inbox=lambda: connect(driver)))
            while not work.done() and (await one.call("group.show", group=group))["unsettled"]:
                await asyncio.sleep(0.02)
            await consumer.close()
            await work
started = []
for way, driver, point in plan["kills"]:
    pid = os.fork()
    if not pid:
        os.environ[VARIABLE] = point
        asyncio.run(globals()[way]("-".join((way, driver, point)), driver))
        os._exit(0)
    started.append(pid)
print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in started]))
"""


def killed(
    world: World, kills: Sequence[tuple[str, str, str]], status: int = -9, **plan: str
) -> None:
    """Kill a process for each, and count the hits. Then have all checked that is
    undecided; no check comes while the processes are at work.
    """
    plan = {"url": world.broker.url, "dsn": world.dsn, "topic": world.topic} | plan
    output = run_script(PRODUCERS, json.dumps(plan | {"kills": kills}))
    assert json.loads(output) == [status] * len(kills)
    for url in {plan["url"], plan.get("other", plan["url"])}:
        with txmq.connect(url, timeout=PATIENCE_S) as client:
            client.call("tx.check", token=None)


def test_every_crash_point_on_asyncio_has_a_test() -> None:
    found = {
        name
        for folder in ON_A_LOOP
        for source in folder.rglob("*.py")
        for name in re.findall(r'crashpoint\("([^"]+)"\)', source.read_text("utf-8"))
        if not name.startswith("xa.")
    }
    assert found == {*CRASHES, *HALVES, *CHECKERS, *LOCALS, *IMPORTS, "inbox.after_commit"}


def test_a_producer_that_dies_anywhere_leaves_rows_and_messages_that_agree(
    world: World, also_deciding: RealBroker
) -> None:
    """One lets the driver commit, one the block of `client.transaction`."""
    ways = (("block", "psycopg"), ("enlisted", "asyncpg"))
    kills = [(way, driver, point) for way, driver in ways for point in CRASHES]
    killed(world, kills, other=also_deciding.url)
    wait_until(world.settled)
    committed = {"-".join(kill) for kill in kills if CRASHES[kill[2]]}
    assert world.orders() == world.messages() == committed
    published = partial(also_deciding.read, world.topic)
    wait_until(lambda: {found.body.decode() for found in published()} == committed)


def test_a_checker_finds_out_what_a_dead_process_has_done(
    world: World, connect: Connect, tmp_path: Path
) -> None:
    checker = connect(world.broker.url, service="shop")
    checker.register_checker("work", lambda half: decision(tmp_path, half))
    kills = [("half", "none", point) for point in HALVES]
    kills += [("local", "none", point) for point in LOCALS]
    killed(world, kills, directory=str(tmp_path))
    wait_until(world.settled)
    sent = HALVES | LOCALS
    assert world.messages() == {"-".join(kill) for kill in kills if sent[kill[2]]}


def test_a_checker_that_dies_is_asked_again_elsewhere(world: World, connect: Connect) -> None:
    """Its answer is there, or the broker asks another process."""
    client = connect(world.broker.url, service="shop")
    for point in CHECKERS:
        half = client.half_async(
            world.topic, point.encode(), checker="work", check_after=0.1
        ).result(PATIENCE_S)
        end_work(half.token)  # as if its process had died
    killed(world, [("checking", "none", point) for point in CHECKERS])
    client.register_checker("work", lambda _half: Decision.COMMIT)
    wait_until(world.settled)
    assert world.messages() == set(CHECKERS)


def decision(directory: Path, half: Half) -> Decision:
    [message] = half.messages
    done = (directory / message.headers["row"]).exists()
    return Decision.COMMIT if done else Decision.ROLLBACK


def test_a_consumer_that_dies_behind_its_commit_leaves_one_effect(world: World) -> None:
    """A second effect would violate the key of the table."""
    drivers = ("psycopg", "asyncpg")
    world.client.send(world.topic, b"o-1")
    killed(world, [("inbox", driver, "inbox.after_commit") for driver in drivers])
    effects = {f"o-1-{driver}" for driver in drivers}
    assert world.orders() == effects
    assert [lag(world, driver) for driver in drivers] == [1, 1]
    killed(world, [("inbox", driver, "never") for driver in drivers], status=0)
    assert [lag(world, driver) for driver in drivers] == [0, 0]
    assert world.orders() == effects
    assert not [*chain(*(world.client.letters(f"{world.topic}-{driver}") for driver in drivers))]


def lag(world: World, driver: str) -> int:
    return int(world.client.call("group.show", group=f"{world.topic}-{driver}")["unsettled"])

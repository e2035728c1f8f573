"""The client on asyncio beside the other faces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.bench.brokers import broker
from tests.bench.harness import in_turn, measured, python
from tests.bench.rows import Row, Run, at_least, benchmark, row
from tests.bench.transactions import transactional

CLIENTS = "tests.bench.clients"
OUTSTANDING = 64
WORKERS = 16


@benchmark("aio.send_64", "64 tasks that send 1 KiB with fsync, beside the Twisted face")
def send_64(run: Run) -> Iterator[Row]:
    count, found = run.count(60_000), dict[str, Any]()

    def face(program_name: str, *how: str) -> float:
        with broker(run) as program:
            argv = python(f"{CLIENTS}.{program_name}", program.address, count, OUTSTANDING, *how)
            took = measured(argv)
        found["".join((program_name, *how))] = took
        return float(took["per_s"])

    value, uv, twisted = in_turn(
        3,
        lambda: face("send_64_aio", "asyncio"),
        lambda: face("send_64_aio", "uvloop"),
        lambda: face("send_64_twisted"),
    )
    what = "1 KiB, fsync, 64 tasks of asyncio, beside the Twisted face"
    goal = at_least(1.0)
    yield row("aio.send_64", what, "msg/s", value, yardstick=twisted, goal=goal)
    cpu = found["send_64_aioasyncio"]["cpu_us"], found["send_64_twisted"]["cpu_us"]
    what = f"{what}: the client's CPU for one"
    yield row("aio.send_64_cpu", what, "µs", cpu[0], yardstick=cpu[1])
    yield row("aio.send_64_uvloop", "the same on uvloop", "msg/s", uv, yardstick=twisted)


@benchmark("aio.tx_16", "16 tasks with a row and a message each, beside 16 threads")
def transactions(run: Run) -> Iterator[Row]:
    found = dict[str, Any]()

    def by(how: str) -> float:
        with transactional(run) as program:
            argv = python(
                f"{CLIENTS}.transactions_at_once",
                program.address,
                run.database.dsn(),
                WORKERS,
                run.seconds(4),
                how,
            )
            found[how] = measured(argv)
        return float(found[how]["per_s"])

    psycopg, asyncpg, threads = in_turn(
        3, lambda: by("psycopg"), lambda: by("asyncpg"), lambda: by("threads")
    )
    for driver, value in (("psycopg", psycopg), ("asyncpg", asyncpg)):
        what = f"row and message, 16 tasks with {driver}, beside 16 threads of the blocking face"
        goal = at_least(1.0)
        yield row(f"aio.tx_16_{driver}", what, "tx/s", value, yardstick=threads, goal=goal)
        cpu = found[driver]["cpu_us"], found["threads"]["cpu_us"]
        what = f"{what}: the client's CPU for one"
        yield row(f"aio.tx_16_{driver}_cpu", what, "µs", cpu[0], yardstick=cpu[1])


@benchmark("aio.bare_16", "the drivers of aio.tx_16 alone: what bounds it")
def bare(run: Run) -> Iterator[Row]:
    found = dict[str, Any]()

    def by(how: str) -> float:
        program = f"{CLIENTS}.bare_at_once"
        found[how] = measured(python(program, run.database.dsn(), WORKERS, run.seconds(3), how))
        return float(found[how]["per_s"])

    psycopg, asyncpg, threads = in_turn(
        3, lambda: by("psycopg"), lambda: by("asyncpg"), lambda: by("threads")
    )
    for driver, value in (("psycopg", psycopg), ("asyncpg", asyncpg)):
        what = f"BEGIN, row, SELECT, COMMIT, 16 tasks with {driver}, beside 16 threads of psycopg2"
        yield row(f"aio.bare_16_{driver}", what, "tx/s", value, yardstick=threads)
        cpu = found[driver]["cpu_us"], found["threads"]["cpu_us"]
        what = f"{what}: the client's CPU for one"
        yield row(f"aio.bare_16_{driver}_cpu", what, "µs", cpu[0], yardstick=cpu[1])

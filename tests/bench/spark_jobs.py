"""Spark over dead letters: reconcile, sending again, memory.

Letters take 90 µs each to make. `make bench ONLY=spark.reconcile` and
`ONLY=spark.replay` have 1,000,000 of them: about fifteen and eight minutes.
`ONLY=spark.memory` has 10,000,000: an hour, and 15 GiB of disk; with SCALE=0.1 six
minutes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tests.bench.brokers import FLUSH_10_MS, command
from tests.bench.data_directories import current_time, filling
from tests.bench.harness import Program, measured, python, serving
from tests.bench.letters import KEYS, READY_WITHIN_S, SPAN, kill
from tests.bench.rows import Row, Run, at_least, at_most, benchmark, row
from txmq.tx.postgres.schema import install
from txmq.tx.postgres.session import connect

CLIENT = "tests.bench.clients.spark_jobs"
LETTERS, ROWS, FEW, WITHIN_S = 1_000_000, 5_000_000, 1_000, 7_200.0
MANY = 10 * LETTERS
MIB = 1 << 20


@contextmanager
def letters(run: Run, count: int) -> Iterator[Program]:
    """Serve letters of group `g` during the block."""
    with tempfile.TemporaryDirectory(dir=run.directory) as name:
        clock = [current_time() - SPAN]
        with filling(Path(name) / "data", lambda: clock[0]) as filler:
            kill(filler, clock, count)
        with serving(command(Path(name), FLUSH_10_MS), READY_WITHIN_S) as program:
            yield program


def business(dsn: str, rows: int) -> None:
    """Make table `orders`, which has rows of the letters' keys, and others."""
    with closing(connect(dsn, application_name="bench")) as connection:
        install(connection)
        cursor = connection.cursor()
        cursor.execute("DROP TABLE IF EXISTS orders")
        cursor.execute("CREATE TABLE orders (id text, version int8, note text)")
        cursor.execute(
            "INSERT INTO orders SELECT 'key-' || n, 1, repeat('x', 40)"
            " FROM generate_series(1, %s) n",
            (max(rows, KEYS // 2),),
        )
        cursor.execute("VACUUM ANALYZE orders")


@benchmark("spark.reconcile", "a reconciliation of letters with a table, on two cores")
def reconcile(run: Run) -> Iterator[Row]:
    dsn, count, rows = run.database.dsn(), run.count(LETTERS), run.count(ROWS)
    business(dsn, rows)
    with letters(run, count) as program:
        directory = run.directory / "reconcile"
        took = measured(python(CLIENT, "reconcile", program.address, dsn, directory), WITHIN_S)
    of = f"{count / 1e6:g} M letters × {rows / 1e6:g} M rows"
    yield row(
        "spark.reconcile_joins",
        f"joins of {of}, beside the same over Parquet",
        "s",
        took["joins_s"],
        yardstick=took["parquet_s"],
        goal=at_most(1.5),
    )
    yield row(
        "spark.reconcile_extraction",
        f"extraction of {rows / 1e6:g} M rows, beside one plain COPY",
        "rows/s",
        rows / took["extract_s"],
        yardstick=rows / took["copy_s"],
        goal=at_least(0.7),
    )
    yield row("spark.reconcile_whole", f"all of it, {of}", "s", took["whole_s"], goal=at_most(180))


@benchmark("spark.replay", "letters sent again as new messages, in the order of their keys")
def replay(run: Run) -> Iterator[Row]:
    count = run.count(LETTERS)
    with letters(run, count) as program:
        directory = run.directory / "replay"
        took = measured(python(CLIENT, "resend", program.address, directory), WITHIN_S)
    of = f"{took['letters'] / 1e6:g} M letters"
    yield row(
        "spark.replay_write",
        f"one transactional write of {of} in key order",
        "/s",
        took["letters"] / took["write_s"],
        goal=at_least(100_000),
    )
    yield row(
        "spark.replay_sent",
        f"{of} held and sent; the broker abandons them later",
        "/s",
        took["letters"] / took["sent_s"],
    )
    yield row(
        "spark.replay_whole",
        f"{of} held, sent and abandoned",
        "/s",
        took["letters"] / took["whole_s"],
    )


@benchmark("spark.memory", "memory of a reconciliation with ten times the letters")
def memory(run: Run) -> Iterator[Row]:
    dsn, found = run.database.dsn(), []
    business(dsn, run.count(LETTERS))
    for count in (run.count(LETTERS), run.count(MANY)):
        with letters(run, count) as program:
            directory = run.directory / f"memory-{count}"
            argv = python(CLIENT, "memory", program.address, dsn, directory)
            found.append(measured(argv, WITHIN_S))
    few, many = found
    parts = {"driver": "the driver", "workers": "its Python workers", "jvm": "Java"}
    for name, what in parts.items():
        yield row(
            f"spark.memory_{name}",
            f"resident memory of {what}, {run.count(MANY) / 1e6:g} M letters beside"
            f" {run.count(LETTERS) / 1e6:g} M",
            "MiB",
            many[name] / MIB,
            yardstick=few[name] / MIB,
            goal=at_most(1.1),
        )


@benchmark("spark.small", "the first result of a small reconciliation")
def small(run: Run) -> Iterator[Row]:
    dsn = run.database.dsn()
    business(dsn, FEW)
    with letters(run, FEW) as program:
        argv = python(CLIENT, "small", program.address, dsn, run.directory / "small")
        took = measured(argv, WITHIN_S)
    yield row(
        "spark.small_reconcile",
        f"plan of {FEW:,} letters, Java warm",
        "s",
        took["first_s"],
        goal=at_most(5),
    )

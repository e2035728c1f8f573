"""Spark over dead letters: reconcile, replay, sending again, memory.

The rows of the letters are computed (`many_letters`): letters that die one by one take
four times as long to make. `make bench ONLY=spark.reconcile` and `ONLY=spark.replay`
have 1,000,000 of them. `ONLY=spark.memory` has 10,000,000 lean ones.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.bench.brokers import FLUSH_10_MS, command
from tests.bench.harness import Program, measured, python, sampled, serving
from tests.bench.letters import KEYS, READY_WITHIN_S
from tests.bench.many_letters import LEAN
from tests.bench.rows import Row, Run, at_least, at_most, benchmark, row
from txmq.tx.postgres.schema import install
from txmq.tx.postgres.session import connect

CLIENT = "tests.bench.clients.spark_jobs"
LETTERS, ROWS, FEW, WITHIN_S = 1_000_000, 5_000_000, 1_000, 7_200.0
MANY = 10 * LETTERS
NEVER = 1 << 50  # bytes of log: no snapshots, each of which is as large as the index
LOOK_S = 1.0  # at the disk
MIB = 1 << 20


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
    with served(run, count) as (program, _figures):
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


def replayed(run: Run, job: str) -> dict[str, Any]:
    """Return what a job of the client has measured, over letters of its own."""
    with served(run, run.count(LETTERS)) as (program, _figures):
        return measured(python(CLIENT, job, program.address, run.directory / job), WITHIN_S)


@benchmark("spark.replay", "letters sent again as new messages, in the order of their keys")
def replay(run: Run) -> Iterator[Row]:
    took = replayed(run, "resend")
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


@benchmark("spark.in_place", "letters that a plan of Spark puts back in their places")
def in_place(run: Run) -> Iterator[Row]:
    took = replayed(run, "in_place")
    of = f"{took['letters'] / 1e6:g} M letters"
    yield row(
        "spark.in_place_held",
        f"{of} handed to the broker and held",
        "/s",
        took["letters"] / took["held_s"],
    )
    yield row(
        "spark.in_place_put_back",
        f"replay of {of}: put back in the order of their keys, without consumers",
        "/s",
        took["letters"] / took["put_back_s"],
        goal=at_least(20_000),
    )


@benchmark("spark.memory", "memory of a reconciliation with ten times the letters")
def memory(run: Run) -> Iterator[Row]:
    dsn, found = run.database.dsn(), []
    business(dsn, run.count(LETTERS))
    for count in (run.count(LETTERS), run.count(MANY)):
        with (
            served(run, count, LEAN) as (program, figures),
            scratch(run) as directory,
            sampled(lambda: disk_used(directory), LOOK_S) as disk,
        ):
            argv = python(CLIENT, "memory", program.address, dsn, directory)
            figures.update(measured(argv, WITHIN_S), spark=max(disk))
        found.append(figures)
    few, many = found
    parts = {"driver": "the driver", "workers": "its Python workers", "jvm": "Java"}
    for name, what in parts.items():
        yield row(
            f"spark.memory_{name}",
            f"resident memory of {what} without mapped files,"
            f" {run.count(MANY) / 1e6:g} M letters beside {run.count(LETTERS) / 1e6:g} M",
            "MiB",
            many[name] / MIB,
            yardstick=few[name] / MIB,
            goal=at_most(1.1),
        )
    of = f"{run.count(MANY) / 1e6:g} M letters"
    yield row(
        "spark.memory_jvm_files",
        f"files that Java has mapped, {of} beside {run.count(LETTERS) / 1e6:g} M",
        "MiB",
        many["jvm_files"] / MIB,
        yardstick=few["jvm_files"] / MIB,
    )
    yield row(
        "spark.memory_maker",
        f"resident memory of what makes {of}, most",
        "MB",
        many["maker"] / 1e6,
        goal=at_most(1_000),
    )
    yield row("spark.memory_disk", f"disk of {of}", "MB", many["disk"] / 1e6, goal=at_most(5_000))
    yield row(
        "spark.memory_spark_disk",
        f"files of Spark and of the plan, {of}",
        "MB",
        many["spark"] / 1e6,
    )


@contextmanager
def served(run: Run, count: int, *kind: str) -> Iterator[tuple[Program, dict[str, float]]]:
    """Serve letters of group `g` during the block. Yield the broker, and the figures of
    its letters, in bytes: {"maker", "disk"}, the second after the block.
    """
    with scratch(run) as directory:
        data = directory / "data"
        figures = measured(python("tests.bench.many_letters", data, count, *kind), WITHIN_S)
        settings = f"{FLUSH_10_MS}\nsnapshot_bytes = {NEVER}"
        with serving(command(directory, settings), READY_WITHIN_S) as program:
            yield program, figures
        figures["disk"] = disk_used(data)


@contextmanager
def scratch(run: Run) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=run.directory) as name:
        yield Path(name)


def disk_used(directory: Path) -> float:
    """Return the bytes of all files below a directory, as far as they are on disk."""
    total = 0
    for place, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):  # deleted meanwhile
                total += os.lstat(f"{place}/{name}").st_blocks * 512
    return total


@benchmark("spark.small", "the first result of a small reconciliation")
def small(run: Run) -> Iterator[Row]:
    dsn = run.database.dsn()
    business(dsn, FEW)
    with served(run, FEW) as (program, _figures):
        argv = python(CLIENT, "small", program.address, dsn, run.directory / "small")
        took = measured(argv, WITHIN_S)
    yield row(
        "spark.small_reconcile",
        f"plan of {FEW:,} letters, Java warm",
        "s",
        took["first_s"],
        goal=at_most(10),
    )

"""The broker's resolver: undecided transactions after a crash, and after the death of a
producer.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import txmq
from tests.bench.brokers import command
from tests.bench.harness import BenchError, measured, python, serving
from tests.bench.rows import Row, Run, at_most, benchmark, row
from tests.bench.transactions import CLIENTS, transactional
from txmq.tx.postgres.schema import install
from txmq.tx.postgres.session import connect

HALVES = 100_000
UNREACHABLE = "host=127.0.0.1 port=1 connect_timeout=1"
CHECK_AFTER_S = 0.5
DECIDED_WITHIN_S = 300.0


def resolver_settings(dsn: str) -> str:
    """Return settings of a broker with this database and short times between
    check-backs.
    """
    return f'[checks]\nthen_s = 1.0\nlongest_s = 1.0\n[[resolver]]\nname = "bench"\ndsn = "{dsn}"'


def undecided(client: txmq.Client) -> int:
    return int(client.call("tx.oldest")["undecided"])


@benchmark("tx.resolver", "undecided transactions after a crash")
def resolving(run: Run) -> Iterator[Row]:
    dsn, count = run.database.dsn(), run.count(HALVES)
    # longer than the storing, so that few check-backs are due before the crash
    wait_s = max(5.0, 90.0 * run.scale)
    with closing(connect(dsn, application_name="bench")) as connection:
        install(connection)
    directory = Path(tempfile.mkdtemp(dir=run.directory))
    with serving(command(directory, resolvers=resolver_settings(UNREACHABLE))) as program:
        measured(python(f"{CLIENTS}.halves", program.address, dsn, count, wait_s))
        program.kill()
    time.sleep(wait_s)  # the time between crash and restart
    with (
        serving(command(directory, resolvers=resolver_settings(dsn))) as program,
        txmq.connect(program.address) as client,
    ):
        began = time.monotonic()
        while left := undecided(client):
            if time.monotonic() - began > DECIDED_WITHIN_S:
                raise BenchError(
                    f"{left} of {count} transactions are undecided after {DECIDED_WITHIN_S:.0f} s"
                )
            time.sleep(0.05)
        took = time.monotonic() - began
    what = f"from a broker's restart until its resolver has decided {count:,} transactions"
    yield row("tx.resolver", what, "s", took, goal=at_most(60.0))


@benchmark("tx.checkback", "a producer's death until its transaction is decided")
def checkback(run: Run) -> Iterator[Row]:
    with transactional(run) as program:
        argv = python(
            f"{CLIENTS}.producer_deaths",
            program.address,
            run.database.dsn(),
            run.count(40),
            CHECK_AFTER_S,
        )
        took = measured(argv)
    for name in ("p50", "p99"):
        late_ms = took[f"{name}_us"] / 1e3 - CHECK_AFTER_S * 1e3
        yield row(
            f"tx.checkback_{name}",
            f"from the first check-back until the decision: {name}",
            "ms",
            late_ms,
            goal=at_most(100),
        )

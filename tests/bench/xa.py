"""The cost of two-phase commit over two databases and a broker, beside the databases
alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.bench.brokers import broker
from tests.bench.harness import in_turn, measured, python
from tests.bench.rows import Row, Run, at_least, benchmark, row

GOAL = 0.6
ROUNDS = 3


@benchmark("tx.xa", "a row in each of two databases and a message, in two phases")
def two_databases(run: Run) -> Iterator[Row]:
    dsns = (run.database.dsn(), run.database.second())
    for threads in (1, 8):

        def ours(threads: int = threads) -> float:
            with broker(run) as program:
                argv = python(
                    "tests.bench.clients.xa", program.address, *dsns, threads, run.seconds(4)
                )
                return float(measured(argv)["per_s"])

        def bare(threads: int = threads) -> float:
            return float(
                measured(python("tests.bench.raw.two_phase", *dsns, threads, run.seconds(4)))[
                    "per_s"
                ]
            )

        value, yardstick = in_turn(ROUNDS, ours, bare)
        who = f"{threads} thread{'s' if threads > 1 else ''}"
        what = f"two databases and a message, {who}, beside bare tpc_* calls"
        yield row(f"tx.xa_{threads}", what, "tx/s", value, yardstick=yardstick, goal=at_least(GOAL))

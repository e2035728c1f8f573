"""What it costs to have a row and a message as one decision, with the resolver and the clean-up of tokens at work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from threading import Event, Thread

from tests.bench.brokers import broker
from tests.bench.harness import Program, in_turn, measured, python
from tests.bench.rows import Row, Run, at_least, benchmark, row
from tests.bench.yardsticks import plain_commit
from txmq.tx.postgres.partitions import maintain
from txmq.tx.postgres.schema import install
from txmq.tx.postgres.session import connect

CLIENTS = "tests.bench.clients"
CLEAN_UP_S = 1.0


@contextmanager
def transactional(run: Run) -> Iterator[Program]:
    """A broker that resolves for the database, whose schema is installed and kept clean."""
    dsn = run.database.dsn()
    with closing(connect(dsn, application_name="bench")) as connection:
        install(connection)
    with broker(run, resolvers=f'[[resolver]]\nname = "bench"\ndsn = "{dsn}"') as program, cleaned(dsn):
        yield program


@contextmanager
def cleaned(dsn: str) -> Iterator[None]:
    """The token table's partitions are made and dropped all the while."""
    over = Event()

    def clean() -> None:
        with closing(connect(dsn, application_name="bench clean-up")) as connection:
            while not over.wait(CLEAN_UP_S):
                maintain(connection)

    thread = Thread(target=clean)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@benchmark("tx.row_and_message", "one row and one message in a transaction")
def row_and_message(run: Run) -> Iterator[Row]:
    for clients in (1, 16):

        def ours(clients: int = clients) -> float:
            with transactional(run) as program:
                argv = python(f"{CLIENTS}.transactions", program.address, run.database.dsn(), clients, run.seconds(4))
                return float(measured(argv)["per_s"])

        def plain(clients: int = clients) -> float:
            return plain_commit(run, clients, "processes", seconds=4)["per_s"]

        value, yardstick = in_turn(3, ours, plain)
        what = f"row and message, {clients} client{'s' if clients > 1 else ''}, beside the same INSERT and COMMIT"
        yield row(f"tx.row_and_message_{clients}", what, "tx/s", value, yardstick=yardstick, goal=at_least(0.5))


@benchmark("tx.commit_to_consumer", "from COMMIT to the message at a consumer")
def commit_to_consumer(run: Run) -> Iterator[Row]:
    with transactional(run) as program:
        argv = python(f"{CLIENTS}.commit_to_consumer", program.address, run.database.dsn(), run.count(1_000))
        took = measured(argv)
    yield row("tx.commit_to_consumer_p50", "from COMMIT to the message at a consumer: p50", "µs", took["p50_us"])
    yield row("tx.commit_to_consumer_p99", "from COMMIT to the message at a consumer: p99", "µs", took["p99_us"])

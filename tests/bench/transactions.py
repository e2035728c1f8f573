"""The cost of a row and a message as one decision, with resolver and token clean-up
running.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from threading import Event, Thread

from tests.bench.brokers import broker
from tests.bench.harness import BenchError, Program, in_turn, measured, python, serving
from tests.bench.raw.plain_commit import run as execute
from tests.bench.rows import Row, Run, at_least, at_most, benchmark, row
from tests.bench.yardsticks import plain_commit
from txmq.errors import DatabaseError
from txmq.relay import slot
from txmq.testing.wait import wait_until
from txmq.tx.postgres.partitions import maintain
from txmq.tx.postgres.schema import install
from txmq.tx.postgres.session import connect

CLIENTS = "tests.bench.clients"
CLEAN_UP_S = 1.0
SLOT = "txmq_bench"


@contextmanager
def transactional(run: Run) -> Iterator[Program]:
    """Run a broker that resolves for the database, with schema and token clean-up."""
    dsn = run.database.dsn()
    with closing(connect(dsn, application_name="bench")) as connection:
        install(connection)
    with (
        broker(run, resolvers=f'[[resolver]]\nname = "bench"\ndsn = "{dsn}"') as program,
        cleaned(dsn),
    ):
        yield program


@contextmanager
def cleaned(dsn: str) -> Iterator[None]:
    """Create and drop partitions of the token table during the block."""
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
                argv = python(
                    f"{CLIENTS}.transactions",
                    program.address,
                    run.database.dsn(),
                    clients,
                    run.seconds(4),
                )
                return float(measured(argv)["per_s"])

        def plain(clients: int = clients) -> float:
            return plain_commit(run, clients, "processes", seconds=4)["per_s"]

        value, yardstick = in_turn(3, ours, plain)
        who = f"{clients} client{'s' if clients > 1 else ''}"
        what = f"row and message, {who}, beside the same INSERT and COMMIT"
        yield row(
            f"tx.row_and_message_{clients}",
            what,
            "tx/s",
            value,
            yardstick=yardstick,
            goal=at_least(0.5),
        )


@benchmark("tx.commit_to_consumer", "from COMMIT to the message at a consumer")
def commit_to_consumer(run: Run) -> Iterator[Row]:
    with transactional(run) as program:
        argv = python(
            f"{CLIENTS}.commit_to_consumer",
            program.address,
            run.database.dsn(),
            run.count(1_000),
            "transaction",
        )
        took = measured(argv)
    yield row(
        "tx.commit_to_consumer_p50",
        "from COMMIT to the message at a consumer: p50",
        "µs",
        took["p50_us"],
    )
    yield row(
        "tx.commit_to_consumer_p99",
        "from COMMIT to the message at a consumer: p99",
        "µs",
        took["p99_us"],
    )


STEADY_PER_S = 100  # well below what one machine commits
STEADY_S = 1_800.0


@benchmark("tx.steady", "rows and messages at a fixed rate, past rounds of autovacuum")
def steady(run: Run) -> Iterator[Row]:
    seconds = run.seconds(STEADY_S)
    with transactional(run) as program:
        found = measured(
            python(
                f"{CLIENTS}.steady", program.address, run.database.dsn(), 4, STEADY_PER_S, seconds
            ),
            seconds + 120,
        )
    share = f"{seconds / 6:.0f} s of {seconds:.0f} s at {STEADY_PER_S}/s"
    for name in ("p50", "p99"):
        yield row(
            f"tx.steady_{name}",
            f"a row and a message, the last {share}, beside the first: {name}",
            "µs",
            found["last"][f"{name}_us"],
            yardstick=found["first"][f"{name}_us"],
            goal=at_most(1.2),
        )
    yield row(
        "tx.steady_vacuums",
        "tables that autovacuum has gone over meanwhile",
        "tables",
        found["vacuums"],
    )


OUTBOX = (
    "DROP TABLE IF EXISTS bench_outbox",
    "CREATE TABLE bench_outbox (id bigserial PRIMARY KEY, body bytea NOT NULL)",
)


def end_to_end(run: Run, clients: int, how: str) -> dict[str, float]:
    """Return {"per_s", "p50_us", "p99_us"}.

    `how` is "txmq", or a relay of an outbox: "notify" or "poll".
    """
    dsn = run.database.dsn()
    kind = "txmq" if how == "txmq" else "outbox"
    with ExitStack() as stack:
        program = stack.enter_context(transactional(run))
        if how != "txmq":
            execute(dsn, *OUTBOX)
            stack.enter_context(serving(python("tests.bench.raw.relay", program.address, dsn, how)))
        return measured(
            python(f"{CLIENTS}.end_to_end", program.address, dsn, clients, run.seconds(6), kind)
        )


@benchmark("tx.outbox", "a transaction beside a transactional outbox")
def outbox(run: Run) -> Iterator[Row]:
    ways = ("txmq", "notify", "poll")
    many = {how: end_to_end(run, 16, how) for how in ways}
    few = {how: end_to_end(run, 1, how) for how in ways}
    relays = {"notify": ("LISTEN/NOTIFY", 0.5), "poll": ("polling every 100 ms", 0.1)}
    for how, (relay, share) in relays.items():
        what = f"row and message end to end, 16 clients, beside an outbox with a relay by {relay}"
        rate, other = many["txmq"]["per_s"], many[how]["per_s"]
        yield row(
            f"tx.outbox_{how}_rate_16", what, "tx/s", rate, yardstick=other, goal=at_least(1.0)
        )
        for clients, took in ((16, many), (1, few)):
            what = (
                f"from COMMIT to the consumer, {clients} clients,"
                f" beside an outbox with a relay by {relay}: p50"
            )
            ours, theirs = took["txmq"]["p50_us"], took[how]["p50_us"]
            goal = at_most(share) if clients > 1 else None
            yield row(
                f"tx.outbox_{how}_p50_{clients}", what, "µs", ours, yardstick=theirs, goal=goal
            )


@benchmark("tx.joined", "what a message costs a business transaction")
def joined(run: Run) -> Iterator[Row]:
    with transactional(run) as program:
        found = measured(
            python(f"{CLIENTS}.joined", program.address, run.database.dsn(), run.count(2_000))
        )
    plain, outbox = found["plain"], found["outbox"]
    for way, call in (("transaction", "client.transaction"), ("enlist", "client.enlist")):
        ours = found[way]
        yield row(
            f"tx.joined_{way}_trips",
            f"round trips to PostgreSQL that a message adds to a transaction, by {call}",
            "round trips",
            ours["trips"] - plain["trips"],
            goal=at_most(1.0),
        )
        yield row(
            f"tx.joined_{way}_wal",
            f"what a message adds to PostgreSQL's log, by {call}, beside an outbox with DELETE",
            "bytes",
            ours["wal_bytes"] - plain["wal_bytes"],
            yardstick=outbox["wal_bytes"] - plain["wal_bytes"],
            goal=at_most(0.6),
        )
    what = "row and message by client.enlist, 1 client, beside client.transaction"
    rate, yardstick = found["enlist"]["per_s"], found["transaction"]["per_s"]
    yield row("tx.joined_enlist_rate", what, "tx/s", rate, yardstick=yardstick)


@contextmanager
def relayed(run: Run) -> Iterator[Program]:
    """Run a broker, and a relay of the messages that the database emits."""
    dsn = run.database.dsn()
    with (
        transactional(run) as program,
        closing(connect(dsn, application_name="bench")) as connection,
    ):
        try:
            slot.create(connection, SLOT)
        except DatabaseError as error:
            raise BenchError(f"no relay: {error}") from error
        try:
            with serving(
                python(
                    "txmq",
                    "relay",
                    "run",
                    "--dsn",
                    dsn,
                    "--broker",
                    program.address,
                    "--slot",
                    SLOT,
                )
            ):
                yield program
        finally:
            wait_until(
                lambda: slot.require(connection, SLOT).active_pid is None, what="the slot is free"
            )
            slot.drop(connection, SLOT)


@benchmark("tx.relay", "messages emitted into transactions, brought by the relay")
def relay(run: Run) -> Iterator[Row]:
    dsn = run.database.dsn()

    def ours() -> float:
        with relayed(run) as program:
            argv = python(f"{CLIENTS}.emit", program.address, dsn, 16, run.seconds(4))
            return float(measured(argv)["per_s"])

    def transactions() -> float:
        with transactional(run) as program:
            argv = python(f"{CLIENTS}.transactions", program.address, dsn, 16, run.seconds(4))
            return float(measured(argv)["per_s"])

    value, yardstick = in_turn(3, ours, transactions)
    what = (
        "row and emitted message, 16 clients, until the last is at the broker,"
        " beside client.transaction"
    )
    yield row("tx.relay_16", what, "messages/s", value, yardstick=yardstick)
    with relayed(run) as program:
        took = measured(
            python(f"{CLIENTS}.commit_to_consumer", program.address, dsn, run.count(1_000), "emit")
        )
    yield row(
        "tx.relay_p50",
        "from COMMIT by way of the relay to the message at a consumer: p50",
        "µs",
        took["p50_us"],
    )
    yield row(
        "tx.relay_p99",
        "from COMMIT by way of the relay to the message at a consumer: p99",
        "µs",
        took["p99_us"],
    )

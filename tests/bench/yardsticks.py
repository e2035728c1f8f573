"""The yardstick programs as functions for benchmarks, and as rows."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Literal

from tests.bench.harness import Program, in_turn, measured, python, serving
from tests.bench.rows import Row, Run, benchmark, row

RAW = "tests.bench.raw"
REQUEST_BYTES = 16 + 1024
Latency = dict[str, float]
Sync = Literal["none", "inline", "thread"]
EchoServer = Literal["echo", "echo_twisted"]
EchoClient = Literal["echo_client", "echo_twisted_client"]
Answers = Literal["fixed_answer", "txmq_answer"]
Clients = Literal["threads", "processes"]


def disk(run: Run, count: int = 3_000) -> Latency:
    """Return {"p50_us", "p99_us"} of a 1 KiB append to zero-filled space with
    fdatasync.
    """
    with tempfile.NamedTemporaryFile(dir=run.directory) as file:
        return measured(python(f"{RAW}.disk", file.name, run.count(count), 1024))


def bare_server(
    server: EchoServer = "echo", answers: Answers = "txmq_answer"
) -> AbstractContextManager[Program]:
    """Run a server that answers every frame at once.

    With `txmq_answer` it accepts hello and send of a txmq client.
    """
    return serving(python(f"{RAW}.{server}", f"{RAW}.{answers}"))


def echo(
    run: Run, server: EchoServer = "echo", client: EchoClient = "echo_client", count: int = 10_000
) -> Latency:
    """Return {"p50_us", "p99_us"} of a 1 KiB request and its 32-byte reply.

    Client and server are bare.
    """
    with bare_server(server, "fixed_answer") as program:
        return measured(python(f"{RAW}.{client}", program.address, run.count(count)))


def sink_per_s(run: Run, outstanding: int, sync: Sync = "thread", count: int = 200_000) -> float:
    """Return the requests of 1 KiB per second through the raw Twisted sink.

    `outstanding` requests are under way on one socket.
    """
    requests = run.count(count)
    mib = requests * REQUEST_BYTES // 2**20 + 1
    with (
        tempfile.NamedTemporaryFile(dir=run.directory) as file,
        serving(python(f"{RAW}.sink", file.name, mib, sync)) as program,
    ):
        return float(
            measured(python(f"{RAW}.sink_client", program.address, requests, outstanding))["per_s"]
        )


def best_sink_per_s(run: Run, outstanding: int, rounds: int = 3) -> float:
    """Return the rate with the faster kind of sync.

    A thread overlaps the sync with receiving; the reactor saves the switch to a thread.
    """
    return max(
        in_turn(
            rounds,
            lambda: sink_per_s(run, outstanding, "thread"),
            lambda: sink_per_s(run, outstanding, "inline"),
        )
    )


def stream_mb_per_s(run: Run, sync_ms: int, mib: int = 512) -> float:
    """Return MB/s of a loopback stream into a file.

    It is synced every `sync_ms`, and never with 0.
    """
    with tempfile.NamedTemporaryFile(dir=run.directory) as file:
        return float(
            measured(python(f"{RAW}.stream", file.name, run.count(mib), sync_ms))["mb_per_s"]
        )


def plain_commit(
    run: Run, clients: int, kind: Clients = "threads", seconds: float = 5.0
) -> dict[str, float]:
    """Return {"per_s", "p50_us", "p99_us"} of `raw.plain_commit.INSERT` and a
    commit.
    """
    return measured(
        python(f"{RAW}.plain_commit", run.database.dsn(), clients, run.seconds(seconds), kind)
    )


@benchmark("store.raw.disk", "1 KiB appended to zero-filled space and synced")
def disk_rows(run: Run) -> Iterator[Row]:
    took = disk(run)
    yield row(
        "store.raw.disk_p50",
        "append 1 KiB to zero-filled space, fdatasync: p50",
        "µs",
        took["p50_us"],
    )
    yield row(
        "store.raw.disk_p99",
        "append 1 KiB to zero-filled space, fdatasync: p99",
        "µs",
        took["p99_us"],
    )


@benchmark("store.raw.echo", "a 1 KiB request and its reply, bare client and bare server")
def echo_rows(run: Run) -> Iterator[Row]:
    what = "1 KiB request, 32-byte reply: p50,"
    yield row("store.raw.echo_p50", f"{what} blocking sockets", "µs", echo(run)["p50_us"])
    server = echo(run, server="echo_twisted")["p50_us"]
    yield row(
        "store.raw.echo_twisted_server_p50", f"{what} Twisted server, blocking client", "µs", server
    )
    client = echo(run, client="echo_twisted_client")["p50_us"]
    yield row(
        "store.raw.echo_twisted_client_p50", f"{what} blocking server, Twisted client", "µs", client
    )


@benchmark("store.raw.sink", "1 KiB requests through the raw Twisted sink")
def sink_rows(run: Run) -> Iterator[Row]:
    what = "raw Twisted sink, 1 KiB,"
    yield row(
        "store.raw.sink_1",
        f"{what} one at a time, synced",
        "msg/s",
        sink_per_s(run, 1, count=5_000),
    )
    yield row(
        "store.raw.sink_64", f"{what} 64 outstanding, synced", "msg/s", best_sink_per_s(run, 64)
    )
    yield row(
        "store.raw.sink_64_unsynced",
        f"{what} 64 outstanding, no sync",
        "msg/s",
        sink_per_s(run, 64, "none"),
    )


@benchmark("store.raw.stream", "a loopback stream into a file")
def stream_rows(run: Run) -> Iterator[Row]:
    plain, synced = in_turn(3, lambda: stream_mb_per_s(run, 0), lambda: stream_mb_per_s(run, 10))
    yield row("store.raw.stream_unsynced", "loopback stream into a file, no sync", "MB/s", plain)
    yield row(
        "store.raw.stream_10ms", "loopback stream into a file, synced every 10 ms", "MB/s", synced
    )


@benchmark("tx.raw.plain_commit", "one row inserted and committed in PostgreSQL")
def plain_commit_rows(run: Run) -> Iterator[Row]:
    for clients in (1, 16):
        result = plain_commit(run, clients)
        what = f"INSERT of one row and COMMIT, {clients} client{'s' if clients > 1 else ''}"
        yield row(f"tx.raw.plain_commit_{clients}", what, "tx/s", result["per_s"])
        yield row(f"tx.raw.plain_commit_{clients}_p50", f"{what}: p50", "µs", result["p50_us"])

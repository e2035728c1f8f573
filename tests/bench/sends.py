"""The cost of sends: one at a time, many outstanding, in large batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.bench.brokers import FLUSH_10_MS, broker, cpu_s
from tests.bench.harness import in_turn, measured, python
from tests.bench.rows import Row, Run, at_least, at_most, benchmark, row
from tests.bench.yardsticks import Sync, bare_server, disk, sink_per_s, stream_mb_per_s

CLIENTS = "tests.bench.clients"
OUTSTANDING = 64


@benchmark("store.send_one", "one send of 1 KiB with fsync, and its receipt")
def send_one(run: Run) -> Iterator[Row]:
    count = run.count(3_000)
    p99s: list[float] = []

    def ours() -> float:
        with broker(run) as program:
            took = measured(python(f"{CLIENTS}.send_one", program.address, count))
        p99s.append(took["p99_us"])
        return float(took["p50_us"])

    def on_twisted() -> float:
        with broker(run) as program:
            return float(
                measured(python(f"{CLIENTS}.send_one_twisted", program.address, count))["p50_us"]
            )

    def bare() -> float:
        with bare_server() as server:
            echo = measured(python(f"{CLIENTS}.send_one", f"txmq://{server.address}", count))
        return disk(run)["p50_us"] + float(echo["p50_us"])

    value, twisted, yardstick = in_turn(3, ours, on_twisted, bare)
    what = "1 KiB, fsync, blocking face"
    beside = f"{what}: p50, beside fdatasync + the same client's echo"
    yield row("store.send_one_p50", beside, "µs", value, yardstick=yardstick, goal=at_most(1.4))
    yield row("store.send_one_twisted_p50", "1 KiB, fsync, Twisted face: p50", "µs", twisted)
    yield row("store.send_one_p99", f"{what}: p99", "µs", sorted(p99s)[1])


@benchmark("store.send_64", "64 sends of 1 KiB outstanding, with fsync")
def send_64(run: Run) -> Iterator[Row]:
    count, found = run.count(100_000), dict[str, Any]()

    def ours() -> float:
        with broker(run) as program:
            before = cpu_s(program.process.pid)
            found.update(
                measured(python(f"{CLIENTS}.send_async", program.address, count, OUTSTANDING))
            )
            found["broker_us"] = (cpu_s(program.process.pid) - before) / count * 1e6
        return float(found["per_s"])

    def sink(sync: Sync) -> float:
        return sink_per_s(run, OUTSTANDING, sync, count=100_000)

    value, in_thread, inline = in_turn(3, ours, lambda: sink("thread"), lambda: sink("inline"))
    what, best = "1 KiB, fsync, 64 outstanding", max(in_thread, inline)
    yield row(
        "store.send_64",
        f"{what}, beside the raw sink",
        "msg/s",
        value,
        yardstick=best,
        goal=at_least(0.7),
    )
    yield row(
        "store.send_64_per_frame",
        f"{what}: messages in a frame",
        "messages",
        count / found["frames"],
    )
    yield row(
        "store.send_64_coalesced",
        f"{what}: shared their frame",
        "%",
        100 * found["coalesced_share"],
    )
    yield row(
        "store.send_64_client_cpu", f"{what}: the client's CPU for a message", "µs", found["cpu_us"]
    )
    yield row(
        "store.send_64_broker_cpu",
        f"{what}: the broker's CPU for a message",
        "µs",
        found["broker_us"],
    )


@benchmark("store.send_flushed_64", "64 sends of 1 KiB outstanding, a flush every 10 ms")
def send_64_flushed(run: Run) -> Iterator[Row]:
    count = run.count(200_000)

    def ours() -> float:
        with broker(run, FLUSH_10_MS) as program:
            return float(
                measured(python(f"{CLIENTS}.send_async", program.address, count, OUTSTANDING))[
                    "per_s"
                ]
            )

    value, sink = in_turn(3, ours, lambda: sink_per_s(run, OUTSTANDING, "none", count=200_000))
    what = "1 KiB, flush every 10 ms, 64 outstanding, beside the raw sink without fsync"
    yield row("store.send_flushed_64", what, "msg/s", value, yardstick=sink, goal=at_least(0.6))


@benchmark(
    "store.send_threads_64", "64 threads that send 1 KiB with fsync, each waiting for its receipt"
)
def send_64_threads(run: Run) -> Iterator[Row]:
    with broker(run) as program:
        took = measured(
            python(f"{CLIENTS}.send_threads", program.address, run.count(30_000), OUTSTANDING)
        )
    what = "1 KiB, fsync, 64 blocking threads"
    yield row("store.send_threads_64", what, "msg/s", took["per_s"])
    yield row("store.send_threads_64_p50", f"{what}: p50", "µs", took["p50_us"])


@benchmark("store.send_many", "batches of columns from one process, a flush every 10 ms")
def send_many(run: Run) -> Iterator[Row]:
    def ours(size: int, keys: int) -> float:
        with broker(run, FLUSH_10_MS) as program:
            took = measured(
                python(f"{CLIENTS}.send_many", program.address, run.seconds(4), size, keys)
            )
        return float(took["per_s"])

    what = "flush every 10 ms, columns of"
    for keys, name, goal in (
        (0, "100b", at_least(1_000_000)),
        (10_000, "100b_keys", at_least(400_000)),
    ):
        with_keys = f"messages with {keys:,} keys" if keys else "messages"
        yield row(
            f"store.send_many_{name}",
            f"{what} 100 B {with_keys}",
            "msg/s",
            ours(100, keys),
            goal=goal,
        )
    per_s, stream = in_turn(3, lambda: ours(1_024, 0), lambda: stream_mb_per_s(run, 0))
    whole = f"{what} 1 KiB messages"
    yield row("store.send_many_1kib", whole, "msg/s", per_s)
    beside, mb_per_s = f"{whole}, beside a loopback stream into a file", per_s * 1_024 / 1e6
    yield row(
        "store.send_many_1kib_mb", beside, "MB/s", mb_per_s, yardstick=stream, goal=at_least(0.6)
    )


@benchmark("store.half_commit_p50", "half messages of 1 KiB and their commits, fsync both")
def half_commit(run: Run) -> Iterator[Row]:
    def ours(count: int, outstanding: int, figure: str) -> float:
        with broker(run) as program:
            took = measured(
                python(f"{CLIENTS}.half_commit", program.address, run.count(count), outstanding)
            )
        return float(took[figure])

    def bare() -> float:
        with bare_server() as server:
            echo = measured(
                python(f"{CLIENTS}.send_one", f"txmq://{server.address}", run.count(2_000))
            )
        return 2 * (disk(run)["p50_us"] + float(echo["p50_us"]))

    value, yardstick = in_turn(3, lambda: ours(2_000, 1, "p50_us"), bare)
    what = "half + commit of 1 KiB, fsync both"
    beside = f"{what}: p50, beside twice fdatasync + echo"
    yield row("store.half_commit_p50", beside, "µs", value, yardstick=yardstick, goal=at_most(1.5))


@benchmark(
    "store.half_commit_64", "64 half messages of 1 KiB and their commits outstanding, fsync both"
)
def half_64(run: Run) -> Iterator[Row]:
    count, found = run.count(20_000), dict[str, Any]()

    def ours(face: str) -> float:
        with broker(run) as program:
            before = cpu_s(program.process.pid)
            took = measured(python(f"{CLIENTS}.{face}", program.address, count, OUTSTANDING))
            found.update(took, broker_us=(cpu_s(program.process.pid) - before) / count * 1e6)
        return float(took["per_s"])

    alone, twisted, value, thread, inline = in_turn(
        3,
        lambda: ours("half_commit"),
        lambda: ours("half_twisted"),
        lambda: ours("half_async"),
        lambda: sink_per_s(run, OUTSTANDING, "thread", count=100_000),
        lambda: sink_per_s(run, OUTSTANDING, "inline", count=100_000),
    )
    what, sink = "half + commit of 1 KiB, fsync both, 64 outstanding", max(thread, inline)
    beside = f"{what}, beside the raw sink"
    yield row("store.half_commit_64", beside, "tx/s", value, yardstick=sink, goal=at_least(0.35))
    yield row("store.half_commit_64_rate", what, "tx/s", value, goal=at_least(15_000))
    yield row(
        "store.half_commit_64_per_frame", f"{what}: in a frame", "requests", found["per_frame"]
    )
    yield row(
        "store.half_commit_64_client_cpu",
        f"{what}: the client's CPU for one",
        "µs",
        found["cpu_us"],
    )
    yield row(
        "store.half_commit_64_broker_cpu",
        f"{what}: the broker's CPU for one",
        "µs",
        found["broker_us"],
    )
    yield row("store.half_commit_64_twisted", f"{what}: Twisted face", "tx/s", twisted)
    yield row(
        "store.half_commit_64_alone", f"{what}: each request in a frame of its own", "tx/s", alone
    )

"""What a send costs: alone, with others under way, in volumes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.bench.brokers import FLUSH_10_MS, broker, cpu_s
from tests.bench.harness import in_turn, measured, python
from tests.bench.rows import Row, Run, at_least, at_most, benchmark, row
from tests.bench.yardsticks import Sync, bare_server, disk, sink_per_s

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
            return float(measured(python(f"{CLIENTS}.send_one_twisted", program.address, count))["p50_us"])

    def bare() -> float:
        with bare_server() as server:
            echo = measured(python(f"{CLIENTS}.send_one", f"txmq://{server.address}", count))
        return disk(run)["p50_us"] + float(echo["p50_us"])

    value, twisted, yardstick = in_turn(3, ours, on_twisted, bare)
    what = "1 KiB, fsync, blocking face"
    beside = f"{what}: p50, beside fdatasync + the same client's echo"
    yield row("store.send_one_p50", beside, "µs", value, yardstick=yardstick, goal=at_most(1.8))
    yield row("store.send_one_twisted_p50", "1 KiB, fsync, Twisted face: p50", "µs", twisted)
    yield row("store.send_one_p99", f"{what}: p99", "µs", sorted(p99s)[1])


@benchmark("store.send_64", "64 sends of 1 KiB outstanding, with fsync")
def send_64(run: Run) -> Iterator[Row]:
    count, found = run.count(100_000), dict[str, Any]()

    def ours() -> float:
        with broker(run) as program:
            before = cpu_s(program.process.pid)
            found.update(measured(python(f"{CLIENTS}.send_async", program.address, count, OUTSTANDING)))
            found["broker_us"] = (cpu_s(program.process.pid) - before) / count * 1e6
        return float(found["per_s"])

    def sink(sync: Sync) -> float:
        return sink_per_s(run, OUTSTANDING, sync, count=100_000)

    value, in_thread, inline = in_turn(3, ours, lambda: sink("thread"), lambda: sink("inline"))
    what, best = "1 KiB, fsync, 64 outstanding", max(in_thread, inline)
    yield row("store.send_64", f"{what}, beside the raw sink", "msg/s", value, yardstick=best, goal=at_least(0.5))
    yield row("store.send_64_per_frame", f"{what}: messages in a frame", "messages", count / found["frames"])
    yield row("store.send_64_coalesced", f"{what}: shared their frame", "%", 100 * found["coalesced_share"])
    yield row("store.send_64_client_cpu", f"{what}: the client's CPU for a message", "µs", found["cpu_us"])
    yield row("store.send_64_broker_cpu", f"{what}: the broker's CPU for a message", "µs", found["broker_us"])


@benchmark("store.send_many", "batches of columns from one process, a flush every 10 ms")
def send_many(run: Run) -> Iterator[Row]:
    for size, name in ((100, "100b"), (1_024, "1kib")):
        with broker(run, FLUSH_10_MS) as program:
            took = measured(python(f"{CLIENTS}.send_many", program.address, run.seconds(4), size))
        what = f"columns of {size} B messages, flush every 10 ms"
        yield row(f"store.send_many_{name}", what, "msg/s", took["per_s"])
        yield row(f"store.send_many_{name}_mb", what, "MB/s", took["mb_per_s"])

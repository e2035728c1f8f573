"""Consumption of letters that a replay plan puts back, beside that of fresh messages.

Fresh messages are the same ones for another group of the same mode: the same keys,
sizes, batches and partitions. Letters are consumed when all of them are put back, and,
by another group, while the plan puts them back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from statistics import mean
from typing import Literal, NamedTuple

import txmq
from tests.bench.brokers import FLUSH_10_MS, broker, cpu_s
from tests.bench.harness import BenchError, Program
from tests.bench.plans import AT_ONCE, DEADLY, PATIENCE_S, POLL_S, wait
from tests.bench.rows import Goal, Row, Run, at_least, benchmark, row

Mode = Literal["concurrent", "ordered"]

LETTERS, ORDERED = 100_000, 20_000
TOPIC, PARTITIONS, SIZE = "mended", 4, 100
SWEEP_POLL_S = 0.5
IDLE = 0.1  # of a core: what a broker uses that has nothing to do is less


class Consumed(NamedTuple):
    """Messages per second, and the broker's CPU time for each in microseconds."""

    per_s: float
    broker_us: float


class _Desk:
    """A broker with messages that have died in some groups."""

    def __init__(self, program: Program, client: txmq.Client, mode: Mode, count: int) -> None:
        self._pid, self._client, self._mode, self._count = program.process.pid, client, mode, count
        self._fresh = 0

    def fill(self, *groups: str) -> None:
        """Send the messages, and let them die in these groups."""
        self._client.call("topic.create", name=TOPIC, partitions=PARTITIONS)
        for number in range(self._count):
            self._client.send_async(TOPIC, b"x" * SIZE, key=f"key-{number}")
        self._client.flush()
        for group in groups:
            self._kill(group)
            settings = AT_ONCE | {"start": False}
            self._client.call("plan.create", name=group, group=group, select={}, settings=settings)
            wait(self._client, group, lambda plan: plan["state"] == "planned")

    def put_back(self, group: str) -> float:
        """Put all letters of a group back; return the letters per second."""
        began = time.perf_counter()
        self.start(group)
        wait(self._client, group, lambda plan: plan["planned"] == 0)
        return self._count / (time.perf_counter() - began)

    def start(self, group: str) -> None:
        self._client.call("plan.start", name=group)

    def end(self, group: str) -> None:
        """Wait until a plan is through, and its rows are swept: the broker rests."""
        wait(self._client, group, lambda plan: plan["state"] == "done")
        used = SWEEP_POLL_S
        while used > IDLE * SWEEP_POLL_S:
            before = cpu_s(self._pid)
            time.sleep(SWEEP_POLL_S)
            used = cpu_s(self._pid) - before

    def fresh(self) -> Consumed:
        """Consume all messages in a new group."""
        self._fresh += 1
        return self.consume(f"fresh-{self._fresh}")

    def consume(self, group: str) -> Consumed:
        left, done = [self._count], threading.Event()

        def handle(_message: object) -> None:
            left[0] -= 1
            if not left[0]:
                done.set()

        began, before = time.perf_counter(), cpu_s(self._pid)
        consumer = self._begin(group, handle)
        if not done.wait(PATIENCE_S):
            raise BenchError(f"{left[0]} messages did not come")
        took, cpu = time.perf_counter() - began, cpu_s(self._pid) - before
        _end(*consumer)
        return Consumed(self._count / took, cpu * 1e6 / self._count)

    def cpu_us(self, since: float = 0.0) -> float:
        """Return the broker's CPU time for each message, without so much."""
        return cpu_s(self._pid) * 1e6 / self._count - since

    def _kill(self, group: str) -> None:
        def die(_message: object) -> None:
            raise ValueError("not mended yet")

        dying = self._begin(group, die)
        until = time.monotonic() + PATIENCE_S
        while self._client.call("dlq.stats", group=group)["letters"] < self._count:
            if time.monotonic() > until:
                raise BenchError("the messages did not die")
            time.sleep(POLL_S)
        _end(*dying)

    def _begin(
        self, group: str, handle: Callable[[txmq.Message], object]
    ) -> tuple[txmq.Consumer, threading.Thread]:
        consumer = self._client.consumer(
            group, [TOPIC], mode=self._mode, flood_keys=0, retry=DEADLY
        )
        thread = threading.Thread(target=consumer.run, args=(handle,), daemon=True)
        thread.start()
        return consumer, thread


def _end(consumer: txmq.Consumer, thread: threading.Thread) -> None:
    consumer.close()
    thread.join()


def rows_of(run: Run, mode: Mode, count: int, goal: Goal | None = None) -> Iterator[Row]:
    """Measure letters of two groups of a mode, between fresh messages."""
    prefix = "letters.replayed" + ("" if mode == "concurrent" else f"_{mode}")
    of = f"{count:,} letters, {mode} group"
    with (
        broker(run, FLUSH_10_MS) as program,
        txmq.connect(program.address, timeout=60.0) as client,
    ):
        desk = _Desk(program, client, mode, count)
        desk.fill("later", "meanwhile")
        fresh = [desk.fresh()]
        before = desk.cpu_us()
        rate, enough = desk.put_back("later"), at_least(20_000)
        yield row(f"{prefix}_put_back", f"{of}: put back", "letters/s", rate, goal=enough)
        put_back_us = desk.cpu_us(before)
        later = desk.consume("later")
        desk.end("later")
        all_us = desk.cpu_us(before)
        fresh.append(desk.fresh())
        desk.start("meanwhile")
        meanwhile = desk.consume("meanwhile")
        desk.end("meanwhile")
        fresh.append(desk.fresh())
    what = f"{of}, put back before: consumed, beside fresh messages"
    beside = mean(one.per_s for one in fresh[:2])
    yield row(f"{prefix}_later", what, "msg/s", later.per_s, yardstick=beside)
    what = f"{of}, consumed while a plan puts them back"
    yield row(f"{prefix}_meanwhile", what, "msg/s", meanwhile.per_s, goal=goal)
    for name, what, value in (
        ("put_back", "put back", put_back_us),
        ("later", "consumed", later.broker_us),
        ("meanwhile", "put back and consumed", meanwhile.broker_us),
        ("all", "put back, consumed and swept", all_us),
        ("fresh", "a fresh message", mean(one.broker_us for one in fresh)),
    ):
        yield row(f"{prefix}_{name}_cpu", f"{of}: CPU of the broker for each: {what}", "µs", value)


@benchmark("letters.replayed", "letters that a plan puts back, and fresh messages, consumed")
def replayed(run: Run) -> Iterator[Row]:
    yield from rows_of(run, "concurrent", run.count(LETTERS), at_least(30_000))
    yield from rows_of(run, "ordered", run.count(ORDERED))

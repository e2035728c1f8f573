"""Replay plans over many dead letters: how fast they are frozen and put back, and what
a replay costs others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import quantiles
from typing import Any

import txmq
from tests.bench.harness import BenchError
from tests.bench.rows import Row, at_least, at_most, row

AT_ONCE = {"rate": 0, "ramp_s": 0, "in_flight": 0, "stop_after": 0, "start": True}
RATE, LIVE_S = 2_000, 8.0
PATIENCE_S = 900.0
POLL_S = 0.05
DEADLY = txmq.RetryPolicy(dead=("ValueError",))


def wait(client: Any, name: str, done: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return a plan once this holds."""
    until = time.monotonic() + PATIENCE_S
    while True:
        shown: dict[str, Any] = client.call("plan.show", name=name)
        if done(shown):
            return shown
        if shown["state"] == "paused" or time.monotonic() > until:
            raise BenchError(f"plan {name} is {shown['state']}: {shown['why']}")
        time.sleep(POLL_S)


def create(client: Any, name: str, settings: dict[str, Any], select: dict[str, Any]) -> float:
    """Freeze a plan; return the letters per second."""
    began = time.perf_counter()
    client.call("plan.create", name=name, group="g", select=select, settings=settings)
    shown = wait(client, name, lambda plan: plan["state"] != "building")
    return float(shown["letters"] / (time.perf_counter() - began))


def live_p99(client: Any, seconds: float) -> float:
    """Return the 99th percentile of sends one after the other, in milliseconds."""
    took: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter()
        client.send("live", b"x" * 100)
        took.append((time.perf_counter() - began) * 1e3)
    return quantiles(took, n=100)[98]


def plan_rows(address: str, client: Any, of: str) -> Iterator[Row]:
    """Replay letters of group g, whose broker has nothing else to do."""
    client.call("topic.create", name="live", partitions=1)
    with txmq.connect(address, timeout=60.0) as producer:
        alone = live_p99(producer, LIVE_S / 2)
        ramped = {"rate": RATE, "ramp_s": LIVE_S / 2, "in_flight": 0, "start": True}
        create(client, "ramped", ramped, {"error_type": "Error7"})
        beside = live_p99(producer, LIVE_S)
        client.call("plan.cancel", name="ramped")
        yield row(
            "letters.replay_live_p99",
            f"p99 of a send while a plan puts back up to {RATE:,} letters/s, beside alone",
            "ms",
            beside,
            yardstick=alone,
            goal=at_most(1.5),
        )
    frozen = create(client, "all", AT_ONCE | {"start": False}, {})
    yield row("letters.plan_frozen", f"a plan over {of} is frozen", "letters/s", frozen)
    began = time.perf_counter()
    client.call("plan.start", name="all")
    shown = wait(client, "all", lambda plan: plan["planned"] == 0)
    yield row(
        "letters.plan_put_back",
        f"a plan over {of}: put back, without consumers",
        "letters/s",
        shown["delivered"] / (time.perf_counter() - began),
        goal=at_least(20_000),
    )

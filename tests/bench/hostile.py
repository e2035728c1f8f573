"""A witness's latency, and the broker's memory, while others misuse the broker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.bench.brokers import command
from tests.bench.clients.attack import ATTACKS
from tests.bench.data_directories import filling, topics
from tests.bench.harness import Program, measured, python, sampled, serving
from tests.bench.rows import Row, Run, at_most, benchmark, row
from tests.bench.scale import directory
from tests.bench.startup import CLIENTS, MIB
from txmq.testing.ports import free_port

WITNESS_S = 5.0
CONSOLE_TOPICS = 100_000
TOPIC = "witness"
LATENCY, MEMORY = at_most(50.0), at_most(250e6 / MIB)


@benchmark("store.hostile", "a witness beside clients that misuse the broker")
def hostile(run: Run) -> Iterator[Row]:
    alone = _latencies(run, "")
    yield row("store.hostile.alone.p99", "sends, p99, with nobody else", "ms", alone["p99_ms"])
    for name, attack in ATTACKS.items():
        what = (attack.__doc__ or name).splitlines()[0].rstrip(".")
        found = _latencies(run, name)
        yield row(
            f"store.hostile.{name}.p99", f"sends, p99: {what}", "ms", found["p99_ms"], goal=LATENCY
        )
        yield row(f"store.hostile.{name}.max", "the longest send", "ms", found["max_ms"])
        yield row(
            f"store.hostile.{name}.refused",
            "sends refused",
            "sends",
            found["refused"],
            goal=at_most(0),
        )
        yield row(f"store.hostile.{name}.rss", "RssAnon, peak", "MiB", found["rss"], goal=MEMORY)


def _latencies(run: Run, attack: str) -> dict[str, Any]:
    """Return what a witness measures during an attack, and the broker's memory."""
    with directory(run) as place:
        if attack == "console":
            with filling(place / "data") as filler:
                filler.submit(topics(run.count(CONSOLE_TOPICS), 1))
        port = free_port()
        settings = f'http = "127.0.0.1:{port}"'
        with serving(command(place, settings), 120.0) as program:
            return _attacked(run, program, attack, port)


def _attacked(run: Run, broker: Program, attack: str, port: int) -> dict[str, Any]:
    if not attack:
        return _witness(run, broker)
    argv = python(f"{CLIENTS}.attack", attack, broker.address, port, TOPIC)
    with serving(argv, 300.0):
        return _witness(run, broker)


def _witness(run: Run, broker: Program) -> dict[str, Any]:
    argv = python(f"{CLIENTS}.witness", broker.address, TOPIC, run.seconds(WITNESS_S))
    with sampled(broker.rss_anon) as memory:
        found = measured(argv)
    return found | {"refused": float(found["refused"]), "rss": max(memory) / MIB}

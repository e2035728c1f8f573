"""A witness's latency, and the broker's memory, while others misuse the broker."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from typing import Any

from tests.bench.brokers import command, cpu_s
from tests.bench.clients.attack import ATTACKS, LOGIN_ATTACKS
from tests.bench.data_directories import filling, topics
from tests.bench.harness import Program, measured, python, sampled, serving
from tests.bench.rows import Row, Run, at_most, benchmark, row
from tests.bench.scale import directory
from tests.bench.startup import CLIENTS, MIB
from txmq.testing.ports import free_port

WITNESS_S = 5.0
CONSOLE_TOPICS = 100_000
TOPIC = "witness"
PASSWORD = "a-password-of-a-benchmark"
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


@benchmark("store.logins", "a witness beside hostile logins, at a broker with users")
def logins(run: Run) -> Iterator[Row]:
    for name, attack in LOGIN_ATTACKS.items():
        what = (attack.__doc__ or name).splitlines()[0].rstrip(".")
        found = _beside_logins(run, name)
        key = f"store.logins.{name}"
        yield row(f"{key}.p99", f"sends, p99: {what}", "ms", found["p99_ms"], goal=LATENCY)
        yield row(f"{key}.max", "the longest send", "ms", found["max_ms"])
        yield row(f"{key}.refused", "sends refused", "sends", found["refused"], goal=at_most(0))
        yield row(f"{key}.rss", "RssAnon, peak", "MiB", found["rss"], goal=MEMORY)
        yield row(f"{key}.cpu", "the broker's processor time in a second", "s", found["cpu"])


def _beside_logins(run: Run, attack: str) -> dict[str, Any]:
    """Return what a user measures during an attack, and what it costs the broker."""
    with directory(run) as place:
        words = place / "password"
        words.write_text(PASSWORD)
        subprocess.run(
            python("txmq", "user", "init-admin", "root", "--data", place / "data",
                   "--password-file", words),
            check=True, capture_output=True,
        )  # fmt: skip
        port = free_port()
        with serving(command(place, f'http = "127.0.0.1:{port}"'), 120.0) as broker:
            known = broker.address.replace("txmq://", f"txmq://root:{PASSWORD}@")
            argv = python(f"{CLIENTS}.attack", attack, broker.address, port, TOPIC)
            with serving(argv, 300.0):
                began, used = time.perf_counter(), cpu_s(broker.process.pid)
                found = _witness(run, broker, known)
                used = cpu_s(broker.process.pid) - used
                return found | {"cpu": used / (time.perf_counter() - began)}


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


def _witness(run: Run, broker: Program, url: str = "") -> dict[str, Any]:
    argv = python(f"{CLIENTS}.witness", url or broker.address, TOPIC, run.seconds(WITNESS_S))
    with sampled(broker.rss_anon) as memory:
        found = measured(argv)
    return found | {"refused": float(found["refused"]), "rss": max(memory) / MIB}

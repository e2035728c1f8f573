"""Sends beside a backup of the log."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from threading import Event, Thread
from typing import Any

from tests.bench.brokers import command
from tests.bench.data_directories import filling, volumes
from tests.bench.harness import measured, python, serving
from tests.bench.rows import Row, Run, at_most, benchmark, row
from tests.bench.scale import directory
from tests.bench.startup import CLIENTS, MIB, PARTITIONS, READY_WITHIN_S
from txmq.core.topics.topics import CreateTopic

WINDOW_S, ROUNDS, OUTSTANDING = 8.0, 5, 64


@contextmanager
def backups(address: str, place: Path, found: list[float]) -> Iterator[None]:
    """Back the broker up, again and again, each time all of it. `found` gets MiB/s."""
    over = Event()
    began = Event()

    def run() -> None:
        while not over.is_set():
            target = tempfile.mkdtemp(dir=place)
            argv = python("txmq", "log", "backup", target, "--broker", address, "--json")
            at = time.monotonic()
            with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
                began.set()
                while process.poll() is None and not over.wait(0.02):
                    pass
                process.terminate()
                assert process.stdout is not None
                told = process.stdout.read()
            if told:
                found.append(json.loads(told)["copied"] / MIB / (time.monotonic() - at))
            shutil.rmtree(target)

    thread = Thread(target=run)
    thread.start()
    began.wait()
    try:
        yield
    finally:
        over.set()
        thread.join()


@benchmark("recover.backup", "64 sends outstanding beside a backup")
def backup(run: Run) -> Iterator[Row]:
    size = run.count(1_024) * MIB
    alone: list[dict[str, Any]] = []
    beside: list[dict[str, Any]] = []
    rates: list[float] = []
    with directory(run) as place:
        (place / "broker").mkdir()
        argv = command(place / "broker")
        with filling(place / "broker" / "data") as filler:
            filler.submit([CreateTopic("bench", PARTITIONS)])
            filler.submit(volumes(size, "bench", PARTITIONS), at_once=4)
        with serving(argv, READY_WITHIN_S) as program:
            sends = python(
                f"{CLIENTS}.send_latency", program.address, run.seconds(WINDOW_S), OUTSTANDING
            )
            for _ in range(ROUNDS):
                alone.append(measured(sends))
                with backups(program.address, place, rates):
                    beside.append(measured(sends))
    what = f"64 sends of 1 KiB outstanding, beside a backup of {size / 2**30:.2g} GiB"
    for name in ("p99", "p50"):
        yield row(
            f"recover.backup.{name}",
            f"{what}: {name}, beside that without",
            "ms",
            median(one[f"{name}_ms"] for one in beside),
            yardstick=median(one[f"{name}_ms"] for one in alone),
            goal=at_most(2.0) if name == "p99" else None,
        )
    yield row(
        "recover.backup.sends",
        f"{what}: sends, beside those without",
        "messages/s",
        median(one["per_s"] for one in beside),
        yardstick=median(one["per_s"] for one in alone),
    )
    if rates:
        yield row("recover.backup.rate", f"{what}: copied", "MiB/s", median(rates))

"""Broker processes for benchmarks."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.bench.harness import Program, python, serving
from tests.bench.rows import Run

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
FLUSH_10_MS = "flush = { every_ms = 10, messages = 100_000 }"


@contextmanager
def broker(run: Run, settings: str = "", resolvers: str = "") -> Iterator[Program]:
    """Run a broker with a data directory of its own during the block.

    `settings` are lines of [broker].
    """
    directory = Path(tempfile.mkdtemp(dir=run.directory))
    try:
        with serving(command(directory, settings, resolvers)) as program:
            yield program
    finally:
        shutil.rmtree(directory)


def command(directory: Path, settings: str = "", resolvers: str = "") -> list[str]:
    """Return the command line of a broker with data and settings below `directory`."""
    config = directory / "txmq.toml"
    broker = f'[broker]\ndata = "{directory / "data"}"\ncreate_topics = true\n'
    config.write_text(f"{broker}{settings}\n{resolvers}")
    return python("txmq", "broker", "--config", config, "--listen", "127.0.0.1:0")


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process, in user and kernel mode. Linux only."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S

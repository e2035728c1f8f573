"""What every benchmark stands on: programs started and stopped, percentiles, memory,
the machine.

Standard library alone, so that the yardstick programs can use it too. Benchmarks
themselves are explained in `tests/bench/__init__.py`.
"""

from __future__ import annotations

import json
import math
import os
import platform
import selectors
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
READY_WITHIN_S = 60.0
STOPS_WITHIN_S = 15.0


class BenchError(Exception):
    """A program did not do what a benchmark needs; its figures would mean nothing."""


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of `values`, in any order, that `share` percent of them do not
    exceed: nearest rank.
    """
    if not values:
        raise ValueError("no values, so no percentile")
    if not 0 < share <= 100:
        raise ValueError(f"a percentile lies in (0, 100], not at {share}")
    return sorted(values)[math.ceil(share / 100 * len(values)) - 1]


def latency_us(took_s: Sequence[float]) -> dict[str, float]:
    """p50 and p99 of times in seconds, in microseconds."""
    return {"p50_us": percentile(took_s, 50) * 1e6, "p99_us": percentile(took_s, 99) * 1e6}


def in_turn(rounds: int, *measures: Callable[[], float]) -> tuple[float, ...]:
    """The median of each measure over `rounds`, taken in turn, so that a slow machine
    slows both sides of a ratio.
    """
    results = [[measure() for measure in measures] for _ in range(rounds)]
    return tuple(statistics.median(column) for column in zip(*results, strict=True))


def python(module: str, *args: object) -> list[str]:
    """The command line of a Python module under this interpreter."""
    return [sys.executable, "-m", module, *map(str, args)]


@dataclass(frozen=True, slots=True)
class Program:
    """A server in a process of its own. `address` is what it printed after "ready"."""

    process: subprocess.Popen[bytes]
    address: str
    ready_after_s: float

    def rss_anon(self) -> int:
        """Bytes of memory that belong to this process alone."""
        return rss_anon(self.process.pid)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait(STOPS_WITHIN_S)


@contextmanager
def serving(argv: Sequence[str], ready_within_s: float = READY_WITHIN_S) -> Iterator[Program]:
    """Run a server for the length of the block; it has to listen on port 0 and to print
    `ready ADDRESS`.

    Raises BenchError, with the end of its standard error, where it ends or stays silent
    before that.
    """
    began = time.perf_counter()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
        )
        try:
            address = _ready_address(process, _name(argv), errors, began + ready_within_s)
            yield Program(process, address, time.perf_counter() - began)
        finally:
            _stop(process)


def measured(argv: Sequence[str], within_s: float = 600.0) -> dict[str, Any]:
    """Run a program to its end; the JSON object in the last line that it printed."""
    try:
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, timeout=within_s, check=True)
    except subprocess.TimeoutExpired as slow:
        raise BenchError(f"{_name(argv)} took more than {within_s} s") from slow
    except subprocess.CalledProcessError as failed:
        raise BenchError(
            f"{_name(argv)} ended with {failed.returncode}: {_tail(failed.stderr)}"
        ) from failed
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def rss_anon(pid: int) -> int:
    """Bytes of anonymous resident memory of a process: without files it maps, such as
    an index. Linux only.
    """
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise BenchError(f"/proc/{pid}/status has no RssAnon: is the process gone?")


@contextmanager
def sampled(probe: Callable[[], float], every_s: float = 0.05) -> Iterator[list[float]]:
    """All that `probe` gave while the block ran, such as the `rss_anon` of a program
    under load.
    """
    samples, done = [probe()], threading.Event()

    def sample() -> None:
        while not done.wait(every_s):
            samples.append(probe())

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield samples
    finally:
        done.set()
        sampler.join()


def machine_line(directory: Path) -> str:
    """One line on what the figures depend on."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return (
        f"{cores} cores, {memory:.1f} GiB memory, {file_system(directory)}, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, {platform.system()} {platform.release()} {platform.machine()}"
    )


def file_system(directory: Path) -> str:
    """Type of the file system that holds `directory`: of the deepest mount point above
    it, the last one made there.
    """
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    above = [mount for mount in mounts if directory.resolve().is_relative_to(mount[1])]
    return max(reversed(above), key=lambda mount: len(mount[1]))[2]


def _ready_address(
    process: subprocess.Popen[bytes], name: str, errors: IO[bytes], deadline: float
) -> str:
    output = process.stdout
    assert output is not None
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, deadline - time.perf_counter())):
                raise BenchError(f"{name} was not ready in time: {_read_tail(errors)}")
            piece = os.read(output.fileno(), 1)
            if not piece:
                raise BenchError(f"{name} ended before it was ready: {_read_tail(errors)}")
            line += piece
    word, _, address = line.decode().strip().partition(" ")
    if word != "ready" or not address:
        raise BenchError(f"{name} printed {line!r} where `ready ADDRESS` was due")
    return address


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOPS_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdout is not None
    process.stdout.close()


def _name(argv: Sequence[str]) -> str:
    return " ".join(argv)


def _tail(text: bytes) -> str:
    return text[-2000:].decode(errors="replace").strip() or "nothing on standard error"


def _read_tail(errors: IO[bytes]) -> str:
    errors.seek(0)
    return _tail(errors.read())

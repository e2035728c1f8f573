"""The harness of the benchmarks: programs, memory, the machine.

`tests/bench/__init__.py` explains benchmarks.
"""

from __future__ import annotations

import json
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
    """A program failed, so that its figures mean nothing."""


def in_turn(rounds: int, *measures: Callable[[], float]) -> tuple[float, ...]:
    """Return the median of each measure over `rounds`.

    The measures take turns, so that a slow machine slows both sides of a ratio.
    """
    results = [[measure() for measure in measures] for _ in range(rounds)]
    return tuple(statistics.median(column) for column in zip(*results, strict=True))


def python(module: str, *args: object) -> list[str]:
    """Return the command line of a Python module under this interpreter."""
    return [sys.executable, "-m", module, *map(str, args)]


@dataclass(frozen=True, slots=True)
class Program:
    """A server process. `address` is the text that it printed after "ready"."""

    process: subprocess.Popen[bytes]
    address: str
    ready_after_s: float

    def rss_anon(self) -> int:
        """Return the anonymous resident memory in bytes."""
        return rss_anon(self.process.pid)

    def kill(self) -> None:
        """Send SIGKILL and wait for the end of the process."""
        self.process.kill()
        self.process.wait(STOPS_WITHIN_S)


@contextmanager
def serving(argv: Sequence[str], ready_within_s: float = READY_WITHIN_S) -> Iterator[Program]:
    """Run a server during the block.

    It must listen on port 0 and print `ready ADDRESS`. Raises BenchError, with the end
    of standard error, where it does not.
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
    """Run a program to its end; return the JSON object on its last line of output."""
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
    """Return the anonymous resident memory of a process in bytes.

    It excludes mapped files, such as an index. Linux only.
    """
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise BenchError(f"/proc/{pid}/status has no RssAnon: the process has ended")


@contextmanager
def sampled(probe: Callable[[], float], every_s: float = 0.05) -> Iterator[list[float]]:
    """Collect results of `probe` during the block, such as the `rss_anon` of a
    program.
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
    """Return a line about the machine."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return (
        f"{cores} cores, {memory:.1f} GiB memory, {file_system(directory)}, "
        f"load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.release()} {platform.machine()}"
    )


def file_system(directory: Path) -> str:
    """Return the type of the file system that holds `directory`."""
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
        raise BenchError(f"{name} printed {line!r} instead of `ready ADDRESS`")
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

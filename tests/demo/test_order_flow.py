"""The demonstration from the input to the audit at a tenth of its size, and its
failures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.kafka_nodes import needs_kafka
from txmq.testing.reaper import reaped, reaper_pipe
from txmq.testing.wait import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]
ORDERS = 1_500  # at scale 0.001
STARTED_PROCESSES = 4  # processes of services; some crash and restart early


def start(directory: Path, *options: str, **environment: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "examples.order_flow",
        "--scale=0.001",
        f"--directory={directory}",
        *options,
    ]
    path = os.pathsep.join((str(ROOT / "spark"), os.environ.get("PYTHONPATH", "")))
    return subprocess.Popen(
        reaped(command),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdin=reaper_pipe(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def demo(directory: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    with start(directory, *options, **environment) as process:
        out, errors = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def processes() -> Iterator[tuple[int, int, str]]:
    """Yield id, parent and command line of all running processes."""
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            if (
                line := (place / "cmdline")
                .read_bytes()
                .replace(b"\0", b" ")
                .decode(errors="replace")
            ):
                yield int(place.name), parent, line


def processes_of(directory: Path) -> list[str]:
    """Return the command lines of processes of that run."""
    return [line for _pid, _parent, line in processes() if str(directory) in line]


def below(pid: int) -> dict[int, str]:
    """Return the command lines of all descendants of a process."""
    known = sorted(processes())
    found, before = {pid: ""}, 0
    while len(found) > before:
        before = len(found)
        found |= {child: line for child, parent, line in known if parent in found}
    del found[pid]
    return found


@pytest.mark.timeout(5 * PATIENCE_S)  # Spark on a busy machine
@pytest.mark.parametrize("options", [(), pytest.param(("--cluster",), marks=needs_kafka)])
def test_the_flow_survives_its_faults(tmp_path: Path, options: Sequence[str]) -> None:
    directory = tmp_path / "run"
    done = demo(directory, "--seed=2", *options)
    file = directory / "result.json"
    result = json.loads(file.read_text("utf-8")) if file.exists() else {}
    assert result.get("contradictions") == {}, done.stdout[-3_000:] + done.stderr[-3_000:]
    assert done.returncode == 0, done.stdout[-3_000:] + done.stderr[-3_000:]
    counts = result["counts"]
    assert counts["committed"] == counts["shipments"] == ORDERS
    assert counts["charges"] + counts["abandoned"] == ORDERS
    assert counts["dead"] == counts["replayed"] + counts["abandoned"]
    # 6 of orders, 2 of payment, 1 of shipping, 1 of tracking, the watch, the broker
    assert counts["killed"] == 12
    assert counts["attempted"] > ORDERS
    for what in (
        "checked back, committed",
        "checked back, rolled back",
        "retried",
        "stored",
        "spooled",
        "replayed",
        "abandoned",
        "duplicates",
        "alerts",
    ):
        assert counts[what], what
    assert (directory / "shipping.html").read_text("utf-8").startswith("<!")
    wait_until(lambda: not processes_of(directory), what="all have ended")
    assert sorted(path.name for path in directory.iterdir() if path.is_dir()) == [
        "journals",
        "logs",
        "payment-plan",
        "shipping-plan",
    ]


def test_without_its_database_it_ends_with_an_error(tmp_path: Path) -> None:
    done = demo(tmp_path / "run", TXMQ_DSN="host=127.0.0.1 port=1 user=nobody")
    assert done.returncode == 1
    assert "Connection refused" in done.stderr
    assert "TXMQ_DSN" in done.stderr
    assert "Traceback" not in done.stderr
    wait_until(lambda: not processes_of(tmp_path), what="all have ended")


def test_nothing_outlives_a_director_that_is_killed(tmp_path: Path) -> None:
    def enough_started() -> bool:
        assert director.poll() is None, director.communicate()
        return (
            sum("order_flow.services" in line for line in below(director.pid).values())
            >= STARTED_PROCESSES
        )

    with start(tmp_path / "run") as director:
        wait_until(enough_started, what="the services run")
        started = below(director.pid)
        director.kill()
    assert any("postgres" in line for line in started.values()) or "TXMQ_TEST_DSN" in os.environ
    assert any("txmq broker" in line for line in started.values())
    wait_until(
        lambda: not started.items() & {pid: line for pid, _, line in processes()}.items(),
        what="all have ended",
    )
    wait_until(lambda: not processes_of(tmp_path), what="all have ended that were started since")


def test_a_run_does_not_write_over_another(tmp_path: Path) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    done = demo(tmp_path / "run")
    assert done.returncode == 1
    assert "exists" in done.stderr
    assert "Traceback" not in done.stderr

"""The demonstration from nothing to its audit, at a tenth of its size, and how it ends when it cannot go on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ORDERS = 1_500  # at scale 0.001
LIMIT_S = 400  # Spark on a busy machine


def demo(directory: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "examples.order_flow", "--scale=0.001", f"--directory={directory}", *options]
    path = os.pathsep.join((str(ROOT / "spark"), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def processes_of(directory: Path) -> list[str]:
    """The command lines of processes that work for that run."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(directory) in line:
            found.append(line)
    return found


@pytest.mark.timeout(LIMIT_S)
def test_the_flow_survives_its_faults(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    done = demo(directory, "--seed=2")
    assert done.returncode == 0, done.stdout[-3_000:] + done.stderr[-3_000:]
    counts = json.loads((directory / "result.json").read_text("utf-8"))["counts"]
    assert counts["committed"] == counts["shipments"] == ORDERS
    assert counts["charges"] + counts["abandoned"] == ORDERS
    assert counts["dead"] == counts["replayed"] + counts["abandoned"]
    assert counts["killed"] == 10  # 6 of orders, 2 of payment, 1 of shipping, the broker
    assert counts["attempted"] > ORDERS
    for what in (
        "checked back, committed",
        "checked back, rolled back",
        "retried",
        "replayed",
        "abandoned",
        "duplicates",
    ):
        assert counts[what], what
    assert (directory / "shipping.html").read_text("utf-8").startswith("<!")
    assert processes_of(directory) == []
    assert sorted(path.name for path in directory.iterdir() if path.is_dir()) == ["journals", "logs"]


def test_without_its_database_it_says_so_and_ends(tmp_path: Path) -> None:
    done = demo(tmp_path / "run", TXMQ_DSN="host=127.0.0.1 port=1 user=nobody")
    assert done.returncode == 1
    assert "Connection refused" in done.stderr
    assert "TXMQ_DSN" in done.stderr
    assert "Traceback" not in done.stderr
    assert processes_of(tmp_path) == []


def test_a_run_does_not_write_over_another(tmp_path: Path) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    done = demo(tmp_path / "run")
    assert done.returncode == 1
    assert "exists" in done.stderr
    assert "Traceback" not in done.stderr

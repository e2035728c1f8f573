"""Where the demonstration runs: what is left running can be looked at, and is ended as
the demonstration says.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import psycopg2
import pytest

from examples.order_flow.flow import LOOK_AROUND
from examples.order_flow.stage import Stage
from txmq.testing.wait import wait_until


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path / "run")
    yield stage
    stage.close(clear=True)


def fetch(url: str) -> bytes:
    with urlopen(url, timeout=10) as response:
        body: bytes = response.read()
        return body


def test_what_is_left_running_serves_its_console_until_it_is_ended_as_told(stage: Stage) -> None:
    stage.start_postgres()
    stage.start_broker()
    stage.crash_broker()  # the console's address is the same in a broker's later lives
    end = stage.leave_running()
    told = LOOK_AROUND.substitute(
        url=stage.url, console=stage.console, dsn=stage.dsn, python="python", end=end
    )
    assert b"console.js" in fetch(stage.console)
    metrics = next(line.split()[1] for line in told.splitlines() if line.split()[:1] == ["metrics"])
    assert b"txmq_broker_info" in fetch(metrics)
    assert stage.query("SELECT 1") == [(1,)]
    subprocess.run(end, shell=True, check=True)
    wait_until(lambda: stage.fleet.processes["broker"].ended() == 0, what="the broker has ended")
    if stage.places()[2:]:
        with pytest.raises(psycopg2.OperationalError):
            stage.query("SELECT 1")
    assert [place for place in stage.places() if place.exists()] == []

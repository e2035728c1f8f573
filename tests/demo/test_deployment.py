"""The deployment of the demonstration: it can be left running, and stopped by the
printed command.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import psycopg2
import pytest

from examples.order_flow.deployment import Deployment
from examples.order_flow.flow import LEFT_RUNNING
from txmq.testing.wait import PATIENCE_S, wait_until


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    deployment = Deployment(tmp_path / "run")
    yield deployment
    deployment.close(clear=True)


def fetch(url: str) -> bytes:
    with urlopen(url, timeout=PATIENCE_S) as response:
        body: bytes = response.read()
        return body


def test_what_is_left_running_serves_its_console_until_its_command_ends_it(
    deployment: Deployment,
) -> None:
    deployment.start_postgres()
    deployment.start_broker()
    deployment.crash_broker()  # the console's address is the same in a broker's later lives
    end = deployment.leave_running()
    text = LEFT_RUNNING.substitute(
        url=deployment.url, console=deployment.console, dsn=deployment.dsn, python="python", end=end
    )
    assert b"<h1>Overview" in fetch(deployment.console)
    metrics = next(line.split()[1] for line in text.splitlines() if line.split()[:1] == ["metrics"])
    assert b"txmq_broker_info" in fetch(metrics)
    assert deployment.query("SELECT 1") == [(1,)]
    subprocess.run(end, shell=True, check=True)
    wait_until(
        lambda: deployment.fleet.processes["broker"].exit_status() == 0, what="the broker has ended"
    )
    if deployment.data_directories()[2:]:
        with pytest.raises(psycopg2.OperationalError):
            deployment.query("SELECT 1")
    assert [place for place in deployment.data_directories() if place.exists()] == []

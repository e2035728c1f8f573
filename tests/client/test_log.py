"""Log events of the client go where its program reads its log, and nowhere else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

import txmq.client
from txmq.client.log import LastingTrouble
from txmq.testing.wait import PATIENCE_S

SAY = """
from txmq.client.log import get_logger
log = get_logger()
log.warning("consumer.disconnected", group="billing", error="gone")
try:
    raise ValueError("why")
except ValueError:
    log.exception("pipeline.failed")
"""
STANDARD = "import logging; logging.basicConfig(format='%(levelname)s %(name)s %(message)s')\n"
STRUCTLOG = (
    "import structlog; structlog.configure(processors=[structlog.processors.JSONRenderer()])\n"
)


def said(program: str) -> tuple[str, str]:
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    return ran.stdout, ran.stderr


def test_a_program_without_a_log_sees_nothing() -> None:
    assert said(SAY) == ("", "")


@pytest.mark.parametrize("program", [STANDARD + SAY, SAY.replace("log = ", STANDARD + "log = ", 1)])
def test_the_standard_librarys_log_has_all_events(program: str) -> None:
    out, err = said(program)
    first, second, *trace = err.splitlines()
    assert out == ""
    assert first == "WARNING txmq consumer.disconnected group='billing' error='gone'"
    assert (second, trace[-1]) == ("ERROR txmq pipeline.failed", "ValueError: why")


def test_structlog_has_all_events_where_it_is_configured() -> None:
    out, err = said(SAY.replace("log = ", STRUCTLOG + "log = ", 1))
    assert out.startswith(
        '{"group": "billing", "error": "gone", "event": "consumer.disconnected"}\n'
    )
    assert '"event": "pipeline.failed"' in out
    assert err == ""


def test_a_log_that_fails_ends_no_work() -> None:
    broken = "import structlog; structlog.configure(processors=[lambda *event: 1 / 0])\n"
    out, err = said(SAY.replace("log = ", broken + "log = ", 1) + "print('went on')")
    assert (out, err.count("ZeroDivisionError: division by zero")) == ("went on\n", 2)


def test_a_trouble_that_lasts_is_told_at_first_once_a_minute_and_at_its_end() -> None:
    seconds = iter((0.0, 5.0, 59.0, 60.0, 119.0, 125.0, 125.0, 130.0))
    trouble = LastingTrouble("inbox.database_away", clock=lambda: next(seconds), group="g")
    with capture_logs() as logs:
        for _ in range(5):
            trouble.warn(OSError("refused"))
        trouble.over()
        trouble.over()
        trouble.warn(OSError("again"))
    assert [(one["event"], one["for_s"], one.get("error")) for one in logs] == [
        ("inbox.database_away", 0, "refused"),
        ("inbox.database_away", 60, "refused"),
        ("inbox.database_away_over", 125, None),
        ("inbox.database_away", 0, "again"),
    ]


def test_every_module_of_the_client_logs_there() -> None:
    directory = Path(txmq.client.__file__).parent
    own = [path.name for path in directory.rglob("*.py") if "structlog" in path.read_text("utf-8")]
    assert own == ["log.py"]

"""What `txmq-spark` prints of texts that come from elsewhere."""

from __future__ import annotations

import json
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import structlog

import txmq
from txmq.errors import ConfigError
from txmq_spark.commands import command_line, plan_commands, stream_commands
from txmq_spark.landing import Landed
from txmq_spark.replay import ReplayResult
from txmq_spark.session.query_errors import QueryFailed

HOSTILE = "\x1b]0;owned\x07\x9b31m\u202egnp\u2028\r"


def refuse() -> int:
    raise ConfigError("x", f"refused {HOSTILE}\nplan forged: done")


def test_no_error_and_no_reason_of_a_plan_has_control_characters_for_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command_line._exit_status(refuse) == 1
    paused = {"name": "p", "state": "paused", "why": f"{HOSTILE}\nplan forged: done"}
    plan_commands._tell_result(Namespace(json=False), ReplayResult((paused,), {"replayed": 1}))
    out, err = capsys.readouterr()
    assert all(char.isprintable() or char == "\n" for char in out + err)
    assert not any(line.startswith("plan forged") for line in (out + err).splitlines())
    assert "gnp" in out
    assert "gnp" in err


def test_the_progress_of_a_plan_says_what_it_waits_for_and_nothing_twice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tell = plan_commands._tell_progress()
    plan = {"name": "p", "state": "canary", "progress": 0.0, "why": f"no members {HOSTILE}"}
    other = plan | {"name": "q", "progress": 0.5, "why": None}
    for one in (plan, plan, other, plan, plan | {"progress": 1.0}):
        tell(one)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("p: canary, 0% (no members \\x1b")
    assert lines[1] == "q: canary, 50%"
    assert lines[2].startswith("p: canary, 100% (")
    assert len(lines) == 3


def test_the_log_of_a_job_is_not_among_its_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def land(_options: Namespace) -> int:
        structlog.get_logger().warning("spark.skipped", topic=HOSTILE)
        sys.stdout.write("the result\n")
        return 0

    job = command_line.JOBS["land"]._replace(run=land)
    monkeypatch.setitem(command_line.JOBS, "land", job)
    assert command_line.main(["land", "--topic=t", "--path=p"]) == 0
    told = capsys.readouterr()
    assert told.out == "the result\n"
    assert "spark.skipped" in told.err
    assert all(char.isprintable() or char == "\n" for char in told.err.replace("\x1b[", ""))


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        (["land", "--topic=t", "--path=p"], {"messages": 3, "skipped": 1}),
        (
            ["watch", "--group=g", "--group=h", "--alerts=a", "--checkpoint=c"],
            {"groups": ["g", "h"], "alerts": "a"},
        ),
    ],
)
def test_results_of_streams_are_json_where_asked(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    result: dict[str, Any],
) -> None:
    monkeypatch.setattr(stream_commands, "job_session", nullcontext)
    monkeypatch.setattr(stream_commands, "land", lambda *_given: Landed(3, 1))
    monkeypatch.setattr(stream_commands, "watch", lambda *_given: None)
    assert command_line.main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == result


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"txmq {txmq.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "number", "status"),
    [
        (["replay", "--plan=p"], signal.SIGTERM, 143),  # its work is not done
        (["land", "--topic=t", "--path=p"], signal.SIGTERM, 143),
        (["land", "--topic=t", "--path=p", "--every=60"], signal.SIGTERM, 0),  # it had no end
        (["land", "--topic=t", "--path=p", "--every=60"], signal.SIGINT, 130),
    ],
)
def test_a_signal_ends_a_job_with_its_status(
    arguments: list[str],
    number: signal.Signals,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(_options: Namespace) -> int:
        os.kill(os.getpid(), number)
        return 1  # the signal is handled before

    job = command_line.JOBS[arguments[0]]
    monkeypatch.setitem(command_line.JOBS, arguments[0], job._replace(run=run))
    with pytest.raises(SystemExit) as ended:
        sys.exit(command_line.main(arguments))
    assert ended.value.code == status
    told = capsys.readouterr().err
    assert told == ("txmq: interrupted; the same command does the rest\n" if status == 130 else "")


@pytest.mark.parametrize("error", [ConnectionRefusedError("the JVM"), QueryFailed("a cut call")])
def test_an_error_on_the_way_out_does_not_hide_the_signal(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def frames_of_executors() -> Iterator[None]:
        try:
            yield
        finally:
            raise error  # the signal has ended the JVM, too

    @frames_of_executors()
    def run(_options: Namespace) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return 1  # the signal is handled before

    job = command_line.JOBS["replay"]
    monkeypatch.setitem(command_line.JOBS, "replay", job._replace(run=run))
    with pytest.raises(SystemExit) as ended:
        command_line.main(["replay", "--plan=p"])
    assert ended.value.code == 143
    assert capsys.readouterr().err == ""

"""The log of the broker's process: its contents, its secrets, and forged events."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from structlog import WriteLogger
from structlog.testing import capture_logs

from txmq.cli.logs import REDACTED, LossyStream, escape_event, observe_twisted, redact_event
from txmq.testing.wait import PATIENCE_S


def cleaned(**event: object) -> Mapping[str, Any]:
    return redact_event(None, "info", dict(event))


@pytest.mark.parametrize(
    "name",
    [
        "password",
        "dsn",
        "body",
        "bodies",
        "key",
        "keys",
        "headers",
        "login",
        "Authorization",
        "db_password",
        "api_token",
    ],
)
def test_what_is_secret_by_its_name_is_not_logged(name: str) -> None:
    assert cleaned(**{name: "anything"}) == {name: REDACTED}
    assert cleaned(outer={name: ["anything"]}) == {"outer": {name: REDACTED}}


@pytest.mark.parametrize(
    ("text", "logged"),
    [
        (
            "connect to postgresql://ada:p%40ss@db/shop failed",
            "connect to postgresql://ada:[redacted]@db/shop failed",
        ),
        ("host=db password=hunter2 dbname=shop", "host=db password=[redacted] dbname=shop"),
        (r"password = 'with \' quote' dbname=shop", "password = [redacted] dbname=shop"),
        ("postgresql://ada:p@ss@db/shop is wrong", "postgresql://ada:[redacted]@db/shop is wrong"),
        ("txmq://shop:p@ss@broker:7650", "txmq://shop:[redacted]@broker:7650"),
        ("host=db sslpassword=hunter2 user=x", "host=db sslpassword=[redacted] user=x"),
        ("PGPASSWORD=hunter2 TXMQ_PASSWORD=x", "PGPASSWORD=[redacted] TXMQ_PASSWORD=[redacted]"),
        (r"password=two\ words dbname=shop", "password=[redacted] dbname=shop"),
        ("password='without end", "password=[redacted]"),
        ("{'password': 'hunter2', 'user': 'x'}", "{'password': [redacted], 'user': 'x'}"),
        ("postgresql://db/?pass%77ord=a&user=x", "postgresql://db/?pass%77ord=[redacted]&user=x"),
        ("Authorization: Basic YTpi", "Authorization: Basic [redacted]"),
        ("TXMQ_PASSWORD_FILE=/run/secrets/x", "TXMQ_PASSWORD_FILE=/run/secrets/x"),
        ("wrong user or password: check both", "wrong user or password: check both"),
        ("https://x/?password=a&b=c", "https://x/?password=[redacted]&b=c"),
        (f"login of 'txmq_{'aB-_' * 10}xyz' failed", "login of '[redacted]' failed"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer [redacted]"),
        (
            "duplicate key\nDETAIL:  Key (name)=(Ada) already exists.\nHINT: none",
            "duplicate key\nDETAIL: [redacted]\nHINT: none",
        ),
        ("txmq://127.0.0.1:7650 is up", "txmq://127.0.0.1:7650 is up"),
    ],
)
def test_passwords_and_quoted_rows_are_taken_out_of_any_text(text: str, logged: str) -> None:
    assert cleaned(error=text, all=[text]) == {"error": logged, "all": [logged]}


def test_what_an_operator_needs_stays() -> None:
    event = {
        "token": "019a00",
        "topic": "orders",
        "offset": 3,
        "ratio": 0.5,
        "torn": None,
        "ok": True,
    }
    assert cleaned(**event) == event


def test_bytes_are_only_counted() -> None:
    assert cleaned(data=b"secret", view=memoryview(b"abc")) == {
        "data": "6 bytes",
        "view": "3 bytes",
    }


def test_on_a_terminal_no_value_can_begin_a_line_of_its_own() -> None:
    event = {
        "service": "x\n2026 [info] forged",
        "peer": "\x1b[2J",
        "exception": "Traceback\n  \x1bline\nError",
        "n": 3,
    }
    assert escape_event(None, "info", event) == {
        "service": "x\\n2026 [info] forged",
        "peer": "\\x1b[2J",
        "exception": "Traceback\n      \\x1bline\n    Error",
        "n": 3,
    }


def test_twisted_s_events_and_failures_are_passed_on() -> None:
    from twisted.logger import LogLevel
    from twisted.python.failure import Failure

    failure = Failure(ValueError("broken"))
    with capture_logs() as logs:
        observe_twisted(
            {
                "log_format": "{count} left",
                "count": 3,
                "log_level": LogLevel.warn,
                "log_namespace": "a.b",
            }
        )
        observe_twisted(
            {"log_format": "oh", "log_level": LogLevel.critical, "log_failure": failure}
        )
        observe_twisted({"format": "old %(style)s", "style": "words"})
        # of ports and factories, which the broker names in its own words
        legacy = {"log_format": "SessionFactory starting", "log_namespace": "log_legacy"}
        observe_twisted({**legacy, "log_level": LogLevel.info})
        observe_twisted({**legacy, "log_level": LogLevel.warn})
    assert [log["log_level"] for log in logs] == ["warning", "critical", "info", "warning"]
    assert [
        (log["log_level"], log["event"], log["text"], log["namespace"]) for log in logs[:2]
    ] == [
        ("warning", "twisted", "3 left", "a.b"),
        ("critical", "twisted", "oh", ""),
    ]
    assert "ValueError: broken" in logs[1]["exception"]
    assert logs[2]["log_level"] == "info"


PROGRAM = """
from txmq.cli import logs
logs.configure(as_json=False)
logs.redirect_twisted()
import structlog
from twisted.logger import Logger
log = structlog.get_logger().bind(peer="127.0.0.1")
log.info("session.open", service="x\\nforged", dsn="host=db password=x")
try:
    raise ValueError("password=hunter2")
except ValueError:
    log.exception("session.failed")
Logger(namespace="t").warn("from Twisted")
"""


def test_a_process_logs_one_json_object_a_line_to_standard_error() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    events = [json.loads(line) for line in ran.stderr.splitlines()]
    assert ran.stdout == ""
    assert [(event["event"], event["level"]) for event in events] == [
        ("session.open", "info"),
        ("session.failed", "error"),
        ("twisted", "warning"),
    ]
    assert all("timestamp" in event for event in events)
    assert events[0]["service"] == "x\nforged"
    assert (events[0]["peer"], events[0]["dsn"]) == ("127.0.0.1", REDACTED)
    assert "hunter2" not in ran.stderr
    assert "ValueError" in events[1]["exception"]
    assert (events[2]["text"], events[2]["namespace"]) == ("from Twisted", "t")


def test_on_a_terminal_a_process_prints_for_people() -> None:
    ours, theirs = pty.openpty()
    shown = b""
    with (
        os.fdopen(ours, "rb", buffering=0) as screen,
        subprocess.Popen([sys.executable, "-c", PROGRAM], stderr=theirs),
    ):
        os.close(theirs)
        with suppress(OSError):  # how the end of a terminal is told
            while data := screen.read(4_096):
                shown += data
    text = shown.decode()
    assert "session.open" in text
    assert '"event"' not in text
    assert "forged" not in [line.strip() for line in text.splitlines()]
    assert "hunter2" not in text


@pytest.mark.parametrize("command", ["broker", "dev"])
def test_on_a_terminal_a_broker_prints_for_people(command: str, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    where = ("--data", str(tmp_path)) if command == "broker" else ()
    words = ("-m", "txmq", command, *where, "--listen", "127.0.0.1:0")
    shown, ended = b"", False
    with (
        os.fdopen(ours, "rb", buffering=0) as screen,
        subprocess.Popen([sys.executable, *words], stdout=theirs, stderr=theirs) as process,
    ):
        os.close(theirs)
        with suppress(OSError):
            while data := screen.read(4_096):
                shown += data
                if b"txmq://127.0.0.1" in shown and b"SERVING" in shown and not ended:
                    process.terminate()
                    ended = True
    assert process.returncode == 0, shown
    lines = shown.decode().splitlines()
    assert [line for line in lines if line.lstrip().startswith("{")] == []
    assert any("broker.life" in line and "SERVING" in line for line in lines)
    assert any("txmq://127.0.0.1:" in line for line in lines)


class FullDisk(io.StringIO):
    """A file on a disk that is full for a while."""

    is_full = False

    def write(self, text: str) -> int:
        if self.is_full:
            raise OSError(28, "No space left on device")
        return super().write(text)


def test_a_log_that_cannot_be_written_loses_lines_and_says_how_many() -> None:
    file = FullDisk()
    logger = WriteLogger(LossyStream(file))  # type: ignore[arg-type]  # it needs no more
    logger.info("before")
    file.is_full = True
    for number in range(3):
        logger.info(str(number))
    file.is_full = False
    logger.info("after")
    logger.info("later")
    before, after, told, later = file.getvalue().splitlines()
    assert (before, after, later) == ("before", "after", "later")
    assert json.loads(told) | {"timestamp": ""} == {
        "event": "log.lines_lost",
        "lines": 3,
        "level": "warning",
        "timestamp": "",
    }
    file.close()
    logger.info("to nobody")


def test_a_log_whose_reader_stands_still_holds_nobody_up() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb"), os.fdopen(writing, "w", encoding="utf-8") as writer:
        logger = WriteLogger(LossyStream(writer))  # type: ignore[arg-type]  # it needs no more
        text = "x" * 10_000
        for _ in range(1_000):  # ten MB, and a pipe holds 64 KiB
            logger.info(text)
        seen = os.read(reading, 1 << 20)
        assert 30_000 < len(seen) < 1_000_000
        logger.info("after")
        rest = os.read(reading, 1 << 20)
    after, told = rest.removeprefix(b"\n").splitlines()
    assert after == b"after"
    assert json.loads(told)["lines"] == 1_000 - seen.count(b"\n")

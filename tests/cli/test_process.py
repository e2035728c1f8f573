"""The `txmq` command as a process: its version, errors in its usage, and an output that
cannot take what it prints.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.cli.support import NOBODY
from txmq import connect
from txmq.cli.app import main
from txmq.cli.options import operating_system_user
from txmq.testing.own_broker import OwnBroker
from txmq.testing.wait import PATIENCE_S
from txmq.version import __version__

ROOT = Path(__file__).parents[2]
FULL = Path("/dev/full")
COMMAND = [sys.executable, "-c", "from txmq.cli.app import main; main()"]


def txmq(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        env=os.environ | environment,
    )


def test_a_command_that_is_interrupted_at_its_first_import_says_nothing() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    module, _, function = project["scripts"]["txmq"].partition(":")
    program = f"""
import os, signal, sys

class Interrupt:
    def find_spec(self, name, *_given):
        if name == "txmq":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from {module} import {function}
{function}()
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT,
        timeout=PATIENCE_S,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize(
    ("place", "status"),
    [("txmq.cli.app.assemble", -signal.SIGINT), ("txmq.cli.command.connect", 130)],
    ids=["while it starts", "while it works"],
)
def test_an_interrupted_command_ends_without_a_traceback(place: str, status: int) -> None:
    module, _, name = place.rpartition(".")
    program = f"""
import os, signal, sys
import {module} as patched
import txmq_command as command

def interrupted(*_given):
    os.kill(os.getpid(), signal.SIGINT)
    return patched_one(*_given)

patched_one, patched.{name} = patched.{name}, interrupted
sys.argv[1:] = ["topic", "list"]
command.main()
"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert (ended.returncode, ended.stderr) == (status, "")


TERMINATED = """
import os, signal, sys
import txmq.broker.service as service
import txmq.cli.commands.broker as broker
import txmq_command as command

def terminated(*_given):
    os.kill(os.getpid(), signal.SIGTERM)

{patch}
sys.argv[1:] = ["broker", "--data", {data!r}, "--listen", "127.0.0.1:0"]
command.main()
"""


@pytest.mark.parametrize(
    "patch",
    [
        "service.BrokerService.open = terminated",
        "broker._say_ready = terminated",
    ],
    ids=["while it recovers", "while it serves"],
)
def test_a_broker_that_is_terminated_ends_in_order(patch: str, tmp_path: Path) -> None:
    program = TERMINATED.format(patch=patch, data=str(tmp_path / "data"))
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False,
        cwd=ROOT, timeout=PATIENCE_S,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr


def test_an_operator_has_a_name_that_the_audit_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, taken in {
        "ada": "ada",
        "CORP\\ada": "CORP_ada",
        "ada@corp.example": "ada_corp.example",
        ".": f"uid-{os.getuid()}",
        "é" * 200: "_" * 127,
    }.items():
        monkeypatch.setenv("LOGNAME", name)
        assert operating_system_user() == taken


def test_the_version_is_that_of_the_package() -> None:
    ended = txmq("--version")
    assert (ended.returncode, ended.stdout) == (0, f"txmq {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["topic", "nonsense"], "No such command 'nonsense'."),
        (["acl", "grant", "ada", "read", "orders"], "no resource 'orders': use cluster, topic:"),
        (["acl", "grant", "ada", "reed", "topic:t"], "'reed' gives nothing on a topic: use desc"),
        (["topic", "show"], "Missing argument 'TOPIC'."),
        (["topic", "show", "a b"], "Invalid value for 'TOPIC': invalid name 'a b'"),
        (["topic", "list", "--nonsense"], "No such option: --nonsense"),
        (["topic", "alter", "t", "--set", "flush=0ms,5"], "invalid flush policy '0ms,5'"),
        (["topic", "alter", "t", "--set", "flush=99d,5"], "invalid flush policy '99d,5'"),
        (["schema", "brokers", "d", "--forget", "x"], "invalid id of a log 'x'"),
        (["schema", "brokers", "d", "--directory", "x"], "invalid id of a data directory 'x'"),
    ],
)
def test_errors_in_the_usage_are_json_where_json_is_asked_for(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process. Below, a process ends with such an error, too."""

    def usage_error(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["txmq", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert (ended.value.code, out) == (2, "")
        return err

    error = json.loads(usage_error(*arguments, "--json"))
    assert error["error"] == "UsageError"
    assert message in error["message"]
    assert "--help" in error["hint"]
    assert f"Usage: txmq {arguments[0]}" in usage_error(*arguments)


@pytest.mark.parametrize("option", [["--broker", NOBODY], ["--json"]])
def test_an_option_before_the_command_is_told_its_place(
    option: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["txmq", *option, "topic", "list"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert f"write it behind the command: txmq topic list {option[0]}" in said


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_a_result_that_cannot_be_written_is_an_error_of_one_line(
    tmp_path: Path, as_json: list[str]
) -> None:
    with FULL.open("w") as full:
        ended = subprocess.run(
            [*COMMAND, "log", "verify", "--data", str(tmp_path), "--help", *as_json],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1
    assert "No space left on device" in ended.stderr


def test_an_output_of_few_characters_shows_the_others_as_escapes() -> None:
    ended = txmq("topic", "show", "ü", PYTHONIOENCODING="ascii")
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    shown = txmq("topic", "show", "ü", "--json", PYTHONIOENCODING="ascii")
    assert "ü" in json.loads(shown.stderr)["message"]


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_end_no_command(closed: str) -> None:
    line = f'exec "$@" {closed}'
    ended = subprocess.run(
        ["sh", "-c", line, "sh", *COMMAND, "--version"],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_a_command_whose_result_cannot_be_written_does_not_say_that_it_did_nothing(
    tmp_path: Path,
) -> None:
    with FULL.open("w") as full:
        ended = subprocess.run(
            [*COMMAND, "log", "verify", "--data", str(tmp_path), "--help", "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
    assert json.loads(ended.stderr)["outcome"] == "unknown"


def test_messages_are_found_in_a_log_with_plans_and_policies(tmp_path: Path) -> None:
    """In a process of its own: that of the tests has imported all events anyway."""
    with OwnBroker(tmp_path) as broker:
        with connect(broker.url) as client:
            client.send("orders", b"m")
            client.consumer("billing", ["orders"]).close()
        ended = txmq("policy", "set", "billing", "--on-version", TXMQ_BROKER=broker.url)
        assert ended.returncode == 0, ended.stderr
        broker.stop()
    found = txmq("log", "find", "orders", "--data", str(broker.data), "--json")
    assert [one["offset"] for one in json.loads(found.stdout)["messages"]] == [0], found.stderr

"""`txmq log backup` and `restore`, killed at each crash point; holds of a broker."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from twisted.internet.task import Clock

from tests.cli.support import ScriptedClient, run
from tests.cli.test_log import NOW, Life
from txmq.broker.data_directory import storage
from txmq.broker.data_directory.log_holds import HOLD_S, MAX_HOLDS, LogHolds
from txmq.broker.data_directory.retention_service import FreeLog
from txmq.broker.data_directory.storage import open_directory
from txmq.cli.commands.log_backup import Progress
from txmq.cli.output import Output
from txmq.cli.running_log import RunningLog
from txmq.config.broker import BrokerSettings
from txmq.core import machine
from txmq.core.events.base import LogRestored
from txmq.core.topics import restored_log
from txmq.core.topics.topics import CreateTopic
from txmq.crashpoints import VARIABLE
from txmq.errors import BackupMismatch, ReadOnly, RestoreUnfinished
from txmq.store.filesystem import RealFileSystem
from txmq.store.log.segment import read_log_id
from txmq.store.tables import SIGN
from txmq.testing.processes import ENVIRONMENT, Running

BACKUP_POINTS = (
    "backup.after_hold",
    "backup.after_snapshot",
    "backup.before_rename",
    "backup.after_segment",
    "backup.before_manifest",
    "backup.after_manifest",
)
RESTORE_POINTS = (
    "restore.after_mark",
    "restore.after_file",
    "restore.before_incarnation",
    "restore.after_incarnation",
    "restore.before_end",
    "restore.after_end",
)


def command(*arguments: str, status: int = 0) -> Any:
    result = run("log", *arguments, "--json")
    assert result.exit_code == status, result.stderr
    return json.loads(result.stdout)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data directory with two segments and a snapshot."""
    life = Life(tmp_path / "data")
    life.do(CreateTopic("t", 1))
    for number in range(12):
        life.send(b"%d" % number * 100_000)
    life.keeper._write_snapshot()
    life.send(b"the last")
    life.close()
    return tmp_path / "data"


def killed_at(directory: Path, point: str, *arguments: str) -> None:
    environment = {**ENVIRONMENT, VARIABLE: point}
    process = Running(directory, "log", *arguments, environment=environment)
    assert process.status() == -signal.SIGKILL, process.err.read_text()


def back_up(data: Path, backup: Path) -> Any:
    return command("backup", str(backup), "--data", str(data), "--rate", "0")


def restored_end(data: Path) -> int:
    """Open a restored directory as a broker does; return where it left the log."""
    opened = open_directory(RealFileSystem(), BrokerSettings(data=data), NOW)
    opened.tables.close()
    opened.log.close()
    [restore] = opened.state.restores
    return restore.position


@pytest.mark.parametrize("point", BACKUP_POINTS)
def test_a_backup_that_is_killed_goes_on(data: Path, tmp_path: Path, point: str) -> None:
    backup = tmp_path / "backup"
    killed_at(tmp_path, point, "backup", str(backup), "--data", str(data), "--rate", "0")
    whole = point == "backup.after_manifest"
    assert (backup / "backup.json").exists() is whole
    report = back_up(data, backup)
    assert report["copied"] + report["kept"] >= report["end"]
    assert command("backup", str(backup), "--verify")["damaged"] == []
    command("restore", str(backup), "--data", str(tmp_path / "new"))
    assert restored_end(tmp_path / "new") == report["end"]


@pytest.mark.parametrize("point", RESTORE_POINTS)
def test_a_restore_that_is_killed_is_run_again(data: Path, tmp_path: Path, point: str) -> None:
    backup, new = tmp_path / "backup", tmp_path / "new"
    end = back_up(data, backup)["end"]
    killed_at(tmp_path, point, "restore", str(backup), "--data", str(new))
    if point != "restore.after_end":
        with pytest.raises(RestoreUnfinished, match="has not finished"):
            open_directory(RealFileSystem(), BrokerSettings(data=new), NOW)
        command("restore", str(backup), "--data", str(new))
    assert restored_end(new) == end


def test_a_backup_of_a_restored_log_needs_a_directory_of_its_own(
    data: Path, tmp_path: Path
) -> None:
    backup, new = tmp_path / "backup", tmp_path / "new"
    back_up(data, backup)
    report = command("restore", str(backup), "--data", str(new))
    restored_end(new)
    result = run("log", "backup", str(backup), "--data", str(new), "--json")
    assert json.loads(result.stderr)["error"] == "BackupMismatch"
    assert back_up(new, tmp_path / "other")["incarnation"] == report["incarnation"]


def test_a_damaged_backup_is_found_by_verify(data: Path, tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    back_up(data, backup)
    segment = min((backup / "log").iterdir())
    content = bytearray(segment.read_bytes())
    content[5_000] ^= 1
    segment.write_bytes(content)
    [found] = command("backup", str(backup), "--verify", status=1)["damaged"]
    assert "checksum mismatch" in found["what"]


def test_a_damaged_log_is_not_backed_up(data: Path, tmp_path: Path) -> None:
    segment = min((data / "log").iterdir())
    content = bytearray(segment.read_bytes())
    content[5_000] ^= 1
    segment.write_bytes(content)
    result = run("log", "backup", str(tmp_path / "backup"), "--data", str(data), "--json")
    assert json.loads(result.stderr)["error"] == "CorruptRecord"


def test_a_hold_keeps_the_log_until_it_ends() -> None:
    clock = Clock()
    holds = LogHolds(clock.seconds)
    assert holds.lowest() == SIGN
    assert holds.hold("a", 7)
    assert holds.hold("b", 9)
    clock.advance(HOLD_S / 2)
    assert holds.hold("b", 12)
    assert holds.lowest() == 7
    clock.advance(HOLD_S / 2)
    assert (holds.lowest(), len(holds)) == (12, 1)
    holds.release("b")
    holds.release("b")
    assert holds.lowest() == SIGN
    assert [holds.hold(str(number), 0) for number in range(MAX_HOLDS + 1)].count(False) == 1


class Held:
    """A retention that frees all, and a hold."""

    def __init__(self, life: Life) -> None:
        self.clock, self.archiving = Clock(), False
        self.holds = LogHolds(self.clock.seconds)
        self.free = FreeLog(life.log.end, 0)
        life.keeper.remove_segments(self, "", self.holds)  # type: ignore[arg-type]
        life.keeper._older = life.log.end


def released(data: Path) -> tuple[bool, bool, bool]:
    """Return whether a segment is removed under a hold, under one on a full disk, and
    without one.
    """
    found: list[bool] = []
    for hold, full in ((True, False), (True, True), (False, False)):
        life = Life(data.with_name(f"{data.name}-{len(found)}"))
        life.do(CreateTopic("t", 1))
        for number in range(12):
            life.send(b"%d" % number * 100_000)
        held = Held(life)
        if hold:
            held.holds.hold("a", 0)
        life.engine.disk.refusing = full
        found.append(life.keeper._release())
        life.engine.disk.refusing = False
        life.log.close()
    return found[0], found[1], found[2]


def test_a_broker_removes_no_segment_that_a_backup_reads(tmp_path: Path) -> None:
    assert released(tmp_path / "data") == (False, True, True)


def test_a_hold_that_is_ignored_is_found(tmp_path: Path) -> None:
    with patch.object(storage.StorageService, "_held_from", lambda _self: SIGN):
        assert released(tmp_path / "data") != (False, True, True)


def restores_of(data: Path, tmp_path: Path) -> tuple[int, int]:
    backup, new = tmp_path / "backup", tmp_path / "new"
    back_up(data, backup)
    command("restore", str(backup), "--data", str(new))
    opened = open_directory(RealFileSystem(), BrokerSettings(data=new), NOW)
    opened.tables.close()
    opened.log.close()
    return len(opened.state.restores), opened.state.next_topic_id


def test_an_incarnation_that_is_not_raised_is_found(data: Path, tmp_path: Path) -> None:
    with patch.dict(machine.APPLIERS, {LogRestored: lambda _state, _event, _context: None}):
        assert restores_of(data, tmp_path) == (0, 2)
    assert machine.APPLIERS[LogRestored] is restored_log.apply_restored


def test_progress_is_shown_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for terminal, as_json in ((True, False), (True, True), (False, False)):
        monkeypatch.setattr("sys.stderr.isatty", lambda terminal=terminal: terminal)
        progress = Progress(Output(as_json=as_json))
        progress.begin(8 << 20)
        progress.passed(2 << 20)
        progress.close()
        shown = capsys.readouterr().err
        assert ("2 MiB, 25 %" in shown) is (terminal and not as_json)


def test_a_backup_reads_no_faster_than_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    # Not the module's own: other threads of the process sleep, too.
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr("txmq.cli.commands.log_backup.time", clock)
    progress = Progress(Output(as_json=True), 1 << 20)
    progress.begin(1 << 30)
    for _ in range(40):
        progress.passed(256 << 10)
    assert now[0] == pytest.approx(110.0)


@pytest.mark.parametrize("text", ["1KiB", "-1", "fast"])
def test_a_rate_that_would_outlast_the_hold_is_refused(text: str) -> None:
    result = run("log", "backup", "/nowhere", "--data", "/nowhere", f"--rate={text}")
    assert result.exit_code == 2


def held_reply(data: Path, *segments: int) -> dict[str, Any]:
    log_id = read_log_id(RealFileSystem(), str(data))
    return {
        "log_id": str(log_id),
        "incarnation": None,
        "segments": list(segments),
        "snapshots": [],
        "durable": 5_000,
        "at": NOW,
        "data": str(data),
        "expires_s": 0.0,
    }


def test_a_log_that_was_not_held_over_a_restart_ends_the_backup(data: Path) -> None:
    replies = [held_reply(data, 0, 4_000), held_reply(data, 4_000), held_reply(data, 4_000)]
    client = ScriptedClient([*replies, {}])
    source = RunningLog(RealFileSystem(), client)
    assert source.hold(0).firsts == (0, 4_000)
    source.keep_holding(4_000)
    with pytest.raises(BackupMismatch, match="run the backup again"):
        source.keep_holding(0)
    source.close()
    assert [name for name, _args in client.calls] == [*["log.hold"] * 3, "log.release"]


def test_a_backup_is_whole_though_a_broker_without_space_cannot_note_it() -> None:
    client = ScriptedClient([ReadOnly("the broker's disk is full")])
    RunningLog(RealFileSystem(), client).note_backup(NOW)
    assert client.calls == [("log.backed_up", {"taken_at": NOW})]


def test_a_broker_of_another_machine_is_not_backed_up(data: Path, tmp_path: Path) -> None:
    for elsewhere in (tmp_path / "nowhere", tmp_path):
        reply = held_reply(data, 0) | {"data": str(elsewhere)}
        with pytest.raises(BackupMismatch, match="on the machine of the broker"):
            RunningLog(RealFileSystem(), ScriptedClient([reply])).hold(0)


@pytest.mark.parametrize("kind", ["link", "fifo", "directory"])
def test_a_file_of_a_backup_that_is_none_is_refused(data: Path, tmp_path: Path, kind: str) -> None:
    backup = tmp_path / "backup"
    back_up(data, backup)
    segment = min((backup / "log").iterdir())
    content = segment.rename(tmp_path / "content")
    if kind == "link":
        segment.symlink_to(content)
    elif kind == "fifo":
        os.mkfifo(segment)
    else:
        segment.mkdir()
    result = run("log", "restore", str(backup), "--data", str(tmp_path / "new"), "--json")
    assert json.loads(result.stderr)["error"] == "StoreError"
    assert not (tmp_path / "new").exists()

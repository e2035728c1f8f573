"""`txmq doctor`: it finds what is wrong with disks and databases."""

from __future__ import annotations

import json
import os
import re
import socket
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.certificates import Authority, Files, locked_key
from tests.cli.support import run
from tests.tx.postgres.support import poor_role
from txmq.cli.commands.broker import _notify_supervisor
from txmq.cli.doctor import machine
from txmq.cli.doctor.machine import file_system_of
from txmq.config.broker import DiskSettings, SettingsFile
from txmq.version import __version__

PACKAGING = Path(__file__).parents[2] / "packaging"
MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:25 / /dev/shm rw - tmpfs tmpfs rw
31 22 0:40 / /srv/my\\040disk rw shared:5 - nfs4 host:/x rw
"""


def examined(file: Path, text: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the exit status, and the results by check."""
    file.write_text(text, "utf-8")
    result = run("doctor", "--config", str(file), "--json")
    answer = json.loads(result.stdout)
    assert answer["healthy"] is (result.exit_code == 0)
    return result.exit_code, {finding["check"]: finding for finding in answer["checks"]}


def settings(data: Path, *sections: str) -> str:
    return "\n".join([f'[broker]\ndata = "{data}"', *sections])


def test_a_sound_database_passes(tmp_path: Path, database: str) -> None:
    resolver = f'[[resolver]]\nname = "shop"\ndsn = "{database}"'
    _status, found = examined(tmp_path / "t.toml", settings(tmp_path / "data", resolver))
    assert found["database shop"]["health"] == "ok"
    assert found["database shop: tables"]["health"] == "ok"
    assert found["database shop: synchronous_commit"]["health"] == "ok"
    assert found["database shop: fsync"]["health"] == "failure"  # as the tests' server has it
    assert re.fullmatch(r"\d+ µs, at most [\d.]+ ms", found["sync"]["found"])
    assert list(tmp_path.iterdir()) == [tmp_path / "t.toml"]  # nothing is left behind


def test_what_would_lose_messages_fails(tmp_path: Path, empty_database: str) -> None:
    weak = f"{empty_database} options='-c synchronous_commit=off'"
    sections = (
        f'[[resolver]]\nname = "shop"\ndsn = "{weak}"',
        f'[[xa.database]]\nname = "stock"\ndsn = "{empty_database}"',
        f'[relay]\ndsn = "{empty_database}"',
        '[[resolver]]\nname = "gone"\ndsn = "host=127.0.0.1 port=1 dbname=x"',
        "[disk]\nwarn_free_mib = 1000000000\nresume_free_mib = 300\nrefuse_free_mib = 256",
    )
    status, found = examined(tmp_path / "t.toml", settings(tmp_path, *sections))
    assert status == 1
    failed = {check for check, one in found.items() if one["health"] == "failure"}
    assert failed >= {
        "database shop: tables",
        "database shop: synchronous_commit",
        "database gone",
    }
    assert found["database stock"]["found"] == "reached, for relay and xa"
    assert found["free space"]["health"] == "warning"
    assert all(one["advice"] for one in found.values() if one["health"] != "ok")


def test_a_role_without_rights_is_told_which_it_lacks(tmp_path: Path, database: str) -> None:
    with poor_role(database) as (_role, dsn):
        resolver = f'[[resolver]]\nname = "shop"\ndsn = "{dsn}"'
        _status, found = examined(tmp_path / "t.toml", settings(tmp_path / "data", resolver))
    tables = found["database shop: tables"]
    assert "GRANT SELECT ON public.txmq_token TO the role" in tables["found"]
    assert "grants" in tables["advice"]  # another installation would not help


def test_a_directory_that_cannot_be_written_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    status, found = examined(tmp_path / "t.toml", settings(tmp_path / "file" / "data"))
    assert (status, found["data directory"]["health"]) == (1, "failure")


def test_a_file_in_the_directory_that_this_user_may_not_read_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log").mkdir()
    segment = tmp_path / "log" / "0.seg"
    segment.touch()
    monkeypatch.setattr(os, "access", lambda path, _mode: path != segment)
    status, found = examined(tmp_path / "t.toml", settings(tmp_path))
    assert (status, found["data directory"]["health"]) == (1, "failure")
    assert str(segment) in found["data directory"]["found"]
    assert "chown" in found["data directory"]["advice"]


def test_a_file_of_tls_that_the_broker_could_not_use_is_named(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    good, other = authority.sign("broker"), authority.sign("other")
    for key, named in (
        (other.key, f"{other.key}: key values mismatch"),
        (tmp_path / "none", f"{tmp_path / 'none'}: No such file"),
        (locked_key(good.key), "the key has a password: store it without one"),
    ):
        tls = f'[tls]\ncert = "{good.cert}"\nkey = "{key}"'
        status, found = examined(tmp_path / "t.toml", settings(tmp_path, tls))
        assert (status, found["TLS"]["health"]) == (1, "failure")
        assert named in found["TLS"]["found"]


def test_certificates_that_clients_would_refuse_are_found_and_versions_are_named(
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path)

    def found_with(files: Files, more: str = "") -> tuple[str, str]:
        files.key.chmod(0o600)
        tls = f'[tls]\ncert = "{files.cert}"\nkey = "{files.key}"\n{more}'
        _status, found = examined(tmp_path / "t.toml", settings(tmp_path, tls))
        assert f"txmq {__version__}, Python 3" in found["versions"]["found"]
        return found["TLS"]["health"], found["TLS"]["advice"]

    good = authority.sign("broker")
    assert found_with(good, f'client_ca = "{authority.ca}"')[0] == "ok"
    assert found_with(authority.sign("soon", days=5))[0] == "warning"
    late = authority.sign("late", days=-1)
    assert found_with(late)[0] == "failure"
    chain = authority.sign("chain")
    chain.cert.write_bytes(chain.cert.read_bytes() + late.cert.read_bytes())
    assert found_with(chain)[0] == "failure"
    other = authority.sign("other")
    assert found_with(Files(good.cert, other.key))[0] == "failure"
    assert found_with(Files(good.cert, tmp_path / "t.toml"))[0] == "failure"
    assert found_with(good, f'client_ca = "{tmp_path / "t.toml"}"')[0] == "failure"
    good.key.chmod(0o644)
    tls = f'[tls]\ncert = "{good.cert}"\nkey = "{good.key}"'
    _status, found = examined(tmp_path / "t.toml", settings(tmp_path, tls))
    assert found["TLS key"]["health"] == "warning"
    open_to_all = settings(tmp_path, 'listen = "0.0.0.0:7650"')
    assert examined(tmp_path / "t.toml", open_to_all)[1]["TLS"]["health"] == "failure"


@pytest.mark.parametrize(
    ("sync_s", "health"), [(1e-6, "warning"), (200e-6, "ok"), (0.05, "warning")]
)
def test_a_disk_that_answers_before_it_has_written_is_found_and_one_that_is_slow(
    sync_s: float, health: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def sync(_file: int) -> None:
        now[0] += sync_s

    monkeypatch.setattr(machine, "os", SimpleNamespace(**vars(os) | {"fdatasync": sync}))
    monkeypatch.setattr(machine, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    [found] = [one for one in machine.check_disk(tmp_path, DiskSettings()) if one.check == "sync"]
    assert found.health == health
    assert f"{sync_s * 1e6:.0f} µs" in found.found
    assert ("write cache" in found.advice) is (sync_s < machine.FASTEST_SYNC_S)


@pytest.mark.parametrize(("files", "health"), [(1_024, "warning"), (65_536, "ok"), (-1, "ok")])
def test_few_open_files_are_found(files: int, health: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _which: (files, files))
    [found] = [one for one in machine.check_machine() if one.check == "open files"]
    assert found.health == health


@pytest.mark.parametrize(("state", "health"), [(machine.TIME_ERROR, "warning"), (0, "ok")])
def test_a_clock_that_nobody_sets_is_found(
    state: int, health: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = SimpleNamespace(adjtimex=lambda _state: state)
    monkeypatch.setattr("ctypes.CDLL", lambda _name: kernel)
    [found] = [one for one in machine.check_machine() if one.check == "clock"]
    assert found.health == health


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("/var/lib/txmq", "ext4"),
        ("/dev/shm/x", "tmpfs"),
        ("/dev/shmore", "ext4"),
        ("/srv/my disk/data", "nfs4"),
    ],
)
def test_the_innermost_mount_tells_the_file_system(place: str, kind: str) -> None:
    assert file_system_of(Path(place), MOUNTS) == kind


def test_a_supervisor_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(str(tmp_path / "notify"))
        _notify_supervisor()
        assert supervisor.recv(100) == b"READY=1"
    _notify_supervisor()  # a follower has told before it leads


def test_the_example_has_every_setting_with_its_default() -> None:
    text = (PACKAGING / "txmq.toml").read_text("utf-8")
    example = SettingsFile.model_validate(tomllib.loads(text))
    assert example == SettingsFile.model_validate({"broker": {"data": "/var/lib/txmq"}})
    lines = re.sub(r"^# (?=\[|\w+ = )", "", text, flags=re.MULTILINE)
    whole = SettingsFile.model_validate(tomllib.loads(lines))
    expected = example.model_dump()
    given = whole.model_dump()
    for section in ("broker", "consumers", "checks", "alarms", "retention", "disk", "scrub"):
        differing = {
            name for name in expected[section] if expected[section][name] != given[section][name]
        }
        assert differing <= {"http", "archive", "webhook", "mail", "backup_s"}
    assert unset(whole) == []


def unset(model: Any, path: str = "") -> list[str]:
    """Return the settings that the example does not name."""
    missing = [
        f"{path}{name}" for name in type(model).model_fields if name not in model.model_fields_set
    ]
    for name in model.model_fields_set:
        value = getattr(model, name)
        inner = value[0] if isinstance(value, tuple) and value else value
        if hasattr(inner, "model_fields_set"):
            missing += unset(inner, f"{path}{name}.")
    return missing

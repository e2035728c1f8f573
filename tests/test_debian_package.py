"""The Debian package: what it has beside the virtual environment, and its scripts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import debian_package
from tests.test_documents import broken_links
from tests.test_hints import PATH, paths_in_texts
from txmq import connect
from txmq.config.broker import load_broker
from txmq.store.backup_manifest import read_manifest
from txmq.store.filesystem import RealFileSystem
from txmq.testing.own_broker import OwnBroker
from txmq.testing.ports import free_port
from txmq.testing.wait import PATIENCE_S
from txmq.wire.calls.users import VerifierArgs
from txmq.wire.scram import MIN_ITERATIONS, make_verifier

ROOT = Path(__file__).parents[1]
PACKAGING = ROOT / "packaging"
NO_DPKG = shutil.which("dpkg-deb") is None


@pytest.mark.skipif(NO_DPKG, reason="no dpkg-deb, which builds packages of Debian")
def test_a_package_has_the_unit_the_settings_and_the_command(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    debian_package.stage(tree, version="0.1.0", python="3.11")
    package = debian_package.pack(tree, tmp_path)
    listed = _output("dpkg-deb", "--contents", str(package))
    units = ("txmq.service", "txmq-backup.service", "txmq-backup.timer")
    for place in ("./etc/txmq.toml", *(f"./lib/systemd/system/{unit}" for unit in units)):
        assert f" {place}\n" in listed
    assert " ./usr/bin/txmq -> /opt/txmq/bin/txmq\n" in listed
    fields = _output("dpkg-deb", "--field", str(package), "Version", "Depends")
    assert "python3 (>= 3.11), python3 (<< 3.12)" in fields


def test_the_documents_of_the_package_have_all_that_hints_and_links_name(tmp_path: Path) -> None:
    debian_package.stage_documents(tmp_path)
    place = tmp_path / debian_package.DOCUMENTS
    assert (place / "copyright").read_bytes() == (ROOT / "LICENSE").read_bytes()
    documents = [*place.rglob("*.md")]
    assert len(documents) > 50
    assert [link for document in documents for link in broken_links(document)] == []
    installed = (PACKAGING / "txmq.toml", *(PACKAGING / "prometheus").iterdir())
    named = {path for file in installed for path in PATH.findall(file.read_text())}
    named.update(paths_in_texts())
    assert {"docs/SECURITY.md", "docs/operations/full-disk.md", "packaging/txmq.toml"} <= named
    assert {path for path in named if not (place / path).is_file()} == set()


@pytest.mark.parametrize("name", debian_package.SCRIPTS)
def test_a_script_of_the_package_is_one(name: str) -> None:
    subprocess.run(["sh", "-n", str(PACKAGING / "debian" / name)], check=True)


def test_the_unit_runs_the_command_and_the_settings_that_the_package_brings() -> None:
    unit = (PACKAGING / "systemd" / "txmq.service").read_text()
    assert "ExecStart=/opt/txmq/bin/txmq broker --config /etc/txmq.toml" in unit
    assert (PACKAGING / "debian" / "conffiles").read_text().split() == ["/etc/txmq.toml"]


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="no systemd-analyze (package systemd)"
)
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for unit in (PACKAGING / "systemd").iterdir():
        text = unit.read_text().replace("/opt/txmq/bin/txmq", shutil.which("true") or "")
        (tmp_path / unit.name).write_text(text)
    files = [str(file) for file in tmp_path.iterdir()]
    assert len(files) == 3
    ran = subprocess.run(
        ["systemd-analyze", "verify", *files], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "txmq" not in ran.stderr, "a setting that systemd does not know"


def daily_backups() -> dict[str, str]:
    """Return the shell commands of the timer, and of the page's line for cron."""
    unit = (PACKAGING / "systemd" / "txmq-backup.service").read_text()
    page = (ROOT / "docs" / "operations" / "backup.md").read_text()
    timer = re.search(r"^ExecStart=/bin/sh -c '(.*)'$", unit, re.MULTILINE)
    cron = re.search(r"^```cron\n(?:\S+ ){5}txmq (.*)$", page, re.MULTILINE)
    assert timer is not None
    assert cron is not None
    return {
        "timer": timer[1].replace("$$", "$").replace("%%", "%"),
        "cron": cron[1].replace("\\%", "%"),
    }


@pytest.mark.parametrize("name", daily_backups())
def test_a_daily_backup_is_made_and_the_broker_knows(tmp_path: Path, name: str) -> None:
    command = daily_backups()[name]
    assert "/var/backups/txmq/" in command
    command = command.replace("/opt/txmq/bin/txmq", f"{sys.executable} -m txmq")
    command = command.replace("/var/backups/txmq", str(tmp_path / "backups"))
    with OwnBroker(tmp_path / "broker") as broker:
        environment = os.environ | {"TXMQ_BROKER": broker.url}
        for _day in range(2):
            subprocess.run(["sh", "-c", command], check=True, env=environment, capture_output=True)
        with connect(broker.url, timeout=PATIENCE_S) as client:
            known = client.call("broker.stats")["log"]["backed_up_at"]
    [backup] = (tmp_path / "backups").iterdir()
    assert re.fullmatch(r"\d{4}-\d\d", backup.name)
    manifest = read_manifest(RealFileSystem(), str(backup))
    assert manifest is not None
    assert manifest.taken_at == known


def test_the_settings_of_the_container_are_valid() -> None:
    settings = load_broker(PACKAGING / "container" / "txmq.toml", {})
    assert settings.broker.trusted_network


def test_the_health_check_of_the_container_works_when_there_are_users(tmp_path: Path) -> None:
    compose = (PACKAGING / "container" / "compose.yml").read_text()
    check = re.search(r'test: \[CMD, python3, -c, "(.*)"\]', compose)
    assert check is not None
    port = free_port()
    program = check[1].replace("127.0.0.1:7651", f"127.0.0.1:{port}")
    with OwnBroker(tmp_path, f'[broker]\nhttp = "127.0.0.1:{port}"\n') as broker:
        with connect(broker.url, timeout=PATIENCE_S) as client:
            password = VerifierArgs.of(make_verifier("a long password", iterations=MIN_ITERATIONS))
            client.call("user.set", name="root", roles=["admin"], new=True, password=password)
        subprocess.run([sys.executable, "-c", program], check=True)
        broker.kill()
        refused = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True)
        assert refused.returncode == 1


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True).stdout.decode("latin-1")

"""The Debian package: what it has beside the virtual environment, and its scripts."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from scripts import debian_package
from txmq.config.broker import load_broker

PACKAGING = Path(__file__).parents[1] / "packaging"
NO_DPKG = shutil.which("dpkg-deb") is None


@pytest.mark.skipif(NO_DPKG, reason="no dpkg-deb, which builds packages of Debian")
def test_a_package_has_the_unit_the_settings_and_the_command(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    debian_package.stage(tree, version="0.1.0", python="3.11")
    package = debian_package.pack(tree, tmp_path)
    listed = _output("dpkg-deb", "--contents", str(package))
    for place in ("./etc/txmq.toml", "./lib/systemd/system/txmq.service"):
        assert f" {place}\n" in listed
    assert " ./usr/bin/txmq -> /opt/txmq/bin/txmq\n" in listed
    fields = _output("dpkg-deb", "--field", str(package), "Version", "Depends")
    assert "python3 (>= 3.11), python3 (<< 3.12)" in fields


@pytest.mark.parametrize("name", debian_package.SCRIPTS)
def test_a_script_of_the_package_is_one(name: str) -> None:
    subprocess.run(["sh", "-n", str(PACKAGING / "debian" / name)], check=True)


def test_the_unit_runs_the_command_and_the_settings_that_the_package_brings() -> None:
    unit = (PACKAGING / "systemd" / "txmq.service").read_text()
    assert "ExecStart=/opt/txmq/bin/txmq broker --config /etc/txmq.toml" in unit
    assert (PACKAGING / "debian" / "conffiles").read_text().split() == ["/etc/txmq.toml"]


def test_the_settings_of_the_container_are_valid() -> None:
    settings = load_broker(PACKAGING / "container" / "txmq.toml", {})
    assert settings.broker.trusted_network


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True).stdout.decode("latin-1")

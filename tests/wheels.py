"""The wheel of this checkout, built without a network."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QUIET = ("--no-deps", "--no-index", "--disable-pip-version-check")


def build_wheel(directory: Path) -> Path:
    """Build the wheel from a copy in `directory`, because setuptools writes beside its
    sources.
    """
    for name in ("pyproject.toml", "LICENSE", "README.md", "txmq_command.py"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, directory)
    for name in ("txmq", "spark"):
        if (ROOT / name).exists():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, directory / name, ignore=ignored)
    _pip("wheel", *QUIET, "--no-build-isolation", "-w", "out", ".", cwd=directory)
    return next((directory / "out").glob("txmq-*.whl"))


def install_wheel(directory: Path) -> Path:
    """Build the wheel in `directory`; return a folder in which it is installed."""
    target = directory / "installed"
    # What a test imports is compiled then; all of it would take seconds.
    given = (*QUIET, "--no-compile", "--target", str(target))
    _pip("install", *given, str(build_wheel(directory)), cwd=directory)
    return target


def _pip(*arguments: str, cwd: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments],
        cwd=cwd,
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr

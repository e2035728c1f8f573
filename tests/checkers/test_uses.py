"""Type checkers know the public names: they take right uses, and refuse wrong ones."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = ("tests/checkers/uses.py", "examples")


def test_mypy_takes_right_uses_and_refuses_wrong_ones() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *FILES],
        cwd=ROOT, capture_output=True, check=False, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout


@pytest.mark.skipif(shutil.which("pyright") is None, reason="pyright is not installed")
def test_pyright_takes_right_uses_and_refuses_wrong_ones(tmp_path: Path) -> None:
    settings = tmp_path / "pyrightconfig.json"
    settings.write_text(
        json.dumps(
            {
                "include": [str(ROOT / "tests/checkers/uses.py")],
                "extraPaths": [str(ROOT)],
                "enableTypeIgnoreComments": True,
                "reportUnnecessaryTypeIgnoreComment": "error",
            }
        )
    )
    ran = subprocess.run(
        ["pyright", "--project", str(settings), "--pythonpath", sys.executable],
        capture_output=True, check=False, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout

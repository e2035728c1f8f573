"""The conftest of all tests: pytest runs on small test files beside a copy of it."""

import os
import subprocess
import sys
from pathlib import Path

from tests import conftest
from txmq.testing.wait import PATIENCE_S

ROOT = Path(conftest.__file__).parents[1]
FORGOTTEN = """
import gc
from twisted.internet.defer import Deferred, fail

kept = []

def in_a_cycle(error):
    deferred = Deferred()
    deferred.itself = deferred
    deferred.errback(error)
    return deferred

def test_forgets_a_failure():
    fail(ValueError("unhandled"))

def test_forgets_a_failure_held_by_a_cycle():
    in_a_cycle(KeyError("in a cycle"))

def test_forgets_a_failure_that_was_old_by_then():
    deferred = in_a_cycle(KeyError("old"))
    gc.collect(1)

def test_handles_its_failure():
    fail(ValueError("handled")).addErrback(lambda failure: failure.trap(ValueError))

def test_keeps_a_failure():
    kept.append(in_a_cycle(KeyError("kept")))

def test_forgets_the_failure_of_another_test():
    kept.clear()
"""

RANDOM = """
from pathlib import Path
from hypothesis import given, strategies

@given(strategies.integers())
def test_writes_what_it_is_given(number):
    with Path("drawn").open("a") as file:
        print(number, file=file)
"""


def run_pytest(directory: Path, test: str, **environ: str) -> str:
    (directory / "conftest.py").write_text(Path(conftest.__file__).read_text())
    (directory / "test_it.py").write_text(test)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rA",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        ".",
        ".",
    ]
    clean = {name: value for name, value in os.environ.items() if name != "CI"} | {
        "PYTHONPATH": str(ROOT)
    }
    return subprocess.run(
        command,
        cwd=directory,
        env=clean | environ,
        capture_output=True,
        check=False,
        text=True,
        timeout=PATIENCE_S,
    ).stdout


def test_an_unhandled_failure_fails_the_test_that_dropped_it(tmp_path: Path) -> None:
    output = run_pytest(tmp_path, FORGOTTEN)
    assert "6 passed, 4 errors" in output
    assert "ERROR test_it.py::test_forgets_a_failure" in output
    assert "ERROR test_it.py::test_forgets_a_failure_held_by_a_cycle" in output
    assert "ERROR test_it.py::test_forgets_a_failure_that_was_old_by_then" in output
    assert "ERROR test_it.py::test_forgets_the_failure_of_another_test" in output
    assert "a Deferred failed and no code handled the failure" in output
    assert "ValueError: unhandled" in output


def test_generated_examples_are_the_same_ones_each_time_in_ci(tmp_path: Path) -> None:
    drawn = []
    for _ in range(2):
        run_pytest(tmp_path, RANDOM, CI="true")
        drawn.append((tmp_path / "drawn").read_text())
        (tmp_path / "drawn").unlink()
    assert drawn[0] == drawn[1]

"""The integration tests that Kombu and Celery bring with their sources, on txmq."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Final, NamedTuple
from xml.etree import ElementTree as ET

from txmq.testing.wait import PATIENCE_S

ROOT: Final = Path(__file__).parents[2]
KEPT: Final = ROOT / ".cache" / "suites"  # sources, from one run to the next
ORDER: Final = "a queue is in order by partition only"
PRIORITY: Final = "priorities are ignored"
SOON: Final = "it waits 10 ms for another process to log something"

# What fails on txmq, or may, and why: everything else passes.
MAY_FAIL: Final = {
    "TestPriority::test_publish_consume": PRIORITY,
    "TestPriority::test_publish_requeue_consume": PRIORITY,
    "TestPriority::test_simple_queue_publish_consume": PRIORITY,
    "TestPriority::test_simple_buffer_publish_consume": PRIORITY,
    "TestEventLoop::test_ack_from_another_thread": ORDER,
    "test_Inspect::test_scheduled": "what has an eta waits at the broker, in no worker",
    "test_tasks::test_revoked_by_headers_complex_canvas": (
        "it ends after 20 s, and results in a database are polled"
    ),
    "test_trace_log_arguments::test_task_success": SOON,
    "test_trace_log_arguments::test_task_failed": SOON,
}
PATIENT: Final = f"""import pytest

@pytest.fixture(scope="session")
def celery_worker_parameters():
    return {{"ping_task_timeout": {PATIENCE_S}, "shutdown_timeout": {PATIENCE_S}}}
"""
# As their own marks `flaky` say: they wait for a second, or for two. Kombu's wait twice
# as long each time: what fails then was given half a minute.
RERUNS: Final = 5


class Suite(NamedTuple):
    """The tests of a package: its modules, the options of pytest, and how many pass."""

    package: str
    modules: tuple[str, ...]
    options: tuple[str, ...]
    passing: int
    first: tuple[str, ...] = ()  # what starts a worker, before single tests


KOMBU: Final = Suite("kombu", ("test_txmq",), ("-o", "python_classes=Test*"), 42)
CELERY: Final = Suite(
    "celery",
    ("test_inspect", "test_worker", "test_tasks"),
    ("-p", "celery.contrib.pytest"),
    68,
    ("t/integration/test_inspect.py::test_Inspect::test_ping",),
)


class Outcomes(NamedTuple):
    """The tests that passed and those that did not, by their places."""

    passed: set[str]
    failed: set[str]


def source_of(package: str) -> Path:
    """Return the source of a package in its locked version. Raises CalledProcessError
    where there is no index.
    """
    lines = (ROOT / "requirements" / "lock.txt").read_text().splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith(f"{package}=="))
    end = next(at for at in range(start, len(lines)) if not lines[at].endswith("\\"))
    name = lines[start].removesuffix(" \\").replace("==", "-")
    if not (KEPT / name).exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        wanted = KEPT / f"{name}.txt"
        wanted.write_text("\n".join(lines[start : end + 1]))
        pip = [sys.executable, "-m", "pip", "--no-input", "download", "--quiet", "--no-deps"]
        options = ["--no-build-isolation", "--no-binary", package, "--require-hashes"]
        subprocess.run([*pip, *options, "-r", wanted, "-d", KEPT], check=True)
        with tarfile.open(KEPT / f"{name}.tar.gz") as archive:
            archive.extractall(KEPT, filter="data")
    return KEPT / name


def run(suite: Suite, url: str, folder: Path) -> Outcomes:
    """Run the tests of a package with a broker; those that fail several times."""
    source = folder / suite.package
    shutil.copytree(source_of(suite.package), source)
    here = Path(__file__).parent
    shutil.copy(here / "kombu_cases.py", source / "t" / "integration" / "test_txmq.py")
    (source / "conftest.py").write_text(PATIENT)
    (folder / "sitecustomize.py").write_text("import txmq.kombu\n")  # for their programs, too
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{folder}:{ROOT}",
        "TEST_BACKEND": f"db+sqlite:///{folder}/results.db",
        "TEST_BROKER": url,
        "WORKER_LOGLEVEL": "INFO",
    }
    passed, failed = set[str](), set[str]()
    for module in suite.modules:  # each in a process: some leave it as they should not
        found = _run_module(suite, source, environment, f"t/integration/{module}.py")
        passed |= found.passed
        failed |= found.failed
    return Outcomes(passed, failed)


def _run_module(suite: Suite, source: Path, environment: dict[str, str], module: str) -> Outcomes:
    wanted, passed, failed = [module], set[str](), set[str]()
    for number in range(1 + RERUNS):
        longer = {"TEST_LONGER": str(2**number)}
        found = _run(suite, source, environment | longer, wanted)
        passed |= found.passed
        failed = (failed | found.failed) - passed
        again = unexpected(Outcomes(passed, failed))
        if not again:
            break
        wanted = [*suite.first, *again]
    return Outcomes(passed, failed)


def _run(suite: Suite, source: Path, environment: dict[str, str], wanted: list[str]) -> Outcomes:
    report = source / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:txmq"]
    subprocess.run(
        [*command, *suite.options, f"--junitxml={report}", "-o", "addopts=", *wanted],
        cwd=source, env=environment, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    passed, failed = set[str](), set[str]()
    for case in ET.parse(report).iter("testcase"):
        place = _place(case.attrib["classname"], case.attrib["name"])
        if case.find("failure") is not None or case.find("error") is not None:
            failed.add(place)
        elif case.find("skipped") is None:
            passed.add(place)
    return Outcomes(passed - failed, failed)


def _place(classname: str, name: str) -> str:
    """Return how pytest is told of a test: `t.integration.test_x.test_Y`, `test_z`."""
    parts = classname.split(".")
    return "::".join(("/".join(parts[:3]) + ".py", *parts[3:], name))


def _short(test: str) -> str:
    return test.partition("::")[2].partition("[")[0]


def unexpected(outcomes: Outcomes) -> list[str]:
    """Return the tests that failed and should not."""
    return sorted(test for test in outcomes.failed if _short(test) not in MAY_FAIL)

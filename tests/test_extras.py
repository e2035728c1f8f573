"""Each part of txmq runs with the packages of its extra alone, and names the extra
without them.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from txmq.errors.extras import how_to_install
from txmq.testing.wait import PATIENCE_S

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
MODULES = {"psycopg2-binary": "psycopg2", "opentelemetry-api": "opentelemetry", "celery": "kombu"}
BASE = ""  # what `pip install txmq` brings

PARTS = {
    "txmq.client.blocking.client": BASE,
    "txmq.client.blocking.cluster": BASE,
    "txmq.client.blocking.consumer.inbox": BASE,
    "txmq.client.blocking.transaction.xa": BASE,
    "txmq.client.blocking.spooling_client": BASE,
    "txmq.postgres": BASE,
    "txmq.relay.relay": BASE,
    "txmq.recover.local": BASE,
    "txmq.twisted": "twisted",
    "txmq.psycopg": "psycopg",
    "txmq.asyncpg": "asyncpg",
    "txmq.sqlalchemy": "sqlalchemy",
    "txmq.starlette": BASE,
    "txmq.taskiq": "taskiq",
    "txmq.django": "django",
    "txmq.kombu": "celery",
    "txmq.cli.app": "cli",
    "txmq.broker.service": "broker",
    "txmq.broker.cluster.kafka_partition": "kafka",
    "txmq_spark": "spark",
    "txmq.testing.broker_thread": "testing",
}

PROGRAM = """
import sys
for name in sys.argv[2:]:
    sys.modules[name] = None  # it cannot be imported
from txmq.errors.extras import MissingExtra
try:
    __import__(sys.argv[1])
except MissingExtra as missing:
    print(missing.extra, missing.hint)
else:
    print("imported")
"""


def module_of(requirement: str) -> str:
    name = re.split(r"[\[<>=;]", requirement, maxsplit=1)[0].strip()
    return MODULES.get(name, name.replace("-", "_"))


def brought(extra: str) -> set[str]:
    """Return the modules of an extra, and of the extras that it names."""
    modules: set[str] = set()
    for requirement in EXTRAS.get(extra, ()):
        if others := re.match(r"txmq\[(.+)\]", requirement):
            modules.update(*(brought(other) for other in others[1].split(",")))
        else:
            modules.add(module_of(requirement))
    return modules


def imported(part: str, *, without: set[str]) -> str:
    base = {module_of(requirement) for requirement in PROJECT["dependencies"]}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, part, *sorted(without - base)],
        capture_output=True, check=False, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    return ran.stdout.strip() or ran.stderr


EVERYTHING = set().union(*map(brought, EXTRAS))


def test_the_guide_has_a_row_for_each_extra() -> None:
    guide = (ROOT / "docs" / "GUIDE.md").read_text("utf-8")
    rows = re.search(r"^\| extra \| for \|\n\|.*\n((?:\|.*\n)+)", guide, re.MULTILINE)
    assert rows is not None
    named = [
        cell for row in rows[1].splitlines() for cell in re.findall("`(.+?)`", row.split("|")[1])
    ]
    assert sorted(named) == sorted(EXTRAS)


def test_a_client_is_imported_without_what_it_does_not_need_yet() -> None:
    """It takes 13 ms, says `python -X importtime`: no package of others is loaded, and
    what connects comes with the first connection.
    """
    program = "import sys; import txmq; print(*sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, check=True, text=True,
        env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    loaded = {name for name in ran.stdout.split() if "." not in name}
    assert loaded <= sys.stdlib_module_names | {"txmq", "__main__"}
    assert loaded.isdisjoint({"asyncio", "socket", "ssl", "threading", "logging"})


@pytest.mark.parametrize(("part", "extra"), PARTS.items())
def test_a_part_needs_its_extra_and_no_other(part: str, extra: str) -> None:
    assert imported(part, without=EVERYTHING - brought(extra)) == "imported"
    if extra != BASE:
        asked = imported(part, without=EVERYTHING)
        named = asked.partition(" ")[0]
        assert brought(named) <= brought(extra), asked
        assert asked == f"{named} run: {how_to_install(named)}"


@pytest.mark.parametrize(
    ("came_from", "command"),
    [
        (None, "pip install 'txmq[cli]'"),
        ({"url": "file:///a%20b", "dir_info": {}}, "pip install '/a b[cli]'"),
        (
            {"url": "file:///a", "dir_info": {"editable": True}},
            "pip install -e '/a[cli]'",
        ),
        (
            {"url": "file:///a/txmq.whl", "archive_info": {}},
            "pip install 'txmq[cli] @ file:///a/txmq.whl'",
        ),
        (
            {"url": "https://host/txmq", "vcs_info": {"vcs": "git"}},
            "pip install 'txmq[cli] @ git+https://host/txmq'",
        ),
    ],
)
def test_an_extra_comes_from_where_txmq_came_from(
    came_from: object, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Installed:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return None if came_from is None else json.dumps(came_from)

    monkeypatch.setattr(importlib.metadata, "distribution", lambda _name: Installed())
    assert how_to_install("cli") == command


@pytest.mark.parametrize(
    ("command", "package", "extra"), [("main", "typer", "cli"), ("spark", "pyspark", "spark")]
)
def test_a_command_without_its_packages_says_how_to_get_them(
    command: str, package: str, extra: str
) -> None:
    program = f"import sys, txmq_command as t; sys.modules['{package}'] = None; t.{command}()"
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        check=False,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ran.returncode == 1
    says = f"txmq: {package} cannot be imported (run: {how_to_install(extra)})\n"
    assert ran.stderr == says

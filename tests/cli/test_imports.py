"""Fast start of the command line: a command imports its dependencies when it runs."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from txmq.cli.app import MODULES, assemble, command_line
from txmq.testing.wait import PATIENCE_S

HEAVY = ("twisted", "psycopg2", "pyspark", "pyarrow", "pandas", "lmdb", "structlog")
PROGRAM = """
import sys
from txmq.cli.app import main
try:
    main()
finally:
    print(*sorted({name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("arguments", "status"),
    [("--help", 0), ("broker --help", 0), ("tx commit --help", 0), ("topic create", 2)],
)
def test_help_and_usage_errors_import_nothing_heavy(arguments: str, status: int) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments.split()],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert ran.returncode == status
    assert "Usage:" in ran.stdout + ran.stderr
    modules = ran.stderr.splitlines()[-1].split()
    assert "txmq" in modules
    assert sorted(set(HEAVY) & set(modules)) == []


def test_a_command_that_is_named_is_built_alone() -> None:
    program = PROGRAM.replace('name.partition(".")[0]', "name")
    ran = subprocess.run(
        [sys.executable, "-c", program, "tx", "commit", "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    modules = ran.stderr.splitlines()[-1].split()
    assert "txmq.cli.commands.transactions" in modules
    assert "txmq.cli.commands.letters" not in modules


@pytest.mark.parametrize("name", MODULES)
def test_a_part_that_is_built_alone_has_all_of_its_commands(name: str) -> None:
    alone: Any = assemble([name])
    among_all: Any = command_line()
    found, expected = (
        sorted(getattr(one.commands[name], "commands", ())) for one in (alone, among_all)
    )
    assert found == expected


def test_the_module_is_the_command() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "txmq", "-h"],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert "Usage: txmq " in ran.stdout
    for name in (
        "broker",
        "dev",
        "schema",
        "topic",
        "send",
        "tail",
        "group",
        "tx",
        "alarms",
        "dlq",
        "resolver",
    ):
        assert f" {name} " in ran.stdout

"""The order in which groups of tests start, and that a group stays together."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from tests import reporting
from tests.reporting import folder_of, group_of, start_order
from txmq.testing.wait import PATIENCE_S

ROOT = Path(reporting.__file__).parents[1]
AT_ONCE = ("--numprocesses", "2", "--dist", "loadscope", "--no-loadscope-reorder")
TESTS = "import pytest\n\n@pytest.mark.parametrize('n', range(4))\ndef test_it(n): pass\n"
SEEDS = {f"seeds-{number}": "simulation" for number in range(4)}
FILES = {f"client/{number}": "client" for number in range(10)}
KILLS = {f"kills-{number}": "system" for number in range(2)}


def in_order(folders: dict[str, str]) -> list[str]:
    starts = start_order(folders)
    return sorted(folders, key=starts.__getitem__)


def test_the_longest_begin_first_and_the_shortest_last() -> None:
    short = {f"wire/{number}": "wire" for number in range(10)}
    order = in_order(short | FILES | KILLS | {"demo": "demo", "spark": "spark"})
    assert order[:4] == ["spark", "demo", *KILLS]
    assert order[-1] == "wire/9"


def test_the_folder_of_spark_has_two_groups() -> None:
    tests = [f"tests/spark/test_{number}.py::test_it[a@b]" for number in range(20)]
    assert {group_of(test) for test in tests} == {"spark-0", "spark-1"}


def test_the_cluster_has_a_group_of_its_own() -> None:
    tests = [f"{file}::test_{number}" for file in reporting.APART for number in range(2)]
    assert all((ROOT / file).is_file() for file in reporting.APART)
    assert [group_of(test) for test in tests] == ["tests/spark/test_cluster.py"] * 2
    assert folder_of(tests[0]) in reporting.FIRST


def test_folders_run_beside_each_other_from_the_first_test_to_the_last() -> None:
    order = in_order(FILES | SEEDS | KILLS)
    places = [order.index(group) for group in SEEDS]
    assert places[0] < len(KILLS) + 2
    assert all(2 <= after - before <= 5 for before, after in pairwise(places))
    assert order[-1] == list(FILES)[-1]
    assert folder_of("tests/test_hints.py::test_it") == folder_of("tests/test_costs.py::test_it")


def test_any_folder_may_be_the_only_one() -> None:
    for folders in (SEEDS, KILLS, FILES, {"spark": "spark"}, {}):
        assert in_order(folders) == list(folders)


def test_the_tests_of_a_file_run_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("pytest_plugins = ['tests.reporting']\n")
    for name in ("spark/test_a.py", "wire/test_b.py", "wire/test_c.py", "wire/test_d.py"):
        file = tmp_path / "tests" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *AT_ONCE]
    output = subprocess.run(
        [*command, "--rootdir", ".", "."],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=False,
        text=True,
        timeout=PATIENCE_S,
    ).stdout
    ran = re.findall(r"\[(gw\d)\].* PASSED tests/(\w+/test_\w)\.py", output)
    assert len(ran) == 4 * 4, output
    processes = {file: {process for process, of in ran if of == file} for _, file in ran}
    assert all(len(used) == 1 for used in processes.values()), processes

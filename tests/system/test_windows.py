"""Kills in every window of a transaction: row and message exist together or not at all, and the broker finds out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import txmq
from tests.system.conftest import Report
from tests.system.farm import Lane, deaths
from tests.system.placing import last_begun
from tests.system.shop import Shop, opened

pytestmark = pytest.mark.timeout(300)  # where the machine is busy
HITS = 20  # confirmed, in each window
CRASHPOINTS = {  # whether the transaction is committed there
    "tx.before_group": False,
    "tx.after_group": False,
    "tx.after_token": False,
    "tx.before_commit": False,
    "tx.after_commit": True,
    "tx.after_decide": True,
}


@pytest.fixture
def shop(tmp_path: Path, crashable_database: str) -> Iterator[Shop]:
    with opened(tmp_path, crashable_database) as shop:
        yield shop


def test_no_crash_point_is_left_out() -> None:
    sources = Path(txmq.__file__).parent.rglob("*.py")
    found = {name for source in sources for name in re.findall(r'crashpoint\("([^"]+)"\)', source.read_text())}
    assert found == CRASHPOINTS.keys()


def test_services_killed_at_every_crash_point(shop: Shop, report: Report) -> None:
    keys = ("a", "b", "c", "d")
    with shop.farm(*(Lane(point, point, HITS, keys) for point in CRASHPOINTS)) as farm:
        assert farm.status() == 0, farm.err.read_text()
    dead = deaths(farm.out.read_text())
    hits = {last_begun(shop.journals, pid): CRASHPOINTS[point] for point, pids in dead.items() for pid in pids}
    assert {point: len(pids) for point, pids in dead.items()} == dict.fromkeys(CRASHPOINTS, HITS)
    report({point: len(pids) for point, pids in dead.items()} | shop.judge(hits))

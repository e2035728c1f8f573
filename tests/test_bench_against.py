"""Benchmarks beside those of an earlier commit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.__main__ import main
from tests.bench.against import Compared, Figure, compared, left_out

UNITS = {"tx.rate": "tx/s", "tx.new": "tx/s", "tx.zero": "%"}


def test_the_ratio_of_each_round_counts_and_their_median_is_told() -> None:
    rounds = [
        ({"tx.rate": Figure(100, 10)}, {"tx.rate": Figure(90, 11)}),
        ({"tx.rate": Figure(50, 5)}, {"tx.rate": Figure(50, 5)}),  # a slow round slows both sides
        ({"tx.rate": Figure(100, 10)}, {"tx.rate": Figure(80, 12)}),
    ]
    expected = Compared("tx.rate", "tx/s", 100.0, 80.0, (0.9, 1.0, 0.8), 1.1)
    assert compared(rounds, UNITS) == [expected]
    assert compared(rounds, UNITS)[0].ratio == 0.9


def test_rows_that_one_tree_lacks_or_that_were_0_are_left_out() -> None:
    old = {"tx.rate": Figure(1), "tx.zero": Figure(0)}
    new = old | {"tx.new": Figure(3)}
    rows = compared([(old, new)], UNITS)
    assert [row.id for row in rows] == ["tx.rate"]
    assert left_out([(old, new)], rows) == ["tx.new", "tx.zero"]
    assert compared([(old, new), ({}, new)], UNITS) == []


def test_an_unknown_commit_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--only", "store.raw.echo", "--directory", str(tmp_path), "--against", "no-such-commit"]
    assert main(argv) == 1
    assert "no-such-commit" in capsys.readouterr().err


def test_less_than_one_round_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--against", "HEAD", "--rounds", "0"])
    assert "--rounds must be at least 1" in capsys.readouterr().err

"""The table of costs: no operation makes another number of calls, writes, statements or
round trips than it says.
"""

from __future__ import annotations

import pytest

from tests.bench.costs import COSTS, OPERATIONS, counted

RISE = (
    "it costs more: name the reason in your commit, and change COSTS in tests/bench/costs.py; "
    "`python -m tests.bench.costs --functions` shows each function"
)
FALL = "it costs less: lower it in COSTS in tests/bench/costs.py, so that it stays so"


def test_each_operation_has_its_row() -> None:
    assert list(COSTS) == list(OPERATIONS)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_costs_what_the_table_says(operation: str, database: str) -> None:
    cost, _calls = counted(database, operation)
    known = COSTS[operation]
    assert cost == known, FALL if all(map(int.__le__, cost, known)) else RISE

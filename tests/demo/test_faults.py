"""What goes wrong in the demonstration is drawn from its seed, at places that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from examples.order_flow import faults
from examples.order_flow.data import Facts

ROOT = Path(__file__).parents[2]
FACTS = Facts(1_500, 6_005, tuple(range(1, 100)), tuple(range(1, 201)), ("AIR", "MAIL", "TRUCK"))


def test_the_same_seed_draws_the_same_faults() -> None:
    assert faults.draw(7, FACTS) == faults.draw(7, FACTS)


def test_another_seed_draws_others() -> None:
    assert faults.draw(7, FACTS) != faults.draw(8, FACTS)


def test_every_crash_point_is_in_the_code() -> None:
    sources = [
        path.read_text("utf-8")
        for top in ("txmq", "examples")
        for path in (ROOT / top).rglob("*.py")
    ]
    known = {name for source in sources for name in re.findall(r'crashpoint\("([\w.]+)"\)', source)}
    drawn = {
        point.partition(":")[0]
        for points in faults.draw(1, FACTS).deaths.values()
        for point in points
    }
    assert drawn <= known


@pytest.mark.parametrize("seed", range(20))
def test_a_process_of_orders_dies_often_enough_before_its_share_is_done(seed: int) -> None:
    deaths = faults.draw(seed, FACTS).deaths
    for process in range(faults.ORDERS_PROCESSES):
        lives = [int(point.partition(":")[2]) for point in deaths[f"orders-{process}"]]
        assert len(lives) == faults.DEATHS_OF_ORDERS
        assert sum(lives) < FACTS.orders // faults.ORDERS_PROCESSES


def test_someone_is_refused_and_something_is_poison_at_any_scale() -> None:
    plan = faults.draw(1, FACTS._replace(orders=15, customers=(1, 2), parts=(1, 2, 3)))
    assert plan.refused
    assert plan.bad_parts

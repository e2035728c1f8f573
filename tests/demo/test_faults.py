"""The faults of the demonstration are drawn from its seed, at existing crash points."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from examples.order_flow import faults
from examples.order_flow.data import InputSummary

ROOT = Path(__file__).parents[2]
FACTS = InputSummary(
    1_500, 6_005, tuple(range(1, 100)), tuple(range(1, 201)), ("AIR", "MAIL", "TRUCK")
)


def test_the_same_seed_draws_the_same_faults() -> None:
    assert faults.draw_plan(7, FACTS) == faults.draw_plan(7, FACTS)


def test_another_seed_draws_other_faults() -> None:
    assert faults.draw_plan(7, FACTS) != faults.draw_plan(8, FACTS)


def test_every_crash_point_is_in_the_code() -> None:
    sources = [
        path.read_text("utf-8")
        for top in ("txmq", "spark", "examples")
        for path in (ROOT / top).rglob("*.py")
    ]
    known = {name for source in sources for name in re.findall(r'crashpoint\("([\w.]+)"\)', source)}
    drawn = {
        point.partition(":")[0]
        for points in faults.draw_plan(1, FACTS).crash_points.values()
        for point in points
    }
    assert drawn <= known


@pytest.mark.parametrize("seed", range(20))
def test_a_process_of_orders_crashes_before_its_share_is_done(seed: int) -> None:
    points = faults.draw_plan(seed, FACTS).crash_points
    for process in range(faults.ORDERS_PROCESSES):
        lives = [int(point.partition(":")[2]) for point in points[f"orders-{process}"]]
        assert len(lives) == faults.CRASHES_OF_ORDERS
        assert sum(lives) < FACTS.orders // faults.ORDERS_PROCESSES


def test_there_are_blocked_customers_and_bad_parts_at_any_scale() -> None:
    plan = faults.draw_plan(1, FACTS._replace(orders=15, customers=(1, 2), parts=(1, 2, 3)))
    assert plan.refused
    assert plan.bad_parts

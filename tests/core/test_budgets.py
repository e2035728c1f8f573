"""Token buckets, and the budget of bytes that are on their way to the disk."""

from __future__ import annotations

from random import Random

import pytest

from txmq.core.disk_budget import LEAST_BYTES, UNKNOWN_BYTES, DiskBudget
from txmq.core.token_bucket import TokenBucket

MIB = 1 << 20


def test_a_bucket_gives_its_rate_and_a_second_s_worth_at_once() -> None:
    bucket, given = TokenBucket(100, now=0.0), 0
    for tenth in range(101):  # ten seconds, asked all the time
        while not bucket.wait_s(tenth / 10):
            bucket.take(10)
            given += 10
    assert given == pytest.approx(100 * 11, abs=10)


def test_a_large_request_passes_and_those_after_it_wait_for_its_debt() -> None:
    bucket = TokenBucket(100, now=0.0)
    assert bucket.wait_s(0.0) == 0.0
    bucket.take(1_000)
    assert bucket.tokens == -900
    assert bucket.wait_s(0.0) == pytest.approx(9.01)
    assert bucket.wait_s(5.0) == pytest.approx(4.01)
    assert bucket.wait_s(9.01) == 0.0


def test_a_bucket_fills_up_to_its_brim_and_not_by_a_clock_that_goes_back() -> None:
    bucket = TokenBucket(10, now=100.0, burst_s=2.0)
    bucket.take(20)
    bucket.wait_s(50.0)
    assert bucket.tokens == 0
    bucket.wait_s(1_000.0)
    assert bucket.tokens == 20


def observed(fixed_s: float, rate: float, sizes: list[int], most: int = 64 * MIB) -> DiskBudget:
    """Return the budget after 100 writes to a disk with a fixed time and a rate."""
    budget = DiskBudget(most)
    for number in range(100):
        size = sizes[number % len(sizes)]
        budget.observe(size, fixed_s + size / rate)
    return budget


def test_the_budget_doubles_the_fixed_time_of_a_slow_disk() -> None:
    budget = observed(0.030, 32 * MIB, [4_096, MIB])
    assert budget.bytes == pytest.approx(0.030 * 32 * MIB, rel=1e-6)
    assert budget.seconds_for(MIB) == pytest.approx(0.030 + 1 / 32)


def test_a_quick_disk_has_ten_milliseconds_of_bytes() -> None:
    assert observed(0.0001, 500 * MIB, [4_096, 8 * MIB]).bytes == pytest.approx(5 * MIB, rel=1e-3)


def test_the_budget_has_a_floor_and_a_ceiling() -> None:
    assert observed(0.001, MIB, [4_096, MIB]).bytes == LEAST_BYTES
    assert observed(0.0, 1e15, [4_096, MIB]).bytes == 64 * MIB
    assert observed(1.0, 500 * MIB, [4_096, MIB], most=2 * MIB).bytes == 2 * MIB


def test_without_writes_and_with_writes_of_one_size_little_is_risked() -> None:
    assert DiskBudget(64 * MIB).bytes == UNKNOWN_BYTES
    assert DiskBudget(MIB).bytes == MIB
    alike = observed(0.020, MIB, [4_096])
    assert alike.bytes == UNKNOWN_BYTES
    assert alike.seconds_for(MIB) == pytest.approx(0.020 + 4_096 / MIB)


def test_a_single_stall_is_forgotten() -> None:
    budget = observed(0.001, 100 * MIB, [4_096, MIB])
    usual = budget.bytes
    budget.observe(MIB, 2.0)
    assert budget.bytes < usual
    for number in range(600):
        size = (4_096, MIB)[number % 2]
        budget.observe(size, 0.001 + size / (100 * MIB))
    assert budget.bytes == pytest.approx(usual, rel=0.01)


def test_pauses_of_a_busy_machine_are_no_property_of_the_disk() -> None:
    """One write in twenty takes up to 30 ms longer. Decisions wait for the budget."""
    random, budget, found = Random(1), DiskBudget(64 * MIB), list[int]()
    for _ in range(20_000):
        size = int(random.choice((0.05, 0.6, 1)) * budget.bytes)
        pause_s = random.random() * 0.03 if random.random() < 0.05 else 0.0
        budget.observe(size, 0.020 + size / (16 * MIB) + pause_s)
        found.append(budget.bytes)
    assert max(found[100:]) < 1.7 * 0.020 * 16 * MIB

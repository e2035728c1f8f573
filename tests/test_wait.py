"""Waiting for a condition: back at once when it holds, an error that names it when it never does."""

import pytest

from txmq.testing.wait import wait_until


def test_returns_as_soon_as_the_condition_holds() -> None:
    looks = iter([False, 0, "", True, False])
    wait_until(lambda: next(looks))
    assert list(looks) == [False]


def test_says_what_it_waited_for_when_time_is_up() -> None:
    with pytest.raises(TimeoutError, match=r"0\.02 s: the broker to answer"):
        wait_until(lambda: False, 0.02, what="the broker to answer")


def test_a_condition_that_already_holds_needs_no_time() -> None:
    wait_until(lambda: True, 0)

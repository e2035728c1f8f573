"""Waiting for a condition: an immediate return, and an error that names the
condition.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from txmq.testing.wait import wait_until


def test_returns_as_soon_as_the_condition_holds() -> None:
    results = iter([False, 0, "", True, False])
    wait_until(lambda: next(results))
    assert list(results) == [False]


def test_the_error_after_the_timeout_names_the_condition() -> None:
    with pytest.raises(TimeoutError, match=r"0\.02 s: the broker to answer"):
        wait_until(lambda: False, 0.02, what="the broker to answer")


def test_a_condition_that_already_holds_needs_no_time() -> None:
    wait_until(lambda: True, 0)


def test_slow_predicates_are_called_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now, began, ended = 0.0, list[float](), list[float]()

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def poll() -> bool:
        began.append(now)
        sleep(0.05)
        ended.append(now)
        return len(began) == 5

    monkeypatch.setattr(
        "txmq.testing.wait.time", SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    )
    wait_until(poll)
    pauses = [after - before for before, after in zip(ended, began[1:], strict=False)]
    assert all(0.1 <= pause <= 0.25 for pause in pauses), pauses

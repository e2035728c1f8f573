"""Retry policies: delays, retries, jitter, and refused settings."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txmq.errors import ConfigError
from txmq.model.retry import FailureAction, RetryPolicy
from txmq.wire.calls.consumers import RetryArgs

SECOND = 1_000_000


def test_the_default_is_the_table_of_sixteen_steps() -> None:
    policy = RetryPolicy()
    minutes = [60 * n * SECOND for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30, 60, 120)]
    assert [policy.delay(attempt) for attempt in range(1, 18)] == [
        10 * SECOND,
        30 * SECOND,
        *minutes,
        None,
    ]


def test_the_last_delay_repeats_until_the_retries_are_used_up() -> None:
    policy = RetryPolicy((1, 2.5), retries=4)
    assert [policy.delay(attempt) for attempt in range(1, 6)] == [
        SECOND,
        2_500_000,
        2_500_000,
        2_500_000,
        None,
    ]


def test_fewer_retries_than_delays_end_early() -> None:
    assert RetryPolicy((1, 2, 3), retries=1).delay(2) is None
    assert RetryPolicy(retries=0).delay(1) is None


def test_seconds_and_timedeltas_make_the_same_policy() -> None:
    policy = RetryPolicy((1, 2.5))
    assert policy == RetryPolicy([timedelta(seconds=1), timedelta(milliseconds=2_500)])
    assert (policy.delays[1], policy.retries) == (timedelta(seconds=2.5), 2)
    assert replace(policy, retries=3) == RetryPolicy((1, 2.5), retries=3)


def test_exponential_delays_grow_to_the_cap() -> None:
    policy = RetryPolicy.exponential(initial=1, factor=3, longest=20, retries=6)
    delays = [policy.delay(attempt) for attempt in range(1, 8)]
    assert delays == [SECOND, 3 * SECOND, 9 * SECOND, 20 * SECOND, 20 * SECOND, 20 * SECOND, None]


def test_many_exponential_retries_need_no_long_table() -> None:
    policy = RetryPolicy.exponential(retries=1_000_000)
    assert len(policy.delays) < 20
    assert policy.delay(1_000_000) == 7_200 * SECOND
    assert policy.delay(1_000_001) is None
    RetryPolicy.exponential(factor=1, retries=1_000_000)


def test_jitter_spreads_to_both_sides() -> None:
    policy = RetryPolicy((100,), jitter=0.2)
    assert [policy.delay(1, chance) for chance in (0.0, 0.5, 1.0)] == [
        80 * SECOND,
        100 * SECOND,
        120 * SECOND,
    ]
    assert RetryPolicy((100,)).delay(1, 0.9) == 100 * SECOND


@pytest.mark.parametrize(
    ("classes", "action"),
    [
        (("ValueError", "Exception"), FailureAction.RETRY),
        (("KeyError", "LookupError", "Exception"), FailureAction.DEAD),
        (("billing.errors.Refused",), FailureAction.DEAD),
        (("billing.errorsome.Refused",), FailureAction.RETRY),
        (("psycopg2.OperationalError", "psycopg2.Error"), FailureAction.POSTPONE),
        (("Away", "LookupError", "OSError"), FailureAction.DEAD),
    ],
)
def test_a_class_of_errors_has_its_action_and_the_nearest_class_decides(
    classes: tuple[str, ...], action: FailureAction
) -> None:
    policy = RetryPolicy(
        (1,), dead=["LookupError", "billing.errors.*"], postpone=["psycopg2.Error", "OSError"]
    )
    assert policy.action(classes) is action


@pytest.mark.parametrize("names", ["ValueError", [""], ["x" * 257], ["x"] * 101, [3]])
def test_names_of_classes_are_checked(names: Any) -> None:
    with pytest.raises(ConfigError):
        RetryPolicy((1,), dead=names)


names = st.lists(st.text(min_size=1, max_size=9), max_size=3).map(tuple)
policies = st.builds(
    RetryPolicy.of_row,
    st.lists(st.integers(0, 10**12), min_size=1, max_size=5).map(tuple),
    st.none() | st.integers(0, 1_000),
    st.floats(0, 1),
    names,
    names,
)


@given(policies)
def test_a_policy_survives_json(policy: RetryPolicy) -> None:
    assert RetryArgs.model_validate_json(json.dumps(policy.to_json())).policy() == policy


@given(policies, st.integers(1, 1_100), st.floats(0, 1))
def test_a_delay_is_never_negative_and_ends_with_the_retries(
    policy: RetryPolicy, attempt: int, chance: float
) -> None:
    delay = policy.delay(attempt, chance)
    assert (delay is None) == (attempt > policy.retries)
    assert delay is None or delay >= 0


def test_who_wants_no_retry_is_told_how() -> None:
    with pytest.raises(ConfigError, match="for no retry add retries=0"):
        RetryPolicy(())
    assert RetryPolicy((1,), retries=0).delay(1) is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"delays": []}, "delays"),
        ({"delays": [1] * 1_001}, "delays"),
        ({"delays": [-1]}, "delays"),
        ({"delays": [10**18]}, "delays"),
        ({"delays": [32_000_000]}, "delays"),
        ({"delays": [timedelta(days=366)]}, "delays"),
        ({"delays": [float("nan")]}, "delays"),
        ({"delays": "12"}, "delays"),
        ({"delays": 10}, "delays"),
        ({"delays": [True]}, "delays"),
        ({"delays": ["1"]}, "delays"),
        ({"retries": -1}, "retries"),
        ({"retries": 1 << 64}, "retries"),
        ({"retries": 1.0}, "retries"),
        ({"retries": True}, "retries"),
        ({"jitter": -0.1}, "jitter"),
        ({"jitter": 1.1}, "jitter"),
        ({"jitter": float("nan")}, "jitter"),
        ({"jitter": "0"}, "jitter"),
        ({"jitter": True}, "jitter"),
    ],
)
def test_what_is_no_policy_is_refused_by_its_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RetryPolicy(**fields)
    assert caught.value.path == f"retry.{field}"


@pytest.mark.parametrize(
    "settings",
    [
        {"factor": 0.5},
        {"factor": float("nan")},
        {"factor": float("inf")},
        {"initial": -1},
        {"longest": float("inf")},
    ],
)
def test_exponential_settings_out_of_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        RetryPolicy.exponential(**settings)  # type: ignore[arg-type]

"""Durations that users give: seconds or timedeltas."""

from __future__ import annotations

from datetime import timedelta

import pytest

from txmq.errors import LocalProtocolError
from txmq.model.durations import Duration, micros_of, seconds_of
from txmq.model.measures import counted


@pytest.mark.parametrize(
    ("duration", "micros"),
    [(0, 0), (1.5, 1_500_000), (timedelta(days=1), 86_400_000_000), (0.0000004, 0)],
)
def test_durations_are_seconds_or_timedeltas(duration: Duration, micros: int) -> None:
    assert micros_of(duration, "delay") == micros


def test_seconds_stay_as_they_are_and_none_means_that_there_is_none() -> None:
    given = (None, 0.25, timedelta(minutes=2))
    assert [seconds_of(one, "timeout") for one in given] == [None, 0.25, 120.0]


@pytest.mark.parametrize(
    "duration",
    [
        -1,
        timedelta(-1),
        timedelta(days=3_650),
        1e12,
        float("nan"),
        float("inf"),
        "5",
        True,
        10**400,
    ],
)
def test_what_is_no_duration_is_refused_by_its_name(duration: float) -> None:
    for convert in (micros_of, seconds_of):
        with pytest.raises(LocalProtocolError, match="less than ten years"):
            convert(duration, "delay")


def test_a_number_has_its_noun() -> None:
    assert [counted(number, "letter") for number in (0, 1, 2_000)] == [
        "0 letters",
        "1 letter",
        "2,000 letters",
    ]

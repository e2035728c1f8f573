"""Names, times, ids and decisions of the public API."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import strategies as our
from txmq.errors import LocalProtocolError
from txmq.model import limits, message
from txmq.model.message import (
    Decision,
    check_name,
    is_name,
    message_id,
    parse_message_id,
    resolve_time,
    time_or_duration,
    to_micros,
)


@given(our.names)
def test_names_in_the_alphabet_are_names(name: str) -> None:
    assert check_name(name, "topic") == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        ".hidden",
        "../../etc/passwd",
        "/etc/passwd",
        "a/../b",
        "a\\b",
        "a b",
        "a\n",
        "\na",
        "a\0b",
        "a%2e",
        "%RETRY%g",
        "group@member",
        "ａdmin",  # noqa: RUF001  # a letter that only looks like one
        "Zürich",
        "a" * 128,
        "a" * 65_536,
        "'; drop table txmq_token;--",
        "(a+)+$",
        b"bytes",
        None,
        7,
    ],
)
def test_other_names_are_refused_with_a_hint(name: str) -> None:
    with pytest.raises(LocalProtocolError, match=r"invalid topic name .*A-Z a-z 0-9") as caught:
        check_name(name, "topic")
    assert len(str(caught.value)) < 700


def test_the_longest_name_is_a_name() -> None:
    assert is_name("a" * limits.NAME)
    assert is_name("0")
    assert is_name("-_.")


@given(our.ids, our.offsets)
def test_a_message_id_is_read_back(producer: bytes, sequence: int) -> None:
    assert parse_message_id(message_id(producer, sequence)) == (producer, sequence)


def test_a_message_id_is_hexadecimal_and_a_number() -> None:
    assert message_id(bytes(range(16)), 42) == "000102030405060708090a0b0c0d0e0f-42"


ZEROS = "0" * 32


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-1",
        ZEROS,
        f"{ZEROS}-",
        f"{ZEROS}--1",
        f"{ZEROS}-01",
        f"{ZEROS}-1 ",
        f"{ZEROS}-1\n",
        f"{ZEROS}-１",  # noqa: RUF001  # a digit, but not of ours
        f"{ZEROS}-9223372036854775808",
        f"{ZEROS}-{'9' * 5000}",
        f"{ZEROS[:-1]}-1",
        f"{ZEROS[:-1]}A-1",
        f"{ZEROS[:-1]}g-1",
    ],
)
def test_other_texts_are_no_message_ids(text: str) -> None:
    with pytest.raises(LocalProtocolError, match="32 hexadecimal digits"):
        parse_message_id(text)


@given(
    st.datetimes(min_value=datetime(1970, 1, 2), timezones=st.timezones(), allow_imaginary=False)  # noqa: DTZ001  # the zones are drawn
)  # the zones are drawn
def test_a_datetime_of_any_zone_is_the_moment_it_names(when: datetime) -> None:
    if when < datetime(9999, 12, 30, tzinfo=UTC):
        # In UTC, because Python finds a time that its zone has twice equal to none of
        # another zone (PEP 495).
        assert datetime(1970, 1, 1, tzinfo=UTC) + timedelta(
            microseconds=to_micros(when)
        ) == when.astimezone(UTC)


def test_times_have_known_numbers() -> None:
    assert (
        to_micros(datetime(2026, 11, 21, 12, 0, 0, 1, tzinfo=timezone(timedelta(hours=2))))
        == 1_795_255_200_000_001
    )
    assert to_micros(None) == to_micros(0) == 0
    assert to_micros(datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)) == limits.TIME


@pytest.mark.parametrize(
    "when",
    [
        -1,
        limits.TIME + 1,
        1.0,
        True,
        "2026-11-21",
        float("nan"),
        datetime(1969, 12, 31, tzinfo=UTC),
    ],
)
def test_other_times_are_refused(when: int) -> None:
    with pytest.raises(LocalProtocolError, match="time_ns"):
        to_micros(when)


def test_a_time_without_a_zone_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="astimezone"):
        to_micros(datetime(2026, 11, 21))  # noqa: DTZ001  # the point of the test


def test_decisions_have_the_numbers_of_the_wire() -> None:
    assert [int(decision) for decision in (message.COMMIT, message.ROLLBACK, message.UNKNOWN)] == [
        1,
        2,
        3,
    ]
    assert list(Decision) == [message.COMMIT, message.ROLLBACK, message.UNKNOWN]


@given(st.timedeltas(timedelta(microseconds=1), timedelta(days=3_649)), our.times)
def test_a_span_counts_from_the_moment_that_is_meant(length: timedelta, start: int) -> None:
    assert resolve_time(time_or_duration(None, length), start) - start == length // timedelta(
        microseconds=1
    )


@given(our.moments, our.times)
def test_a_time_is_that_time_whatever_the_moment(when: int, start: int) -> None:
    assert resolve_time(time_or_duration(when, None), start) == when


@pytest.mark.parametrize("when", [1, 1_795_255_200, 1_795_255_200_000, limits.DURATION - 1])
def test_a_time_in_seconds_or_milliseconds_is_refused_rather_than_read_as_a_span(when: int) -> None:
    with pytest.raises(LocalProtocolError, match="microseconds since 1970"):
        time_or_duration(when, None)


def test_a_time_and_a_span_at_once_are_refused() -> None:
    with pytest.raises(LocalProtocolError, match="deliver_at or delay"):
        time_or_duration(limits.DURATION, 1)


def test_levels_of_delay_are_those_of_rocketmq() -> None:
    table = ("1s", "5s", "10s", "30s", *(f"{n}m" for n in range(1, 11)), "20m", "30m", "1h", "2h")
    seconds = [int(level[:-1]) * {"s": 1, "m": 60, "h": 3_600}[level[-1]] for level in table]
    assert [message.delay_level(n).total_seconds() for n in range(1, 19)] == seconds


@pytest.mark.parametrize("level", [0, 19, -1, "3", True])
def test_there_is_no_other_level(level: int) -> None:
    with pytest.raises(LocalProtocolError, match="1 to 18"):
        message.delay_level(level)

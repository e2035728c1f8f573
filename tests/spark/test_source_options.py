"""Options of the data source, and the offsets that they select."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from txmq.errors import ConfigError, LocalProtocolError
from txmq_spark import TxmqDataSource
from txmq_spark.source.options import (
    ReadOptions,
    parse_read_options,
    parse_write_options,
    require_batch,
    require_stream,
)

URL = {"url": "txmq://127.0.0.1:7650"}
TOPIC = URL | {"topic": "orders"}


def test_several_topics_are_read_together() -> None:
    wanted = parse_read_options(URL | {"topic": "orders, refunds"})
    assert wanted.topics == ("orders", "refunds")


def test_topics_are_named_or_match_a_pattern_as_a_whole() -> None:
    by_pattern = parse_read_options(URL | {"topicPattern": "orders(-eu)?"})
    assert [
        name for name in ("orders", "orders-eu", "orders-us", "x") if by_pattern.selects(name)
    ] == ["orders", "orders-eu"]
    assert not parse_read_options(URL | {"topicPattern": ".*"}).selects("_txmq.audit")
    assert parse_read_options(URL | {"topic": "_txmq.audit"}).selects("_txmq.audit")
    assert parse_read_options(TOPIC).selects("orders")
    assert not parse_read_options(TOPIC).selects("orders-eu")


def test_columns_are_read_in_the_order_of_their_names() -> None:
    source = TxmqDataSource(TOPIC | {"columns": "key, offset"})
    assert source.schema().simpleString() == "struct<key:string,offset:bigint>"
    with pytest.raises(ConfigError, match="no column 'colour'"):
        TxmqDataSource(TOPIC | {"columns": "colour"}).schema()


def test_letters_of_several_groups_and_states_are_read_together() -> None:
    wanted = parse_read_options(URL | {"letters": "billing, mail@a", "states": "open,abandoned"})
    assert (wanted.letters, wanted.states) == (("billing", "mail@a"), ("open", "abandoned"))


@pytest.mark.parametrize(
    ("options", "check", "says"),
    [
        (TOPIC | {"maxOffsetsPerTrigger": "5"}, require_batch, "no triggers"),
        (TOPIC | {"startingOffsets": "latest"}, require_batch, "is empty"),
        (URL | {"letters": "billing", "states": "open"}, require_stream, "when it dies"),
        (URL | {"letters": "g", "startingTimestamp": "5"}, require_stream, "have no offsets"),
        (TOPIC | {"endingTimestamp": "5"}, require_stream, "has no end"),
    ],
)
def test_batches_and_streams_refuse_each_others_options(
    options: dict[str, str], check: Callable[[ReadOptions], None], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        check(parse_read_options(options))


BAD: list[tuple[dict[str, str], str]] = [
    ({"topic": "orders"}, "url"),
    (URL, "either a topic"),
    (TOPIC | {"letters": "billing"}, "either a topic"),
    (TOPIC | {"startingOffset": "earliest"}, "no such option"),
    (TOPIC | {"startingOffsets": "first"}, "invalid offsets"),
    (TOPIC | {"startingOffsets": '{"orders": {"0": -1}}'}, "invalid offsets"),
    (TOPIC | {"endingOffsets": '{"orders": 4}'}, "invalid offsets"),
    (TOPIC | {"endingOffsets": '{"orders": {"0": 18446744073709551616}}'}, "invalid offsets"),
    (TOPIC | {"endingOffsets": "[" * 100_000}, "invalid offsets"),
    (TOPIC | {"minPartitions": "many"}, "invalid number"),
    (TOPIC | {"minPartitions": "0"}, "invalid number"),
    (TOPIC | {"minPartitions": "²"}, "invalid number"),
    (TOPIC | {"minPartitions": "9" * 5_000}, "invalid number"),
    (TOPIC | {"topicPattern": "x"}, "either a topic"),
    (URL | {"topicPattern": "("}, "invalid pattern"),
    (URL | {"letters": "billing", "states": "dead"}, "no such state"),
    (TOPIC | {"startingTimestamp": "2026-01-01T00:00:00"}, "has no zone"),
    (TOPIC | {"startingTimestamp": "yesterday"}, "invalid time"),
    (TOPIC | {"startingTimestamp": "9" * 30}, "out of range"),
    (TOPIC | {"startingTimestamp": "0001-01-01T00:00:00Z"}, "out of range"),
    (TOPIC | {"endingTimestamp": "5", "endingOffsets": "latest"}, "is given, too"),
    (TOPIC | {"failOnDataLoss": "perhaps"}, "invalid value"),
    (URL | {"letters": "g", "select": '{"colour": "red"}'}, "invalid selection"),
    (URL | {"letters": "g", "select": '{"states": ["open"]}'}, "an option of their own"),
    (TOPIC | {"select": "{}"}, "no letters"),
]


@pytest.mark.parametrize(("options", "says"), BAD)
def test_invalid_options_are_refused(options: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_read_options(options)


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "file:///etc/passwd", "a b", "", ".hidden", "a" * 128]
)
def test_invalid_names_are_refused(name: str) -> None:
    with pytest.raises((LocalProtocolError, ConfigError)):
        parse_read_options(URL | {"topic": name})
    with pytest.raises((LocalProtocolError, ConfigError)):
        parse_read_options(URL | {"letters": name})


@pytest.mark.parametrize(
    "options",
    [
        {"topic": "orders"},
        TOPIC | {"idempotency_key": " "},
        TOPIC | {"mode": "x"},
        URL | {"topic": "a/b"},
    ],
)
def test_a_write_with_other_options_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, LocalProtocolError)):
        parse_write_options(options)

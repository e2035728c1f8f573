"""Options of the data source, which Spark passes as texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Final, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from txmq.errors import ConfigError
from txmq.model import limits
from txmq.model.message import check_name
from txmq_spark.arrow_messages import OffsetRange

EARLIEST, LATEST = "earliest", "latest"
READ_OPTIONS: Final = frozenset(
    {"url", "topic", "letters", "startingoffsets", "endingoffsets", "minpartitions", "path"}
)
WRITE_OPTIONS: Final = frozenset({"url", "topic", "idempotency_key", "path"})
KEY_HINT: Final = "name the data: a second write with the same key sends nothing"

Offset = Annotated[int, Field(ge=0, le=limits.SEQUENCE)]
_OFFSETS: Final = TypeAdapter(dict[str, dict[int, Offset]])

Ends = Mapping[str, Sequence[int]]  # by topic, then by partition
Offsets = Mapping[str, Mapping[int, int]]  # by topic and partition, as given in an option
ALL_OFFSETS: Final[Offsets] = MappingProxyType({})


class ReadOptions(NamedTuple):
    """Options of a read: topics between two sets of offsets, or the letters of a
    group.
    """

    url: str
    topics: tuple[str, ...] = ()
    letters: str | None = None
    start: Offsets = ALL_OFFSETS
    end: Offsets = ALL_OFFSETS
    min_partitions: int = 1


class WriteOptions(NamedTuple):
    """Options of a write. `topic` is None where a column names the topic."""

    url: str
    topic: str | None
    idempotency_key: str | None


def parse_read_options(options: Mapping[str, str]) -> ReadOptions:
    """Return the checked options of a read. Raises ConfigError."""
    _require_known(options, READ_OPTIONS)
    letters, topic = options.get("letters"), options.get("topic")
    if (letters is None) == (topic is None):
        raise ConfigError(
            "topic",
            "either a topic or letters must be given",
            hint='option("topic", "orders,payments")',
        )
    return ReadOptions(
        url=_required(options, "url"),
        topics=()
        if topic is None
        else tuple(check_name(name.strip(), "topic") for name in topic.split(",")),
        letters=None if letters is None else _group_name(letters),
        start=_offsets(options, "startingOffsets", EARLIEST),
        end=_offsets(options, "endingOffsets", LATEST),
        min_partitions=_count(options, "minPartitions"),
    )


def parse_write_options(options: Mapping[str, str]) -> WriteOptions:
    """Return the checked options of a write. Raises ConfigError."""
    _require_known(options, WRITE_OPTIONS)
    topic, key = options.get("topic"), options.get("idempotency_key")
    if topic is not None:
        check_name(topic, "topic")
    if key is not None and not key.strip():
        raise ConfigError("idempotency_key", "the key is empty", hint=KEY_HINT)
    return WriteOptions(_required(options, "url"), topic, key)


def plan_ranges(
    options: ReadOptions, published: Ends, firsts: Ends | None = None
) -> list[OffsetRange]:
    """Return the offset ranges to read, at least `min_partitions` of them if possible.

    A partition without a start is read from its first offset in `firsts`, or from 0.
    Raises ConfigError for offsets that the topics do not have.
    """
    _require_existing(options, published)
    kept = {topic: dict(enumerate(offsets)) for topic, offsets in (firsts or {}).items()}
    starts = {
        topic: kept.get(topic, {}) | dict(options.start.get(topic, {})) for topic in published
    }
    whole = [
        OffsetRange(
            topic, partition, starts[topic].get(partition, 0), _end(options, topic, partition, end)
        )
        for topic, ends in published.items()
        for partition, end in enumerate(ends)
    ]
    filled = [offsets for offsets in whole if offsets.start < offsets.end]
    rows = sum(offsets.end - offsets.start for offsets in filled)
    step = (
        -(-rows // max(options.min_partitions, 1))
        if len(filled) < options.min_partitions
        else limits.SEQUENCE
    )
    return [
        offsets._replace(start=start, end=min(start + step, offsets.end))
        for offsets in filled
        for start in range(offsets.start, offsets.end, step)
    ]


def _end(options: ReadOptions, topic: str, partition: int, published: int) -> int:
    end = options.end.get(topic, {}).get(partition, published)
    if end > published:
        hint = "choose an end up to the published one"
        raise ConfigError(
            "endingOffsets", f"{topic}/{partition} ends at {published}, not at {end}", hint=hint
        )
    return end


def _require_existing(options: ReadOptions, published: Ends) -> None:
    for name, offsets in (("startingOffsets", options.start), ("endingOffsets", options.end)):
        for topic, partitions in offsets.items():
            ends = published.get(topic, ())
            unknown = [f"{topic}/{number}" for number in partitions if not 0 <= number < len(ends)]
            if not ends or unknown:
                what = unknown[0] if ends else topic
                raise ConfigError(
                    name,
                    f"{what} is not among the partitions to read",
                    hint="name existing topics and partitions of this read",
                )


def _group_name(name: str) -> str:
    """Check the name of a consumer group, or of a broadcast member: `group@member`."""
    for part in name.split("@", 1):
        check_name(part, "consumer group")
    return name


def _require_known(options: Mapping[str, str], names: frozenset[str]) -> None:
    unknown = sorted(option for option in options if option.lower() not in names)
    if unknown:
        raise ConfigError(
            unknown[0],
            "no such option",
            hint=f"use one of {', '.join(sorted(names - {'path'}))}",
        )


def _required(options: Mapping[str, str], name: str) -> str:
    if not (value := options.get(name)):
        raise ConfigError(name, "the option is missing", hint=f'add option("{name}", ...)')
    return value


def _offsets(options: Mapping[str, str], name: str, default: str) -> Offsets:
    text = options.get(name, default)
    if text == default:
        return {}
    try:
        return _OFFSETS.validate_json(text)
    except ValidationError as error:
        hint = f'use "{default}", or JSON such as {{"orders": {{"0": 23, "1": 0}}}}'
        raise ConfigError(
            name, f"invalid offsets {text[:200]!r}: {error.errors()[0]['msg']}", hint=hint
        ) from None


def _count(options: Mapping[str, str], name: str) -> int:
    text = options.get(name, "1")
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= 100_000):
        raise ConfigError(
            name, f"invalid number of partitions {text[:80]!r}", hint="use 1 to 100000"
        )
    return int(text)

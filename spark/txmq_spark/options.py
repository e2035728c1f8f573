"""Options of the data source, which Spark hands over as texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Final, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from txmq.errors import ConfigError
from txmq.model import limits
from txmq.model.message import check_name
from txmq_spark.columns import Span

EARLIEST, LATEST = "earliest", "latest"
READING: Final = frozenset(
    {"url", "topic", "letters", "startingoffsets", "endingoffsets", "minpartitions", "path"}
)
WRITING: Final = frozenset({"url", "topic", "idempotency_key", "path"})
KEY_HINT: Final = "text that names the data: the same key again sends nothing"

Offset = Annotated[int, Field(ge=0, le=limits.SEQUENCE)]
_OFFSETS: Final = TypeAdapter(dict[str, dict[int, Offset]])

Ends = Mapping[str, Sequence[int]]  # of each topic, by partition
Offsets = Mapping[str, Mapping[int, int]]  # as asked for
EVERYTHING: Final[Offsets] = MappingProxyType({})


class Reading(NamedTuple):
    """What to read: the messages of topics between two sets of offsets, or the letters
    of a consumer group.
    """

    url: str
    topics: tuple[str, ...] = ()
    letters: str | None = None
    start: Offsets = EVERYTHING
    end: Offsets = EVERYTHING
    least_partitions: int = 1


class Writing(NamedTuple):
    """Where to write. `topic` is None where a column says it."""

    url: str
    topic: str | None
    idempotency_key: str | None


def reading(options: Mapping[str, str]) -> Reading:
    """Checked options of a read. Raises ConfigError."""
    _known(options, READING)
    letters, topic = options.get("letters"), options.get("topic")
    if (letters is None) == (topic is None):
        raise ConfigError(
            "topic",
            "either a topic or `letters` is needed",
            hint='option("topic", "orders,payments")',
        )
    return Reading(
        url=_required(options, "url"),
        topics=()
        if topic is None
        else tuple(check_name(name.strip(), "topic") for name in topic.split(",")),
        letters=None if letters is None else _group(letters),
        start=_offsets(options, "startingOffsets", EARLIEST),
        end=_offsets(options, "endingOffsets", LATEST),
        least_partitions=_count(options, "minPartitions"),
    )


def writing(options: Mapping[str, str]) -> Writing:
    """Checked options of a write. Raises ConfigError."""
    _known(options, WRITING)
    topic, key = options.get("topic"), options.get("idempotency_key")
    if topic is not None:
        check_name(topic, "topic")
    if key is not None and not key.strip():
        raise ConfigError("idempotency_key", "it is empty", hint=KEY_HINT)
    return Writing(_required(options, "url"), topic, key)


def spans(wanted: Reading, published: Ends, firsts: Ends | None = None) -> list[Span]:
    """What is to be read, frozen: each partition from its start to its end, cut so that
    there are enough of them.

    Where no start is named it is the first message that is kept: `firsts`, 0 where
    those do not say. Raises ConfigError for offsets that the topics do not have.
    """
    _existing(wanted, published)
    kept = {topic: dict(enumerate(offsets)) for topic, offsets in (firsts or {}).items()}
    starts = {topic: kept.get(topic, {}) | dict(wanted.start.get(topic, {})) for topic in published}
    whole = [
        Span(topic, partition, starts[topic].get(partition, 0), _end(wanted, topic, partition, end))
        for topic, ends in published.items()
        for partition, end in enumerate(ends)
    ]
    filled = [span for span in whole if span.start < span.end]
    rows = sum(span.end - span.start for span in filled)
    step = (
        -(-rows // max(wanted.least_partitions, 1))
        if len(filled) < wanted.least_partitions
        else limits.SEQUENCE
    )
    return [
        span._replace(start=start, end=min(start + step, span.end))
        for span in filled
        for start in range(span.start, span.end, step)
    ]


def _end(wanted: Reading, topic: str, partition: int, published: int) -> int:
    end = wanted.end.get(topic, {}).get(partition, published)
    if end > published:
        hint = "offsets up to the published end can be read"
        raise ConfigError(
            "endingOffsets", f"{topic}/{partition} ends at {published}, not at {end}", hint=hint
        )
    return end


def _existing(wanted: Reading, published: Ends) -> None:
    for name, offsets in (("startingOffsets", wanted.start), ("endingOffsets", wanted.end)):
        for topic, partitions in offsets.items():
            ends = published.get(topic, ())
            unknown = [f"{topic}/{number}" for number in partitions if not 0 <= number < len(ends)]
            if not ends or unknown:
                what = unknown[0] if ends else topic
                raise ConfigError(
                    name,
                    f"{what} is none of what is read",
                    hint="name topics and partitions there are",
                )


def _group(name: str) -> str:
    """The name of a consumer group, or of one member's own: `group@member`."""
    for part in name.split("@", 1):
        check_name(part, "consumer group")
    return name


def _known(options: Mapping[str, str], names: frozenset[str]) -> None:
    unknown = sorted(option for option in options if option.lower() not in names)
    if unknown:
        raise ConfigError(
            unknown[0],
            "there is no such option",
            hint=f"there are: {', '.join(sorted(names - {'path'}))}",
        )


def _required(options: Mapping[str, str], name: str) -> str:
    if not (value := options.get(name)):
        raise ConfigError(name, "it is needed", hint=f'option("{name}", ...)')
    return value


def _offsets(options: Mapping[str, str], name: str, default: str) -> Offsets:
    text = options.get(name, default)
    if text == default:
        return {}
    try:
        return _OFFSETS.validate_json(text)
    except ValidationError as error:
        hint = f'"{default}", or JSON such as {{"orders": {{"0": 23, "1": 0}}}}'
        raise ConfigError(
            name, f"{text[:200]!r} names no offsets: {error.errors()[0]['msg']}", hint=hint
        ) from None


def _count(options: Mapping[str, str], name: str) -> int:
    text = options.get(name, "1")
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= 100_000):
        raise ConfigError(name, f"{text[:80]!r} is no number of partitions")
    return int(text)

"""Options of the data source, which Spark passes as texts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Annotated, Any, Final, NamedTuple
from uuid import UUID

from pydantic import Field, TypeAdapter, ValidationError

from txmq.errors import ConfigError
from txmq.model import limits
from txmq.model.message import check_name
from txmq.model.own_topics import is_own
from txmq.model.units import MILLISECOND, SECOND
from txmq.wire.calls.letters import SelectionArgs
from txmq_spark.source.broker_urls import full_url

EARLIEST, LATEST = "earliest", "latest"
BROKER_NAMES: Final = ("url", "user", "passwordFile", "ca")
READ_NAMES: Final = (
    *BROKER_NAMES,
    "topic",
    "topicPattern",
    "letters",
    "log",
    "states",
    "select",
    "columns",
    "pushFilters",
    "startingOffsets",
    "startingTimestamp",
    "endingOffsets",
    "endingTimestamp",
    "minPartitions",
    "maxPartitionBytes",
    "maxOffsetsPerTrigger",
    "failOnDataLoss",
)
WRITE_NAMES: Final = (*BROKER_NAMES, "topic", "idempotency_key")
# Spark passes options of its own, too.
OF_SPARK: Final = frozenset({"path", "checkpointlocation", "queryname"})
KEY_HINT: Final = "name the data: a second write with the same key sends nothing"
LETTER_STATES: Final = ("open", "replaying", "abandoned", "local")
MAX_PARTITIONS: Final = 100_000
PARTITION_BYTES: Final = 128 << 20  # as Spark's spark.sql.files.maxPartitionBytes

Offset = Annotated[int, Field(ge=0, le=limits.SEQUENCE)]
_OFFSETS: Final = TypeAdapter(dict[str, dict[int, Offset]])

Offsets = Mapping[str, Mapping[int, int]]  # by topic and partition, as given in an option
NO_OFFSETS: Final[Offsets] = MappingProxyType({})
NO_SELECTION: Final[Mapping[str, Any]] = MappingProxyType({})


class Bound(NamedTuple):
    """Start or end of a read: offsets, or a time in microseconds.

    `given` has the offsets of some partitions. For the others, the time decides if
    there is one, else `default`.
    """

    default: str
    given: Offsets = NO_OFFSETS
    time: int | None = None


class ReadOptions(NamedTuple):
    """Options of a read: topics between two bounds, or the letters of groups.

    `pattern` matches whole names of topics. `states` () = the open letters, also those
    that an undecided transaction replays. `select` has other arguments of a selection
    of the broker. `max_offsets` 0 = no limit.
    """

    url: str
    topics: tuple[str, ...] = ()
    pattern: str | None = None
    letters: tuple[str, ...] = ()
    log: str | None = None  # the id of one of several logs; None = all of them
    states: tuple[str, ...] = ()
    select: Mapping[str, Any] = NO_SELECTION
    push_filters: bool = False
    columns: tuple[str, ...] = ()  # () = all
    start: Bound = Bound(EARLIEST)
    end: Bound = Bound(LATEST)
    min_partitions: int = 1
    partition_bytes: int = PARTITION_BYTES
    max_offsets: int = 0
    fail_on_data_loss: bool = True

    def selects(self, topic: str) -> bool:
        """Return True if the topic is one of those to read.

        A pattern does not match the broker's own topics.
        """
        if self.pattern is None:
            return topic in self.topics
        return not is_own(topic) and re.fullmatch(self.pattern, topic) is not None


class WriteOptions(NamedTuple):
    """Options of a write. `topic` is None where a column names the topic."""

    url: str
    topic: str | None
    idempotency_key: str | None


def parse_read_options(options: Mapping[str, str]) -> ReadOptions:
    """Return the checked options of a read. Raises ConfigError."""
    _require_known(options, READ_NAMES)
    letters, topic = options.get("letters"), options.get("topic")
    pattern = options.get("topicPattern")
    if sum(given is not None for given in (letters, topic, pattern)) != 1:
        raise ConfigError(
            "topic",
            "either a topic, a topicPattern or letters must be given",
            hint='option("topic", "orders,payments")',
        )
    return ReadOptions(
        url=_url(options),
        topics=() if topic is None else tuple(check_name(one, "topic") for one in _list(topic)),
        pattern=None if pattern is None else _pattern(pattern),
        letters=() if letters is None else tuple(_group_name(one) for one in _list(letters)),
        log=None if options.get("log") is None else _log_id(options["log"]),
        states=_states(options.get("states")),
        select=_selection(options),
        push_filters=_switch(options, "pushFilters", default=False),
        columns=_list(options["columns"]) if options.get("columns") else (),
        start=_bound(options, "startingOffsets", "startingTimestamp", EARLIEST),
        end=_bound(options, "endingOffsets", "endingTimestamp", LATEST),
        min_partitions=_count(options, "minPartitions", 1, MAX_PARTITIONS),
        partition_bytes=_count(options, "maxPartitionBytes", PARTITION_BYTES, 1 << 60),
        max_offsets=_count(options, "maxOffsetsPerTrigger", 0, limits.SEQUENCE),
        fail_on_data_loss=_switch(options, "failOnDataLoss", default=True),
    )


def require_batch(options: ReadOptions) -> None:
    """Raise ConfigError for options that only a stream has."""
    if options.max_offsets:
        raise ConfigError(
            "maxOffsetsPerTrigger", "a batch has no triggers", hint="use it with readStream"
        )
    if options.start.default == LATEST:
        raise ConfigError(
            "startingOffsets",
            "a batch from the latest offsets is empty",
            hint="use readStream, or startingTimestamp",
        )


def require_stream(options: ReadOptions) -> None:
    """Raise ConfigError for options that a stream cannot have."""
    if options.letters and (options.states or options.select):
        raise ConfigError(
            "states" if options.states else "select",
            "a stream has each letter once, when it dies",
            hint="leave it out, or use spark.read",
        )
    if options.letters and (options.start.given or options.start.time is not None):
        raise ConfigError(
            "startingOffsets",
            "letters have no offsets",
            hint='use "earliest" (all that are there) or "latest"',
        )
    if options.end != Bound(LATEST):
        raise ConfigError(
            "endingOffsets",
            "a stream has no end",
            hint="use spark.read, or trigger(availableNow=True)",
        )


def parse_write_options(options: Mapping[str, str]) -> WriteOptions:
    """Return the checked options of a write. Raises ConfigError."""
    _require_known(options, WRITE_NAMES)
    topic, key = options.get("topic"), options.get("idempotency_key")
    if topic is not None:
        check_name(topic, "topic")
    if key is not None and not key.strip():
        raise ConfigError("idempotency_key", "the key is empty", hint=KEY_HINT)
    return WriteOptions(_url(options), topic, key)


def parse_time(text: str, name: str) -> int:
    """Return a time in microseconds: milliseconds since 1970 in digits, as Kafka's
    options have them, or ISO 8601 with a zone. Raises ConfigError.
    """
    hint = f'option("{name}", "2026-01-31T08:00:00Z"), or milliseconds since 1970'
    if text.isascii() and text.isdigit():
        micros = int(text) * MILLISECOND
    else:
        try:
            at = datetime.fromisoformat(text)
        except ValueError:
            raise ConfigError(name, f"invalid time {text[:80]!r}", hint=hint) from None
        if at.tzinfo is None:
            raise ConfigError(name, f"time {text!r} has no zone", hint=hint)
        micros = int(at.timestamp()) * SECOND + at.microsecond
    if not 0 <= micros <= limits.TIME:
        raise ConfigError(name, f"time {text[:80]!r} is out of range", hint=hint)
    return micros


def _list(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one.strip() for one in text.split(",")))


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ConfigError(
            "topicPattern", f"invalid pattern {text[:200]!r}: {error}", hint='"orders-.*"'
        ) from None
    return text


def _log_id(text: str) -> str:
    try:
        return str(UUID(text))
    except ValueError:
        raise ConfigError("log", f"invalid id {text[:80]!r}", hint="txmq cluster logs") from None


def _states(text: str | None) -> tuple[str, ...]:
    states = () if text is None else _list(text)
    unknown = [state for state in states if state not in LETTER_STATES]
    if unknown:
        raise ConfigError(
            "states", f"no such state {unknown[0]!r}", hint=f"use {', '.join(LETTER_STATES)}"
        )
    return states


def _selection(options: Mapping[str, str]) -> Mapping[str, Any]:
    text = options.get("select")
    if text is None:
        return NO_SELECTION
    hint = 'use JSON such as {"error_type": "shop.BadOrder", "died_from": 1767225600000000}'
    try:
        chosen = SelectionArgs.model_validate_json(text).model_dump(exclude_unset=True)
    except ValidationError as error:
        raise ConfigError(
            "select", f"invalid selection {text[:200]!r}: {error.errors()[0]['msg']}", hint=hint
        ) from None
    if "states" in chosen or "letters" not in options:
        what = "states are an option of their own" if "states" in chosen else "there are no letters"
        raise ConfigError("select", what, hint='option("letters", ...).option("states", ...)')
    return chosen


def _group_name(name: str) -> str:
    """Check the name of a consumer group, or of a broadcast member: `group@member`."""
    for part in name.split("@", 1):
        check_name(part, "consumer group")
    return name


def _require_known(options: Mapping[str, str], names: tuple[str, ...]) -> None:
    if any(option.lower() == "password" for option in options):
        raise ConfigError(
            "password",
            "a password is no option: Spark may show it",
            hint='option("passwordFile", ...), or TXMQ_PASSWORD in the environment of executors',
        )
    known = {name.lower() for name in names} | OF_SPARK
    unknown = sorted(option for option in options if option.lower() not in known)
    if unknown:
        raise ConfigError(unknown[0], "no such option", hint=f"use one of {', '.join(names)}")


def _url(options: Mapping[str, str]) -> str:
    more = (options.get(name) for name in BROKER_NAMES[1:])
    return full_url(_required(options, "url"), *more)


def _required(options: Mapping[str, str], name: str) -> str:
    if not (value := options.get(name)):
        raise ConfigError(name, "the option is missing", hint=f'add option("{name}", ...)')
    return value


def _bound(options: Mapping[str, str], offsets: str, time: str, default: str) -> Bound:
    text, at = options.get(offsets), options.get(time)
    if text is not None and at is not None:
        raise ConfigError(time, f"{offsets} is given, too", hint="give one of the two")
    if at is not None:
        return Bound(default, time=parse_time(at, time))
    if text is None or text == default:
        return Bound(default)
    if offsets == "startingOffsets" and text == LATEST:
        return Bound(LATEST)
    try:
        return Bound(default, _OFFSETS.validate_json(text))
    except ValidationError as error:
        hint = f'use "{default}", or JSON such as {{"orders": {{"0": 23, "1": 0}}}}'
        raise ConfigError(
            offsets, f"invalid offsets {text[:200]!r}: {error.errors()[0]['msg']}", hint=hint
        ) from None


def _count(options: Mapping[str, str], name: str, default: int, most: int) -> int:
    text = options.get(name, str(default))
    if text == str(default):
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 20 and 0 < int(text) <= most):
        raise ConfigError(name, f"invalid number {text[:80]!r}", hint=f"use 1 to {most}")
    return int(text)


def _switch(options: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = options.get(name, str(default)).lower()
    if text not in ("true", "false"):
        raise ConfigError(name, f"invalid value {text[:80]!r}", hint="use true or false")
    return text == "true"

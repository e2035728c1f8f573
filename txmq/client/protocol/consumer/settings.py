"""The settings of a consumer, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from hashlib import sha256
from math import inf
from os import PathLike
from typing import Any, Literal, TypedDict, Unpack, get_args

from txmq.client.protocol.typed.bodies import Topics, TypedBodies, models_of, topic_names
from txmq.errors import LocalProtocolError
from txmq.errors.validation import check_options
from txmq.model.durations import Duration, micros_of, seconds_of
from txmq.model.message import check_name, to_micros
from txmq.model.retry import RetryPolicy
from txmq.model.units import MIB
from txmq.selector import Selector, parse

Mode = Literal["concurrent", "ordered", "broadcast"]
OnFailure = Literal["broker", "local"]
OnExhausted = Literal["park", "block", "skip"]
Strategy = Literal["average", "circular", "consistent", "sticky"]
Start = Literal["first", "last"]
MAX_FILTER = 200  # characters of what a member tells of its filter
STORE_LIMITS = ("local_store_bytes", "local_store_messages")


class ConsumerOptions(TypedDict, total=False):
    """The keyword arguments of `client.consumer`.

    What is left out is as the group has it, or the default.

    `mode`: "concurrent"; "ordered", each key strictly in order; or "broadcast", every
    member gets everything, and its position is stored by the name of the `member`.
    `tags`: only messages with one of them. `selector`: only messages whose headers
    satisfy this condition, in SQL-92's syntax (see `txmq.selector`). A message that one
    member does not want is settled for the whole group, so that all members should want
    the same: an alarm names those that differ. What the group has accepted before, such
    as a retry or a replayed letter, comes whatever they say. `start`: where a topic new
    to the group begins: "first", "last", a time, or a timedelta ago. The default is
    "first", and "last" for a broadcast member without a name.

    `on_exhausted`: "park", "block" or "skip", what becomes of a message that failed for
    good; in an ordered group, of its key. `max_parked`: how many messages may wait
    behind a failed one of their key, 10,000. When more arrive the partition stalls, and
    an alarm reports it. `flood_keys`: when so many keys fail alike, 20, and fewer
    succeed, the circuit breaker of the group opens. Then one message at a time is
    delivered as a probe, no failure counts, and delivery goes on once a probe succeeds;
    0 = never. `retry`: the delays and the number of retries.

    `on_failure`: "broker" or "local", who stores failed messages and retries them: the
    broker, or this consumer, on its disk. `local_store`: the directory for that, needed
    for "local". With "broker" it takes failed messages while the broker cannot be
    reached. One process at a time may use it for a group, and the next one continues.
    `local_store_bytes`, 1 GiB, and `local_store_messages`, 1,000,000, limit each
    topic's store; nothing is fetched while one is full.

    `attempts_in_place`: how often `run` calls the handler for a message, 1, before the
    message has failed; the pauses begin with 0.1 s and double. To the broker they are
    one attempt.

    `static`: the named `member` keeps its partitions while it is away, for as long as
    its session. Within that time neither `close` nor a restart causes a rebalance.
    `version`: of the program; a new one may begin a replay (`txmq policy`).
    `strategy`: how partitions are assigned. `lease`: how long a message stays with a
    consumer that gives no sign of life, 60 s. `session`: how long a member may be
    silent, 30 s. `prefetch_messages` and `prefetch_bytes`: limits of the local queue; a
    batch is fetched whole, with all its bytes. `messages_per_s`: the consumer hands out
    no more than so many messages a second; for a whole group there is `txmq group alter
    --limit`. `span`: how many messages of a partition
    may be delivered beyond the first unsettled one; 0 = any number.
    `consume_timeout`: a handler that holds one message for longer, 900 s, has failed.
    The message is retried by the policy, and later acks and nacks of it have no effect.
    `extend` gives the handler more time. The time of a batch begins anew with every
    message of it that is settled.
    """

    mode: Mode
    tags: Collection[str] | None
    selector: str | None
    start: Start | datetime | timedelta | int | None
    on_exhausted: OnExhausted | None
    on_failure: OnFailure
    local_store: str | PathLike[str] | None
    local_store_bytes: int
    local_store_messages: int
    attempts_in_place: int
    retry: RetryPolicy | None
    member: str | None
    static: bool
    version: str | None
    strategy: Strategy | None
    max_parked: int | None
    flood_keys: int | None
    span: int | None
    lease: Duration | None
    consume_timeout: Duration | None
    session: Duration | None
    prefetch_messages: int
    prefetch_bytes: int
    messages_per_s: float | None


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    """The checked settings of one consumer, explained in `ConsumerOptions`. A `start`
    that is a time is in µs. `models` are the typed ones of the topics.
    """

    group: str
    topics: tuple[str, ...]
    mode: Mode = "concurrent"
    tags: frozenset[str] | None = None
    selector: Selector | None = None
    start: Start | int | None = None
    on_exhausted: OnExhausted | None = None
    retry: RetryPolicy | None = None
    attempts_in_place: int = 1
    on_failure: OnFailure = "broker"
    local_store: str | None = None
    local_store_bytes: int = 1_024 * MIB
    local_store_messages: int = 1_000_000
    member: str | None = None
    static: bool = False
    version: str | None = None
    strategy: Strategy | None = None
    max_parked: int | None = None
    flood_keys: int | None = None
    span: int | None = None
    lease: float | None = None
    consume_timeout: float | None = None
    session: float | None = None
    prefetch_messages: int = 16_384
    prefetch_bytes: int = 16 * MIB
    messages_per_s: float | None = None
    models: Mapping[str, TypedBodies[Any]] = field(default_factory=dict)

    @property
    def ordered(self) -> bool:
        """True if messages of one key are delivered strictly one after the other."""
        return self.mode == "ordered"

    def join_args(self, instance: str) -> dict[str, Any]:
        """Return the arguments of `consumer.join`, without those of a rejoin."""
        return {
            "group": self.group,
            "instance": instance,
            "mode": self.mode,
            "topics": list(self.topics),
            "start": self.start,
            "on_exhausted": self.on_exhausted,
            "retry": None if self.retry is None else self.retry.to_json(),
            "lease_ms": _milliseconds(self.lease),
            "session_ms": _milliseconds(self.session),
            "consume_timeout_ms": _milliseconds(self.consume_timeout),
            "strategy": self.strategy,
            "max_parked": self.max_parked,
            "flood_keys": self.flood_keys,
            "span": self.span,
            "static": self.static,
            "version": self.version or "",
            "filter": self.filter,
        }

    @property
    def filter(self) -> str:
        """A text of the messages that the member takes, for operators and for the
        comparison with other members; "" = all. The end of a long one is its digest.
        """
        parts = []
        if self.tags is not None:
            parts.append(f"tags {', '.join(map(repr, sorted(self.tags)))}")
        if self.selector is not None:
            parts.append(f"selector {self.selector.text}")
        # Half of a surrogate pair cannot be sent.
        text = "; ".join(parts).encode(errors="backslashreplace").decode()
        if len(text) <= MAX_FILTER:
            return text
        digest = sha256(text.encode()).hexdigest()[:16]
        return f"{text[: MAX_FILTER - len(digest) - 2]}… {digest}"


def consumer_settings(
    group: str, topics: Topics, **options: Unpack[ConsumerOptions]
) -> ConsumerSettings:
    """Return the settings that these arguments make.

    Raises LocalProtocolError for invalid ones, ConfigError for one that is none.
    """
    check_options("consumer", options, ConsumerOptions.__optional_keys__)
    check_name(group, "consumer group")
    topics = topics if isinstance(topics, str) else list(topics)
    names = checked_topics(topics)
    if options.get("member") is not None:
        check_name(str(options["member"]), "member")
    if options.get("static") and (
        options.get("member") is None or options.get("mode") == "broadcast"
    ):
        raise LocalProtocolError(
            "a static member needs a name, and a mode other than broadcast",
            hint='give it a name: member="billing-1"',
        )
    _check_choice("mode", options.get("mode", "concurrent"), get_args(Mode))
    _check_choice("on_exhausted", options.get("on_exhausted"), (None, *get_args(OnExhausted)))
    _check_choice("strategy", options.get("strategy"), (None, *get_args(Strategy)))
    _check_choice("on_failure", options.get("on_failure", "broker"), get_args(OnFailure))
    for name in ("prefetch_messages", "prefetch_bytes", "attempts_in_place", *STORE_LIMITS):
        _check_number(name, options.get(name), "use a whole number above 0", above=0)
    _check_rate(options.get("messages_per_s"))
    for name in ("max_parked", "flood_keys", "span"):
        _check_number(name, options.get(name), "use a whole number from 0 up", above=-1)
    fields: dict[str, Any] = dict(options)
    for name in ("consume_timeout", "lease", "session"):
        fields[name] = _positive_seconds(name, fields.get(name))
    _check_retry(fields.get("retry"))
    fields["local_store"] = _local_store(options)
    fields["tags"] = _tags(fields.get("tags"))
    fields["selector"] = _selector(fields.get("selector"))
    fields["start"] = _start(fields.get("start"))
    return ConsumerSettings(group, names, models=models_of(topics), **fields)


def _local_store(options: ConsumerOptions) -> str | None:
    """Return the directory of local stores. Raises LocalProtocolError."""
    directory = options.get("local_store")
    if directory is None:
        if options.get("on_failure") == "local":
            raise LocalProtocolError(
                'on_failure="local" needs a directory for failed messages',
                hint='name one that lasts: local_store="/var/lib/billing/failed"',
            )
        return None
    if options.get("mode") == "broadcast":
        raise LocalProtocolError(
            "a broadcast member has no local store: its group is its own, and nobody else"
            " could adopt the store",
            hint="leave local_store out: the broker stores its failed messages",
        )
    if not isinstance(directory, str | PathLike) or not str(directory):
        raise LocalProtocolError(
            f"local_store is {directory!r}", hint='give a directory: local_store="failed"'
        )
    return str(directory)


def checked_topics(topics: Topics) -> tuple[str, ...]:
    """Return the names of topics, each once. Raises LocalProtocolError."""
    names = () if isinstance(topics, str) else tuple(dict.fromkeys(topic_names(topics)))
    if not names:
        raise LocalProtocolError(
            f"topics is {topics!r}", hint='give a sequence of names: topics=["orders"]'
        )
    return tuple(check_name(name, "topic") for name in names)


def _positive_seconds(name: str, duration: Duration | None) -> float | None:
    seconds = seconds_of(duration, name)
    if seconds == 0:
        raise LocalProtocolError(f"{name} is {duration!r}", hint="give more than 0 seconds")
    return seconds


def _check_number(name: str, value: object, rule: str, *, above: int) -> None:
    """Check a number; None leaves it to the group or the default."""
    fits = isinstance(value, int) and not isinstance(value, bool) and above < value
    if not fits and value is not None:
        raise LocalProtocolError(f"{name} is {value!r}", hint=rule)


def _check_rate(rate: object) -> None:
    fits = isinstance(rate, int | float) and not isinstance(rate, bool) and 0 < rate < inf
    if rate is not None and not fits:
        raise LocalProtocolError(
            f"messages_per_s is {rate!r}", hint="give a number above 0, such as 100 or 0.5"
        )


def _check_retry(policy: object) -> None:
    if not (policy is None or isinstance(policy, RetryPolicy)):
        raise LocalProtocolError(
            f"retry is {policy!r}",
            hint="give a policy: retry=txmq.RetryPolicy(delays=(10, 60, 600), retries=5)",
        )


def _check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        raise LocalProtocolError(
            f"{name} is {value!r}", hint=f"use one of {', '.join(map(repr, choices))}"
        )


def _tags(tags: Collection[str] | None) -> frozenset[str] | None:
    if tags is None:
        return None
    if isinstance(tags, str) or not tags or not all(isinstance(tag, str) and tag for tag in tags):
        raise LocalProtocolError(
            f"tags is {tags!r}", hint='give a collection of texts: tags={"paid", "shipped"}'
        )
    return frozenset(tags)


def _selector(text: str | None) -> Selector | None:
    if text is None:
        return None
    if not isinstance(text, str):
        raise LocalProtocolError(
            f"selector is {text!r:.80}",
            hint="give a text: selector=\"region = 'eu' AND price > 10\"",
        )
    return parse(text)


def _start(start: Start | datetime | timedelta | int | None) -> Start | int | None:
    if isinstance(start, timedelta):
        return -span_in_microseconds(start)
    if start is None or isinstance(start, int | datetime):
        return None if start is None else to_micros(start)
    if start not in get_args(Start):
        raise LocalProtocolError(
            f"start is {start!r}",
            hint='use "first", "last", a datetime with a time zone, or timedelta(hours=2) for'
            " two hours ago",
        )
    return start


def span_in_microseconds(start: timedelta) -> int:
    """Return how many microseconds ago a start is. Raises LocalProtocolError."""
    if not start:
        raise LocalProtocolError(
            f"start is {start!r}", hint='give a timedelta above zero, or "last"'
        )
    return micros_of(start, "start")


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1_000)

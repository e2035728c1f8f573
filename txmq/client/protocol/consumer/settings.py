"""What a consumer is made with, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import inf
from typing import Any, Literal, TypedDict, Unpack

from txmq.errors import LocalProtocolError
from txmq.model.message import check_name, micros
from txmq.model.retry import RetryPolicy
from txmq.selector import Selector, parse

Mode = Literal["concurrent", "ordered", "broadcast"]
OnExhausted = Literal["park", "block", "skip"]
Strategy = Literal["average", "circular", "consistent", "sticky"]
Start = Literal["first", "last"]
MODES, POLICIES = ("concurrent", "ordered", "broadcast"), ("park", "block", "skip")
STRATEGIES, STARTS = ("average", "circular", "consistent", "sticky"), ("first", "last")
MIB = 1 << 20


class Options(TypedDict, total=False):
    """The keyword arguments of `client.consumer`; what is left out is as the group has
    it, or by default.

    `mode`: "concurrent", "ordered" (one key strictly in order) or "broadcast" (every
    member gets everything; where it is, is remembered by the name of the `member`).
    `tags`: only messages with one of them. `selector`: only messages for which this
    condition over their headers is true, after SQL-92 (see `txmq.selector`); what a
    member does not want is done with for its whole group, so that all members should
    want the same. `start`: where a topic new to the group begins: "first", "last", a
    time, or a timedelta ago; by default "first", and "last" for a broadcast member
    without a name. `on_exhausted`: what becomes of a message that failed for good, in
    an ordered group of its key: "park", "block" or "skip". `max_parked`: how many
    messages may wait behind a failed one of their key, 10,000; with more of the key to
    come its partition stands still, and an alarm says so. `flood_keys`: with so many
    keys failing alike, 20, and fewer successes, the group is guarded: one message at a
    time is a probe, no failure counts, and all goes on by itself once a probe succeeds;
    0 = never. `on_failure`: "broker", the only policy yet: the broker keeps what
    failed. `static`: the named `member` keeps its partitions while it is away, for as
    long as its session: neither `close` nor a restart within that time moves anything.
    `lease_s`: how long a message stays with a consumer that gives no sign of life, 60
    s; `session_s`: how long a member may be silent, 30 s. `prefetch_messages` and
    `prefetch_bytes` wait here at most, but what was sent as one batch comes with all
    its bytes. `span`: of a partition at most so many messages go out, from the first
    that is not done with on; 0 = any. `consume_timeout_s`: a handler that holds one
    message for longer, 900 s, has failed: the message is retried as the policy has it,
    and what the handler says of it later has no effect. `extend` gives it more time;
    that of a batch begins anew with every message of it that is done with.
    """

    mode: Mode
    tags: Collection[str] | None
    selector: str | None
    start: Start | datetime | timedelta | int | None
    on_exhausted: OnExhausted | None
    on_failure: Literal["broker"]
    retry: RetryPolicy | None
    member: str | None
    static: bool
    strategy: Strategy | None
    max_parked: int | None
    flood_keys: int | None
    span: int | None
    lease_s: float | None
    consume_timeout_s: float | None
    session_s: float | None
    prefetch_messages: int
    prefetch_bytes: int


@dataclass(frozen=True, slots=True)
class Settings:
    """The checked settings of one consumer; `Options` tells what they mean. A `start`
    that is a time is in µs.
    """

    group: str
    topics: tuple[str, ...]
    mode: Mode = "concurrent"
    tags: frozenset[str] | None = None
    selector: Selector | None = None
    start: Start | int | None = None
    on_exhausted: OnExhausted | None = None
    retry: RetryPolicy | None = None
    member: str | None = None
    static: bool = False
    strategy: Strategy | None = None
    max_parked: int | None = None
    flood_keys: int | None = None
    span: int | None = None
    lease_s: float | None = None
    consume_timeout_s: float | None = None
    session_s: float | None = None
    prefetch_messages: int = 16_384
    prefetch_bytes: int = 16 * MIB

    @property
    def ordered(self) -> bool:
        """Whether messages of one key come strictly one after the other."""
        return self.mode == "ordered"

    def join_args(self, instance: str) -> dict[str, Any]:
        """The arguments of `consumer.join`, without those that only a rejoin has."""
        return {
            "group": self.group,
            "instance": instance,
            "mode": self.mode,
            "topics": list(self.topics),
            "start": self.start,
            "on_exhausted": self.on_exhausted,
            "retry": None if self.retry is None else self.retry.to_json(),
            "lease_ms": _milliseconds(self.lease_s),
            "session_ms": _milliseconds(self.session_s),
            "consume_timeout_ms": _milliseconds(self.consume_timeout_s),
            "strategy": self.strategy,
            "max_parked": self.max_parked,
            "flood_keys": self.flood_keys,
            "span": self.span,
            "static": self.static,
        }


def checked(group: str, topics: Sequence[str], **options: Unpack[Options]) -> Settings:
    """The settings that these arguments make. Raises LocalProtocolError for what cannot
    be meant.
    """
    if unknown := options.keys() - Options.__optional_keys__:
        raise LocalProtocolError(
            f"there is no option {min(unknown)!r}",
            hint="see txmq.client.protocol.consumer.settings.Options",
        )
    check_name(group, "consumer group")
    if isinstance(topics, str) or not topics:
        raise LocalProtocolError(
            f"{topics!r} are no topics", hint='a sequence of names: topics=["orders"]'
        )
    names = tuple(dict.fromkeys(check_name(topic, "topic") for topic in topics))
    if options.get("member") is not None:
        check_name(str(options["member"]), "member")
    if options.get("static") and (
        options.get("member") is None or options.get("mode") == "broadcast"
    ):
        raise LocalProtocolError(
            "a static member needs a name, and a share of the partitions", hint='member="billing-1"'
        )
    _one_of("mode", options.get("mode", "concurrent"), MODES)
    _one_of("on_exhausted", options.get("on_exhausted"), (None, *POLICIES))
    _one_of("strategy", options.get("strategy"), (None, *STRATEGIES))
    _one_of("on_failure", options.pop("on_failure", "broker"), ("broker",))
    for name in ("consume_timeout_s", "lease_s", "session_s"):
        _number(name, options.get(name), "a number of seconds above 0 is needed", above=0)
    for name in ("prefetch_messages", "prefetch_bytes"):
        _number(name, options.get(name), "a whole number above 0 is needed", above=0, kind=int)
    for name in ("max_parked", "flood_keys", "span"):
        _number(name, options.get(name), "a whole number from 0 is needed", above=-1, kind=int)
    fields: dict[str, Any] = dict(options)
    fields["tags"] = _tags(fields.get("tags"))
    fields["selector"] = _selector(fields.get("selector"))
    fields["start"] = _start(fields.get("start"))
    return Settings(group, names, **fields)


def _number(name: str, value: object, rule: str, *, above: int, kind: type[float] = float) -> None:
    """Nothing, None, is left to the group or the default."""
    fits = isinstance(value, int | kind) and not isinstance(value, bool) and above < value < inf
    if not fits and value is not None:
        raise LocalProtocolError(f"{name} is {value!r}", hint=rule)


def _one_of(name: str, value: object, known: Sequence[object]) -> None:
    if value not in known:
        raise LocalProtocolError(
            f"{name} is {value!r}", hint=f"one of {', '.join(map(repr, known))}"
        )


def _tags(tags: Collection[str] | None) -> frozenset[str] | None:
    if tags is None:
        return None
    if isinstance(tags, str) or not tags or not all(isinstance(tag, str) and tag for tag in tags):
        raise LocalProtocolError(
            f"{tags!r} are no tags", hint='a collection of texts: tags={"paid", "shipped"}'
        )
    return frozenset(tags)


def _selector(text: str | None) -> Selector | None:
    if text is None:
        return None
    if not isinstance(text, str):
        raise LocalProtocolError(
            f"{text!r:.80} is no selector", hint="selector=\"region = 'eu' AND price > 10\""
        )
    return parse(text)


def _start(start: Start | datetime | timedelta | int | None) -> Start | int | None:
    if isinstance(start, timedelta):
        return -microseconds_ago(start)
    if start is None or isinstance(start, int | datetime):
        return None if start is None else micros(start)
    if start not in STARTS:
        hint = '"first", "last", a datetime with a time zone, or how long ago: timedelta(hours=2)'
        raise LocalProtocolError(f"start is {start!r}", hint=hint)
    return start


def microseconds_ago(start: timedelta) -> int:
    """How long ago a start is. Raises LocalProtocolError for a span that cannot be
    meant.
    """
    if not timedelta(0) < start < timedelta(days=36_500):
        raise LocalProtocolError(f"start is {start!r}", hint="how long ago: timedelta(hours=2)")
    return start // timedelta(microseconds=1)


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1_000)

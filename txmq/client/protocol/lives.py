"""The life of a key or a message in all topics, by control calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from txmq.client.protocol.calls import Calls
from txmq.client.protocol.life_events import LifeEvent, events_of
from txmq.errors import (
    AccessDenied,
    LocalProtocolError,
    OffsetOutOfRange,
    UnknownTopic,
    UnknownTransaction,
)
from txmq.model import limits
from txmq.model.causation import correlation_of
from txmq.model.message import is_message_id

PAGE = 100
MAX_OPERATIONS = 100  # entries of the audit topic about one message
LOG_REPLIES = 4  # of the search for deliveries: 64 MiB of the log each
DELIVERED = "delivered"


class Trace(NamedTuple):
    """The life of messages, and of what follows from them: the `events` of all by time,
    what has none last. `messages` are the parts as the broker tells them, in the order
    of their storage; `more`: there are more than the limit.
    """

    messages: list[dict[str, Any]]
    events: list[LifeEvent]
    more: bool


class Searched(NamedTuple):
    """The messages that a search has found. It has come to `next`, in the topic `at`;
    None = the end. So many messages were `read` for it. `cut`: more were found than
    the limit.
    """

    messages: list[dict[str, Any]]
    next: Any
    at: str | None
    read: int
    cut: bool = False

    @property
    def more(self) -> bool:
        """Return whether there may be more messages."""
        return self.cut or self.next is not None


Told = Callable[[Searched], bool]  # of a search that goes on; False ends it


def search_title(criteria: Mapping[str, str | tuple[str, str | None]]) -> str:
    """Return the criteria of a search as a title."""
    texts = {
        name: value if isinstance(value, str) else "=".join(filter(None, value))
        for name, value in criteria.items()
    }
    return ", ".join(
        f"{'message' if name == 'id' else name} {text}" for name, text in texts.items()
    )


async def trace_messages(call: Calls, wanted: Mapping[str, Any], limit: int) -> Trace:
    """Return the lives of the messages that meet the criteria of `message.search`, and
    of those that follow from them. Raises LocalProtocolError for no criterion.
    """
    if all(value is None for value in wanted.values()):
        raise LocalProtocolError("a trace of nothing", hint="give a key, an id, a body or a header")
    found = await with_correlated(call, await search_messages(call, wanted, limit), limit)
    for one in found.messages:
        await add_life(call, one)
    await add_deliveries(call, found.messages)
    return Trace(found.messages, events_of(found.messages), found.more)


async def search_messages(
    call: Calls,
    wanted: Mapping[str, Any],
    limit: int,
    *,
    told: Told | None = None,
    after: Any = None,  # noqa: ANN401  # `next` of another search
    within_ms: int | None = None,
) -> Searched:
    """Search for messages in all topics, by criteria of `message.search`, or in the one
    that is named, by those of `message.find`, until so many are found or `told` ends
    it. A call in all topics takes `within_ms` at most, None = no limit.
    """
    topic = wanted.get("topic")
    name = "message.search" if topic is None else "message.find"
    bound = {"within_ms": within_ms} if topic is None else {}
    found: list[dict[str, Any]] = []
    read = 0
    while True:
        size = min(limit - len(found), PAGE)
        page = await call(name, {**wanted, **bound, "after": after, "limit": size})
        found += page["messages"]
        after, read = page["next"], read + page.get("read", 0)
        if wanted.get("id") is not None and found:
            after = None
        at = None
        if after is not None:
            at = page["at"] if topic is None else "/".join(map(str, (topic, *after)))
        searched = Searched(found, after, at, read)
        if after is None or len(found) >= limit or (told is not None and not told(searched)):
            return searched


async def with_correlated(
    call: Calls,
    found: Searched,
    limit: int,
    *,
    told: Told | None = None,
    within_ms: int | None = None,
) -> Searched:
    """Return what a search has found with the messages that have a correlation in
    common with that, in the order of their storage.
    """
    messages = _by_id({}, found.messages)
    roots = list(dict.fromkeys(map(_correlation, messages.values())))[:PAGE]
    others, is_cut = Searched([], None, None, 0), False
    if roots and len(messages) < limit:
        for root in roots:
            if root not in messages and is_message_id(root):
                first = await search_messages(call, {"id": root}, 1, told=told, within_ms=within_ms)
                _by_id(messages, first.messages)
                if is_cut := first.next is not None:
                    break
        stored = [one["stored_at"] for one in messages.values() if one.get("stored_at")]
        wanted = {"correlations": roots, "start": min(stored, default=None)}
        others = await search_messages(call, wanted, limit, told=told, within_ms=within_ms)
    _by_id(messages, others.messages)
    kept = list(messages.values())[:limit]  # what was asked for before what follows from it
    return Searched(
        sorted(kept, key=_stored_last),
        found.next or others.next,
        found.at or others.at,
        found.read + others.read,
        cut=is_cut or len(messages) > limit,
    )


def _by_id(known: dict[str, dict[str, Any]], found: list[dict[str, Any]]) -> dict[str, Any]:
    """Add messages that are not known yet."""
    for one in found:
        known.setdefault(str(one["message_id"]), one)
    return known


def _correlation(message: Mapping[str, Any]) -> str:
    return correlation_of(str(message["message_id"]), message.get("headers", {}))


def _stored_last(message: Mapping[str, Any]) -> int:
    return int(message.get("stored_at") or message.get("born_at") or limits.TIME)


async def add_life(call: Calls, message: dict[str, Any]) -> None:
    """Add what became of a message: in its transaction, in each group, by operators."""
    about: list[dict[str, Any]] = []
    if message.get("offset") is not None:
        place = [message["topic"], message["partition"], message["offset"]]
        try:
            message["life"] = await call(
                "message.life",
                dict(zip(("topic", "partition", "offset"), place, strict=True)),
            )
        except (OffsetOutOfRange, UnknownTopic):  # retention was faster
            message["life"] = None
        else:
            message["transaction"] = message["life"].pop("transaction")
            about += [{"about": f"plan:{name}"} for name in _plans_of(message["life"])]
        about.append({"message": place})
    else:
        await _add_transaction(call, message)
    token = _token_of(message)
    if token is not None:
        about.append({"about": f"tx:{token}"})
    entries: list[dict[str, Any]] = []
    for wanted in about:
        entries += await read_operations(call, wanted)
    message["audit"] = sorted(entries, key=lambda entry: int(entry["at"]))


async def deliveries_of_letter(
    call: Calls, group: str, topic: str, partition: int, offset: int
) -> dict[str, Any]:
    """Return the fields of a dead letter that tell of its deliveries in its group."""
    life: dict[str, Any] = {"topic": topic, "partition": partition, "offset": offset}
    life["groups"] = [{"group": group, "deliveries": []}]
    await add_deliveries(call, [{"life": life}], replies=1)
    found = life["groups"][0]["deliveries"]
    return {"deliveries": found, "deliveries_known": life["deliveries_known"]}


async def add_deliveries(
    call: Calls,
    messages: list[dict[str, Any]],
    *,
    replies: int = LOG_REPLIES,
    within_ms: int | None = None,
) -> None:
    """Add who had the messages, and how each delivery ended, as far as the log tells.

    It is read from the first of them on, for so many replies, each of which takes
    `within_ms` at most; None = no limit. `deliveries_known` of a
    life says what was read; null = nothing, as the caller may not.
    """
    lives = [message["life"] for message in messages if message.get("life")][:PAGE]
    if not lives:
        return
    places = [[life["topic"], life["partition"], life["offset"]] for life in lives]
    known: dict[str, Any] | None = None
    args: dict[str, Any] = {"messages": places, "within_ms": within_ms}
    for _number in range(replies):
        try:
            page = await call("message.deliveries", args)
        except (UnknownTopic, AccessDenied):
            break
        for one in page["deliveries"]:
            _add_delivery(lives[one.pop("message")], one)
        whole = page["whole"] and (known is None or known["whole"])
        from_at = page["from_at"]
        if known is not None and page["whole"]:  # otherwise retention was faster
            from_at = known["from_at"] or from_at
        known = {
            "whole": whole and not page["damaged"],
            "from_at": from_at,
            "until_at": page["until_at"],
            "more": page["next"] is not None,
        }
        if page["next"] is None:
            break
        args |= {"after": page["next"], "known": page["known"]}
    for life in lives:
        life["deliveries_known"] = known


def _add_delivery(life: dict[str, Any], event: dict[str, Any]) -> None:
    """Add an event of a delivery: its begin, or its end to the one that it ends."""
    name = event.pop("group")
    group = next((one for one in life["groups"] if one["group"] == name), None)
    if group is None:
        return
    found: list[dict[str, Any]] = group.setdefault("deliveries", [])
    what, at = event.pop("what"), event.pop("at")
    if what == DELIVERED:
        found.append(event | {"at": at, "ended": None, "ended_at": None})
    elif found and found[-1]["ended"] is None:
        found[-1] |= {"ended": what, "ended_at": at}
        if "token" in event:
            found[-1]["token"] = event["token"]
    else:
        found.append(event | {"at": None, "ended": what, "ended_at": at})


def _plans_of(life: dict[str, Any]) -> list[str]:
    plans = (group.get("plan") for group in life["groups"])
    return [plan["plan"] for plan in plans if plan]


async def _add_transaction(call: Calls, message: dict[str, Any]) -> None:
    """Add the transaction of a message that has no offset, if it came with one."""
    token = message.get("token") or str(message["message_id"]).partition("-")[0]
    try:
        message["transaction"] = await call("tx.show", {"token": token})
    except UnknownTransaction:  # a plain message that is delayed
        return


def _token_of(message: dict[str, Any]) -> str | None:
    transaction = message.get("transaction")
    return message.get("token") if transaction is None else str(transaction["token"])


async def read_operations(call: Calls, wanted: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the newest entries of the audit topic, oldest first."""
    page = await call("audit.list", {"newest": True, "limit": MAX_OPERATIONS, **wanted})
    return [entry for entry in reversed(page["entries"]) if "damaged" not in entry]


def merged(traces: list[Trace]) -> Trace:
    """Return the lives of several brokers as one."""
    messages = [message for trace in traces for message in trace.messages]
    return Trace(messages, events_of(messages), any(trace.more for trace in traces))

"""The life of a key or a message in all topics, by control calls."""

from __future__ import annotations

from collections.abc import Callable
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

PAGE = 100
MAX_OPERATIONS = 100  # entries of the audit topic about one message
LOG_REPLIES = 4  # of the search for deliveries: 64 MiB of the log each
DELIVERED = "delivered"


class Trace(NamedTuple):
    """The life of a key or a message: the `events` of all messages by time, what has
    none last. `messages` are the parts as the broker tells them, `more`: there are more
    messages than the limit.
    """

    messages: list[dict[str, Any]]
    events: list[LifeEvent]
    more: bool


async def trace_steps(call: Calls, key: str | None, message: str | None, limit: int) -> Trace:
    """Return the life of a key, or of a message by its id."""
    if (key is None) == (message is None):
        raise LocalProtocolError("a trace of neither or both", hint="give a key or a message id")
    found, more = await search_steps(call, key, message, limit)
    for one in found:
        await life_steps(call, one)
    await delivery_steps(call, found)
    return Trace(found, events_of(found), more)


async def search_steps(
    call: Calls,
    key: str | None,
    message: str | None,
    limit: int,
    *,
    bodies: bool = False,
    told: Callable[[object], None] | None = None,
) -> tuple[list[dict[str, Any]], bool]:
    """Return the messages of a key or an id in all topics, and whether there are more.
    Where it takes several calls, `told` gets the place that the search has reached.
    """
    found: list[dict[str, Any]] = []
    after: Any = None
    while True:
        size = min(limit - len(found), PAGE)
        page = await call(
            "message.search",
            {"key": key, "id": message, "after": after, "limit": size, "bodies": bodies},
        )
        found += page["messages"]
        after = page["next"]
        if after is None or len(found) >= limit or (message is not None and found):
            break
        if told is not None:
            told(page["at"])
    more = after is not None and message is None
    return found[:limit], more or len(found) > limit


async def life_steps(call: Calls, message: dict[str, Any]) -> None:
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
        await _transaction_steps(call, message)
    token = _token_of(message)
    if token is not None:
        about.append({"about": f"tx:{token}"})
    entries: list[dict[str, Any]] = []
    for wanted in about:
        entries += await operation_steps(call, wanted)
    message["audit"] = sorted(entries, key=lambda entry: int(entry["at"]))


async def letter_delivery_steps(
    call: Calls, group: str, topic: str, partition: int, offset: int
) -> dict[str, Any]:
    """Return the fields of a dead letter that tell of its deliveries in its group."""
    life: dict[str, Any] = {"topic": topic, "partition": partition, "offset": offset}
    life["groups"] = [{"group": group, "deliveries": []}]
    await delivery_steps(call, [{"life": life}], replies=1)
    found = life["groups"][0]["deliveries"]
    return {"deliveries": found, "deliveries_known": life["deliveries_known"]}


async def delivery_steps(
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


async def _transaction_steps(call: Calls, message: dict[str, Any]) -> None:
    """Add the transaction of a message that has no offset, if it came with one."""
    token = message.get("token") or str(message["message_id"]).partition("-")[0]
    try:
        message["transaction"] = await call("tx.show", {"token": token})
    except UnknownTransaction:  # a plain message that is delayed
        return


def _token_of(message: dict[str, Any]) -> str | None:
    transaction = message.get("transaction")
    return message.get("token") if transaction is None else str(transaction["token"])


async def operation_steps(call: Calls, wanted: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the newest entries of the audit topic, oldest first."""
    page = await call("audit.list", {"newest": True, "limit": MAX_OPERATIONS, **wanted})
    return [entry for entry in reversed(page["entries"]) if "damaged" not in entry]


def merged(traces: list[Trace]) -> Trace:
    """Return the lives of several brokers as one."""
    messages = [message for trace in traces for message in trace.messages]
    return Trace(messages, events_of(messages), any(trace.more for trace in traces))

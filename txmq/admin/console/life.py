"""The life of messages as a time line: what `txmq trace` tells, for pages."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from txmq.admin.console.page import PageRequest, Refused
from txmq.client.protocol.life_events import events_of
from txmq.client.protocol.lives import Trace, delivery_steps, life_steps, trace_steps
from txmq.errors import TxmqError
from txmq.model.units import MILLISECOND

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from txmq.client.protocol.calls import Calls
    from txmq.client.protocol.life_events import LifeEvent


T = TypeVar("T")
SEARCH_MS, DELIVERIES_MS = 200, 100  # of a page; who wants more asks for a thorough one
MAX_THOROUGH = 4  # at a time: each takes seconds, and keeps a connection from other viewers
MAX_OF_USER = 2  # of these, where there are users
_thorough: set[PageRequest] = set()  # viewers of those under way


class PageTrace(NamedTuple):
    """A trace, as far as it was made.

    `reached` is the topic where the search for messages stopped, "" = none is left.
    With `cut`, the log has more about deliveries.
    """

    trace: Trace
    reached: str = ""
    cut: bool = False


async def trace_of(
    request: PageRequest, key: str | None, message: str | None, limit: int, *, thorough: bool
) -> PageTrace:
    """Return the life of a key, or of a message. Raises Refused.

    Without `thorough` it takes a bounded time, however large the log is.
    """
    if thorough:
        own = sum(one.user == request.user for one in _thorough)
        if len(_thorough) >= MAX_THOROUGH or (request.user is not None and own >= MAX_OF_USER):
            reason = f"{len(_thorough)} thorough traces are under way"
            raise Refused("Throttled", reason, "try again, or use: txmq trace", 429)
        _thorough.add(request)
        try:
            trace = await _run(request, lambda call: trace_steps(call, key, message, limit))
        finally:
            _thorough.discard(request)
        return PageTrace(trace, "", _is_cut(trace.messages))
    found, more, reached = await _search(request, key, message, limit)
    for one in found:
        await _run(request, partial(life_steps, message=one))
    await _add_deliveries(request, found)
    return PageTrace(Trace(found, events_of(found), more), reached, _is_cut(found))


async def _search(
    request: PageRequest, key: str | None, message: str | None, limit: int
) -> tuple[list[dict[str, Any]], bool, str]:
    """Return the messages, whether there are more than the limit, and the topic where
    the search has stopped because its time was over.
    """
    found: list[dict[str, Any]] = []
    after: list[int] | None = None
    began = request.now
    while True:
        left_ms = SEARCH_MS - (request.now - began) // MILLISECOND
        page = await request.ask(
            "message.search",
            key=key,
            id=message,
            after=after,
            limit=limit - len(found),
            within_ms=max(1, left_ms),
        )
        found += page["messages"]
        after = page["next"]
        if after is None or (message is not None and found):
            return found[:limit], len(found) > limit, ""
        if len(found) >= limit:
            return found[:limit], True, ""
        if request.now - began >= SEARCH_MS * MILLISECOND:
            return found, False, page["at"]


def _is_cut(messages: list[dict[str, Any]]) -> bool:
    lives = [one["life"] for one in messages if one.get("life")]
    return any((life.get("deliveries_known") or {}).get("more") for life in lives)


async def life_of(request: PageRequest, message: dict[str, Any]) -> list[LifeEvent]:
    """Return what became of a message that was shown; [] = it may not be seen."""
    place = {name: message[name] for name in ("topic", "partition", "offset")}
    if not request.may("message.life", **place).allowed:
        return []
    one = {**message, "state": "published"}
    await _run(request, partial(life_steps, message=one))
    await _add_deliveries(request, [one])
    return events_of([one])


async def _add_deliveries(request: PageRequest, found: list[dict[str, Any]]) -> None:
    await _run(
        request, lambda call: delivery_steps(call, found, replies=1, within_ms=DELIVERIES_MS)
    )


async def _run(request: PageRequest, steps: Callable[[Calls], Awaitable[T]]) -> T:
    """Make the calls of some steps; the audit topic is left out for viewers who may not
    see it. Raises Refused.
    """
    may_audit = request.may("audit.list").allowed

    async def call(name: str, args: dict[str, Any]) -> dict[str, Any]:
        if name == "audit.list" and not may_audit:
            return {"entries": []}
        try:
            found: dict[str, Any] = await request.ask(name, **args)
        except Refused as refused:
            if refused.kind is None:
                raise
            raise refused.kind(refused.message) from refused
        return found

    try:
        return await steps(call)
    except TxmqError as error:
        if isinstance(error.__cause__, Refused):
            raise error.__cause__ from None
        raise

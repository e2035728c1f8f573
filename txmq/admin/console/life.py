"""The life of messages as a time line: what `txmq trace` tells, for pages."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from txmq.admin.console.page import PageRequest, Refused
from txmq.client.protocol.life_events import events_of
from txmq.client.protocol.lives import (
    Searched,
    Told,
    Trace,
    add_deliveries,
    add_life,
    search_messages,
    trace_messages,
    with_correlated,
)
from txmq.errors import TxmqError
from txmq.model.units import MILLISECOND

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

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
    request: PageRequest, wanted: Mapping[str, Any], limit: int, *, thorough: bool
) -> PageTrace:
    """Return the lives of the messages that meet criteria of `message.search`, and of
    what follows from them. Raises Refused.

    Without `thorough` it takes a bounded time, however large the log is.
    """
    if thorough:
        own = sum(one.user == request.user for one in _thorough)
        if len(_thorough) >= MAX_THOROUGH or (request.user is not None and own >= MAX_OF_USER):
            reason = f"{len(_thorough)} thorough traces are under way"
            raise Refused("Throttled", reason, "try again, or use: txmq trace", 429)
        _thorough.add(request)
        try:
            trace = await _run(request, lambda call: trace_messages(call, wanted, limit))
        finally:
            _thorough.discard(request)
        return PageTrace(trace, "", _is_cut(trace.messages))
    found = await _run(request, lambda call: _bounded(call, request, wanted, limit))
    for one in found.messages:
        await _run(request, partial(add_life, message=one))
    await _add_deliveries(request, found.messages)
    stopped = found.next is not None and len(found.messages) < limit
    trace = Trace(found.messages, events_of(found.messages), found.more and not stopped)
    return PageTrace(trace, (found.at or "") if stopped else "", _is_cut(found.messages))


async def _bounded(
    call: Calls, request: PageRequest, wanted: Mapping[str, Any], limit: int
) -> Searched:
    """Search, and follow what was found, each for a bounded time."""

    def in_time(began: int) -> Told:
        return lambda _searched: request.now - began < SEARCH_MS * MILLISECOND

    found = await search_messages(
        call, wanted, limit, told=in_time(request.now), within_ms=SEARCH_MS
    )
    return await with_correlated(call, found, limit, told=in_time(request.now), within_ms=SEARCH_MS)


def _is_cut(messages: list[dict[str, Any]]) -> bool:
    lives = [one["life"] for one in messages if one.get("life")]
    return any((life.get("deliveries_known") or {}).get("more") for life in lives)


async def life_of(request: PageRequest, message: dict[str, Any]) -> list[LifeEvent]:
    """Return what became of a message that was shown; [] = it may not be seen."""
    place = {name: message[name] for name in ("topic", "partition", "offset")}
    if not request.may("message.life", **place).allowed:
        return []
    one = {**message, "state": "published"}
    await _run(request, partial(add_life, message=one))
    await _add_deliveries(request, [one])
    return events_of([one])


async def _add_deliveries(request: PageRequest, found: list[dict[str, Any]]) -> None:
    await _run(
        request, lambda call: add_deliveries(call, found, replies=1, within_ms=DELIVERIES_MS)
    )


async def _run(request: PageRequest, work: Callable[[Calls], Awaitable[T]]) -> T:
    """Do work that makes calls; the audit topic is left out for viewers who may not
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
        return await work(call)
    except TxmqError as error:
        if isinstance(error.__cause__, Refused):
            raise error.__cause__ from None
        raise

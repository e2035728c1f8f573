"""The life of messages as a time line: what `txmq trace` tells, for pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.admin.console.page import PageRequest, Refused
from txmq.client.protocol.call_steps import CallRun
from txmq.client.protocol.life_events import events_of
from txmq.client.protocol.lives import Trace, delivery_steps, life_steps, trace_steps
from txmq.model.units import MILLISECOND

if TYPE_CHECKING:
    from txmq.client.protocol.call_steps import CallSteps
    from txmq.client.protocol.life_events import LifeEvent


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
            trace = await _run(request, trace_steps(key, message, limit))
        finally:
            _thorough.discard(request)
        return PageTrace(trace, "", _is_cut(trace.messages))
    found, more, reached = await _search(request, key, message, limit)
    for one in found:
        await _run(request, life_steps(one))
    await _run(request, delivery_steps(found, replies=1, within_ms=DELIVERIES_MS))
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
    await _run(request, life_steps(one))
    await _run(request, delivery_steps([one], replies=1, within_ms=DELIVERIES_MS))
    return events_of([one])


async def _run(request: PageRequest, steps: CallSteps[Any]) -> Any:  # noqa: ANN401  # the steps' own
    """Make the calls of some steps; the audit topic is left out for viewers who may not
    see it.
    """
    run = CallRun(steps)
    may_audit = request.may("audit.list").allowed
    while run.call is not None:
        name, args = run.call
        if name == "audit.list" and not may_audit:
            run.reply({"entries": []})
            continue
        try:
            reply = await request.ask(name, **args)
        except Refused as refused:
            if refused.kind is None:
                raise
            try:
                run.fail(refused.kind(refused.message))
            except refused.kind:
                raise refused from None
        else:
            run.reply(reply)
    return run.result

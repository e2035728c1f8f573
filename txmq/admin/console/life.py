"""The life of messages as a time line: what `txmq trace` tells, for pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from txmq import errors
from txmq.admin.console.page import Reader, Refused
from txmq.client.protocol.call_steps import CallRun
from txmq.client.protocol.life_events import events_of
from txmq.client.protocol.lives import Trace, delivery_steps, life_steps, trace_steps
from txmq.errors import TxmqError

if TYPE_CHECKING:
    from txmq.client.protocol.call_steps import CallSteps
    from txmq.client.protocol.life_events import LifeEvent


async def trace_of(reader: Reader, key: str | None, message: str | None, limit: int) -> Trace:
    """Return the life of a key, or of a message. Raises Refused."""
    found: Trace = await _run(reader, trace_steps(key, message, limit))
    return found


async def life_of(reader: Reader, message: dict[str, Any]) -> list[LifeEvent]:
    """Return what became of a message that was shown; [] = it may not be seen."""
    place = {name: message[name] for name in ("topic", "partition", "offset")}
    if not reader.may("message.life", **place).allowed:
        return []
    one = {**message, "state": "published"}
    await _run(reader, life_steps(one))
    await _run(reader, delivery_steps([one], replies=1))
    return events_of([one])


async def _run(reader: Reader, steps: CallSteps[Any]) -> Any:  # noqa: ANN401  # the steps' own
    """Make the calls of some steps; the audit topic is left out for readers who may not
    see it.
    """
    run = CallRun(steps)
    may_audit = reader.may("audit.list").allowed
    while run.call is not None:
        name, args = run.call
        if name == "audit.list" and not may_audit:
            run.reply({"entries": []})
            continue
        try:
            reply = await reader.ask(name, **args)
        except Refused as refused:
            kind: Any = getattr(errors, refused.error, None)
            if not (isinstance(kind, type) and issubclass(kind, TxmqError)):
                raise
            try:
                run.fail(kind(refused.message))
            except kind:
                raise refused from None
        else:
            run.reply(reply)
    return run.result

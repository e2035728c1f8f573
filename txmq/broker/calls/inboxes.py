"""Control calls of inboxes: the effects that they must have, and those they lack."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

from txmq.broker.calls.dispatcher import CallContext, Handler, then
from txmq.core.consumers import effects

if TYPE_CHECKING:
    from txmq.broker.engine.engine import Engine
    from txmq.wire.calls import consumers as wire


class InboxCalls:
    """Calls of members whose handlers run with an inbox."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # A copy of the log has the same boot epochs, but not this id of one run.
        self._run = str(uuid4())
        self._ends_at_start = {
            topic_id: tuple(topic.end_offsets)
            for topic_id, topic in engine.state.topics_by_id.items()
        }
        self.handlers: dict[str, Handler] = {
            "inbox.show": self.show,
            "inbox.open": self.open,
            "inbox.restore": self.restore,
        }

    def show(self, call: CallContext, args: wire.InboxArgs) -> dict[str, Any]:
        described = effects.describe_inbox(self._engine.state, _partition(args))
        ends = self._ends_at_start.get(args.topic_id, ())
        began_at = ends[args.partition] if args.partition < len(ends) else 0
        described |= {"run": self._run, "began_at": began_at}
        return described

    def open(self, call: CallContext, args: wire.InboxOpen) -> None:
        command = effects.OpenInbox(_partition(args), args.applied)
        self._engine.submit(command, then(call.answer, lambda _reply: {}))

    def restore(self, call: CallContext, args: wire.InboxRestore) -> None:
        command = effects.RestoreEffects(_partition(args), args.ranges, args.lost)
        self._engine.submit(command, then(call.answer, lambda reply: reply._asdict()))


def _partition(args: wire.InboxArgs) -> effects.InboxPartition:
    return effects.InboxPartition(args.group, args.topic, args.topic_id, args.partition)

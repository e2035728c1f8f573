"""Control calls about single messages: those that wait for their time, and recalls."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from txmq.broker.calls import Asking, Handler, then
from txmq.broker.core import delayed, topics
from txmq.broker.core.delays import Recall
from txmq.broker.core.state import Rejected
from txmq.message import message_id

if TYPE_CHECKING:
    from txmq.broker.core.delayed import Waiting
    from txmq.broker.engine import Engine
    from txmq.wire import calls_messages as wire

LOOKED_AT = 10_000  # rows, for one page of a topic's


class MessageCalls:
    """What is asked about messages by their ids."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.handlers: dict[str, Handler] = {"message.recall": self.recall, "message.delayed": self.delayed}

    def recall(self, asking: Asking, args: wire.MessageIds) -> None:
        self._engine.submit(Recall(args.ids), then(asking.answer, lambda reply: {"recalled": reply.recalled}))

    def delayed(self, asking: Asking, args: wire.DelayedList) -> None:
        """A page may be short of its limit, and even empty, where a topic is asked for that has few of many."""
        state = self._engine.state
        topic = None if args.topic is None else topics.find(state, args.topic)
        if isinstance(topic, Rejected):
            asking.answer(topic)
            return
        found: list[Waiting] = []
        last: Waiting | None = None
        start, position = args.after or (0, 0)
        for last in islice(delayed.rows(state, start, position=position), LOOKED_AT):
            if topic is None or last.message.topic_id == topic.topic_id:
                found.append(last)
            if len(found) == args.limit:
                break
        ended = last is None or next(delayed.rows(state, last.due, position=last.position + 1), None) is None
        rest = None if ended or last is None else (last.due, last.position + 1)
        rows = [self._row(waiting) for waiting in found]
        self._engine.tell(asking.answer, {"messages": rows, "next": rest, "delayed": state.delayed})

    def _row(self, waiting: Waiting) -> dict[str, Any]:
        message = waiting.message
        return {
            "message_id": message_id(message.origin, message.sequence),
            "topic": self._engine.state.topics_by_id[message.topic_id].name,
            "partition": message.partition,
            "due_at": waiting.due,
            "size": message.length,
        }

"""Control calls about single messages: those that wait for their time, and recalls."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from txmq.broker.calls.control import Asking, Handler, then
from txmq.broker.search.search import Wanted, fitting, where_is
from txmq.core.state.state import Rejected
from txmq.core.topics import delayed, topics
from txmq.core.topics.admission import unreadable
from txmq.core.topics.delay_rules import Recall
from txmq.model.message import message_id

if TYPE_CHECKING:
    from txmq.broker.catalogues.catalogue_service import Cataloguing
    from txmq.broker.engine import Engine
    from txmq.core.topics.delayed import Waiting
    from txmq.wire import calls_messages as wire

LOOKED_AT = 10_000  # rows, for one page of a topic's


class MessageCalls:
    """What is asked about messages by their ids."""

    def __init__(self, engine: Engine, cataloguing: Cataloguing) -> None:
        self._engine, self._cataloguing = engine, cataloguing
        self.handlers: dict[str, Handler] = {
            "message.recall": self.recall,
            "message.delayed": self.delayed,
            "message.show": self.show,
            "message.find": self.find,
        }

    def recall(self, asking: Asking, args: wire.MessageIds) -> None:
        self._engine.submit(
            Recall(args.ids), then(asking.answer, lambda reply: {"recalled": reply.recalled})
        )

    def show(self, asking: Asking, args: wire.MessageShow) -> None:
        """What is not known by its id alone may still be in a topic: that is for
        `find`.
        """
        found = where_is(self._engine.store, self._engine.state, args.id, bodies=args.bodies)
        self._engine.tell(asking.answer, {"message": found})

    def find(self, asking: Asking, args: wire.MessageFind) -> None:
        state = self._engine.state
        partition, offset = args.after or (args.partition or 0, args.offset)
        topic = topics.find(state, args.topic, partition)
        refused = topic if isinstance(topic, Rejected) else unreadable(topic)
        if isinstance(topic, Rejected) or refused is not None:
            asking.answer(refused)
            return
        last = len(topic.ends) if args.partition is None else args.partition + 1
        wanted = Wanted(args.key, args.id, args.start, args.end, args.limit, args.bodies)
        page = fitting(self._cataloguing.search(topic, wanted, range(partition, last), offset))
        asking.answer({"messages": page.messages, "next": page.following})

    def delayed(self, asking: Asking, args: wire.DelayedList) -> None:
        """A page may be short of its limit, and even empty, where a topic is asked for
        that has few of many.
        """
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
        ended = (
            last is None
            or next(delayed.rows(state, last.due, position=last.position + 1), None) is None
        )
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

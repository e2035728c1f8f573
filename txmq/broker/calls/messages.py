"""Control calls about single messages: search, delayed messages, recalls."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from txmq.broker.calls.dispatcher import CallContext, Handler, damaged, then
from txmq.broker.search import search
from txmq.broker.search.search import (
    BegunBatch,
    SearchPage,
    SearchQuery,
    find_by_id,
    fit_page,
)
from txmq.core.topics import delayed, topics
from txmq.core.topics.delay_rules import Recall
from txmq.core.topics.sends import SkipSequences
from txmq.core.topics.topics import check_readable
from txmq.errors import CorruptRecord
from txmq.model.message import message_id

if TYPE_CHECKING:
    from txmq.broker.engine.engine import Engine
    from txmq.broker.search.catalogue_service import CatalogueService
    from txmq.core.state.state import Topic
    from txmq.core.steps import Steps
    from txmq.core.topics.delayed import ScheduledMessage
    from txmq.wire.calls import messages as wire

STEP_BATCHES, STEP_BYTES = 16, 64 << 10  # scanned between two looks at the time
SCANNED_ROWS = 10_000  # rows, for one page of a topic's


class MessageCalls:
    """Calls about messages by id, key, time and place."""

    def __init__(self, engine: Engine, catalogues: CatalogueService) -> None:
        self._engine, self._catalogues = engine, catalogues
        self.handlers: dict[str, Handler] = {
            "message.recall": self.recall,
            "message.delayed": self.list_delayed,
            "message.show": self.show,
            "message.find": self.find,
            "producer.skip": self.skip,
        }

    def recall(self, call: CallContext, args: wire.MessageIds) -> None:
        self._engine.submit(
            Recall(args.ids, call.user),
            then(call.answer, lambda reply: {"recalled": reply.recalled}),
        )

    def show(self, call: CallContext, args: wire.MessageShow) -> dict[str, Any]:
        """Find a message by its id alone. One that is not found may still be in a
        topic, where `find` looks.
        """
        found = find_by_id(self._engine.store, self._engine.state, args.id, bodies=args.bodies)
        return {"message": found}

    def find(self, call: CallContext, args: wire.MessageFind) -> Steps[dict[str, Any]]:
        state = self._engine.state
        partition, offset = args.after or (args.partition or 0, args.offset)
        topic = topics.find_topic(state, args.topic, max(partition, args.partition or 0))
        check_readable(topic)
        last = len(topic.end_offsets) if args.partition is None else args.partition + 1
        wanted = SearchQuery(
            args.key, args.id, args.start, args.end, args.limit, args.bodies, args.content
        )
        return self._find(topic, wanted, range(partition, last), offset)

    def _find(
        self, topic: Topic, wanted: SearchQuery, partitions: range, offset: int
    ) -> Steps[dict[str, Any]]:
        """Return a page, in steps: without a catalogue it scans megabytes."""
        found: list[dict[str, Any]] = []
        place: tuple[int, int] | None = (partitions.start, offset)
        batches, size, read = search.PAGE_BATCHES, search.PAGE_READ_BYTES, 0
        begun = BegunBatch()
        while place is not None and batches > 0 and size > 0 and len(found) < wanted.limit:
            if topic.deleted:
                raise topics.unknown_topic(self._engine.state, topic.name)
            left = wanted._replace(limit=wanted.limit - len(found))
            try:
                page = self._catalogues.search(
                    topic,
                    left,
                    range(place[0], partitions.stop),
                    place[1],
                    batches=min(batches, STEP_BATCHES),
                    size=min(size, STEP_BYTES),
                    begun=begun,
                )
            except CorruptRecord as error:
                if batches == search.PAGE_BATCHES:
                    raise damaged(error) from None
                break  # the next page begins with the damage, and reports it
            found += page.messages
            read += page.read
            place, batches, size = page.following, batches - page.batches, size - page.size
            yield
        fitting = fit_page(SearchPage(found, place))
        return {"messages": fitting.messages, "next": fitting.following, "read": read}

    def skip(self, call: CallContext, args: wire.ProducerSkip) -> None:
        producer = bytes.fromhex(args.producer)
        command = SkipSequences(producer, args.epoch, args.sequence, call.user)
        self._engine.submit(command, then(call.answer, lambda _none: {}))

    def list_delayed(self, call: CallContext, args: wire.DelayedList) -> dict[str, Any]:
        """List delayed messages. Where the named topic has few of many, a page may be
        short, even empty.
        """
        state = self._engine.state
        topic = None if args.topic is None else topics.find_topic(state, args.topic)
        found: list[ScheduledMessage] = []
        last: ScheduledMessage | None = None
        start, position = args.after or (0, 0)
        for last in islice(delayed.scan(state, start, position=position), SCANNED_ROWS):
            if topic is None or last.message.topic_id == topic.topic_id:
                found.append(last)
            if len(found) == args.limit:
                break
        ended = (
            last is None
            or next(delayed.scan(state, last.due, position=last.position + 1), None) is None
        )
        rest = None if ended or last is None else (last.due, last.position + 1)
        rows = [self._row(waiting) for waiting in found]
        return {"messages": rows, "next": rest, "delayed": state.delayed_count}

    def _row(self, waiting: ScheduledMessage) -> dict[str, Any]:
        message = waiting.message
        return {
            "message_id": message_id(message.producer, message.sequence),
            "topic": self._engine.state.topics_by_id[message.topic_id].name,
            "partition": message.partition,
            "due_at": waiting.due,
            "size": message.length,
        }

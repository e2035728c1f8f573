"""Control calls of the lives of messages: find them in all topics, and tell what became
of each in the transactions, the topic and the consumer groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from txmq.batch import BatchView
from txmq.broker.calls import transaction_views
from txmq.broker.calls.dispatcher import CallContext, Handler
from txmq.broker.search.deliveries import DeliverySearch
from txmq.broker.search.everywhere import SearchEverywhere
from txmq.broker.search.message_view import describe_message, read_view
from txmq.broker.search.search import SearchQuery
from txmq.core.consumers import message_lives
from txmq.core.state import failed_messages
from txmq.core.topics import topics
from txmq.core.transactions.model import get
from txmq.errors import BadRequest, CorruptRecord, OffsetOutOfRange
from txmq.model.keys import key_hash

if TYPE_CHECKING:
    from txmq.broker.engine.engine import Engine
    from txmq.broker.search.catalogue_service import CatalogueService
    from txmq.core.state.consumer_groups import MessageRef
    from txmq.core.steps import Steps
    from txmq.wire.calls import messages as wire


class MessageLifeCalls:
    """Calls that follow single messages and keys."""

    def __init__(self, engine: Engine, catalogues: CatalogueService) -> None:
        self._engine, self._catalogues = engine, catalogues
        self.handlers: dict[str, Handler] = {
            "message.search": self.search,
            "message.life": self.life,
            "message.deliveries": self.deliveries,
        }

    def search(self, call: CallContext, args: wire.MessageSearch) -> Steps[dict[str, Any]]:
        by_content = args.key is not None or args.content is not None
        if by_content == (args.id is not None):
            hint = "send either an id alone, or a key, a body, a header or correlations"
            raise BadRequest("a search for nothing, or for an id and more", hint=hint)
        wanted = SearchQuery(
            args.key, args.id, args.start, args.end, args.limit, args.bodies, args.content
        )
        search = SearchEverywhere(
            self._engine, self._catalogues, wanted, args.after, args.within_ms
        )
        return search.reply()

    def life(self, call: CallContext, args: wire.MessageLife) -> Steps[dict[str, Any]]:
        state = self._engine.state
        topic = topics.find_topic(state, args.topic, args.partition)
        ref = (topic.topic_id, args.partition, args.offset)
        seen = yield from self._message(ref)
        if seen is None:
            place = f"{args.topic}/{args.partition}/{args.offset}"
            raise OffsetOutOfRange(
                f"message {place} is not there: not published, or removed by retention",
                hint="find messages: txmq trace --key KEY, or --id ID",
            )
        message, key, visible_at = seen
        groups = yield from message_lives.groups_of(
            state, ref, None if key is None else key_hash(key), visible_at
        )
        return {
            "topic": topic.name,
            "topic_id": topic.topic_id,
            "partition": args.partition,
            "offset": args.offset,
            "message": message,
            "transaction": self._transaction(message),
            "groups": groups,
        }

    def deliveries(self, call: CallContext, args: wire.MessageDeliveries) -> Steps[dict[str, Any]]:
        refs: list[MessageRef] = []
        for name, partition, offset in args.messages:
            topic = topics.find_topic(self._engine.state, name, partition)
            refs.append((topic.topic_id, partition, offset))
        search = DeliverySearch(self._engine, refs, args.after, args.known, args.within_ms)
        return search.reply()

    def _message(self, ref: MessageRef) -> Steps[tuple[dict[str, Any], str | None, int] | None]:
        """Return the fields of a message, its key, and since when it is visible.

        It is read from its topic, or from where a group keeps it though retention has
        removed it there.
        """
        state, store = self._engine.state, self._engine.store
        for base, entry in topics.entry_at(state, *ref):
            if entry.visible_at > store.durable:
                return None
            fields = {"stored_at": entry.stored_at, "position": entry.position}
            found = self._fields(entry.position, entry.length, ref[2] - base, fields)
            return *found, entry.visible_at
        for number, group in enumerate(list(state.groups.by_id.values())):
            row = failed_messages.get(state, group, ref)
            if row is not None:
                fields = {"stored_at": row.stored_at, "position": row.position, "removed": True}
                return *self._fields(row.position, row.length, row.row, fields), row.visible_at
            if not number % message_lives.GROUPS_PER_STEP:
                yield
        return None

    def _fields(
        self, position: int, length: int, row: int, fields: dict[str, Any]
    ) -> tuple[dict[str, Any], str | None]:
        try:
            view: BatchView = read_view(self._engine.store, position, length)
        except CorruptRecord as error:
            return fields | {"damaged": error.message}, None
        return fields | describe_message(view, row, bodies=False) | {
            "producer": view.header.producer_id.hex()
        }, view.keys[row]

    def _transaction(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """Return the transaction that a message came with, as far as it is known."""
        if "producer" not in message:
            return None
        token = bytes.fromhex(message["producer"])
        row = get(self._engine.state, token)
        return None if row is None else transaction_views.summary(token, row)

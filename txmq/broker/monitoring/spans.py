"""Spans of what a broker does, by OpenTelemetry: what it stores, decides, checks,
dead-letters and replays (setting `otel`).

Events are noted as they are applied. Their spans are made once they are durable, from
the time of the record until then: a span tells of nothing that a crash takes back.
Without the setting nothing here is imported.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.trace import Link, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from txmq.batch import BatchView
from txmq.batch.header import COLUMNS_AT, HEADERS
from txmq.core.events.consumers import DeadLettered, Delivered, Replayed, RetriesChanged
from txmq.core.events.plans import PlanPutBack
from txmq.core.events.topics import BatchQueued, BatchStored
from txmq.core.events.transactions import CheckPlanned, Decided, JobDecided, PartStored
from txmq.core.state import failed_messages
from txmq.core.state.failed_rows import FailedKind
from txmq.core.state.plans import LetterOutcome
from txmq.errors import ConfigError, TxmqError
from txmq.model.message import Decision
from txmq.store import tables as t
from txmq.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from opentelemetry.trace import Tracer, TracerProvider

    from txmq.broker.engine.engine import Engine
    from txmq.core.events.base import RecordContext

SCHEMA = "https://opentelemetry.io/schemas/1.44.0"
MOST_LINKS = 128  # which the SDK keeps of a span
MOST_SPANS = 256  # of a flush; what else it brought is counted in the next span
MOST_KEPT = 50_000  # links of undecided transactions, kept for their decisions
MOST_STATE = 512  # characters of a tracestate, which all tracers must take
NANOSECONDS = 1_000  # of a microsecond


class SpanDraft(NamedTuple):
    """A span before it is made. `kind` is SERVER for what a client has asked for."""

    name: str
    links: list[Link]
    attributes: dict[str, Any]
    destination: str = ""
    kind: SpanKind = SpanKind.INTERNAL


def find_tracer(provider: TracerProvider | None = None) -> Tracer:
    """Return the tracer of the program's provider. Raises ConfigError without one."""
    found = trace.get_tracer_provider() if provider is None else provider
    if isinstance(found, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        raise ConfigError(
            "broker.otel",
            "this process has no tracer provider, so nobody would get the spans",
            hint="run it by OpenTelemetry's launcher: opentelemetry-instrument txmq broker --otel",
        )
    return found.get_tracer("txmq.broker", __version__, SCHEMA)


class BrokerSpans:
    """Makes the spans of a broker. All methods belong to the reactor's thread."""

    def __init__(self, engine: Engine, tracer: Tracer) -> None:
        self._engine, self._tracer = engine, tracer
        self._propagator = TraceContextTextMapPropagator()
        self._noted: deque[tuple[Any, RecordContext]] = deque()
        self._left_out = 0
        self._links: OrderedDict[bytes, list[Link]] = OrderedDict()  # by token
        self._kept = 0  # of these
        self._drafts: dict[type, Any] = {
            BatchStored: self._stored,
            BatchQueued: self._stored,
            PartStored: self._part,
            Decided: self._decided,
            JobDecided: self._decided,
            CheckPlanned: self._checked,
            DeadLettered: self._dead_lettered,
            Delivered: self._dead_lettered,
            RetriesChanged: self._dead_lettered,
            Replayed: self._replayed,
            PlanPutBack: self._put_back,
        }
        for event in self._drafts:
            engine.listen(event, self._note)
        engine.on_durable.append(self._emit)

    def _note(self, event: Any, context: RecordContext) -> None:  # noqa: ANN401  # of any kind
        may_have_none = isinstance(event, Delivered | RetriesChanged)
        if may_have_none and not any(True for _row in _letters(event.moves)):
            return
        if len(self._noted) >= MOST_SPANS:
            self._left_out += 1
        else:
            self._noted.append((event, context))

    def _emit(self) -> None:
        durable = self._engine.store.durable
        while self._noted and self._noted[0][1].end <= durable:
            event, context = self._noted.popleft()
            self._make(self._drafts[type(event)](event, context), context.stored_at)

    def _make(self, draft: SpanDraft, began: int) -> None:
        named = {
            "messaging.system": "txmq",
            "messaging.operation.name": draft.name,
            "messaging.operation.type": draft.name,
            **draft.attributes,
        }
        if draft.destination:
            named["messaging.destination.name"] = draft.destination
        if self._left_out:
            named["messaging.txmq.spans_left_out"], self._left_out = self._left_out, 0
        # What concerns one message continues its trace too, beside the link.
        parent = contexts.Context()
        if len(draft.links) == 1:
            creation = trace.NonRecordingSpan(draft.links[0].context)
            parent = trace.set_span_in_context(creation, parent)
        self._tracer.start_span(
            f"{draft.name} {draft.destination}".rstrip(),
            parent,
            draft.kind,
            named,
            draft.links,
            began * NANOSECONDS,
        ).end(max(began, self._engine.now()) * NANOSECONDS)

    def _stored(self, event: BatchStored | BatchQueued, context: RecordContext) -> SpanDraft:
        links = self._links_in(context.attachment_position, event.length)
        attributes = {
            "messaging.batch.message_count": event.count,
            "messaging.destination.partition.id": str(event.partition),
        }
        return SpanDraft("store", links, attributes, self._topic(event.topic_id), SpanKind.SERVER)

    def _part(self, event: PartStored, context: RecordContext) -> SpanDraft:
        found = (
            link
            for batch in event.batches
            for link in self._links_in(context.attachment_position + batch[2], batch[3])
        )
        links = list(islice(found, MOST_LINKS))
        topics = {batch[0] for batch in event.batches}
        undecided = event.offsets is None and not event.commit
        if links and undecided:
            self._keep(event.token, links)
        attributes = {
            "messaging.txmq.transaction": event.token.hex(),
            "messaging.batch.message_count": sum(batch[4] for batch in event.batches),
        }
        name = "store_half" if undecided else "store"
        topic = self._topic(topics.pop()) if len(topics) == 1 else ""
        return SpanDraft(name, links, attributes, topic, SpanKind.SERVER)

    def _keep(self, token: bytes, links: list[Link]) -> None:
        """Keep links until the decision, so many in all: the oldest give way."""
        known = self._links.setdefault(token, [])
        new = links[: MOST_LINKS - len(known)]
        known += new
        self._kept += len(new)
        while self._kept > MOST_KEPT:
            self._forget(next(iter(self._links)))

    def _forget(self, token: bytes) -> list[Link]:
        links = self._links.pop(token, [])
        self._kept -= len(links)
        return links

    def _decided(self, event: Decided | JobDecided, _context: RecordContext) -> SpanDraft:
        tokens = [event.token]
        if isinstance(event, JobDecided):
            tokens += [*event.winners, *event.losers]
        found = [link for token in tokens for link in self._forget(token)]
        name = "commit" if event.outcome == Decision.COMMIT else "rollback"
        attributes = {
            "messaging.txmq.transaction": event.token.hex(),
            "messaging.txmq.decided_by": event.by,
        }
        links = list(islice(found, MOST_LINKS))
        return SpanDraft(name, links, attributes, kind=SpanKind.SERVER)

    def _checked(self, event: CheckPlanned, _context: RecordContext) -> SpanDraft:
        attributes = {
            "messaging.txmq.transaction": event.token.hex(),
            "messaging.txmq.check.tries": event.tries,
            "messaging.txmq.in_doubt": event.in_doubt,
        }
        return SpanDraft("check", list(self._links.get(event.token, ())), attributes)

    def _dead_lettered(
        self, event: DeadLettered | Delivered | RetriesChanged, _context: RecordContext
    ) -> SpanDraft:
        return self._of_letters("dead_letter", event.group_id, list(_letters(event.moves)))

    def _replayed(self, event: Replayed, _context: RecordContext) -> SpanDraft:
        return self._of_letters("replay", event.group_id, event.moves)

    def _put_back(self, event: PlanPutBack, _context: RecordContext) -> SpanDraft:
        draft = self._of_letters("replay", event.group_id, self._last_letters(event))
        draft.attributes["messaging.batch.message_count"] = event.letters
        draft.attributes["messaging.txmq.plan"] = event.plan_id
        return draft

    def _last_letters(self, event: PlanPutBack) -> Iterator[tuple[Any, ...]]:
        """Yield the last letters that a record has put back, as many as have links.

        What is processed and swept meanwhile is left out.
        """
        state = self._engine.state
        group = state.groups.by_id.get(event.group_id)
        if group is None:
            return
        rows = state.tables[t.PLAN_LETTERS].range(
            t.PLAN_KEY.pack(event.plan_id), event.cursor + b"\0", reverse=True
        )
        planned = (key for key, row in rows if row[0] == LetterOutcome.PLANNED)
        for key in islice(planned, min(event.letters, MOST_LINKS)):
            _plan_id, _visible_at, *ref = t.PLAN_LETTER_KEY.unpack(key)
            row = failed_messages.get(state, group, (ref[0], ref[1], ref[2]))
            if row is not None:
                yield (*ref, row)

    def _of_letters(self, name: str, group_id: int, moves: Iterable[Any]) -> SpanDraft:
        moved = list(moves)
        found = (
            link
            for _topic, _partition, _offset, row in moved
            for link in self._links_in(row[4], row[5], row[6])
        )
        attributes: dict[str, Any] = {
            "messaging.consumer.group.name": self._group(group_id),
            "messaging.batch.message_count": len(moved),
        }
        topics = {move[0] for move in moved}
        if len(moved) == 1:
            [(_topic, partition, offset, row)] = moved
            attributes["messaging.destination.partition.id"] = str(partition)
            attributes["messaging.txmq.message.offset"] = offset
            attributes["messaging.txmq.message.attempt"] = row[1]
        topic = self._topic(topics.pop()) if len(topics) == 1 else ""
        return SpanDraft(name, list(islice(found, MOST_LINKS)), attributes, topic)

    def _topic(self, topic_id: int) -> str:
        topic = self._engine.state.topics_by_id.get(topic_id)
        return "" if topic is None else topic.name

    def _group(self, group_id: int) -> str:
        group = self._engine.state.groups.by_id.get(group_id)
        return "" if group is None else group.name

    def _links_in(self, position: int, length: int, row: int | None = None) -> list[Link]:
        """Return links to the creation contexts of a batch, or of one of its rows. What
        is not in the memory of the system, or damaged, has none.
        """
        try:
            data = self._engine.store.read_cached(position, length)
            if data is None or not data[COLUMNS_AT] & HEADERS:
                return []
            headers = BatchView(data).headers
        except TxmqError:
            return []
        wanted = headers if row is None else headers[row : row + 1]
        return list(islice(self._links_of(wanted), MOST_LINKS))

    def _links_of(self, headers: Iterable[Mapping[str, str]]) -> Iterator[Link]:
        for each in headers:
            if "traceparent" in each:
                carrier = dict(each)
                if len(each.get("tracestate", "")) > MOST_STATE:
                    del carrier["tracestate"]
                found = self._propagator.extract(carrier, contexts.Context())
                creation = trace.get_current_span(found).get_span_context()
                if creation.is_valid:
                    yield Link(creation)


def _letters(moves: Iterable[Any]) -> Iterator[Any]:
    """Yield the moves that make a message a dead letter."""
    return (move for move in moves if move[3][0] == FailedKind.LETTER)

"""Control calls about local stores of consumers: reports of their owners, and orders of
operators.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from txmq.batch import key_hash_at
from txmq.broker.calls import operators
from txmq.broker.calls.dispatcher import Answer, CallContext, Handler, then
from txmq.broker.calls.operators import audited, operator_note
from txmq.broker.search import message_view
from txmq.core.consumers import commands as core
from txmq.core.consumers import store_reports, store_views
from txmq.core.consumers.authorization import find_group
from txmq.crashpoints import crashpoint
from txmq.errors import CorruptRecord, RequestRejected
from txmq.model import limits
from txmq.model.retry import FailureReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from txmq.broker.engine.engine import Engine
    from txmq.broker.engine.turn_work import TurnWork
    from txmq.core.consumers.store_adoption import AdoptReply
    from txmq.core.consumers.store_reports import StoreReply
    from txmq.core.state.consumer_groups import ConsumerGroup, MessageRef
    from txmq.core.steps import Steps
    from txmq.wire.calls import recover as wire

UNREADABLE: dict[str, Any] = {
    "message_id": None,
    "key": None,
    "tag": None,
    "headers": {},
    "born_at": None,
    "size": None,
}


class RecoverCalls:
    """Calls of members about their stores, and of operators about all stores."""

    def __init__(self, engine: Engine, turns: TurnWork) -> None:
        self._engine, self._turns = engine, turns
        # last reports, by group id and store: most of them change nothing
        self._seen: dict[tuple[int, bytes], int] = {}
        self.handlers: dict[str, Handler] = {
            "consumer.stored": self.stored,
            "recover.list": self.list_stores,
            "recover.show": self.show,
            "recover.adopt": self.adopt,
            "recover.tell": self.tell,
        }

    def stored(self, call: CallContext, args: wire.ConsumerStored) -> None:
        """Take the report of a member."""
        store = bytes.fromhex(args.store)
        command = core.ReportStored(args.group, args.member, args.generation, store, args.host)
        self._report(call, command, args.entries)
        group = self._engine.state.groups.by_name.get(args.group)
        if group is not None and store in group.stores:
            self._seen[group.group_id, store] = self._engine.now()
        elif group is not None:
            self._seen.pop((group.group_id, store), None)

    def tell(self, call: CallContext, args: wire.RecoverTell) -> None:
        """Take the report of an operator who has a copy of a store."""
        store = bytes.fromhex(args.store)
        command = core.ReportStored(args.group, "", 0, store, "", force=args.force)
        act = partial(audited, "recover.tell", operators.group(args.group), args)
        self._report(call, command, args.entries, act)

    def _report(
        self,
        call: CallContext,
        command: core.ReportStored,
        entries: Sequence[wire.Entry],
        act: Callable[[core.ReportStored], object] | None = None,
    ) -> None:
        replies: list[StoreReply | RequestRejected] = []
        submit = partial(self._submit, act, replies.append)
        steps = self._submitted(command, list(map(_entry, entries)), submit)
        # The replies are there by then: all rest on the same records or earlier ones.
        self._turns.run(call.reader, steps, lambda _none: call.answer(self._answer(replies)))

    def _submit(
        self,
        act: Callable[[core.ReportStored], object] | None,
        deliver: Answer,
        command: core.ReportStored,
    ) -> None:
        self._engine.submit(command if act is None else act(command), deliver)

    def _submitted(
        self,
        command: core.ReportStored,
        entries: list[core.StoredEntry],
        submit: Callable[[core.ReportStored], None],
    ) -> Steps[None]:
        """Submit a report as commands whose entries can be judged at once."""
        part: list[core.StoredEntry] = []
        seen: set[object] = set()
        last_of: dict[object, MessageRef] = {}  # by key: what was before, and not acked
        for entry in entries:
            read, units = self._with_key(command.group, entry)
            if not seen.isdisjoint(units) or len(part) >= store_reports.STEP_ENTRIES:
                submit(command._replace(entries=tuple(part)))
                part, seen = [], set()
                yield
                read, units = self._with_key(command.group, entry)
            seen.update(units)
            part.append(read._replace(behind=last_of.get(units[-1])))
            if read.state != store_reports.ACKED:
                last_of[units[-1]] = units[0]
        submit(command._replace(entries=tuple(part)))

    def _with_key(
        self, group_name: str, entry: core.StoredEntry
    ) -> tuple[core.StoredEntry, store_reports.Units]:
        """Return an entry with its message's key, and the units it concerns."""
        state = self._engine.state
        group = state.groups.by_name.get(group_name)
        if group is None:
            return entry, ((entry.topic_id, entry.partition, entry.offset),)
        source = store_reports.key_source(state, group_name, entry)
        if source is not None:
            begin, read = source.entry.position, self._engine.store.read
            try:
                key = key_hash_at(lambda at, size: read(begin + at, size), source.row)
            except CorruptRecord:
                entry = entry._replace(source=source, damaged=True)
            else:
                entry = entry._replace(key_hash=key, source=source)
        return entry, store_reports.units(state, group, entry)

    def _answer(
        self, replies: list[StoreReply | RequestRejected]
    ) -> dict[str, Any] | RequestRejected:
        verdicts: list[str] = []
        fences: list[int] = []
        for reply in replies:
            if isinstance(reply, RequestRejected):
                return reply
            verdicts += reply.verdicts
            fences += reply.fences
        last = replies[-1]
        assert not isinstance(last, RequestRejected), "all were looked at"
        topics = self._engine.state.topics_by_id
        orders = [(topics[ref[0]].name, *ref, order.name.lower()) for ref, order in last.orders]
        return {"verdicts": verdicts, "fences": fences, "orders": orders, "more": last.more}

    def list_stores(self, call: CallContext, args: wire.RecoverList) -> Steps[dict[str, Any]]:
        state = self._engine.state
        if args.group is None:
            groups: list[ConsumerGroup] = [
                group for _name, group in sorted(state.groups.by_name.items()) if group.stores
            ]
        else:
            groups = [find_group(state, args.group)]
        listed: list[dict[str, Any]] = []
        after_group, _slash, after_store = args.after.rpartition("/")
        for group in groups:
            if group.name >= after_group:
                later = after_store if group.name == after_group else ""
                listed += [
                    self._with_last_report(group, view)
                    for view in store_views.list_stores(state, group)
                    if view["store"] > later
                ]
            if len(listed) > args.limit:
                break
            yield
        page = listed[: args.limit]
        following = f"{page[-1]['group']}/{page[-1]['store']}" if len(listed) > len(page) else None
        return {"stores": page, "next": following}

    def _with_last_report(self, group: ConsumerGroup, view: dict[str, Any]) -> dict[str, Any]:
        seen = self._seen.get((group.group_id, bytes.fromhex(view["store"])), 0)
        return view | {"seen_at": max(view["seen_at"], seen)}

    def show(self, call: CallContext, args: wire.RecoverShow) -> dict[str, Any]:
        state, store_id = self._engine.state, bytes.fromhex(args.store)
        page = store_views.list_messages(state, args.group, store_id, args.after, args.limit)
        messages, following = page
        views = self._message_views(messages, bodies=args.bodies)
        shown = list(message_view.fit_entries(views))
        if len(shown) < len(messages):
            following = _place(shown[-1])
        group = state.groups.by_name[args.group]
        view = self._with_last_report(group, store_views.describe_store(state, group, store_id))
        return view | {"list": shown, "next": following}

    def _message_views(
        self, messages: Sequence[store_views.StoredView], *, bodies: bool
    ) -> Iterator[dict[str, Any]]:
        """Return the messages that can be shown. Without bodies, a damaged one is
        listed as damaged; with bodies, the page ends before it, and where a batch of
        the largest size was decompressed.
        """
        opened = 0
        for number, message in enumerate(messages):
            if opened >= limits.BATCH:
                return
            try:
                view = message_view.read_view(self._engine.store, message.position, message.length)
                opened += max(0, view.header.size - message.length) if bodies else 0
                yield message.fields | message_view.describe_message(
                    view, message.row, bodies=bodies
                )
            except CorruptRecord as error:
                if bodies and not number:
                    raise
                if bodies:
                    return
                yield message.fields | UNREADABLE | {"damaged": error.message}

    def adopt(self, call: CallContext, args: wire.RecoverAdopt) -> None:
        store = bytes.fromhex(args.store)
        command = core.AdoptStore(args.group, store, args.force, operator_note(args))
        acted = audited("recover.adopt", operators.group(args.group), args, command)

        def fenced(reply: AdoptReply) -> dict[str, Any]:
            crashpoint("adoption.after_fence")
            return reply._asdict()

        crashpoint("adoption.before_fence")
        self._engine.submit(acted, then(call.answer, fenced))


def _entry(row: wire.Entry) -> core.StoredEntry:
    topic, topic_id, partition, offset, state, attempt, due, failure, generation, epoch = row
    report = None if failure is None else FailureReport(*failure)
    place = (topic, topic_id, partition, offset)
    return core.StoredEntry(*place, state, attempt, due, report, generation, epoch)


def _place(view: dict[str, Any]) -> MessageRef:
    return view["topic_id"], view["partition"], view["offset"]

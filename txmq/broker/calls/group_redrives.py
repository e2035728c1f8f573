"""The control call that gives dead letters to another group.

Letters that are not in their topic as they are, are copied first; once the copies are
durable, the other group's rows point at them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.batch import single_row
from txmq.broker.calls import operators
from txmq.broker.calls.dispatcher import CallContext, then, unless_refused
from txmq.broker.calls.operators import audited
from txmq.broker.engine.log_reader import read_batches
from txmq.broker.engine.message_copies import MessageCopies
from txmq.core.consumers import group_redrives
from txmq.core.consumers.failures import closed_reason, find_message
from txmq.core.consumers.group_redrives import GiveLetters, GivenLetter
from txmq.crashpoints import crashpoint
from txmq.errors import CorruptRecord

if TYPE_CHECKING:
    from txmq.broker.calls.letters import DeadLetterCalls
    from txmq.broker.engine.engine import Engine
    from txmq.core.consumers.commands import TopicOffset
    from txmq.core.events.base import LogSpan
    from txmq.core.state.consumer_groups import ConsumerGroup, MessageRef
    from txmq.core.state.failed_rows import FailedMessage
    from txmq.core.steps import Steps
    from txmq.wire.calls import letters as wire

MAX_GIVEN = 500  # of one call
MAX_BYTES = 4 << 20  # of their copies, or one that is larger: they are one record
PER_STEP = 32  # letters, between which other connections have their turns


class _Page(NamedTuple):
    letters: list[GivenLetter]
    batches: list[bytes]  # of those letters that are copied, in their order
    copied: list[int]  # places of these letters in `letters`
    refused: list[tuple[str, int, int, str]]
    rest: dict[str, Any]


class GroupRedrives:
    """Letters that another group gets. All methods belong to the reactor's thread."""

    def __init__(self, engine: Engine, letters: DeadLetterCalls) -> None:
        self._engine, self._letters = engine, letters
        self._state = engine.state
        self._copies = MessageCopies(engine)

    def give(self, call: CallContext, args: wire.DlqRedrive) -> None:
        def read(page: _Page) -> None:
            if page.batches:
                self._store(call, args, page)
            else:
                self._point(call, args, page)

        answer = unless_refused(call.answer, read)
        self._letters.turns.run(call.reader, self._read(args), answer)

    def _read(self, args: wire.DlqRedrive) -> Steps[_Page]:
        assert args.to_group is not None, "it is what the call wants"
        groups = group_redrives.find_groups(self._state, args.group, args.to_group)
        page = _Page([], [], [], [], {})
        read = self._read_named if args.letters else self._read_selected
        yield from read(args, groups[0], page)
        return page

    def _read_named(self, args: wire.DlqRedrive, group: ConsumerGroup, page: _Page) -> Steps[None]:
        left: list[TopicOffset] = []
        for number, letter in enumerate(dict.fromkeys(args.letters), 1):
            ref, row = find_message(self._state, group, *letter)
            if ref is None or row is None or closed_reason(row):
                page.refused.append((*letter, closed_reason(row)))
            elif not self._add(page, letter, ref, row):
                left.append(letter)
            if not number % PER_STEP:
                yield
        page.rest["left"] = left

    def _read_selected(
        self, args: wire.DlqRedrive, _group: ConsumerGroup, page: _Page
    ) -> Steps[None]:
        selected = self._letters.selected(args, args.cursor)
        full = False
        while not (full or selected.scan.ended or selected.exhausted):
            for found, damaged in selected.places():
                topic_id, partition, offset = found.ref
                letter = (self._state.topics_by_id[topic_id].name, partition, offset)
                if damaged:
                    page.refused.append((*letter, damaged))
                elif full := not self._add(page, letter, found.ref, found.row):
                    selected.scan.step_back()
                    break
            yield
        page.rest.update(next=selected.following, scanned=selected.scan.examined)
        return None

    def _add(self, page: _Page, letter: TopicOffset, ref: MessageRef, row: FailedMessage) -> bool:
        """Add a letter, or the reason why it is not given. False = there is no room."""
        size = sum(map(len, page.batches))
        if len(page.letters) >= MAX_GIVEN or size >= MAX_BYTES:
            return False
        try:
            [data] = read_batches(self._engine.store, [(row.position, row.length)])
        except CorruptRecord as error:
            page.refused.append((*letter, error.message))
            return True
        if not group_redrives.in_topic(self._state, ref, row):
            page.copied.append(len(page.letters))
            page.batches.append(single_row(bytes(data), row.row))
        page.letters.append(GivenLetter(letter, row.number, row.edits))
        return True

    def _store(self, call: CallContext, args: wire.DlqRedrive, page: _Page) -> None:
        def stored(spans: list[LogSpan]) -> None:
            crashpoint("redrive.after_copy")
            for number, span in zip(page.copied, spans, strict=True):
                page.letters[number] = page.letters[number]._replace(span=span)
            self._point(call, args, page)

        self._copies.store(page.batches, unless_refused(call.answer, stored))

    def _point(self, call: CallContext, args: wire.DlqRedrive, page: _Page) -> None:
        assert args.to_group is not None, "it is what the call wants"
        command = GiveLetters(
            args.group,
            args.to_group,
            tuple(page.letters),
            args.abandon,
            args.again,
            args.operator,
            args.reason,
        )

        def given(reply: Any) -> dict[str, Any]:  # noqa: ANN401  # a GivenReply
            crashpoint("redrive.after_give")
            return {"done": reply.done, "refused": (*reply.refused, *page.refused), **page.rest}

        acted = audited("dlq.redrive", operators.group(args.group), args, command)
        self._engine.submit(acted, then(call.answer, given))

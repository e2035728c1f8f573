"""Control calls of dead letters, and of messages that are retried: list, count, show
and change them.

A call that selects letters reads a bounded number of them, in steps between which other
connections have their turns. Its reply says where to go on, and how many letters it has
read: no reply is late because few letters fit.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from txmq.batch import BatchView, single_row
from txmq.broker.calls import operators
from txmq.broker.calls.dispatcher import CallContext, Handler, Reply, then, unless_refused
from txmq.broker.calls.operators import audited, operator_note
from txmq.broker.calls.pages import page_of
from txmq.broker.engine.log_reader import read_batches
from txmq.broker.search import message_view
from txmq.broker.search.audit_log import with_operations
from txmq.core.consumers import commands as core
from txmq.core.consumers import letter_notes, letter_stats, letter_views, message_lives
from txmq.core.consumers.authorization import find_group
from txmq.core.consumers.failures import MAX_LETTERS
from txmq.core.consumers.letter_exports import NoteExported
from txmq.core.consumers.letter_selection import (
    FoundLetter,
    LetterScan,
    LetterSelection,
    ScanPosition,
)
from txmq.core.consumers.letter_trials import TryLetter, outcome_of
from txmq.core.state.letter_cells import LetterState
from txmq.errors import BadRequest, CorruptRecord, RequestRejected, UnknownTopic
from txmq.model.content import content_of
from txmq.model.keys import key_hash
from txmq.wire.calls.audit import AuditList
from txmq.wire.calls.letters import Cursor, SelectionArgs, parse_cursor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from txmq.broker.engine.engine import Engine
    from txmq.broker.engine.turn_work import TurnWork
    from txmq.core.consumers.letter_views import LetterView
    from txmq.core.state.consumer_groups import ConsumerGroup
    from txmq.core.steps import Steps
    from txmq.wire.calls import letters as wire
    from txmq.wire.calls.consumers import OperatorArgs

UNREADABLE: dict[str, Any] = {
    "key": None,
    "tag": None,
    "headers": {},
    "message_id": None,
    "born_at": None,
}
# A call that selects reads no more than this: about 30 ms of the broker's time.
MAX_SCANNED = 2_000  # letters; one with its message counts as four
MESSAGE_WEIGHT = 3
MAX_READ = 16 << 20  # bytes of messages
READ_PER_STEP = 256 << 10
# A batch is read once for so many letters of a page or more, if it has at most so many
# bytes; else one row is cut out of it for each.
DENSE, SMALL = 16, 1 << 20
REPEAT = "repeat `next` of the page before, with the same selection"


class SelectedLetters:
    """The letters of a selection, from a position on, with their messages where those
    are asked for.
    """

    def __init__(
        self,
        calls: DeadLetterCalls,
        group: ConsumerGroup,
        args: SelectionArgs,
        cursor: str | None,
    ) -> None:
        self._calls, self.group, self.args = calls, group, args
        start = None if cursor is None else ScanPosition(*parse_cursor(cursor))
        self.scan = LetterScan(calls.state, group, core_selection(args), start, calls.now())
        self._content = content_of(args.body, args.header)
        self._judges_messages = args.key is not None or self._content is not None
        self._read = self._messages = 0  # bytes, and their number

    def shown(self, *, bodies: bool) -> Iterator[dict[str, Any]]:
        """Yield the letters that a bounded search finds, as a reply has them.

        A letter whose message is damaged is among them in any case: it is unknown
        whether the selection has it.
        """
        for found in self._step():
            fields = self._fields(found, bodies=bodies)
            if self._may_have(fields):
                if not bodies:
                    fields.pop("body", None)
                yield fields

    def places(self) -> Iterator[tuple[FoundLetter, str]]:
        """Yield the letters that a bounded search finds, each with the damage of its
        message. Messages are read only where the selection depends on them.
        """
        for found in self._step():
            fields = self._fields(found, bodies=False) if self._judges_messages else {}
            if self._may_have(fields):
                yield found, fields.get("damaged", "")

    def _step(self) -> Iterator[FoundLetter]:
        until = self._read + READ_PER_STEP
        for found in self.scan.step():
            yield found
            if self._read >= until:
                return

    def judge(self) -> Callable[[FoundLetter], bool] | None:
        """Return a function that judges letters by their messages; None = the rows tell
        all that the selection needs.
        """
        if not self._judges_messages:
            return None

        def has(found: FoundLetter) -> bool:
            fields = self._fields(found, bodies=False)
            return "damaged" not in fields and self._has(fields)

        return has

    def _fields(self, found: FoundLetter, *, bodies: bool) -> dict[str, Any]:
        view = letter_views.view_of(self._calls.state, self.group, *found)
        before = self._calls.opened
        fields = self._calls.fields_of(view, bodies=bodies or self.args.body is not None)
        self._read += view.length + self._calls.opened - before
        self._messages += 1
        return fields

    def _may_have(self, fields: dict[str, Any]) -> bool:
        return not self._judges_messages or "damaged" in fields or self._has(fields)

    def _has(self, fields: dict[str, Any]) -> bool:
        args = self.args
        if args.key is not None and fields["key"] != args.key:
            return False
        if self._content is None:
            return True
        return self._content.is_in(fields["headers"], lambda: self._body(fields))

    def _body(self, fields: dict[str, Any]) -> bytes:
        """Return the body, which counts as read: it may have been compressed."""
        body = b64decode(fields["body"])
        self._read += len(body)
        return body

    @property
    def exhausted(self) -> bool:
        """Return True if the call has read enough."""
        work = self.scan.examined + MESSAGE_WEIGHT * self._messages
        return work >= MAX_SCANNED or self._read >= MAX_READ

    @property
    def following(self) -> str | None:
        """Return the cursor of the next page; None = this is the last one."""
        return None if self.scan.ended else str(Cursor(*self.scan.position))


class DeadLetterCalls:
    """Calls of operators about dead letters, and messages that are retried."""

    def __init__(self, engine: Engine, turns: TurnWork) -> None:
        self._engine, self.turns = engine, turns
        self.state, self.now = engine.state, engine.now
        self.opened = 0  # bytes by which batches have grown when they were decompressed
        self.handlers: dict[str, Handler] = {
            "dlq.list": self.list_letters,
            "dlq.show": self.show,
            "dlq.stats": self.stats,
            "dlq.replay": self.replay,
            "dlq.abandon": self.abandon,
            **{f"retry.{one.name.lower()}": partial(self.retry, one) for one in core.RetryChange},
            "dlq.exported": self.note_exported,
            "dlq.try": self.try_one,
            "dlq.tried": self.tried,
            "dlq.note": self.note,
            "dlq.save": self.save,
            "dlq.saved": self.saved,
        }

    def list_letters(self, call: CallContext, args: wire.DlqList) -> Reply:
        if args.after if args.selects else args.cursor is not None:
            raise BadRequest("the page before was of another list", hint=REPEAT)
        if args.selects:
            return self._select(args)
        return self._list_by_number(args)

    def _list_by_number(self, args: wire.DlqList) -> dict[str, Any]:
        """Answer a client that knows no selections."""
        letters, following = letter_views.list_letters(
            self.state, args.group, args.after, args.limit
        )
        shown = list(message_view.fit_entries(self._views(letters, bodies=args.bodies)))
        if len(shown) < len(letters):
            following = shown[-1]["number"]
        return {"letters": shown, "next": following}

    def _select(self, args: wire.DlqList) -> Steps[dict[str, Any]]:
        selected = self.selected(args, args.cursor)
        shown: list[dict[str, Any]] = []
        size, full = 0, False
        while not (full or selected.scan.ended or selected.exhausted):
            for fields in selected.shown(bodies=args.bodies):
                size += message_view.weight_of(fields)
                if shown and size > message_view.PAGE_BYTES:
                    selected.scan.step_back()
                    full = True
                    break
                shown.append(fields)
                if full := len(shown) == args.limit:
                    break
            yield
        return {
            "letters": shown,
            "next": selected.following,
            "scanned": selected.scan.examined,
        }

    def selected(self, args: wire.SelectArgs, cursor: str | None) -> SelectedLetters:
        """Return the letters that a call selects."""
        group = find_group(self.state, args.group)
        chosen = self.selection(args)
        if chosen.topic is not None and chosen.topic not in self.state.topics:
            message = f"topic {chosen.topic!r} does not exist"
            raise UnknownTopic(message, hint="see the topics: txmq topic list")
        return SelectedLetters(self, group, chosen, cursor)

    def selection(self, args: wire.SelectArgs) -> SelectionArgs:
        """Return the selection that a call gives or names."""
        if args.saved is not None and args.select is not None:
            message = "both a selection and the name of one"
            raise BadRequest(message, hint="send either select or saved")
        if args.saved is None:
            return args.select or SelectionArgs()
        note = letter_notes.selection_of(self.state, args.saved)
        if note is None:
            message = f"there is no selection {args.saved!r}"
            raise BadRequest(message, hint="see the selections: txmq dlq select list")
        return SelectionArgs.model_validate_json(note.text)

    def show(self, call: CallContext, args: wire.DlqShow) -> Steps[dict[str, Any]]:
        letter = letter_views.describe_letter(
            self.state, args.group, args.topic, args.partition, args.offset, args.version
        )
        # what is damaged has no body to show, and the rest of the letter is known
        view = self._view if args.bodies else self.fields_of
        fields = view(letter, bodies=args.bodies)
        place = (args.topic, args.partition, args.offset)
        wanted = [AuditList(about=operators.group(args.group), message=place)]
        plan = fields["plan"] or message_lives.last_plan(self.state, args.group, *place)
        if plan is not None:
            wanted.append(AuditList(about=f"plan:{plan}"))
        return with_operations(self._engine, fields, *wanted)

    def stats(self, call: CallContext, args: wire.DlqStats) -> Steps[dict[str, Any]]:
        selected = self.selected(args, None)
        group, judge = selected.group, selected.judge()
        chosen = core_selection(selected.args)
        counted = yield from letter_stats.count(
            self.state, group, chosen, self.now(), judge, count_keys=args.keys
        )
        for row in counted["top_keys"]:
            place = (row.pop("topic"), row.pop("partition"), row.pop("offset"))
            try:
                letter = letter_views.describe_letter(self.state, args.group, *place)
                row["key"] = self.fields_of(letter, bodies=False)["key"]
            except RequestRejected:  # it is gone
                row["key"] = None
        return counted

    def _views(self, letters: Sequence[LetterView], *, bodies: bool) -> Iterator[dict[str, Any]]:
        """Return the letters that can be shown. Without bodies, a damaged letter is
        listed as damaged; with bodies, the page ends before it, and where enough was
        decompressed.
        """
        batches = Counter((letter.position, letter.length) for letter in letters)
        known: dict[tuple[int, int], BatchView] = {}
        until = self.opened + MAX_READ
        for number, letter in enumerate(letters):
            if self.opened >= until:
                return
            dense = batches[letter.position, letter.length] >= DENSE and letter.length <= SMALL
            try:
                yield self._view(letter, bodies=bodies, known=known if dense else None)
            except CorruptRecord as error:
                if bodies and not number:
                    raise
                if bodies:
                    return
                yield letter.fields | UNREADABLE | {"damaged": error.message}

    def fields_of(self, letter: LetterView, *, bodies: bool) -> dict[str, Any]:
        """Return a letter with the fields of its message, or with its damage."""
        try:
            return self._view(letter, bodies=bodies)
        except CorruptRecord as error:
            return letter.fields | UNREADABLE | {"damaged": error.message}

    def _view(
        self,
        letter: LetterView,
        *,
        bodies: bool,
        known: dict[tuple[int, int], BatchView] | None = None,
    ) -> dict[str, Any]:
        """Return a letter with the fields of its batch. Letters are durable, so the log
        can be read. `known` keeps a batch that the next letter may be in, too.
        """
        view, row, size = self._batch_of(letter, known, bodies=bodies)
        fields = letter.fields | {
            "key": view.keys[row],
            "tag": view.tags[row],
            "headers": dict(view.headers[row]),
            "message_id": view.message_ids[row],
            "born_at": view.born_at[row],
            "size": size,
        }
        return fields | {"body": b64encode(view.bodies[row]).decode()} if bodies else fields

    def _batch_of(
        self, letter: LetterView, known: dict[tuple[int, int], BatchView] | None, *, bodies: bool
    ) -> tuple[BatchView, int, int]:
        """Return a batch, the letter's row of it, and the size of its body: a batch of
        this row alone where nothing is kept, with its body if that is wanted.
        """
        place = letter.position, letter.length
        view = None if known is None else known.get(place)
        if view is None:
            (batch,) = read_batches(self._engine.store, [place])
            view = BatchView(bytes(batch))
            self.opened += max(0, view.header.size - letter.length) if bodies else 0
        size = view.size_of(letter.row)
        if known is None:
            alone = single_row(view.buffer, letter.row, view, body=bodies)
            return BatchView(alone), 0, size
        known.clear()
        known[place] = view
        return view, letter.row, size

    def replay(self, call: CallContext, args: wire.DlqReplay) -> None:
        note = operator_note(args)
        self._change(call, args, lambda letters: core.ReplayLetters(args.group, letters, note))

    def abandon(self, call: CallContext, args: wire.DlqAbandon) -> None:
        by, reason = args.operator or "", args.reason
        self._change(
            call,
            args,
            lambda letters: core.AbandonLetters(args.group, letters, reason, by),
        )

    def retry(self, change: core.RetryChange, call: CallContext, args: wire.DlqReplay) -> None:
        """Change messages that are retried."""
        by = operator_note(args)
        self._change(
            call,
            args,
            lambda messages: core.ChangeRetries(args.group, change, messages, args.reason, by),
        )

    def _change(
        self,
        call: CallContext,
        args: wire.DlqReplay,
        command: Callable[[tuple[core.TopicOffset, ...]], object],
    ) -> None:
        """Change the letters that are named, or the next ones that are selected."""
        if bool(args.letters) == args.selects:
            message = "letters and a selection" if args.letters else "no letters"
            raise BadRequest(message, hint="send either letters or a selection")
        if args.letters:
            self._submit(call, args, command(args.letters), lambda reply: reply._asdict())
            return

        def found(page: dict[str, Any]) -> None:
            letters, unknown = page.pop("letters"), page.pop("damaged")

            def changed(reply: Any) -> dict[str, Any]:  # noqa: ANN401  # a LettersReply
                return {"done": reply.done, "refused": (*reply.refused, *unknown), **page}

            self._submit(call, args, command(letters), changed)

        answer = unless_refused(call.answer, found)
        self.turns.run(call.reader, self.next_places(args, MAX_LETTERS), answer)

    def next_places(self, args: wire.DlqReplay, most: int) -> Steps[dict[str, Any]]:
        """Return the places of the next letters of a selection, and of the damaged
        ones.
        """
        selected = self.selected(args, args.cursor)
        places: list[core.TopicOffset] = []
        damage: list[tuple[str, int, int, str]] = []
        while not (selected.scan.ended or selected.exhausted or len(places) == most):
            for found, damaged in selected.places():
                topic_id, partition, offset = found.ref
                place = (self.state.topics_by_id[topic_id].name, partition, offset)
                if damaged:
                    damage.append((*place, damaged))
                else:
                    places.append(place)
                if len(places) == most:
                    break
            yield
        return {
            "letters": tuple(places),
            "damaged": damage,
            "next": selected.following,
            "scanned": selected.scan.examined,
        }

    def note_exported(self, call: CallContext, args: wire.DlqExported) -> None:
        command = NoteExported(args.group, args.letters, operator_note(args))
        self._submit(call, args, command, lambda reply: reply._asdict())

    def try_one(self, call: CallContext, args: wire.DlqTry) -> None:
        letter = (args.topic, args.partition, args.offset)
        command = TryLetter(args.group, letter, args.member, operator_note(args))
        self._submit(call, args, command, lambda reply: reply._asdict())

    def tried(self, call: CallContext, args: wire.DlqTried) -> dict[str, Any]:
        letter = (args.topic, args.partition, args.offset)
        found = outcome_of(self.state, args.group, letter, args.number)
        return found._asdict()

    def note(self, call: CallContext, args: wire.DlqNote) -> None:
        by = operator_note(args)
        command = letter_notes.NoteFingerprint(args.group, args.fingerprint, args.text, by)
        self._submit(call, args, command, lambda _reply: {})

    def save(self, call: CallContext, args: wire.DlqSave) -> None:
        text = "" if args.select is None else args.select.model_dump_json(exclude_defaults=True)
        command = letter_notes.SaveSelection(args.name, text, operator_note(args), call.user)
        acted = audited(call.name, f"selection:{args.name}", args, command)
        self._engine.submit(acted, then(call.answer, lambda _reply: {}))

    def saved(self, call: CallContext, args: wire.DlqSaved) -> dict[str, Any]:
        known = dict(letter_notes.selections(self.state))
        page = page_of(known, args, "selections")
        found = [
            {"name": name, "select": json.loads(known[name].text), **_author(known[name])}
            for name in page.names
        ]
        return {"selections": found, "next": page.following}

    def _submit(
        self,
        call: CallContext,
        args: OperatorArgs,
        command: object,
        make: Callable[[Any], dict[str, Any]],
    ) -> None:
        """Submit an operator's change of a group's letters."""
        acted = audited(call.name, operators.group(args.group), args, command)
        self._engine.submit(acted, then(call.answer, make))


def core_selection(args: SelectionArgs) -> LetterSelection:
    """Return the part of a selection that the core judges by rows of the tables."""
    return LetterSelection(
        tuple(dict.fromkeys(LetterState[state.upper()] for state in args.states)),
        args.topic,
        None if args.key is None else key_hash(args.key),
        args.died_from or 0,
        args.died_before,
        args.error_type,
        args.fingerprint,
        args.min_attempts or 0,
        args.max_attempts,
        args.text,
        args.max_replays,
    )


def _author(note: letter_notes.Note) -> dict[str, Any]:
    return {"by": note.by, "saved_at": note.at}

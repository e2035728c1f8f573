"""The control call that edits a dead letter."""

from __future__ import annotations

from base64 import b64decode
from typing import TYPE_CHECKING, Any

from txmq.batch import BatchView, edited_row, single_row
from txmq.broker.calls import operators
from txmq.broker.calls.dispatcher import CallContext, Handler, then, unless_refused
from txmq.broker.calls.operators import audited
from txmq.broker.engine.log_reader import read_batches
from txmq.broker.engine.message_copies import MessageCopies
from txmq.core.consumers import letter_edits
from txmq.core.consumers.letter_edits import EditLetter
from txmq.core.events.base import LogSpan
from txmq.crashpoints import crashpoint
from txmq.errors import BadRequest, LocalProtocolError, MessageTooLarge
from txmq.model.schemas.bodies import CONTENT_TYPE, format_lost, mistake_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from txmq.broker.engine.engine import Engine
    from txmq.core.consumers.letter_edits import OpenLetter
    from txmq.wire.calls import letters as wire


LOST = (
    "the body before it is: mend the new one, give another content-type, or send it as it is "
    "(--any-format, any_format=True)"
)
SCHEMA = "mend the body: txmq topic schema show prints the schema"


class LetterEditCalls:
    """Edits: the new version is stored; once it is durable, the letter points at it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._copies = MessageCopies(engine)
        self.handlers: dict[str, Handler] = {"dlq.edit": self.edit}

    def edit(self, call: CallContext, args: wire.DlqEdit) -> None:
        letter = (args.topic, args.partition, args.offset)
        found = letter_edits.find_open(self._engine.state, args.group, letter, args.edits)
        _refuse_mistake(args)
        letter_edits.refuse_edit(self._engine.state, found, reverts=args.revert)
        command = EditLetter(args.group, letter, args.edits, None, None, args.operator, args.reason)
        if args.revert:
            self._point(call, args, command)
            return
        self._store(call, args, command, self._batches(found, args))

    def _batches(self, found: OpenLetter, args: wire.DlqEdit) -> tuple[bytes, ...]:
        """Return the batches to store: before the first edit a copy of the original,
        then the new version.
        """
        row = found.row
        [data] = read_batches(self._engine.store, [(row.position, row.length)])
        before = single_row(bytes(data), row.row)
        body = None if args.body is None else b64decode(args.body)
        try:
            after = edited_row(before, 0, body=body, headers=args.headers)
        except (LocalProtocolError, MessageTooLarge) as error:
            raise BadRequest(error.message, hint=error.hint) from None
        self._refuse_mistake_in(before, after, args)
        if after == before:
            message = "the edit changes nothing: the letter has this body and these headers"
            raise BadRequest(message, hint="see the letter: txmq dlq show")
        return (after,) if row.edits else (before, after)

    def _refuse_mistake_in(self, before: bytes, after: bytes, args: wire.DlqEdit) -> None:
        """Refuse an edited body that has lost the format of the former one, or does not
        fit the JSON Schema of its topic. A body that stays may be older than the
        schema.
        """
        (was, its_type), (body, content_type) = (
            (bytes(view.bodies[0]), dict(view.headers[0]).get(CONTENT_TYPE, ""))
            for view in map(BatchView, (before, after))
        )
        if (was, its_type) == (body, content_type):
            return
        same_format = its_type == content_type and not args.any_format
        if same_format and (lost := format_lost(was, body, content_type)):
            raise BadRequest(lost, hint=LOST)
        schema = self._engine.state.topics[args.topic].settings.schema
        if schema and (mistake := mistake_in(schema, body, content_type)):
            message = f"the body does not fit the schema of topic {args.topic!r}: {mistake}"
            raise BadRequest(message, hint=SCHEMA)

    def _store(
        self,
        call: CallContext,
        args: wire.DlqEdit,
        command: EditLetter,
        batches: Sequence[bytes],
    ) -> None:
        def stored(spans: list[LogSpan]) -> None:
            crashpoint("edit.after_store")
            original = spans[0] if len(spans) > 1 else None
            self._point(call, args, command._replace(version=spans[-1], original=original))

        self._copies.store(batches, unless_refused(call.answer, stored))

    def _point(self, call: CallContext, args: wire.DlqEdit, command: EditLetter) -> None:
        def edited(reply: Any) -> dict[str, Any]:  # noqa: ANN401  # an EditReply
            crashpoint("edit.after_edit")
            return {"edits": reply.edits}

        acted = audited("dlq.edit", operators.group(args.group), args, command)
        self._engine.submit(acted, then(call.answer, edited))


def _refuse_mistake(args: wire.DlqEdit) -> None:
    changes = args.body is not None or args.headers is not None
    if changes == args.revert:
        message = "both a new version and a return to the original" if changes else "no new version"
        raise BadRequest(message, hint="send either body and headers, or revert")

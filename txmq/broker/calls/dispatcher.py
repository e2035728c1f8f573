"""The table of control calls. Handlers stand in modules by subject.

A handler gets the call under way and its checked arguments. It returns its reply, a
dict for JSON, or steps that do; that goes out once all that it rests on is durable. Or
it returns None, and answers through `answer`, now or later.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.broker.access.guard import OWN_USER
from txmq.broker.access.needs import BODIES, CALLS, judging
from txmq.core.steps import Steps
from txmq.errors import CorruptRecord, MessagesDamaged, RequestRejected
from txmq.wire.calls import registry as wire
from txmq.wire.calls.encoding import encode_call
from txmq.wire.json import dump

if TYPE_CHECKING:
    from txmq.broker.access.guard import Rights
    from txmq.broker.engine.engine import Engine
    from txmq.broker.engine.turn_work import TurnWork
    from txmq.broker.reactor.interfaces import UserRights
    from txmq.broker.reactor.protocol import ClientSession
    from txmq.model.access import Need
    from txmq.wire.frames import Frame

Answer = Callable[[Any], None]  # a dict, or a RequestRejected
Reply = dict[str, Any] | Steps[dict[str, Any]] | None
Handler = Callable[["CallContext", Any], Reply]


class CallContext(NamedTuple):
    """A call under way: its name, the client's session, and the function that
    answers.
    """

    name: str
    caller: ClientSession | None  # None = a call from inside this process, which only reads
    answer: Answer
    rights: Rights | None = None  # of the user for whom this process asks, without a session

    @property
    def user(self) -> str:
        """The user who calls, "" where the broker has no users."""
        rights = self._rights
        return "" if rights is None or rights.user == OWN_USER else rights.user

    @property
    def _rights(self) -> UserRights | None:
        return self.rights if self.caller is None else self.caller.rights

    def may(self, need: Need) -> bool:
        """Return whether the user may do this."""
        rights = self._rights
        return rights is None or rights.allows(need)

    @property
    def reader(self) -> object:
        """Reader whose long reads take turns with those of others: the connection, or
        the user for whom this process asks.
        """
        return self.user if self.caller is None else self.caller

    @property
    def session(self) -> ClientSession:
        """The session of the client."""
        assert self.caller is not None, "this call is for clients only"
        return self.caller


class CallDispatcher:
    """Decodes calls and passes them to their handlers."""

    def __init__(self, handlers: dict[str, Handler], engine: Engine, turns: TurnWork) -> None:
        missing = wire.CALLS.keys() ^ handlers.keys()
        assert not missing, f"calls without a handler, or the other way round: {sorted(missing)}"
        self._handlers, self._engine, self._turns = handlers, engine, turns

    def handle(self, session: ClientSession, frame: Frame) -> None:
        """Execute one call of a client."""
        name, args = wire.decode_call(frame.payload)
        if session.rights is not None:
            if session.rights.meter is not None:
                session.rights.check_call_quota(name)
            args = session.rights.judge_call(self._engine.state, name, args)

        answer = partial(session.answer, frame, dump)
        self._execute(name, CallContext(name, session, answer), args)

    def ask(
        self,
        name: str,
        args: dict[str, object],
        answer: Answer,
        rights: Rights | None = None,
        via: str = "",
    ) -> None:
        """Execute a call for an edge of the broker such as the admin pages, whose name
        is `via` where the call changes something: the audit topic has it. The arguments
        are checked like a client's, and by the user's `rights`, where the broker has
        users.

        `answer` gets a dict or a RequestRejected. Raises RemoteProtocolError for
        arguments that the call does not have.
        """
        _name, checked = wire.decode_call(encode_call(name, args))
        checked.come_by(via)
        if rights is not None:
            checked = rights.judge_call(self._engine.state, name, checked)
        self._execute(name, CallContext(name, None, answer, rights), checked)

    def missing(self, name: str, args: dict[str, object], rights: Rights) -> Need | None:
        """Return the permission that a user lacks for a call, if any; with that for
        bodies, where it asks for them. Raises RemoteProtocolError for arguments that
        the call does not have.
        """
        _name, checked = wire.decode_call(encode_call(name, args))
        needs = list(CALLS[name](self._engine.state, checked))
        if "bodies" in args:
            needs += BODIES[name](self._engine.state, checked)
        needs += judging(self._engine.state, name, checked)
        return rights.missing(needs)

    def lacks(self, name: str, args: dict[str, object], rights: Rights) -> Need | None:
        """Return the permission that a user lacks for a call of which some arguments
        are known, if any. Raises AttributeError where those are too few.
        """
        some = wire.CALLS[name].model_construct(None, **args)
        return rights.missing(CALLS[name](self._engine.state, some))

    def _execute(self, name: str, call: CallContext, args: Any) -> None:  # noqa: ANN401  # the call's own model
        try:
            reply = self._handlers[name](call, args)
            if isinstance(reply, dict):
                self._engine.answer_when_durable(call.answer, reply)
            elif reply is not None:
                self._turns.run(call.reader, reply, call.answer)
        except RequestRejected as refused:
            self._engine.answer_when_durable(call.answer, refused)
        except CorruptRecord as error:
            call.answer(damaged(error))


def damaged(error: CorruptRecord) -> RequestRejected:
    """Return the refusal of a call that met damage in the log."""
    detail: dict[str, object] = {"path": error.path, "position": error.position}
    hint = (
        "the broker's alarms name the file: "
        "restore it from a backup, or ask for what comes after it"
    )
    return MessagesDamaged(error.message, hint=hint, detail=detail)


def then(answer: Answer, make: Callable[[Any], dict[str, Any]]) -> Answer:
    """Return an `answer` for replies of the core: it passes refusals on, and other
    replies through `make`.
    """
    return unless_refused(answer, lambda reply: answer(make(reply)))


def unless_refused(answer: Answer, go_on: Callable[[Any], None]) -> Answer:
    """Return a function that goes on with a reply of the core, or answers with its
    refusal.
    """
    return lambda reply: (answer if isinstance(reply, RequestRejected) else go_on)(reply)

"""The table of binary requests: each opcode and its handler."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from txmq.broker.reactor.held_sends import WRITES
from txmq.broker.requests.bundles import BundleRequests
from txmq.broker.requests.consumers import ConsumerRequests
from txmq.broker.requests.letters import LetterRequests
from txmq.broker.requests.sends import SendRequests
from txmq.errors import BadRequest, BrokerFailed, TxmqError
from txmq.model import limits
from txmq.store.tables import IndexDamaged
from txmq.wire.data_requests import Opcode

if TYPE_CHECKING:
    from collections.abc import Callable

    from txmq.broker.calls.dispatcher import CallDispatcher
    from txmq.broker.checkback.resolvers import Resolvers
    from txmq.broker.checkback.transaction_listeners import TransactionListeners
    from txmq.broker.delivery.fetch_service import FetchService
    from txmq.broker.engine.engine import Engine
    from txmq.broker.engine.turn_work import TurnWork
    from txmq.broker.reactor.protocol import ClientSession
    from txmq.wire.frames import Frame


class RequestDispatcher:
    """Answers the frames of all sessions. All methods belong to the reactor's
    thread.
    """

    def __init__(
        self,
        engine: Engine,
        fetches: FetchService,
        calls: CallDispatcher,
        resolvers: Resolvers,
        listeners: TransactionListeners,
        turns: TurnWork,
        *,
        message_bytes: int = limits.MESSAGE,
    ) -> None:
        sends, consumers = SendRequests(engine, message_bytes), ConsumerRequests(engine, fetches)
        bundles = BundleRequests(engine, resolvers, listeners, message_bytes)
        self._engine, self._faults = engine, engine.faults
        self._handlers: dict[int, Callable[[ClientSession, Frame], None]] = {
            Opcode.SEND: sends.send,
            Opcode.SENDS: sends.multi_send,
            Opcode.ACK: consumers.ack,
            Opcode.FETCH: consumers.fetch,
            Opcode.READ: consumers.read,
            Opcode.LETTERS: LetterRequests(engine, turns).read,
            Opcode.GROUP: bundles.store,
            Opcode.GROUPS: bundles.multi_store,
            Opcode.DECIDE: bundles.decide,
            Opcode.DECISIONS: bundles.multi_decide,
            Opcode.CALL: calls.handle,
            Opcode.PING: lambda session, frame: session.reply(frame),
        }

    def handle(self, session: ClientSession, frame: Frame) -> None:
        """Answer one request."""
        handler = self._handlers.get(frame.opcode)
        if handler is None or frame.status:
            session.refuse(
                frame, BadRequest(f"unknown request {frame.opcode}, flags {frame.status}")
            )
            return
        # The frame's checksum was right, so only this request is at fault, whatever
        # happens: the next one may be fine.
        engine = self._engine
        engine.requester = (self._fail, session, frame)
        try:
            if session.rights is not None:
                if session.rights.meter is not None:
                    session.rights.check_quota(engine.state, frame.opcode, frame.payload)
                session.rights.check(engine.state, frame.opcode, frame.payload)
            handler(session, frame)
        except Exception as error:  # noqa: BLE001
            self._fail(session, frame, error)
        finally:
            engine.requester = engine.own_requester

    def _fail(self, session: ClientSession, frame: Frame, error: Exception) -> None:
        """Answer a request that an exception ended."""
        if not isinstance(error, TxmqError) or isinstance(error, IndexDamaged):
            self._faults.record(f"request {frame.opcode}", error)
            error = BrokerFailed(
                f"the broker failed while it worked on the request: {type(error).__name__}",
                hint="see the broker's log for the reason",
            )
        if frame.opcode in WRITES:  # producers count on answers in the order of their sends
            left = session.drop_payload(frame)
            self._engine.answer_when_durable(partial(session.refuse, left), error)
        else:
            session.refuse(frame, error)

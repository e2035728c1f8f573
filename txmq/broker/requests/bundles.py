"""GROUP, GROUPS, DECIDE and DECISIONS: bundles stored, and transactions decided."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from txmq.batch import read_header, split, verify
from txmq.batch.header import DELIVER_AT
from txmq.broker.requests.multi_request import MultiRequest
from txmq.core.topics import topics
from txmq.core.transactions import decisions
from txmq.core.transactions.batched import (
    DecideBundles,
    StoreBundles,
    is_batchable_decision,
    is_batchable_store,
)
from txmq.core.transactions.half_storage import BundleBatch, StorePart
from txmq.core.transactions.instances import check_incarnation
from txmq.errors import NoResolver, TxmqError
from txmq.model.decider import ByPostgres
from txmq.wire.batched import unpack_requests
from txmq.wire.bundle import pack_bundle_receipt, unpack_part
from txmq.wire.data_requests import Opcode, pack_decide_receipt, unpack_decide

if TYPE_CHECKING:
    from txmq.broker.checkback.resolvers import Resolvers
    from txmq.broker.checkback.transaction_listeners import TransactionListeners
    from txmq.broker.engine.engine import Engine
    from txmq.broker.reactor.protocol import ClientSession
    from txmq.wire.bundle import BundlePart, PartBatch
    from txmq.wire.frames import Frame

NO_DESCRIPTION = (None, "", (), 0, ())  # of the parts after the first


class BundleRequests:
    """Answers GROUP, GROUPS, DECIDE and DECISIONS. All methods belong to the reactor's
    thread.
    """

    def __init__(
        self,
        engine: Engine,
        resolvers: Resolvers,
        listeners: TransactionListeners,
        message_bytes: int,
    ) -> None:
        self._engine, self._resolvers, self._listeners = engine, resolvers, listeners
        self._message_bytes = message_bytes

    def store(self, session: ClientSession, frame: Frame) -> None:
        command = self._store_command(session, frame.payload)
        self._engine.submit(command, partial(session.answer, frame, pack_bundle_receipt))

    def decide(self, session: ClientSession, frame: Frame) -> None:
        command = _decide_command(frame.payload)
        self._engine.submit(command, partial(session.answer, frame, pack_decide_receipt))

    def multi_store(self, session: ClientSession, frame: Frame) -> None:
        requests = MultiRequest(self._engine, StoreBundles, pack_bundle_receipt)
        for payload in unpack_requests(frame.payload):
            try:
                if session.rights is not None:
                    session.rights.check(self._engine.state, Opcode.GROUP, payload)
                command = self._store_command(session, payload)
            except TxmqError as error:
                requests.refuse(error)
            else:
                requests.add(command.token, command, batchable=is_batchable_store(command))
        requests.end(partial(session.reply, frame))

    def multi_decide(self, session: ClientSession, frame: Frame) -> None:
        state = self._engine.state
        requests = MultiRequest(self._engine, DecideBundles, pack_decide_receipt)
        for payload in unpack_requests(frame.payload):
            try:
                if session.rights is not None:
                    session.rights.check(state, Opcode.DECIDE, payload)
                command = _decide_command(payload)
            except TxmqError as error:
                requests.refuse(error)
            else:
                batchable = is_batchable_decision(state, command.token)
                requests.add(command.token, command, batchable=batchable)
        requests.end(partial(session.reply, frame))

    def _store_command(self, session: ClientSession, payload: bytes) -> StorePart:
        """Return the command in the payload of a GROUP. Raises TxmqError."""
        part, state = unpack_part(payload), self._engine.state
        if session.instance is not None and state.transactions.get(part.token) is None:
            check_incarnation(state, *session.instance, session.incarnation)
        decider = None if part.description is None else part.description.decider
        if isinstance(decider, ByPostgres) and not self._resolvers.may_resolve(decider):
            self._listeners.unresolvable()
            hint = "name its database under [[resolver]] in the broker's settings"
            raise NoResolver(
                "no resolver of this broker leads to the database that decides", hint=hint
            )
        if isinstance(decider, ByPostgres):
            # A part that comes again may be of a commit from before the failover.
            if state.transactions.get(part.token) is None and (
                reason := self._resolvers.left_behind(decider)
            ):
                raise NoResolver(reason, hint="connect to the primary, and run it again")
            self._resolvers.note_bundle(decider)
        command = store_command(part, session.origin)
        limit = self._message_bytes
        for batch in command.batches:
            if batch.header.size > limit:
                topics.check_message_size(batch.header, batch.data, limit, "the broker")
        return command


def store_command(part: BundlePart, origin: bytes = b"") -> StorePart:
    """Return the command that stores a part, sent by process `origin`. Raises TxmqError
    for a damaged batch.
    """
    batches: list[BundleBatch] = []
    for batch in part.batches:
        _add_batch(batches, batch)
    decider, service, actions, check_after, participants = part.description or NO_DESCRIPTION
    return StorePart(
        part.token,
        part.part,
        tuple(batches),
        part.sealed,
        part.commit,
        part.digest,
        part.epoch,
        decider,
        service,
        actions,
        check_after,
        participants,
        origin,
    )


def _add_batch(batches: list[BundleBatch], batch: PartBatch) -> None:
    """Add the batch; if some of its messages are delayed, each message as a batch of
    its own.
    """
    topic, partition, epoch, data = batch
    header = verify(data)
    if not header.columns & DELIVER_AT:
        batches.append(BundleBatch(topic, epoch, partition, data, header))
        return
    singles = [single.data for single in split(data, header)]
    batches += [
        BundleBatch(topic, epoch, partition, single, read_header(single)) for single in singles
    ]


def _decide_command(payload: bytes) -> decisions.DecideTransaction:
    request = unpack_decide(payload)
    return decisions.DecideTransaction(request.token, request.outcome, request.by)

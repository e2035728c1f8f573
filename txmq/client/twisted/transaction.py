"""Transactions that a broker decides as it stores them, on Twisted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

from txmq.client.protocol.sender.accumulator import SideRequest
from txmq.client.protocol.sender.routing import Routing
from txmq.client.protocol.sender.rows import Fields, micros_now
from txmq.client.protocol.transaction.acks import AckOwner, ack_owner_of, require_same_log
from txmq.client.protocol.transaction.broker_split import (
    BrokerSends,
    split_by_broker,
    topics_to_look_up,
)
from txmq.client.protocol.transaction.buffer import Buffer, BuiltBatches
from txmq.client.protocol.transaction.decision import decide_request
from txmq.client.protocol.transaction.lifecycle import Stage, wrong_stage
from txmq.client.protocol.transaction.parts import batch_count, split_into_parts
from txmq.client.protocol.transaction.state import require_no_spool
from txmq.client.protocol.transaction.tokens import new_token
from txmq.client.twisted.core import TwistedCore
from txmq.crashpoints import crashpoint
from txmq.errors import (
    BrokerUnavailable,
    InDoubt,
    LocalProtocolError,
    StaleTopic,
    TransactionAborted,
    TxmqError,
)
from txmq.model.bundle import BundleState
from txmq.model.decider import ByBroker
from txmq.model.message import ROLLBACK, Message, Receipt
from txmq.wire.bundle import BundleDescription, BundlePart, pack_part, unpack_bundle_receipt
from txmq.wire.data_requests import Opcode


class Transaction:
    """An `async with` block whose sends and acks take effect together, or not at all.

    Nothing is sent where the block raises. It needs no thread.
    """

    def __init__(self, core: TwistedCore) -> None:
        self._core = core
        self._buffer = Buffer(core.topics)
        self._topics: dict[str, None] = {}
        self._acked: list[tuple[AckOwner, object]] = []
        self._stage = Stage.NEW
        self.token = new_token()
        self.receipts: list[Receipt] = []  # after the block; the offsets are not known

    def send(
        self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> None:
        """Send a message if the block does not raise.

        Raises LocalProtocolError or MessageTooLarge.
        """
        self._require(Stage.OPEN)
        self._buffer.add(topic, Message(body, **fields), micros_now(), partition)
        self._topics[topic] = None

    def ack(self, delivered: object) -> None:
        """Ack a message or batch of a consumer of this process, if the block does not
        raise.
        """
        self._require(Stage.OPEN)
        owner = ack_owner_of(delivered)
        require_same_log(owner, self._core.known_log_id)
        actions = owner.ack_actions(delivered)
        self._buffer.actions += actions
        self._acked.append((owner, delivered))

    async def __aenter__(self) -> Self:
        self._require(Stage.NEW)
        self._stage = Stage.OPEN
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stage, committed = Stage.OVER, False
        known: bool | None = False
        try:
            if error is None and not self._buffer.empty:
                await self._traced(self._commit())
                committed = True
        except TxmqError as failure:
            known = None if failure.outcome == "unknown" else False
            require_no_spool(self._core.settings, failure)
            raise
        finally:
            self._buffer.clear()
            for owner, delivered in self._acked:
                owner.transaction_ended(delivered, committed=committed or known)

    def _traced(self, work: Coroutine[Any, Any, None]) -> Awaitable[None]:
        telemetry = self._core.settings.telemetry
        if telemetry is None:
            return work
        traced: Awaitable[None] = telemetry.store(self._buffer.items, decided=True).around(
            lambda: work
        )
        return traced

    async def _commit(self) -> None:
        for topic in self._topics:
            await self._core.topic(topic)
        service = self._core.settings.service or ""
        description = BundleDescription(ByBroker(), service, tuple(self._buffer.actions), 0)
        deadline = self._core.seconds() + self._core.settings.timeout
        stored: list[BundlePart] = []
        built, state = BuiltBatches([], []), None
        while state is None:
            before = built.first(batch_count(stored))
            built = self._buffer.build(self.token, stored=before)
            parts = split_into_parts(self.token, description, built.batches, stored=stored)
            state = await self._store(
                [*parts[:-1], parts[-1]._replace(commit=True)], stored, deadline
            )
        crashpoint("local.after_group")
        if state is BundleState.ROLLED_BACK:
            raise TransactionAborted(f"transaction {self.token} was rolled back")
        self.receipts = built.receipts(self.token, [None] * len(built.batches))

    async def _store(
        self, parts: Sequence[BundlePart], stored: list[BundlePart], deadline: float
    ) -> BundleState | None:
        """Send the parts that are not stored, and return the state of the bundle; None
        where a topic has grown, so that the rest is to be built anew.
        """
        state = None
        try:
            for part in parts[len(stored) :]:
                state = await self._store_part(part, deadline)
                if state is None:
                    return None
                stored.append(part)
        except TxmqError as error:
            if error.outcome == "unknown" and len(stored) + 1 == len(parts):
                raise InDoubt(f"no answer came: {error.message}", token=str(self.token)) from error
            if len(parts) > 1:  # its first parts would hold their keys until they time out
                self._roll_back()
            raise
        return state

    async def _store_part(self, part: BundlePart, deadline: float) -> BundleState | None:
        try:
            receipt: bytes = await self._core.send_request(
                SideRequest(Opcode.GROUP, pack_part(part))
            )
        except StaleTopic as stale:
            if self._core.seconds() >= deadline:
                raise
            await self._core.refresh(str(stale.detail.get("topic", "")))
            return None
        return BundleState(unpack_bundle_receipt(receipt).state)

    def _roll_back(self) -> None:
        """Send a rollback without waiting for its answer."""
        payload = decide_request(self.token, ROLLBACK, self._core.settings.service or "")
        self._core.start(self._core.send_request(SideRequest(Opcode.DECIDE, payload)))

    def _require(self, stage: Stage) -> None:
        if self._stage is not stage:
            raise wrong_stage(self.token, self._stage)


class ClusterTransaction(Transaction):
    """A Transaction over a cluster: the broker of its messages and acks decides it.

    The block raises LocalProtocolError at its end where they belong to several brokers.
    """

    def __init__(
        self,
        cores: Sequence[TwistedCore],
        routing: Routing,
        look_up: Callable[[Iterable[str]], Awaitable[None]],
    ) -> None:
        """`look_up` asks the brokers for their partitions of topics."""
        super().__init__(cores[0])
        self._cores, self._routing, self._look_up = cores, routing, look_up
        self._acked_at: TwistedCore | None = None

    def ack(self, delivered: object) -> None:
        """Ack a message or batch of a consumer of this cluster, if the block does not
        raise.
        """
        log_id = ack_owner_of(delivered).log_id
        core = next((core for core in self._cores if core.known_log_id == log_id), None)
        if core is None or log_id is None:
            raise LocalProtocolError(
                "the message is of none of the cluster's brokers",
                hint="ack what a consumer of this cluster delivered",
            )
        if self._acked_at not in (None, core):
            raise self._several_brokers()
        self._core = core
        super().ack(delivered)
        self._acked_at = core

    async def _commit(self) -> None:
        turn = await self._choose_core()
        try:
            await super()._commit()
        except BrokerUnavailable as error:
            if turn is not None:
                self._routing.avoid(turn, error, self._core.seconds())
            raise

    async def _choose_core(self) -> int | None:
        """Choose the broker, and return it if it is only the next one in turn."""
        sends = self._buffer.items
        await self._look_up(topics_to_look_up(sends, self._routing))
        by_broker = split_by_broker(sends, self._routing)
        anywhere = by_broker.pop(None, BrokerSends())
        turn = None
        cores = {self._cores[broker] for broker in by_broker if broker is not None}
        if self._acked_at is not None:
            cores.add(self._acked_at)
        if len(cores) > 1:
            raise self._several_brokers()
        if not cores:
            turn = self._routing.brokers_in_turn(self._core.seconds())[0]
            cores.add(self._cores[turn])
        [self._core] = cores
        for routed in by_broker.values():
            anywhere = anywhere.merge(routed)
        buffer = Buffer(self._core.topics)
        buffer.items, buffer.actions = anywhere.sends, self._buffer.actions
        self._buffer = buffer
        return turn

    def _several_brokers(self) -> LocalProtocolError:
        return LocalProtocolError(
            f"Transaction {self.token} cannot have a second broker",
            hint="its broker decides it alone: let a database decide, with "
            "client.transaction(connection)",
        )

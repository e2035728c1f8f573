"""Transactions that the broker decides as it stores them, for the Twisted face."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

from txmq.client.blocking.sender.producer import Fields, micros_now
from txmq.client.blocking.transaction.broker_part import AckOwner, require_same_log
from txmq.client.blocking.transaction.bundles import parts_of
from txmq.client.blocking.transaction.transaction import Stage
from txmq.client.protocol.transaction.buffer import Action, Buffer
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import ClientClosed, InDoubt, LocalProtocolError, TransactionAborted, TxmqError
from txmq.model.bundle import GroupState
from txmq.model.message import Message, Receipt
from txmq.wire.group import Description, pack_part, unpack_group_receipt
from txmq.wire.headers import Opcode

if TYPE_CHECKING:
    from txmq.client.twisted.core import Core


class Transaction:
    """An `async with` block whose sends and acks take effect together, or not at all;
    if it raises, nothing is sent.
    """

    def __init__(self, core: Core) -> None:
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
        """Sends a message if the block ends well. Raises LocalProtocolError or
        MessageTooLarge.
        """
        self._require(Stage.OPEN)
        self._buffer.add(topic, Message(body, **fields), micros_now(), partition)
        self._topics[topic] = None

    def ack(self, delivered: object) -> None:
        """Acks a message, or a batch, of one of this process's consumers if the block
        ends well.
        """
        self._require(Stage.OPEN)
        owner = getattr(getattr(delivered, "parcel", None), "owner", None)
        if not isinstance(owner, AckOwner):
            hint = "ack what a consumer of this process delivered, as it delivered it"
            raise LocalProtocolError(
                f"{type(delivered).__name__} cannot be acked in a transaction", hint=hint
            )
        require_same_log(owner, self._core.known_log_id)
        actions: list[Action] = list(owner.ack_actions(delivered))
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
                await self._commit()
                committed = True
        except TxmqError as failure:
            known = None if failure.outcome == "unknown" else False
            raise
        finally:
            self._buffer.clear()
            for owner, delivered in self._acked:
                owner.transaction_over(delivered, committed=committed or known)

    async def _commit(self) -> None:
        for topic in self._topics:
            await self._core.shape(topic)
        built = self._buffer.build(self.token)
        service = self._core.settings.service or ""
        described = Description(("local",), service, tuple(self._buffer.actions), 0)
        *parts, last = parts_of(self.token, described, built.batches)
        receipt = None
        try:
            for part in (*parts, last._replace(commit=True)):
                receipt = unpack_group_receipt(
                    await self._core.carried(Opcode.GROUP, pack_part(part))
                )
        except TxmqError as error:
            if error.outcome == "unknown":
                raise InDoubt(f"no answer came: {error.message}", token=str(self.token)) from error
            raise
        assert receipt is not None, "a group has a part"
        if receipt.state == GroupState.ROLLED_BACK:
            raise TransactionAborted(f"transaction {self.token} was rolled back")
        self.receipts = built.receipts(self.token, [None] * len(built.batches))

    def _require(self, stage: Stage) -> None:
        if self._stage is Stage.OVER:
            raise ClientClosed(
                f"transaction {self.token} is over",
                hint="begin another one with client.transaction",
            )
        if self._stage is not stage:
            raise LocalProtocolError(
                f"transaction {self.token} {self._stage.value}", hint="use it inside its block"
            )

"""The bundle of a transaction at one broker, from its first send to its decision.

All bundles of a transaction carry its token. The brokers store them at the same time,
so that several brokers cost hardly more time than one.
"""

from __future__ import annotations

import time
from typing import Any
from uuid import UUID

from txmq.client.blocking.core import BlockingCore
from txmq.client.blocking.decision_pipeline import PendingDecision, log_undelivered
from txmq.client.blocking.transaction.bundle_upload import BundleUpload
from txmq.client.blocking.transaction.decisions import (
    await_state,
    decide,
    request_check,
    send_decision,
)
from txmq.client.protocol.awaited.bundle import StoringBundle
from txmq.client.protocol.sender.batches import FIRST_PAUSE_S
from txmq.client.protocol.transaction.decision import is_published
from txmq.errors import (
    ClientClosed,
    RequestRejected,
    RequestTimeout,
    StaleTopic,
    Throttled,
    TransactionAborted,
    TxmqError,
)
from txmq.model.bundle import BundleReceipt, BundleState, DecideReceipt
from txmq.model.message import Decision, Receipt
from txmq.wire.bundle import BundleDescription
from txmq.wire.data_requests import Opcode


class BrokerBundle(StoringBundle[BlockingCore]):
    """A transaction's messages and acks at one broker. For one thread."""

    _decision: PendingDecision | None = None

    def __init__(self, core: BlockingCore, token: UUID) -> None:
        super().__init__(core, token)
        self._upload: BundleUpload | None = None

    def _log_id(self) -> UUID:
        return self.core.log_id

    async def log_id(self) -> UUID:
        return self.core.log_id

    async def call(
        self, name: str, args: dict[str, Any], *, within: float | None = None
    ) -> dict[str, Any]:
        return self.core.call(name, args, timeout=within, repeat=True)

    async def ping(self) -> None:
        self.core.request(Opcode.PING)

    async def build(self, description: BundleDescription, deadline: float) -> None:
        self._description, self._deadline = description, deadline
        self._upload = BundleUpload(self.core, self._parts(), deadline)

    async def send(self) -> None:
        assert self._upload is not None, "build() comes before send()"
        self._begin_operation()
        try:
            self._upload.send()
        except BaseException as error:
            self._end_operation(error)
            raise
        self.sent = True

    def extend_deadline(self, deadline: float) -> None:
        assert self._upload is not None, "send() comes before extend_deadline()"
        self._deadline = self._upload.deadline = deadline

    async def await_receipt(self) -> BundleReceipt:
        assert self._upload is not None, "send() comes before await_receipt()"
        try:
            receipt = self._await_receipt()
        except BaseException as error:
            self._end_operation(error)
            if isinstance(error, RequestRejected):
                self.sent = self._upload.part_count > 1  # some parts may be stored
            raise
        self._end_operation()
        if receipt.state == BundleState.ROLLED_BACK:
            raise TransactionAborted(
                f"Transaction {self.token} was rolled back before it was complete",
                hint="it took too long, or an operator decided so: see `txmq tx show`",
            )
        return receipt

    def _await_receipt(self) -> BundleReceipt:
        assert self._upload is not None, "send() comes before await_receipt()"
        while True:
            try:
                return self._upload.await_receipt()
            except (StaleTopic, Throttled) as refused:
                stored, now = self._upload.stored_parts, time.monotonic()
                pause = 0.0
                if isinstance(refused, Throttled):
                    pause = max(FIRST_PAUSE_S, refused.retry_after_s)
                if stored is None or now + pause >= self._deadline:
                    raise
                if isinstance(refused, StaleTopic):
                    self.core.topics.refresh(str(refused.detail.get("topic", "")))
                time.sleep(pause)
            parts = self._parts(stored=self._upload.parts[:stored])
            self._upload = BundleUpload(self.core, parts, self._deadline, stored)
            self._upload.send()

    async def decide(self, outcome: Decision, seconds: float) -> DecideReceipt:
        return decide(self.core, self.token, outcome, timeout=seconds)

    async def await_state(
        self, target: BundleState, deadline: float, *, check: bool = False
    ) -> BundleState | None:
        return await_state(self.core, self.token, target, deadline, check=check)

    def abandon(self) -> None:
        self._end_operation()
        if self._upload is not None:
            self._upload.abandon()

    def request_check(self) -> None:
        request_check(self.core, self.token)

    def send_decision(self, outcome: Decision) -> None:
        try:
            self._decision = send_decision(self.core, self.token, outcome)
        except ClientClosed as closed:
            log_undelivered(self.token, outcome, closed)

    def wait_published(self, deadline: float) -> None:
        """Wait until consumers can see the messages.

        Raises RequestTimeout or TransactionAborted.
        """
        if (
            self.published
            or not (self._built.batches or self.in_outbox)
            or self._decision_was_published(deadline)
        ):
            return
        state = await_state(self.core, self.token, BundleState.PUBLISHED, deadline, check=True)
        if state is BundleState.ROLLED_BACK:
            raise TransactionAborted(
                f"Transaction {self.token} was rolled back",
                hint="`txmq tx show` tells who rolled it back",
            )
        if state is not BundleState.PUBLISHED:
            raise RequestTimeout(
                f"Transaction {self.token} is not published in time, but "
                f"{state.name if state else 'UNKNOWN'}",
                hint=f"see `txmq tx show {self.token}`",
            )

    def receipts(self) -> list[Receipt]:
        """Return the receipts in the order of the sends; see TransactionOperations."""
        if not self._built.batches:
            return []
        shown = self.core.call("tx.show", {"token": self.token.hex}, repeat=True)
        offsets = [batch["offset"] for batch in shown["batches"]]
        return self._built.receipts(self.token, offsets, self.first_number)

    def _decision_was_published(self, deadline: float) -> bool:
        if self._decision is None:
            return False
        try:
            payload = self._decision.result(max(0.0, deadline - time.monotonic()))
        except (TimeoutError, TxmqError):
            return False
        return is_published(payload)

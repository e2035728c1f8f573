"""The bundle of a transaction at one broker, stored and decided on asyncio.

Bundles and decisions go through the client's sender: those of one turn of the loop
share frames. All bundles of a transaction carry its token.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

from txmq.client.aio.core import AioCore
from txmq.client.aio.loop import expire
from txmq.client.log import get_logger
from txmq.client.protocol.awaited.bundle import StoringBundle
from txmq.client.protocol.sender.routing import Routing
from txmq.client.protocol.transaction.decision import decide_request, deciding, is_published
from txmq.client.protocol.transaction.unrouted import UnroutedSends, in_order
from txmq.errors import (
    ClientClosed,
    RequestRejected,
    RequestTimeout,
    StaleTopic,
    TransactionAborted,
    TxmqError,
    UnknownTransaction,
)
from txmq.model.bundle import BundleReceipt, BundleState, DecideReceipt
from txmq.model.message import Decision, Receipt
from txmq.wire.bundle import BundleDescription, BundlePart, pack_part, unpack_bundle_receipt
from txmq.wire.data_requests import Opcode, unpack_decide_receipt

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.2  # between polls of a bundle's state
log = get_logger()


class AioBundle(StoringBundle[AioCore]):
    """A transaction's messages and acks at one broker."""

    _decision: Future[bytes] | None = None

    def __init__(self, core: AioCore, token: UUID) -> None:
        super().__init__(core, token)
        self._sent_parts: list[BundlePart] = []
        self._stored_parts = 0
        self._answers: list[Future[bytes]] = []

    async def log_id(self) -> UUID:
        return await self.core.log_id()

    async def call(
        self, name: str, args: dict[str, Any], *, within: float | None = None
    ) -> dict[str, Any]:
        return await self.core.call(name, args, within=within, repeat=True)

    async def ping(self) -> None:
        await self.core.request(Opcode.PING)

    async def build(self, description: BundleDescription, deadline: float) -> None:
        self._description, self._deadline = description, deadline
        self._stored_parts = 0  # of an earlier attempt, which the broker knows by the token
        for topic in dict.fromkeys(item.topic for item in self.buffer.items):
            await self.core.topic(topic)
        self._sent_parts = self._parts()

    async def send(self) -> None:
        self._begin_operation()
        try:
            await self.core.wait_connected(self._deadline - self.core.seconds())
            self._send_parts()
        except BaseException as error:
            self._end_operation(error)
            raise

    def _send_parts(self) -> None:
        self.sent = True
        sender = self.core.sender
        for part in self._sent_parts[self._stored_parts :]:
            answer: Future[bytes] = sender.send_request(Opcode.GROUP, b"".join(pack_part(part)))
            answer.add_done_callback(_retrieve)
            self._answers.append(answer)

    def extend_deadline(self, deadline: float) -> None:
        self._deadline = deadline

    async def await_receipt(self) -> BundleReceipt:
        try:
            while True:
                try:
                    receipt = await self._await_answers()
                    break
                except StaleTopic as stale:
                    await self._await_rest()
                    if self.core.seconds() >= self._deadline:
                        raise
                    await self.core.refresh(str(stale.detail.get("topic", "")))
                self._sent_parts = self._parts(stored=self._sent_parts[: self._stored_parts])
                self._send_parts()
        except BaseException as error:
            self._end_operation(error)
            if isinstance(error, RequestRejected):
                self.sent = len(self._sent_parts) > 1  # some parts may be stored
            raise
        finally:
            self.abandon()
        if receipt.state == BundleState.ROLLED_BACK:
            raise TransactionAborted(
                f"Transaction {self.token} was rolled back before it was complete",
                hint="it took too long, or an operator decided so: see `txmq tx show`",
            )
        return receipt

    async def _await_answers(self) -> BundleReceipt:
        receipt = None
        while self._answers:
            payload = await self._in_time(self._answers.pop(0))
            receipt = unpack_bundle_receipt(payload)
            self._stored_parts += 1
        assert receipt is not None, "a bundle has at least one part"
        return receipt

    async def _await_rest(self) -> None:
        """Read the answers to the parts behind a refused one: no part may arrive when
        others are on their way in its place.
        """
        while self._answers:
            try:
                await self._in_time(self._answers.pop(0))
            except RequestRejected:
                continue

    async def _in_time(self, answer: Future[bytes]) -> bytes:
        seconds = self._deadline - self.core.seconds()
        late = RequestTimeout("no answer came in time", hint="the bundle may be stored")
        return await expire(self.core.loop, answer, seconds, late)

    def abandon(self) -> None:
        self._end_operation()
        self._answers.clear()

    def send_decision(self, outcome: Decision) -> None:
        request = decide_request(self.token, outcome, self.core.settings.service)
        try:
            self.core.connection()
            with deciding(self.core.settings, self.token, outcome):
                self._decision = self.core.sender.send_request(Opcode.DECIDE, request)
            self._decision.add_done_callback(_retrieve)
        except ClientClosed as closed:
            log.warning(
                "transaction.decision_lost",
                token=str(self.token),
                outcome=outcome.name,
                error=closed.message,
            )

    async def decide(self, outcome: Decision, seconds: float) -> DecideReceipt:
        payload = decide_request(self.token, outcome, self.core.settings.service)
        with deciding(self.core.settings, self.token, outcome):
            receipt = await self.core.request(Opcode.DECIDE, payload, within=seconds, repeat=True)
        return unpack_decide_receipt(receipt)

    async def wait_published(self, deadline: float) -> None:
        """Wait until consumers can see the messages.

        Raises RequestTimeout or TransactionAborted.
        """
        if (
            self.published
            or not (self._built.batches or self.in_outbox)
            or await self._decision_was_published(deadline)
        ):
            return
        state = await self.await_state(BundleState.PUBLISHED, deadline, check=True)
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

    async def _decision_was_published(self, deadline: float) -> bool:
        if self._decision is None:
            return False
        await asyncio.wait([self._decision], timeout=max(0.0, deadline - self.core.seconds()))
        if not self._decision.done() or self._decision.exception() is not None:
            return False
        return is_published(self._decision.result())

    async def state(self, seconds: float) -> BundleState | None:
        """Return the state of the bundle; None = the broker has none of that token."""
        try:
            shown = await self.core.call(
                "tx.show", {"token": self.token.hex}, within=seconds, repeat=True
            )
        except UnknownTransaction:
            return None
        return BundleState[shown["state"]]

    async def await_state(
        self, target: BundleState, deadline: float, *, check: bool = False
    ) -> BundleState | None:
        pause, state = FIRST_PAUSE_S, None
        while True:
            left = max(deadline - self.core.seconds(), FIRST_PAUSE_S)
            try:
                if check:
                    await self.core.call("tx.check", {"token": self.token.hex}, within=left)
                state = await self.state(left)
            except TxmqError:
                pause = LONGEST_PAUSE_S
            reached = state is not None and state >= target
            if reached or self.core.seconds() + pause >= deadline:
                return state
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def request_check(self) -> None:
        self.core.start(self.core.call("tx.check", {"token": self.token.hex}))

    async def receipts(self) -> list[Receipt]:
        """Return the receipts in the order of the sends."""
        if not self._built.batches:
            return []
        shown = await self.core.call("tx.show", {"token": self.token.hex}, repeat=True)
        offsets = [batch["offset"] for batch in shown["batches"]]
        return self._built.receipts(self.token, offsets, self.first_number)


class UnroutedBundle(UnroutedSends[AioBundle], AioBundle):
    """Sends of a transaction over a cluster. Nothing is stored from here."""

    def __init__(
        self,
        cores: Sequence[AioCore],
        routing: Routing,
        token: UUID,
        bundle_of: Callable[[AioCore], AioBundle],
    ) -> None:
        """`bundle_of` returns or makes the transaction's bundle of a broker."""
        super().__init__(cores[0], token)
        self._begin(cores, routing, bundle_of)

    async def receipts(self) -> list[Receipt]:
        """Return the receipts in the order of the sends."""
        return in_order(
            [
                found
                for placed in self._placed
                for found in placed.receipts(await placed.bundle.receipts())
            ]
        )


def _retrieve(answer: Future[bytes]) -> None:
    """Take note of a failure that nobody may ask for."""
    if not answer.cancelled():
        answer.exception()

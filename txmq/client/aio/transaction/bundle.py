"""The bundle of a transaction at one broker, stored and decided on asyncio.

Bundles and decisions go through the client's sender: those of one turn of the loop
share frames. All bundles of a transaction carry its token.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from uuid import UUID

from txmq.client.aio.core import AioCore
from txmq.client.aio.loop import expire
from txmq.client.log import get_logger
from txmq.client.protocol.awaited.bundle import StoringBundle
from txmq.client.protocol.awaited.bundle import UnroutedBundle as AnyUnrouted
from txmq.client.protocol.sender.accumulator import SideRequest
from txmq.client.protocol.transaction.decision import decide_request, deciding
from txmq.errors import (
    ClientClosed,
    RequestRejected,
    RequestTimeout,
    StaleTopic,
)
from txmq.model.bundle import BundleReceipt
from txmq.model.message import Decision
from txmq.wire.bundle import BundlePart, pack_part, unpack_bundle_receipt
from txmq.wire.data_requests import Opcode

log = get_logger()


class AioBundle(StoringBundle[AioCore]):
    """A transaction's messages and acks at one broker."""

    _decision: Future[bytes] | None = None

    def __init__(self, core: AioCore, token: UUID) -> None:
        super().__init__(core, token)
        self._sent_parts: list[BundlePart] = []
        self._stored_parts = 0
        self._answers: list[Future[bytes]] = []

    @staticmethod
    def awaited(core: AioCore) -> AioCore:
        return core

    def _build(self) -> None:
        self._stored_parts = 0  # of an earlier attempt, which the broker knows by the token
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
            answer: Future[bytes] = sender.send_request(
                SideRequest(Opcode.GROUP, b"".join(pack_part(part)))
            )
            answer.add_done_callback(_retrieve)
            self._answers.append(answer)

    def extend_deadline(self, deadline: float) -> None:
        self._deadline = deadline

    async def _receipt(self) -> BundleReceipt:
        while True:
            try:
                return await self._await_answers()
            except StaleTopic as stale:
                await self._await_rest()
                left = self._deadline - self.core.seconds()
                if left <= 0:
                    raise
                await self.core.refresh(str(stale.detail.get("topic", "")), within=left)
            self._sent_parts = self._parts(stored=self._sent_parts[: self._stored_parts])
            self._send_parts()

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
                self._decision = self.core.sender.send_request(SideRequest(Opcode.DECIDE, request))
            self._decision.add_done_callback(_retrieve)
        except ClientClosed as closed:
            log.warning(
                "transaction.decision_lost",
                token=str(self.token),
                outcome=outcome.name,
                error=closed.message,
            )

    async def _answer_to_decision(self, deadline: float) -> bytes | None:
        if self._decision is None:
            return None
        await asyncio.wait([self._decision], timeout=max(0.0, deadline - self.core.seconds()))
        if not self._decision.done() or self._decision.exception() is not None:
            return None
        return self._decision.result()

    def request_check(self) -> None:
        self.core.start(self.core.call("tx.check", {"token": self.token.hex}))


class UnroutedBundle(AnyUnrouted[AioBundle, AioCore], AioBundle):
    """Sends of a transaction over a cluster."""


def _retrieve(answer: Future[bytes]) -> None:
    """Take note of a failure that nobody may ask for."""
    if not answer.cancelled():
        answer.exception()

"""The bundle of a transaction at one broker, from its first send to its decision.

All bundles of a transaction carry its token. The brokers store them at the same time,
so that several brokers cost hardly more time than one.
"""

from __future__ import annotations

import time
from uuid import UUID

from txmq.client.blocking.at_once import CoreAtOnce
from txmq.client.blocking.core import BlockingCore
from txmq.client.blocking.decision_pipeline import PendingDecision, log_undelivered
from txmq.client.blocking.transaction.bundle_upload import BundleUpload
from txmq.client.blocking.transaction.decisions import request_check
from txmq.client.protocol.awaited.bundle import StoringBundle
from txmq.client.protocol.awaited.bundle import UnroutedBundle as AnyUnrouted
from txmq.client.protocol.sender.batches import FIRST_PAUSE_S
from txmq.client.protocol.transaction.decision import decide_request, deciding
from txmq.errors import (
    ClientClosed,
    StaleTopic,
    Throttled,
    TxmqError,
)
from txmq.model.bundle import BundleReceipt
from txmq.model.message import Decision


class BrokerBundle(StoringBundle[BlockingCore]):
    """A transaction's messages and acks at one broker. For one thread."""

    _decision: PendingDecision | None = None
    _upload: BundleUpload | None = None

    @staticmethod
    def awaited(core: BlockingCore) -> CoreAtOnce:
        return CoreAtOnce(core)

    def _log_id(self) -> UUID:
        return self.core.log_id

    def _build(self) -> None:
        self._upload = BundleUpload(self.core, self._parts(), self._deadline)

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

    async def _receipt(self) -> BundleReceipt:
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
                    topic, left = str(refused.detail.get("topic", "")), self._deadline - now
                    self.core.topics.refresh(topic, left)
                time.sleep(pause)  # noqa: ASYNC251  # as all of this face, it blocks
            parts = self._parts(stored=self._upload.parts[:stored])
            self._upload = BundleUpload(self.core, parts, self._deadline, stored)
            self._upload.send()

    def abandon(self) -> None:
        self._end_operation()
        if self._upload is not None:
            self._upload.abandon()

    def request_check(self) -> None:
        request_check(self.core, self.token)

    def send_decision(self, outcome: Decision) -> None:
        request = decide_request(self.token, outcome, self.core.settings.service)
        try:
            with deciding(self.core.settings, self.token, outcome):
                self._decision = self.core.decision_pipeline.send(self.token, outcome, request)
        except ClientClosed as closed:
            log_undelivered(self.token, outcome, closed)

    async def _answer_to_decision(self, deadline: float) -> bytes | None:
        if self._decision is None:
            return None
        try:
            return self._decision.result(max(0.0, deadline - time.monotonic()))
        except (TimeoutError, TxmqError):
            return None


class UnroutedBundle(AnyUnrouted[BrokerBundle, BlockingCore], BrokerBundle):
    """Sends of a transaction over a cluster."""

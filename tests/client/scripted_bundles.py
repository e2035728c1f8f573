"""A scripted broker's answers to bundles and decisions."""

from __future__ import annotations

from typing import Any

from tests.client.scripted_broker import FakeBroker, HangUp
from txmq.errors import RequestRejected
from txmq.model.bundle import BundleReceipt, BundleState, DecideReceipt
from txmq.wire.batched import BatchedReply, pack_replies, unpack_requests
from txmq.wire.bundle import BundlePart, pack_bundle_receipt, unpack_part
from txmq.wire.data_requests import Opcode, pack_decide_receipt
from txmq.wire.frames import Frame
from txmq.wire.status import error_reply

STORED = pack_bundle_receipt(BundleReceipt(BundleState.UNDECIDED, 7))
PUBLISHED = pack_decide_receipt(DecideReceipt(BundleState.PUBLISHED, repeated=False))


class BundleAnswers:
    """Answers of a scripted broker to bundles and decisions; by default all succeed."""

    def __init__(self, fake: FakeBroker) -> None:
        self.fake, self.frames = fake, list[Any]()
        self.script: list[Any] = []  # for each frame: HangUp, or what each request in it gets
        fake.others = self

    def __call__(self, frame: Frame) -> Any:
        together = frame.opcode in (Opcode.GROUPS, Opcode.DECISIONS)
        requests = unpack_requests(frame.payload) if together else [frame.payload]
        self.frames.append((frame.opcode, requests))
        step = self.script.pop(0) if self.script else None
        if step is HangUp:
            return HangUp
        yes = STORED if frame.opcode in (Opcode.GROUP, Opcode.GROUPS) else PUBLISHED
        answers = [yes if said is None else said for said in step or [None] * len(requests)]
        if not together:
            return answers[0]
        replies = [
            BatchedReply(*error_reply(a)) if isinstance(a, RequestRejected) else BatchedReply(0, a)
            for a in answers
        ]
        return b"".join(pack_replies(replies))

    def parts(self) -> list[list[BundlePart]]:
        return [
            [unpack_part(one) for one in requests]
            for code, requests in self.frames
            if code in (17, 22)
        ]

"""Frames that are nearly right, by the million, at a broker in memory.

    python -m tests.broker.requests.frame_fuzzer [FRAMES]

A frame is a request of a corpus with a few changes, and a right checksum, so that what
is behind the checksum is reached; some have a wrong one. They come in pieces that are
cut anywhere. Each frame has one answer, or ends its connection, and the broker goes on.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from functools import cache
from random import Random

import structlog

from tests.broker.calls.test_numbers import sample
from tests.broker.support import HELLO, BrokerInMemory, Client, send_payload
from tests.fuzz.mutation import changed
from txmq.batch import Codec, encode
from txmq.core.topics.topics import CreateTopic
from txmq.model.decider import ByBroker, ByChecker, ByPostgres
from txmq.model.message import COMMIT, Message
from txmq.wire.batched import pack_requests
from txmq.wire.bundle import BundleDescription, BundlePart, PartBatch, bundle_digest, pack_part
from txmq.wire.calls.encoding import encode_call
from txmq.wire.calls.registry import CALLS
from txmq.wire.data_requests import (
    Ack,
    AckedRange,
    Decide,
    Fetch,
    Opcode,
    Read,
    ReadLetters,
    pack_ack,
    pack_decide,
    pack_fetch,
    pack_read,
    pack_read_letters,
    send_header,
)
from txmq.wire.frames import Frame, FrameDecoder, encode_frame

FRAMES = 10_000_000
LIFE = 50_000  # frames until the next broker, whose memory is that of the first
LONGEST_WAIT_S = 90.0  # of a poll, whatever it asks for
AT_ONCE = 16  # frames on a connection, before a look at the answers


def bundle(token: bytes, decider: object) -> bytes:
    data = encode([Message(b"m", "k")], producer_id=token, epoch=0, sequence=0, born_at=1)
    described = BundleDescription(decider, "s")  # type: ignore[arg-type]  # any of them
    part = BundlePart(token, 0, 0, True, False, bytes(32), described, (PartBatch("t", 0, 0, data),))
    return b"".join(pack_part(part._replace(digest=bundle_digest([part]))))


def corpus(now_ms: int) -> list[tuple[int, bytes]]:
    """Return requests of each kind: opcodes and payloads."""
    token = now_ms.to_bytes(6, "big") + bytes(10)
    rich = Message(b"x" * 300, "key", "tag", {"h": "v"})
    batches = [
        encode([rich] * 3, producer_id=b"q" * 16, epoch=0, sequence=0, born_at=1, codec=codec)
        for codec in Codec
    ]
    group: dict[str, object] = {"group": "g", "member": "m", "topics": ["t"], "instance": "i"}
    return [
        (Opcode.PING, b""),
        (Opcode.HELLO, HELLO[16:]),
        (Opcode.LOGIN, b'{"message":"c=biws,r=x,p=y"}'),
        (Opcode.SEND, send_payload()),
        *((Opcode.SEND, send_header("t", 0, 0) + batch) for batch in batches),
        *(
            (Opcode.GROUP, bundle(token, decider))
            for decider in (ByBroker(), ByChecker("c"), ByPostgres(1, 1, 5, 7, 1))
        ),
        (Opcode.SENDS, b"".join(pack_requests([send_payload(1), send_payload(2)]))),
        (Opcode.GROUPS, b"".join(pack_requests([bundle(token, ByChecker("c"))]))),
        (Opcode.DECIDE, pack_decide(Decide(COMMIT, token, 0, "stranger"))),
        (Opcode.FETCH, pack_fetch(Fetch(1, 0, 1_000, 10, "g", "m", 1, 10, ("t",)))),
        (Opcode.ACK, pack_ack(Ack(1, "g", "m", (AckedRange("t", 0, 0, 2),)))),
        (Opcode.READ, pack_read(Read(0, 0, 0, 1_000, "t", 1))),
        (Opcode.LETTERS, pack_read_letters(ReadLetters(0, 0, 9, 1_000, "plan", "t"))),
        (Opcode.CALL, encode_call("consumer.join", group)),
        *((Opcode.CALL, encode_call(name, arguments(name))) for name in CALLS),
    ]


@cache
def arguments(call: str) -> dict[str, object]:
    """Return arguments that a call accepts."""
    schema = CALLS[call].model_json_schema()
    return dict(sample(schema, schema.get("$defs", {}), call))


class FrameFuzzer:
    """One broker, and frames of one seed. `seen` counts what has come of them."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self.broker = BrokerInMemory()
        self.broker.start()
        self.broker.do(CreateTopic("t", 2))
        self._payloads: dict[int, list[bytes]] = {}
        for opcode, payload in corpus(int(self.broker.now() // 1_000)):
            self._payloads.setdefault(opcode, []).append(payload)
        self._opcodes = [*self._payloads, *[Opcode.CALL] * 4]
        self._client: Client | None = None
        self.seen: Counter[str] = Counter()

    def run(self, frames: int) -> str:
        """Send so many frames; return what was wrong, "" = nothing."""
        sent = 0
        while sent < frames:
            number = min(AT_ONCE, frames - sent)
            sent += number
            if failure := self._burst(number):
                return failure
        return self._ended()

    def _burst(self, number: int) -> str:
        if self._client is None or self._client.closed:
            self.seen["connections"] += 1
            self._client = self.broker.connect()
        client, random = self._client, self._random
        made = [self._frame(correlation) for correlation in range(number)]
        data = b"".join(made)
        cuts = sorted(random.randrange(len(data)) for _ in range(random.randrange(4)))
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            client.send(data[start:end])
        self.broker.pass_time(0.001)
        answers = self._answers(client)
        unfinished = client.session._decoder.pending > 0  # type: ignore[attr-defined]
        if len(answers) < number and not client.closed and not unfinished:
            self.seen["waited"] += 1
            self.broker.pass_time(LONGEST_WAIT_S)
            answers += self._answers(client)
        self.seen["frames"] += number
        self.seen["answers"] += len(answers)
        self.seen["refusals"] += sum(1 for answer in answers if answer.status)
        if unfinished:  # a length has grown: the rest would be taken for its payload
            client.session.connectionLost()  # type: ignore[attr-defined]
            self._client = None
        elif not client.closed and len(answers) != number:
            return f"{number} frames got {len(answers)} answers, and no end: {data!r}"
        faults, engine = self.broker.engine.faults, self.broker.engine
        if faults.counts or engine.failed is not None:
            return f"{faults.last or engine.failed}: {data!r}"
        return ""

    @staticmethod
    def _answers(client: Client) -> list[Frame]:
        data = client.transport.value()
        client.transport.clear()
        return FrameDecoder(1 << 25).feed(data)

    def _frame(self, correlation: int) -> bytes:
        random = self._random
        opcode = random.choice(self._opcodes)
        payload = changed(random, self._payloads[opcode])
        if random.random() < 0.02:
            opcode = random.randrange(256)
        status = random.choice((1, 0x8000)) if random.random() < 0.01 else 0
        frame = encode_frame(opcode, correlation, payload, status=status)
        if random.random() < 0.01:  # which ends the connection
            broken = bytearray(frame)
            broken[random.randrange(len(broken))] ^= 1 << random.randrange(8)
            return bytes(broken)
        return frame

    def _ended(self) -> str:
        """Return what is wrong in the end: the witness must be served."""
        witness = self.broker.connect()
        return "" if witness.ask(Opcode.PING, b"").status == 0 else "the witness is refused"


def main(frames: int) -> int:
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory(), processors=[])
    began, sent, seed = time.monotonic(), 0, 0
    while sent < frames:
        number = min(LIFE, frames - sent)
        run = FrameFuzzer(seed)
        if failure := run.run(number):
            sys.stdout.write(f"seed {seed}: {failure}\n")
            return 1
        sent, seed = sent + number, seed + 1
        rate = sent / (time.monotonic() - began)
        sys.stdout.write(f"{sent} frames, {rate:.0f}/s, {dict(run.seen)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else FRAMES))

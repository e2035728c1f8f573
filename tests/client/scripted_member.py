"""A member of a consumer group, with the broker's answers given by the test."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple
from uuid import uuid4

from txmq.batch import encode
from txmq.client.protocol.consumer.fetched import FetchedBatch
from txmq.client.protocol.consumer.member import Member
from txmq.client.protocol.consumer.operations import Operations
from txmq.client.protocol.consumer.requests import Request
from txmq.client.protocol.consumer.settings import consumer_settings
from txmq.errors import RequestRejected
from txmq.model.message import Message
from txmq.model.retry import RetryPolicy
from txmq.wire.chunks import ACCEPTED, REDELIVERY, Chunk, pack_chunks
from txmq.wire.data_requests import AckedRange, Opcode, unpack_ack, unpack_fetch

PRODUCER = b"p" * 16
NAMES = {Opcode.FETCH: "fetch", Opcode.ACK: "ack"}


def chunk(
    *messages: Message | str,
    at: int = 0,
    partition: int = 0,
    lease: int = 1,
    attempt: int = 1,
    moved: bool = False,
    accepted: bool = False,
    rows: slice = slice(None),
    topic: str = "orders",
) -> Chunk:
    """Return a chunk of these messages; a text is a message without a key. `at` is the
    offset of the first.
    """
    made = [Message(one.encode()) if isinstance(one, str) else one for one in messages]
    batch = encode(made, producer_id=PRODUCER, epoch=0, sequence=at, born_at=7)
    first, end, _step = rows.indices(len(made))
    flags = REDELIVERY * moved | ACCEPTED * accepted
    return Chunk(topic, partition, at, 9, 64, attempt, flags, lease, first, end - first, batch)


def keyed(keys: str) -> list[Message]:
    """Return a message for each letter, which is its key. The body is the letter with
    its place: "a0", "b1" ...
    """
    return [Message(f"{key}{place}".encode(), key) for place, key in enumerate(keys)]


def fetched_batch(made: Chunk) -> FetchedBatch:
    return FetchedBatch(made, owner=None, epoch=1, now=0.0)


def bodies(messages: Iterable[Any]) -> list[str]:
    return [message.body.decode() for message in messages]


# what a broker tells of the group in each reply
GROUP: dict[str, Any] = {
    "epoch": 1,
    "consume_timeout_ms": 900_000,
    "topics": {"orders": 7, "refunds": 8},
    "resets": [],
    "retry": RetryPolicy().to_json(),
}


class SentRequest(NamedTuple):
    """A request as the broker decodes it."""

    name: str
    args: Any
    request: Request


class ScriptedMember:
    """A member, its clock, and its requests that are not answered (`open`)."""

    def __init__(self, mode: str = "concurrent", **options: Any) -> None:
        topics = options.pop("topics", ["orders"])
        settings = consumer_settings("billing", topics, mode=mode, **options)  # type: ignore[arg-type]  # any mode
        self.member = Member(settings, "i-1", owner=self)
        self.operations = Operations(self.member)
        self.now = 100.0
        self.open: list[SentRequest] = []

    def joined(
        self, *partitions: int, generation: int = 1, group: str = "billing"
    ) -> ScriptedMember:
        """Connect and join; nothing else is requested yet."""
        self.member.connected(self.now)
        self.answer(
            "consumer.join", **self.join_reply(*partitions, generation=generation, group=group)
        )
        return self

    def join_reply(
        self, *partitions: int, generation: int = 1, group: str = "billing"
    ) -> dict[str, Any]:
        assignment = [["orders", partition] for partition in partitions or (0,)]
        seat = {
            "group": group,
            "member": "m-1",
            "generation": generation,
            "assignment": assignment,
        }
        return seat | {"session_ms": 30_000, "lease_ms": 60_000} | GROUP

    def requests(self) -> list[SentRequest]:
        """Return the open requests, with those that are due now."""
        for request in self.member.requests(self.now):
            self.open.append(_decoded(request))
        return self.open

    def args_of(self, name: str) -> Any:
        """Return the arguments of the only open request of this name."""
        [found] = [asked.args for asked in self.requests() if asked.name == name]
        return found

    def request_names(self) -> list[str]:
        """Return the names of the open requests."""
        return [asked.name for asked in self.requests()]

    def answer(self, name: str, payload: bytes | None = None, **reply: Any) -> None:
        """Answer the first open request of this name."""
        found = next(asked for asked in self.requests() if asked.name == name)
        self.open.remove(found)
        if name == "consumer.heartbeat":
            reply = GROUP | reply
        found.request.reply(json.dumps(reply).encode() if payload is None else payload, self.now)

    def refuse(self, name: str, error: RequestRejected) -> None:
        found = next(asked for asked in self.requests() if asked.name == name)
        self.open.remove(found)
        found.request.refused(error, self.now)

    def fetched(self, *chunks: Chunk) -> ScriptedMember:
        """Answer the fetch in flight."""
        self.answer("fetch", b"".join(pack_chunks(chunks, generation=1)))
        return self

    def receive(self, most: int = 1) -> list[Any]:
        return self.operations.receive_many(most, self.now)

    def disconnect(self) -> None:
        """Lose the connection."""
        self.open.clear()
        self.member.disconnected(self.now)


def _decoded(request: Request) -> SentRequest:
    if request.opcode == Opcode.CALL:
        tree = json.loads(request.payload)
        return SentRequest(tree["call"], tree["args"], request)
    args = (
        unpack_fetch(request.payload)
        if request.opcode == Opcode.FETCH
        else unpack_ack(request.payload)
    )
    return SentRequest(NAMES[Opcode(request.opcode)], args, request)


def fresh(prefix: str) -> str:
    """Return a name that no other test has."""
    return f"{prefix}-{uuid4().hex[:8]}"


def places(
    *ranges: tuple[int, int], partition: int = 0, topic: str = "orders"
) -> tuple[AckedRange, ...]:
    return tuple(AckedRange(topic, partition, start, end) for start, end in ranges)

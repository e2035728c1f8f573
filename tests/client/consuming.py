"""A member of a consumer group and the answers of a broker, spoken by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple
from uuid import uuid4

from txmq.batch import encode
from txmq.client.protocol.consumer.fetched import Parcel
from txmq.client.protocol.consumer.member import Member
from txmq.client.protocol.consumer.operations import Hands
from txmq.client.protocol.consumer.requests import Request
from txmq.client.protocol.consumer.settings import checked
from txmq.errors import RequestRejected
from txmq.model.message import Message
from txmq.wire.chunks import MOVED, Chunk, pack_chunks
from txmq.wire.headers import Acked, Opcode, unpack_ack, unpack_fetch

PRODUCER = b"p" * 16
NAMES = {Opcode.FETCH: "fetch", Opcode.ACK: "ack"}


def chunk(
    *messages: Message | str,
    at: int = 0,
    partition: int = 0,
    lease: int = 1,
    attempt: int = 1,
    moved: bool = False,
    rows: slice = slice(None),
    topic: str = "orders",
) -> Chunk:
    """A chunk of these messages, a text standing for one without a key; `at` is the
    offset of the first.
    """
    made = [Message(one.encode()) if isinstance(one, str) else one for one in messages]
    batch = encode(made, producer_id=PRODUCER, epoch=0, sequence=at, born_at=7)
    first, end, _step = rows.indices(len(made))
    flags = MOVED if moved else 0
    return Chunk(topic, partition, at, 9, 64, attempt, flags, lease, first, end - first, batch)


def keyed(keys: str) -> list[Message]:
    """A message for each letter, which is its key; its body is the letter and its
    place: "a0", "b1" ...
    """
    return [Message(f"{key}{place}".encode(), key) for place, key in enumerate(keys)]


def parcel(made: Chunk) -> Parcel:
    return Parcel(made, owner=None, epoch=1, now=0.0)


def bodies(messages: Iterable[Any]) -> list[str]:
    return [message.body.decode() for message in messages]


class Asked(NamedTuple):
    """A request as the broker understands it."""

    name: str
    args: Any
    request: Request


class Spoken:
    """A member, its clock, and what it asked and was not answered yet."""

    def __init__(self, mode: str = "concurrent", **options: Any) -> None:
        topics = options.pop("topics", ["orders"])
        settings = checked("billing", topics, mode=mode, **options)  # type: ignore[arg-type]  # any mode
        self.member = Member(settings, "i-1", owner=self)
        self.hands = Hands(self.member)
        self.now = 100.0
        self.open: list[Asked] = []

    def joined(self, *partitions: int, generation: int = 1, group: str = "billing") -> Spoken:
        """Connected and joined, with nothing else asked yet."""
        self.member.connected(self.now)
        self.answer("consumer.join", **self.seat(*partitions, generation=generation, group=group))
        return self

    def seat(self, *partitions: int, generation: int = 1, group: str = "billing") -> dict[str, Any]:
        assignment = [["orders", partition] for partition in partitions or (0,)]
        seat = {
            "group": group,
            "member": "m-1",
            "generation": generation,
            "epoch": 1,
            "assignment": assignment,
        }
        return seat | {"session_ms": 30_000, "lease_ms": 60_000}

    def ask(self) -> list[Asked]:
        """What the member wants to send now."""
        for request in self.member.requests(self.now):
            self.open.append(_understood(request))
        return self.open

    def asked(self, name: str) -> Any:
        """The arguments of the one open request of this name."""
        [found] = [asked.args for asked in self.ask() if asked.name == name]
        return found

    def names(self) -> list[str]:
        """What is open."""
        return [asked.name for asked in self.ask()]

    def answer(self, name: str, payload: bytes | None = None, **reply: Any) -> None:
        """Answers the first open request of this name."""
        found = next(asked for asked in self.ask() if asked.name == name)
        self.open.remove(found)
        found.request.reply(json.dumps(reply).encode() if payload is None else payload, self.now)

    def refuse(self, name: str, error: RequestRejected) -> None:
        found = next(asked for asked in self.ask() if asked.name == name)
        self.open.remove(found)
        found.request.refused(error, self.now)

    def fetched(self, *chunks: Chunk) -> Spoken:
        """Answers the fetch under way."""
        self.answer("fetch", b"".join(pack_chunks(chunks, generation=1)))
        return self

    def take(self, most: int = 1) -> list[Any]:
        return self.hands.take(most, self.now)

    def lost(self) -> None:
        """The connection breaks."""
        self.open.clear()
        self.member.lost(self.now)


def _understood(request: Request) -> Asked:
    if request.opcode == Opcode.CALL:
        tree = json.loads(request.payload)
        return Asked(tree["call"], tree["args"], request)
    args = (
        unpack_fetch(request.payload)
        if request.opcode == Opcode.FETCH
        else unpack_ack(request.payload)
    )
    return Asked(NAMES[Opcode(request.opcode)], args, request)


def fresh(what: str) -> str:
    """A name that no other test has."""
    return f"{what}-{uuid4().hex[:8]}"


def places(
    *ranges: tuple[int, int], partition: int = 0, topic: str = "orders"
) -> tuple[Acked, ...]:
    return tuple(Acked(topic, partition, start, end) for start, end in ranges)

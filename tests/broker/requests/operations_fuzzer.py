"""Random operations of several clients, many of them in one turn of the reactor: topics
and groups are made, grown, altered and deleted beside sends, fetches, reads, half
messages and lists. Batches are compressed, and replies of any size.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import count
from random import Random
from typing import Any

from tests.broker.support import BrokerInMemory
from txmq.batch import Codec, encode, encode_one
from txmq.model.decider import ByChecker
from txmq.model.message import Decision, Message
from txmq.wire import data_requests
from txmq.wire.bundle import BundleDescription, BundlePart, PartBatch, bundle_digest, pack_part
from txmq.wire.calls.encoding import encode_call
from txmq.wire.chunks import unpack_chunks
from txmq.wire.data_requests import Fetch, Opcode, Read, pack_fetch, pack_read
from txmq.wire.frames import Frame, encode_frame
from txmq.wire.json import parse

TOPICS, GROUPS, CLIENTS = ("t", "u", "v"), ("g", "h"), 4
NOISE = os.urandom(1 << 20)
WHO: dict[str, Any] = {"operator": "ada", "reason": "as it comes"}
WAIT_MS = 200
NACKS = 150  # in one turn
TOO_LARGE = b"exceeds the limit of"
PATIENCE_S = 8.0  # a topic waits 5 s to grow


class OperationsFuzzer:
    """One run. `failure` says what was wrong with it, "" = nothing."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self.broker = BrokerInMemory()
        self.broker.start()
        self._clients = [self.broker.connect() for _ in range(CLIENTS)]
        self._numbers = count(1)
        self._tokens: list[bytes] = []
        self._generations: dict[tuple[int, str], int] = {}
        self._fetches: dict[int, dict[str, Any]] = {}  # who fetched, by correlation
        # messages that a client has, and may return
        self._held: dict[int, list[dict[str, Any]]] = {number: [] for number in range(CLIENTS)}
        self._joins: dict[int, tuple[int, str]] = {}  # by correlation
        self._due: dict[int, set[int]] = {number: set() for number in range(CLIENTS)}
        self.replies = 0
        self._operations: list[Callable[[int], bytes]] = [
            self._topic, self._topic, self._group, self._send, self._send, self._send,
            self._join, self._join, self._fetch, self._fetch, self._fetch, self._fetch,
            self._nack, self._nack, self._read, self._list, self._half, self._decide,
            self._checks, self._letters,
        ]  # fmt: skip

    def run(self, turns: int) -> str:
        """Make so many turns; return what went wrong."""
        for _ in range(turns):
            self._turn()
            failure = self._look()
            if failure:
                return failure
        for _ in range(10):
            self.broker.pass_time(PATIENCE_S / 10)
            self._look()
        open_requests = {number: due for number, due in self._due.items() if due}
        return f"requests without a reply: {open_requests}" if open_requests else self._look()

    def _turn(self) -> None:
        for number, client in enumerate(self._clients):
            operations = self._random.choices(self._operations, k=self._random.randrange(6))
            data = b"".join([operation(number) for operation in operations])
            client.session.dataReceived(data)  # type: ignore[attr-defined]
        self.broker.pass_time(self._random.choice([0, 0, 0.01, 0.3]))

    def _look(self) -> str:
        for number, client in enumerate(self._clients):
            if client.closed:
                return f"client {number} was cut"
            for reply in client.replies():
                self.replies += 1
                if reply.correlation not in self._due[number]:
                    return f"a second reply to {reply.correlation}"
                self._due[number].discard(reply.correlation)
                if reply.status and TOO_LARGE in reply.payload:
                    return f"a reply did not fit in a frame: {reply.payload!r}"
                self._note(number, reply)
        if self.broker.engine.failed is not None:
            return f"the engine failed: {self.broker.engine.failed}"
        faults = self.broker.engine.faults
        return f"{dict(faults.counts)}: {faults.last}" if faults.counts else ""

    def _note(self, client: int, reply: Frame) -> None:
        fetch = self._fetches.pop(reply.correlation, None)
        if fetch is not None and not reply.status:
            for chunk in unpack_chunks(reply.payload).chunks:
                first = chunk.base_offset + chunk.first_row
                self._held[client] += [
                    fetch | {"topic": chunk.topic, "partition": chunk.partition, "offset": offset}
                    for offset in range(first, first + chunk.rows)
                ]
        member = self._joins.pop(reply.correlation, None)
        if member is not None and not reply.status:
            joined: Any = parse(reply.payload)
            self._generations[member] = joined["generation"]

    def _frame(self, client: int, opcode: int, payload: bytes) -> bytes:
        correlation = next(self._numbers)
        self._due[client].add(correlation)
        return encode_frame(opcode, correlation, payload)

    def _call(self, client: int, name: str, /, **args: Any) -> bytes:
        return self._frame(client, Opcode.CALL, encode_call(name, args))

    def _topic(self, client: int) -> bytes:
        random = self._random
        name: dict[str, Any] = {"name": random.choice(TOPICS)}
        calls: list[tuple[str, dict[str, Any]]] = [
            ("topic.create", name | {"partitions": random.choice([1, 4])}),
            ("topic.create", name | {"partitions": 4}),
            ("topic.grow", name | {"partitions": random.randint(1, 9)}),
            ("topic.alter", name | {"retention_ms": random.randint(0, 9)}),
            ("topic.delete", name),
            ("topic.show", name),
            ("message.find", {"topic": name["name"], "key": "k1", "bodies": True}),
            ("topic.describe", {"names": [name["name"]], "create": True}),
        ]
        call, args = random.choice(calls)
        return self._call(client, call, **args)

    def _group(self, client: int) -> bytes:
        random = self._random
        group: dict[str, Any] = {"group": random.choice(GROUPS)}
        calls: list[tuple[str, dict[str, Any]]] = [
            ("group.alter", group | WHO | {"max_parked": random.randint(1, 9)}),
            ("group.delete", group | WHO),
            ("group.show", group),
            ("group.pause", group | WHO),
            ("group.resume", group | WHO),
            ("consumer.leave", group | {"member": f"m{client}", "instance": f"i{client}"}),
        ]
        call, args = random.choice(calls)
        return self._call(client, call, **args)

    def _messages(self) -> list[Message]:
        random = self._random
        size = random.choice([1, 100, 5_000, 80_000, 700_000])
        rows = max(1, min(random.choice([1, 3, 50, 400]), (12 << 20) // size))
        noise = NOISE[: random.choice([0, 10])]
        body = noise + bytes(size)
        ttl = random.choice([None, None, 0.001])
        return [
            Message(body, f"k{row % 7}", ttl=ttl if row % 3 == 0 else None) for row in range(rows)
        ]

    def _batch(self, producer: bytes) -> bytes:
        codec = self._random.choice([Codec.NONE, Codec.ZSTD, Codec.ZSTD, Codec.LZ4])
        return encode(
            self._messages(), producer_id=producer, epoch=0, sequence=0, born_at=1, codec=codec
        )

    def _send(self, client: int) -> bytes:
        topic = self._random.choice(TOPICS)
        header = data_requests.send_header(topic, self._random.randrange(4), 0)
        producer = next(self._numbers).to_bytes(16, "big")
        return self._frame(client, Opcode.SEND, header + self._batch(producer))

    def _join(self, client: int) -> bytes:
        group = self._random.choice(GROUPS)
        chosen = self._random.sample(TOPICS, self._random.randint(1, 3))
        mode = "ordered" if group == "h" else "concurrent"
        made = self._call(
            client,
            "consumer.join",
            group=group,
            topics=chosen,
            member=f"m{client}",
            instance=f"i{client}",
            mode=mode,
            flood_keys=0,
        )
        self._joins[max(self._due[client])] = (client, group)
        return made

    def _fetch(self, client: int) -> bytes:
        group = self._random.choice(GROUPS)
        generation = self._generations.get((client, group), 1)
        most, size = (
            self._random.choice([1, 500, 10_000]),
            self._random.choice([1, 1 << 20, 1 << 31]),
        )
        request = Fetch(generation, WAIT_MS, size, most, group, f"m{client}")
        made = self._frame(client, Opcode.FETCH, pack_fetch(request))
        member = {"group": group, "member": f"m{client}", "generation": generation}
        self._fetches[max(self._due[client])] = member
        return made

    def _nack(self, client: int) -> bytes:
        """Return many messages, each of which comes again by itself."""
        held, self._held[client] = self._held[client][:NACKS], self._held[client][NACKS:]
        dead = self._random.random() < 0.05
        return b"".join(
            self._call(client, "consumer.nack", **message, delay_ms=0, dead=dead)
            for message in held
        )

    def _read(self, client: int) -> bytes:
        offset, wait = self._random.choice([0, 0, 5, 1 << 40]), self._random.choice([0, WAIT_MS])
        read = Read(self._random.randrange(4), offset, wait, 2**32 - 1, self._random.choice(TOPICS))
        return self._frame(client, Opcode.READ, pack_read(read))

    def _list(self, client: int) -> bytes:
        names = ["topic.list", "group.list", "tx.list", "broker.alarms", "xa.committed"]
        name = self._random.choice(names)
        if name == "xa.committed":
            return self._call(client, name, boot_epoch=1, after=self._random.choice([0, 1 << 62]))
        page = {"limit": self._random.randint(1, 3)} if name.endswith("list") else {}
        return self._call(client, name, **page)

    def _half(self, client: int) -> bytes:
        token = self.broker.token(next(self._numbers))
        self._tokens.append(token)
        if self._random.random() < 0.5:
            batch = encode_one(
                Message(bytes(3 << 20), "k"), producer_id=token, epoch=0, sequence=0, born_at=1
            )
        else:
            batch = self._batch(token)
        part = BundlePart(
            token,
            0,
            0,
            True,
            False,
            bytes(32),
            BundleDescription(ByChecker("c"), "shop", (), self._random.choice([0, 1_000])),
            (PartBatch(self._random.choice(TOPICS), 0, 0, batch),),
        )
        packed = pack_part(part._replace(digest=bundle_digest([part])))
        return self._frame(client, Opcode.GROUP, b"".join(packed))

    def _decide(self, client: int) -> bytes:
        token = self._random.choice(self._tokens) if self._tokens else bytes(16)
        outcome = self._random.choice([Decision.COMMIT, Decision.ROLLBACK]).name
        return self._call(client, "tx.decide", token=token.hex(), outcome=outcome, **WHO)

    def _checks(self, client: int) -> bytes:
        wait = self._random.choice([0, WAIT_MS])
        return self._call(client, "checks.wait", service="shop", wait_ms=wait, max=100)

    def _letters(self, client: int) -> bytes:
        group = self._random.choice(GROUPS)
        choice = self._random.random()
        if choice < 0.3:
            return self._call(client, "dlq.stats", group=group)
        if choice < 0.6:
            select = self._random.choice(({}, {"text": "e"}, {"key": "k"}, {"error_type": "E"}))
            name = self._random.choice(("dlq.stats", "dlq.list", "dlq.replay"))
            return self._call(client, name, group=group, select=select)
        return self._call(client, "dlq.list", group=group, after=0, limit=100, bodies=True)

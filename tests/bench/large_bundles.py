"""The longest step of a large transaction in the core: `python -m
tests.bench.large_bundles [messages]`.

The core runs over real tables, without network and log. A half message of 100,000 keyed
messages over two topics is stored part by part, decided and published, while another
transaction holds one key in a hundred. The program prints the longest `decide` and
`apply` of each kind of event, in milliseconds of CPU time.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import UUID

from txmq.batch import encode_columns, verify
from txmq.client.protocol.sender.rows import PART_ROWS
from txmq.core import machine
from txmq.core.events.base import Event, RecordContext, encode
from txmq.core.state.state import State
from txmq.core.topics.topics import CreateTopic
from txmq.core.transactions.decisions import DecideTransaction
from txmq.core.transactions.half_storage import BundleBatch, StorePart
from txmq.core.transactions.large_publication import AdvanceBacklog, BacklogStep
from txmq.errors import RequestRejected
from txmq.model.decider import ByPostgres
from txmq.model.keys import partition_of
from txmq.model.message import COMMIT
from txmq.store.index.lmdb_tables import LmdbTables

MESSAGES, PARTITIONS, TOPICS = 100_000, 4, ("a", "b")
POSTGRES = ByPostgres(1, 1, 5, 7, 1)
NOW = 1_700_000_000_000_000
COMMIT_EVERY = 200  # records between two commits of the tables


class BareCore:
    """The core of a broker, without the broker."""

    def __init__(self, directory: Path) -> None:
        self.tables = LmdbTables.open(directory, log_id=UUID(int=1))
        self.state = State(self.tables)
        self.end, self.records = 64, 0
        self.longest: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        self.events: dict[str, int] = defaultdict(int)

    def submit(self, command: object) -> object:
        """Return the reply to a command; record its times by kind of event."""
        began = time.thread_time()
        outcome = machine.decide(self.state, command, NOW)
        assert not isinstance(outcome, RequestRejected), outcome
        heads = [encode(event) for event in outcome.events]
        decided = (time.thread_time() - began) * 1_000
        for event, head in zip(outcome.events, heads, strict=True):
            self._apply(event, len(head) + len(outcome.attachment), decided)
        return outcome.reply

    def _apply(self, event: Event, size: int, decided: float) -> None:
        place = RecordContext(self.end, self.end + 64 + size, self.end + 64, NOW, 1)
        self.end = place.end
        began = time.thread_time()
        machine.apply(self.state, event, place)
        name, took = type(event).__name__, (time.thread_time() - began) * 1_000
        before = self.longest[name]
        self.longest[name] = (max(before[0], decided), max(before[1], took))
        self.events[name] += 1
        self.records += 1
        if self.records % COMMIT_EVERY == 0:
            self._commit()

    def _commit(self) -> None:
        """Commit the tables, as the broker does from time to time in another thread."""
        machine.save(self.state)
        frozen = self.tables.freeze(self.end)
        assert frozen is not None
        self.tables.commit(frozen, durable=self.end)
        self.tables.release(frozen)


def token(number: int) -> bytes:
    return (NOW // 1_000).to_bytes(6, "big") + number.to_bytes(10, "big")


def store(core: BareCore, name: bytes, keys: list[str]) -> None:
    """Store a half message with one message per key, in parts as a client sends
    them.
    """
    partitions: dict[tuple[str, int], list[str]] = defaultdict(list)
    for number, key in enumerate(keys):
        partitions[TOPICS[number % len(TOPICS)], partition_of(key, PARTITIONS)].append(key)
    parts = [
        (place, rows[at : at + PART_ROWS])
        for place, rows in partitions.items()
        for at in range(0, len(rows), PART_ROWS)
    ]
    for part, ((topic, partition), rows) in enumerate(parts):
        bodies = [b"x" * 100] * len(rows)
        data = encode_columns(
            bodies, rows, None, producer_id=name, epoch=0, sequence=part, born_at=NOW
        )
        batch = BundleBatch(topic, 0, partition, data, verify(data))
        last = part + 1 == len(parts)
        core.submit(
            StorePart(name, part, (batch,), last, False, b"d" * 32, 0, POSTGRES, "s", (), 6_000_000)
        )


def publish(core: BareCore) -> None:
    """Publish step by step, each as if the ones before were durable."""
    reply = BacklogStep()
    while not reply.idle:
        found = core.submit(AdvanceBacklog(core.end, reply.checked))
        assert isinstance(found, BacklogStep)
        reply = found


def main(messages: int) -> None:
    keys = [f"k{number}" for number in range(messages)]
    with TemporaryDirectory() as directory:
        core = BareCore(Path(directory) / "index")
        for topic in TOPICS:
            core.submit(CreateTopic(topic, PARTITIONS))
        store(core, token(1), keys[:: len(keys) // 100 * 2 or 1])
        store(core, token(2), keys)
        store(core, token(3), keys)
        for number in (2, 3, 1):
            core.submit(DecideTransaction(token(number), COMMIT, "producer"))
            publish(core)
        published = sum(sum(topic.end_offsets) for topic in core.state.topics.values())
        assert not core.state.held_keys, "all messages must be published"
    print(f"{published} messages published; ms of CPU time, longest decide and apply:")
    for name, (decided, applied) in core.longest.items():
        print(
            f"{name:20} {core.events[name]:6} records  decide {decided:7.2f}  apply {applied:7.2f}"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else MESSAGES)

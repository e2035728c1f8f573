"""Random work of producers, transactions and time on a broker's state."""

from __future__ import annotations

from random import Random

from tests.broker.data_directory.retention_world import RetentionWorld
from txmq.batch import encode, verify
from txmq.core.topics import sends
from txmq.core.topics.delay_rules import PublishDue
from txmq.core.topics.sends import StoreBatch, StoreBatches
from txmq.core.transactions.decisions import DecideTransaction
from txmq.core.transactions.half_storage import BundleBatch, StorePart
from txmq.model.decider import ByBroker, ByPostgres
from txmq.model.message import Decision, Message

KEYS = [f"k{number}" for number in range(12)]
HOUR = 3_600
POSTGRES = ByPostgres(1, 1, 5, 7, 1)


class Work:
    """Random sends, bundles, decisions, delays and retention; `ids` holds every message
    id.
    """

    def __init__(self, world: RetentionWorld, seed: int) -> None:
        self.world, self._rng, self.ids = world, Random(seed), list[tuple[bytes, int]]()
        self._open: list[bytes] = []
        self._groups = 0
        self._seed = seed
        self._sequence = 0

    def some(self, steps: int) -> None:
        rest = [self.half, self.half, self.decide, self.decide, self.pass_time, self.retain]
        acts = [self.send] * 5 + [self.send_together, *rest]
        for _ in range(steps):
            self._rng.choice(acts)()

    def _messages(self, most: int) -> list[Message]:
        rng = self._rng
        delay = rng.choice([None, None, None, 5.0, 3 * HOUR])
        return [
            Message(
                rng.randbytes(rng.randrange(60)), rng.choice([*KEYS, None, "ü" * 9]), delay=delay
            )
            for _ in range(rng.randrange(1, most))
        ]

    def send(self) -> None:
        self.world.do(self._send(self._messages(9)))

    def send_together(self) -> None:
        """Send several batches in one frame: one record, unless one of them has to
        wait.
        """
        frame = [self._send([Message(b"x", self._rng.choice(KEYS))]) for _ in range(3)]
        state = self.world.state
        share = all(
            sends.can_share_record(state, state.topics.get(send.topic), send) for send in frame
        )
        for command in [StoreBatches(tuple(frame))] if share else frame:
            self.world.do(command)

    def _send(self, messages: list[Message]) -> StoreBatch:
        producer = bytes([self._seed]) * 16
        self.ids += [(producer, self._sequence + row) for row in range(len(messages))]
        data = encode(messages, producer_id=producer, epoch=0, sequence=self._sequence, born_at=1)
        self._sequence += len(messages)
        return StoreBatch(self._rng.choice("ttu"), 0, self._rng.randrange(3), data, verify(data))

    def token(self) -> bytes:
        self._groups += 1
        return (
            (self.world.now() // 1_000).to_bytes(6, "big")
            + bytes([self._seed]) * 2
            + self._groups.to_bytes(8)
        )

    def half(self) -> None:
        rng, token, batches = self._rng, self.token(), []
        for number in range(rng.randrange(1, 5)):
            data = encode(
                self._messages(4), producer_id=token, epoch=0, sequence=10 * number, born_at=1
            )
            header = verify(data)
            if header.columns & 8 and header.count > 1:
                continue  # a broker takes these apart
            self.ids += [(token, 10 * number + row) for row in range(header.count)]
            batches.append(BundleBatch(rng.choice("tu"), 0, rng.randrange(3), data, header))
        local = rng.random() < 0.3
        decider = ByBroker() if local else POSTGRES
        self.world.do(
            StorePart(
                token, 0, tuple(batches), True, local, b"d" * 32, 0, decider, "shop", (), 10**6
            )
        )
        if not local:
            self._open.append(token)

    def decide(self) -> None:
        if self._open:
            token = self._open.pop(self._rng.randrange(len(self._open)))
            outcome = self._rng.choice([Decision.COMMIT, Decision.COMMIT, Decision.ROLLBACK])
            self.world.do(DecideTransaction(token, outcome, "test"))
            self.world.assembly._publication.tick()
            self.world.turn()

    def pass_time(self) -> None:
        self.world.turn(self._rng.choice([1, 10, HOUR / 2]))
        self.world.do(PublishDue())
        self.world.turn()

    def retain(self) -> None:
        self.world.retain()

"""Nodes of a shared log that lead when a test tells them to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from os import urandom
from random import Random
from uuid import UUID

from tests.broker.cluster.loop import Loop
from txmq.store.shared.node import End, Node, State
from txmq.store.shared.partition import CaughtUp, Deliver, Lost, Partition, Reported
from txmq.store.shared.records import Genesis, NodeStatus, PartitionRecord, Slice, decode, encode
from txmq.store.shared.rules import Place

LOG_ID = UUID(int=7)
NOTHING = Place()
# No time passes, so nodes neither beat nor claim by themselves. But the lease of the
# leader before is over when a node appends.
NOW, LATER = 0.0, 1e6


class ObedientNode:
    """A node, its copy of the log, and what it would have answered for.

    `reports` counts what its slices were told: certain, asked (read on), failed.
    """

    def __init__(self, partition: Partition, name: str, place: Place = NOTHING) -> None:
        self.name = name
        self.log = bytearray()
        self.promised = b""  # the log as far as it was confirmed
        self.reports: Counter[str] = Counter()
        self.end: End | None = None
        self.detail = ""
        self._has_waited = False
        self.partition = _Watched(partition, self)
        self.node = Node(
            self.partition, self, place, name=name, nonce=urandom(16), rng=Random(7), now=NOW
        )
        self.node.start()

    @property
    def leads_on(self) -> bool:
        return self.node.state is State.LEADING

    @property
    def has_read_all(self) -> bool:
        return self.node._is_caught_up

    @property
    def is_decided(self) -> bool:
        """Return whether no claim and no slice of it is open."""
        if self.node.state is State.CLAIMING:
            return False
        return not self.leads_on or len(self.promised) == len(self.log)

    def append(self, data: bytes) -> None:
        if not self._has_waited:
            self.node.tick(NOW)
            self._has_waited = True
        self.log += data
        self.node.append(data, LATER)

    def claim(self) -> bool:
        return self.node.claim(NOW)

    def counted(self, record: PartitionRecord, place: Place) -> None:
        del self.log[place.end :]
        if isinstance(record, Slice):
            self.log[record.start :] = record.data

    def heard(self, said: NodeStatus, place: Place, *, is_history: bool) -> None: ...

    def leads(self, place: Place) -> None:
        self.promised = bytes(self.log)

    def confirmed(self, position: int) -> None:
        self.promised = bytes(self.log[:position])

    def ended(self, end: End, detail: str) -> None:
        self.end, self.detail = end, detail


class _Watched:
    """A node's partition, which may hold back what was read."""

    def __init__(self, partition: Partition, node: ObedientNode) -> None:
        self._partition = self._writes = partition
        self._node = node
        self._held: list[Callable[[], None]] | None = None

    def replace(self, partition: Partition) -> None:
        """Write by another partition object from now on."""
        self._writes = partition

    def hold(self) -> None:
        """Let the node read nothing until `release`."""
        self._held = []

    def release(self) -> None:
        held, self._held = self._held, None
        for call in held or ():
            call()

    def produce(self, data: bytes, reported: Reported) -> None:
        is_slice = isinstance(decode(data), Slice)
        self._writes.produce(data, partial(self._report, reported) if is_slice else reported)

    def read_from(self, offset: int, deliver: Deliver, caught_up: CaughtUp, lost: Lost) -> None:
        told = (partial(self._pass, call) for call in (deliver, caught_up, lost))
        self._partition.read_from(offset, *told)

    def forget_before(self, offset: int) -> None:
        self._partition.forget_before(offset)

    def close(self) -> None:
        self._partition.close()
        self._writes.close()

    def _report(self, reported: Reported, error: Exception | None, offset: int | None) -> None:
        promised = self._node.promised
        reported(error, offset)
        certain = len(self._node.promised) > len(promised)
        self._node.reports["failed" if error else "certain" if certain else "asked"] += 1

    def _pass(self, call: Callable[..., None], *args: object) -> None:
        if self._held is None:
            call(*args)
        else:
            self._held.append(partial(call, *args))


def begin_log(loop: Loop, partition: Partition) -> None:
    """Write the genesis of a log."""
    reported: list[Exception | None] = []
    partition.produce(encode(Genesis(LOG_ID, 0, 0, 0)), lambda error, _: reported.append(error))
    loop.run_until(lambda: reported, "a genesis")
    assert reported == [None]


def broken_promises(nodes: Iterable[ObedientNode], log: bytes) -> list[str]:
    """Return who has answered for what the log does not have."""
    return [one.name for one in nodes if not log.startswith(one.promised)]

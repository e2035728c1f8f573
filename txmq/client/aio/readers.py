"""Readers of several brokers on asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import NoReturn, Self

from txmq.client.aio.core import AioCore
from txmq.client.aio.reader import Reader, Receiving
from txmq.client.protocol.offsets import OffsetsByLog, OffsetStore
from txmq.client.protocol.reader import ReaderStart, positions_of_one_broker
from txmq.client.protocol.typed.bodies import Topics
from txmq.model.message import ReceivedMessage
from txmq.model.topic_partition import PartitionName


class Readers(Receiving):
    """A reader of several brokers, for one coroutine at a time.

    Made by `cluster.reader`, and used as a Reader. Partitions of different brokers have
    the same numbers, so `positions` and `assign` are for readers of one broker.
    """

    def __init__(
        self,
        cores: Sequence[AioCore],
        name: str,
        topics: Topics,
        store: OffsetStore,
        start: ReaderStart,
    ) -> None:
        """Raises LocalProtocolError for an invalid name, start or topics."""
        by_log = OffsetsByLog(store)
        names = topics if isinstance(topics, str) else list(topics)
        self._name, self._turn = name, 0
        self._readers = [Reader(core, name, names, by_log, start, self._wake) for core in cores]
        self._store, self._core, self._loop = store, cores[0], cores[0].loop
        self.closed = False

    async def open(self) -> Self:
        try:
            for reader in self._readers:
                await reader.open()
        except BaseException:
            await self.close()
            raise
        return self

    @property
    def name(self) -> str:
        """The name under which the positions are stored."""
        return self._name

    @property
    def missed(self) -> int:
        """Messages that retention had dropped before they were read."""
        return sum(reader.missed for reader in self._readers)

    @property
    def positions(self) -> dict[PartitionName, int]:
        """Raises LocalProtocolError: positions are those of one broker."""
        raise positions_of_one_broker("positions")

    def assign(self, partitions: Collection[PartitionName] | None) -> NoReturn:
        """Raises LocalProtocolError: partitions are those of one broker."""
        raise positions_of_one_broker("assign(…)")

    def raise_failure(self) -> None:
        """Raise the error that ended a reader, if there is one."""
        for reader in self._readers:
            reader.raise_failure()

    def mark_processed(self) -> None:
        """Count the last message as processed, and have the next ones read."""
        for reader in self._readers:
            reader.mark_processed()

    def next_ready(self) -> ReceivedMessage | None:
        """Return a message that waits locally, of the brokers in turn."""
        self._turn += 1
        for n in range(len(self._readers)):
            reader = self._readers[(self._turn + n) % len(self._readers)]
            if (message := reader.next_ready()) is not None:
                return message
        return None

    async def _commit(self) -> None:
        for reader in self._readers:
            await reader.commit()

    async def _close(self) -> None:
        self.closed = True
        self._wake()
        try:
            for reader in self._readers:
                await reader.close()
        finally:
            await asyncio.to_thread(self._store.close)

"""Readers of several brokers on asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress
from typing import NoReturn, Self

from txmq.client.aio.core import AioCore
from txmq.client.aio.reader import Reader, Receiving
from txmq.client.log import get_logger
from txmq.client.protocol.offsets import OffsetsByLog, OffsetStore
from txmq.client.protocol.reader import REFRESH_S, ReaderStart, positions_of_one_broker
from txmq.client.protocol.sender.brokers import Brokers
from txmq.client.protocol.typed.bodies import Topics
from txmq.errors import TxmqError, UnknownTopic
from txmq.model.message import ReceivedMessage
from txmq.model.topic_partition import PartitionName

log = get_logger()


class Readers(Receiving):
    """A reader of several brokers, for one coroutine at a time.

    Made by `cluster.reader`, and used as a Reader. Partitions of different brokers have
    the same numbers, so `positions` and `assign` are for readers of one broker. A log
    that is found later is read from its first message on.
    """

    def __init__(
        self,
        found: Brokers[AioCore],
        name: str,
        topics: Topics,
        store: OffsetStore,
        start: ReaderStart,
    ) -> None:
        """`found` has the brokers to read, which become more.

        Raises LocalProtocolError for an invalid name, start or topics.
        """
        self._found, self._joined = found, found.answered
        self._by_log, self._start = OffsetsByLog(store), start
        self._topics = topics if isinstance(topics, str) else list(topics)
        self._name, self._turn = name, 0
        self._joining = asyncio.Lock()  # a store that is closed is not used again
        self._readers = [self._reader_at(core, start) for core in self._joined]
        self._store, self._core, self._loop = store, found.cores[0], found.cores[0].loop
        self._failure: Exception | None = None
        self.closed = False

    def _reader_at(self, core: AioCore, start: ReaderStart) -> Reader:
        return Reader(core, self._name, self._topics, self._by_log, start, self._wake)

    async def open(self) -> Self:
        try:
            for reader in self._readers:
                await reader.open()
            for core in self._found.cores:  # they become more, and a later list may have fewer
                if core not in self._joined and core in self._found.present:
                    with suppress(UnknownTopic):  # so each message comes later than the reader
                        await self._join(core, self._start)
        except BaseException:
            await self.close()
            raise
        return self

    async def join_at(self, core: AioCore) -> None:
        """Read at a broker that was found, too, once it lets the reader do so."""
        while not await self._join_at(core):
            await core.sleep(REFRESH_S)

    async def _join_at(self, core: AioCore) -> bool:
        """Return whether there is no more to do."""
        async with self._joining:
            if self.closed or core in self._joined:
                return True
            try:
                await self._join(core, "first")
            except TxmqError as error:
                log.warning("reader.not_joined", reader=self.name, error=str(error))
                return False
            except Exception as error:  # noqa: BLE001  # of the user's store
                self._failure = error
        self._wake()
        return True

    async def _join(self, core: AioCore, start: ReaderStart) -> None:
        self._readers.append(await self._reader_at(core, start).open())
        self._joined.append(core)

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
        if self._failure is not None:
            raise self._failure
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
        async with self._joining:
            try:
                for reader in self._readers:
                    await reader.close()
            finally:
                await asyncio.to_thread(self._store.close)

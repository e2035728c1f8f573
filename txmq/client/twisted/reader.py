"""Readers without a consumer group, on Twisted's reactor."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NoReturn

from txmq.client.aio import reader, readers
from txmq.client.aio.closing import AsyncCloseable
from txmq.client.protocol.reader import positions_of_one_broker
from txmq.client.twisted.bridge import Bridge
from txmq.client.twisted.deferring import deferring
from txmq.model.message import ReceivedMessage
from txmq.model.topic_partition import PartitionName


class TwistedReader(AsyncCloseable):
    """A reader of one broker or of several, for use with `async with`."""

    _bridge: Bridge
    _awaited: reader.Reader | readers.Readers

    async def __aiter__(self) -> AsyncIterator[ReceivedMessage]:
        while (message := await self.receive()) is not None:
            yield message

    @property
    def closed(self) -> bool:
        """True once the reader gives nothing more."""
        return self._awaited.closed

    @property
    def name(self) -> str:
        """The name under which the positions are stored."""
        return self._awaited.name

    @property
    def missed(self) -> int:
        """Messages that retention had dropped before they were read."""
        return self._bridge.at_once(lambda: self._awaited.missed)

    receive = deferring(reader.Receiving.receive)
    commit = deferring(reader.Receiving.commit)
    close = deferring(reader.Receiving.close)


class Reader(TwistedReader):
    """A reader of one broker, for one coroutine at a time. Made by `client.reader`;
    otherwise as the blocking one.

    `async for message in reader` gives messages until it is closed. A message is
    processed when the next one is requested.
    """

    def __init__(self, bridge: Bridge, awaited: reader.Reader) -> None:
        self._bridge, self._awaited = bridge, awaited

    @property
    def positions(self) -> dict[PartitionName, int]:
        """The next message to process of each partition."""
        return self._bridge.at_once(lambda: self._awaited.positions)

    assign = deferring(reader.Reader.assign)


class Readers(TwistedReader):
    """A reader of several brokers, for one coroutine at a time.

    Made by `cluster.reader`, and used as a Reader. Partitions of different brokers have
    the same numbers, so `positions` and `assign` are for readers of one broker.
    """

    def __init__(self, bridge: Bridge, awaited: readers.Readers) -> None:
        self._bridge, self._awaited = bridge, awaited

    @property
    def positions(self) -> dict[PartitionName, int]:
        """Raises LocalProtocolError: positions are those of one broker."""
        return self._awaited.positions

    def assign(self, partitions: object) -> NoReturn:
        """Raises LocalProtocolError: partitions are those of one broker."""
        raise positions_of_one_broker("assign(…)")

"""Topics that a client has looked up, and the partitions of its messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.batch import NO_COMPRESSION, Compression
from txmq.client.log import get_logger
from txmq.client.protocol.sender.rows import Rows
from txmq.client.protocol.settings import Partitioner
from txmq.errors import LocalProtocolError, RemoteProtocolError
from txmq.model.keys import partition_of
from txmq.model.message import check_name

if TYPE_CHECKING:  # OpenTelemetry is for those who ask for it
    from txmq.client.protocol.telemetry.tracing import Telemetry

# Returns the broker's description of a topic, within so many seconds; None = those of
# the client. The broker may create it at first use.
Describe = Callable[[str, float | None], dict[str, Any]]

MAX_PARTITIONS = 1 << 32
log = get_logger()


class TopicMetadata(NamedTuple):
    """Partitions of a topic. `epoch` counts the changes of their number. `topic_id` 0:
    the topic was never described.
    """

    name: str
    partitions: int
    epoch: int
    topic_id: int = 0


def parse_description(topic: str, reply: Mapping[str, Any]) -> TopicMetadata:
    """Return the topic that a broker describes; warn where it was made for the asking.
    Raises RemoteProtocolError.
    """
    warn_of_created(reply)
    try:
        [fields] = reply["topics"]
        return TopicMetadata(
            topic, int(fields["partitions"]), int(fields["epoch"]), int(fields["topic_id"])
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RemoteProtocolError(
            f"invalid description of topic {topic}: {reply!r:.200}"
        ) from error


def warn_of_created(reply: Mapping[str, Any]) -> None:
    """Warn of topics that a broker has made because a client named them: a misspelt
    name is such a topic, and nobody sends to it or reads it.
    """
    if created := reply.get("created"):
        log.warning("topic.created_at_use", topics=created, similar=reply.get("similar", ""))


class TopicCache:
    """Metadata of topics, the client's choice of partitions, its compression and spans.

    For any number of threads.
    """

    def __init__(
        self,
        describe: Describe,
        partitioner: Partitioner | None,
        compression: Compression = NO_COMPRESSION,
        telemetry: Telemetry | None = None,
    ) -> None:
        self._describe = describe
        self._partitioner = partitioner
        self._metadata: dict[str, TopicMetadata] = {}
        self.has_partitioner = partitioner is not None
        self.compression, self.telemetry = compression, telemetry
        self._turns, self._refreshes = count(), count()
        self._refreshed: dict[str, int] = {}  # by topic: the number of the refresh

    def get(self, topic: str) -> TopicMetadata:
        """Return a topic from the cache, or else from the broker.

        Raises UnknownTopic, and the errors of a call.
        """
        return self._metadata.get(topic) or self.refresh(topic)

    # What messages without a transaction are routed by: see SpoolTopics.
    for_send = get

    def refresh(self, topic: str, within: float | None = None) -> TopicMetadata:
        """Return the topic as the broker describes it now, `within` so many seconds.

        Of answers that overtake one another, the one asked for last stays.
        """
        number = next(self._refreshes)
        metadata = parse_description(topic, self._describe(check_name(topic, "topic"), within))
        if self._refreshed.get(topic, -1) < number:
            self._refreshed[topic], self._metadata[topic] = number, metadata
        return metadata

    def cached(self, topic: str) -> TopicMetadata | None:
        """Return the topic if it is in the cache."""
        return self._metadata.get(topic)

    def forget(self, topic: str) -> None:
        """Drop a topic that the broker no longer has."""
        self._metadata.pop(topic, None)

    def locate(self, topic: str, key: str | None, partition: int | None) -> tuple[int, int]:
        """Return the partition of one message, and the epoch of the topic's metadata.

        Raises as `get` and `choose_partition`.
        """
        metadata = self._metadata.get(topic) or self.refresh(topic)
        return self.choose_partition(metadata, key, partition), metadata.epoch

    def choose_partition(
        self, topic: TopicMetadata, key: str | None, partition: int | None = None
    ) -> int:
        """Return the partition of one message.

        It is the one requested, the partitioner's, the key's, or the next in turn.
        Raises LocalProtocolError for an invalid partition or key.
        """
        if partition is not None:
            return _checked(partition)
        if self._partitioner is not None:
            chosen = self._partitioner(topic.name, key, topic.partitions)
            if chosen is not None:
                return _checked(chosen, topic.partitions)
        if not key:
            return self.next_partition(topic)
        try:
            return partition_of(key, topic.partitions)
        except (TypeError, UnicodeEncodeError) as error:
            raise LocalProtocolError(
                f"invalid key {key!r:.80}", hint="use text that UTF-8 can encode"
            ) from error

    def next_partition(self, topic: TopicMetadata) -> int:
        """Return the next partition in turn."""
        return next(self._turns) % topic.partitions

    def split_rows(
        self, topic: TopicMetadata, rows: Rows, partition: int | None = None
    ) -> dict[int, Sequence[int]]:
        """Return the places of the rows of each partition.

        All rows without a key go to the next partition in turn.
        """
        everything = range(len(rows))
        if partition is not None:
            return {_checked(partition): everything}
        if self._partitioner is not None:
            return self._split_by_partitioner(topic, rows.row_keys() or [None] * len(rows))
        keyless = self.next_partition(topic)
        if topic.partitions == 1:
            return {keyless: everything}
        return dict(rows.places(topic.partitions, keyless))

    def _split_by_partitioner(
        self, topic: TopicMetadata, keys: Sequence[str | None]
    ) -> dict[int, Sequence[int]]:
        places: dict[int, list[int]] = {}
        for place, key in enumerate(keys):
            places.setdefault(self.choose_partition(topic, key), []).append(place)
        return dict(places)


def _checked(partition: int, partitions: int = MAX_PARTITIONS) -> int:
    """Return a valid partition number. The broker checks whether it exists."""
    if type(partition) is not int or not 0 <= partition < partitions:
        last = f" to {partitions - 1}" if partitions < MAX_PARTITIONS else ""
        raise LocalProtocolError(
            f"invalid partition {partition!r}", hint=f"use a number from 0{last}"
        )
    return partition

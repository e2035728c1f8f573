"""Topics of a client with a spool: sends go on while no broker tells about a topic."""

from __future__ import annotations

import time
from collections.abc import Callable

from txmq.batch import NO_COMPRESSION, Compression
from txmq.client.log import get_logger
from txmq.client.protocol.sender.accumulator import UNROUTED
from txmq.client.protocol.sender.topics import Describe, TopicCache, TopicMetadata
from txmq.client.protocol.settings import Partitioner
from txmq.errors import RequestRejected, StoreError, TxmqError
from txmq.model.message import check_name
from txmq.recover.local.spools import KnownTopic, SpoolDirectory

RETRY_S = 1.0  # until the broker is asked again after it did not answer
log = get_logger()


class SpoolTopics(TopicCache):
    """A cache of topics that for sends falls back to what the spools' directory has.

    A topic that is not there either has no partitions: its messages are UNROUTED.
    `offline` tells whether the client has found no broker.
    """

    def __init__(
        self,
        describe: Describe,
        partitioner: Partitioner | None,
        compression: Compression = NO_COMPRESSION,
    ) -> None:
        super().__init__(describe, partitioner, compression)
        self.offline: Callable[[], bool] = lambda: False
        self.unrouted: set[str] = set()  # to be refreshed once the broker answers
        self._directory: SpoolDirectory | None = None
        self._known: dict[str, KnownTopic] = {}
        self._ask_again_at = 0.0

    def use(self, directory: SpoolDirectory) -> None:
        """Keep the topics in that directory, and fall back to those in it."""
        self._directory, self._known = directory, directory.topics()

    def for_send(self, topic: str) -> TopicMetadata:
        """Return a topic from the cache, from the broker, or else as it was known last.

        Raises UnknownTopic, and other refusals.
        """
        if (metadata := self._metadata.get(topic)) is not None:
            return metadata
        if not self.offline() and time.monotonic() >= self._ask_again_at:
            try:
                return self.refresh(topic)
            except TxmqError as error:
                if isinstance(error, RequestRejected) or not error.retriable:
                    raise
                self._ask_again_at = time.monotonic() + RETRY_S
        return self._last_known(check_name(topic, "topic"))

    def _last_known(self, topic: str) -> TopicMetadata:
        known = self._known.get(topic)
        if known is None:
            self.unrouted.add(topic)
            return TopicMetadata(topic, 0, 0)
        metadata = TopicMetadata(topic, *known)
        return self._metadata.setdefault(topic, metadata)

    def refresh(self, topic: str, within: float | None = None) -> TopicMetadata:
        metadata = super().refresh(topic, within)
        known = KnownTopic(metadata.partitions, metadata.epoch, metadata.topic_id)
        if self._directory is not None and self._known.get(topic) != known:
            self._known[topic] = known
            try:
                self._directory.remember_topics({topic: known})
            except StoreError as error:  # only a process that starts in an outage needs it
                log.warning("spool.topic_not_kept", topic=topic, error=str(error))
        return metadata

    def forget(self, topic: str) -> None:
        super().forget(topic)
        self._known.pop(topic, None)

    def choose_partition(
        self, topic: TopicMetadata, key: str | None, partition: int | None = None
    ) -> int:
        if not topic.partitions and partition is None:
            return UNROUTED
        return super().choose_partition(topic, key, partition)

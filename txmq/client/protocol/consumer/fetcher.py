"""The fetch requests of a member: their size, and the topics that they leave out."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from itertools import count

from txmq.client.protocol.consumer.fetched import FetchedBatch
from txmq.client.protocol.consumer.local_queue import LocalQueue
from txmq.client.protocol.consumer.membership import Membership
from txmq.client.protocol.consumer.requests import OnRefusal, Request, fetch_request
from txmq.client.protocol.consumer.settings import ConsumerSettings
from txmq.errors import LocalProtocolError
from txmq.model.keys import tag_filter

FETCH_WAIT_S = 20.0


class Fetcher:
    """The fetches in flight, one at a time.

    A second one that leaves out other topics makes the broker end the first.
    """

    def __init__(self, settings: ConsumerSettings, queue: LocalQueue) -> None:
        self._settings, self._queue = settings, queue
        self._all_paused = False
        self._paused_topics = frozenset[str]()
        self._in_flight: dict[int, frozenset[str]] = {}  # the topics that each leaves out
        self._numbers = count()

    @property
    def paused(self) -> frozenset[str]:
        """The paused topics, of which nothing is delivered."""
        return frozenset(self._settings.topics) if self._all_paused else self._paused_topics

    def pause(self, topics: Collection[str], *, paused: bool) -> None:
        """Pause or resume these topics, or all where none is named.

        Raises LocalProtocolError where the consumer does not read one of them.
        """
        for topic in topics:
            if topic not in self._settings.topics:
                raise LocalProtocolError(
                    f"a consumer of {self._settings.group!r} does not read {topic!r}",
                    hint=f"use one of its topics: {', '.join(self._settings.topics)}",
                )
        if not topics:
            self._all_paused = paused
        elif paused:
            self._paused_topics = self._paused_topics.union(topics)
        else:
            self._paused_topics = self._paused_topics.difference(topics)

    def is_paused(self, batch: FetchedBatch) -> bool:
        """Return whether a batch is of a paused topic."""
        return batch.topic in self.paused

    @property
    def in_flight(self) -> bool:
        """True if a fetch has not been answered."""
        return bool(self._in_flight)

    def forget(self) -> None:
        """Forget the fetches in flight: their answers will not come, or do not
        matter.
        """
        self._in_flight.clear()

    def is_due(self) -> bool:
        """Return whether half of the local queue is free and no fetch will fill it."""
        queue, settings = self._queue, self._settings
        if (
            queue.ready > settings.prefetch_messages // 2
            or queue.ready_bytes > settings.prefetch_bytes // 2
        ):
            return False
        if len(self._in_flight) > 1 or self._paused_topics in self._in_flight.values():
            return False
        return len(self.paused) < len(settings.topics)

    def fetch(
        self,
        membership: Membership,
        fetched: Callable[[bytes, float], None],
        refused: OnRefusal,
    ) -> Request:
        """Return the next fetch."""
        number, settings = next(self._numbers), self._settings
        self._in_flight[number] = self._paused_topics
        return fetch_request(
            membership,
            FETCH_WAIT_S,
            settings.prefetch_messages - self._queue.ready,
            settings.prefetch_bytes - self._queue.ready_bytes,
            partial(self._answered, number, fetched),
            partial(self._answered, number, refused),
            tags=tag_filter(settings.tags or ()),
            without=tuple(sorted(self._paused_topics)),
        )

    def _answered(self, number: int, then: Callable[..., None], answer: object, now: float) -> None:
        self._in_flight.pop(number, None)
        then(answer, now)

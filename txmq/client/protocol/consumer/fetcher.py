"""What a member fetches: how much at a time, and which topics it leaves out for now."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from itertools import count

from txmq.client.protocol.consumer.fetched import Parcel
from txmq.client.protocol.consumer.local_queue import Holdings
from txmq.client.protocol.consumer.requests import Refusal, Request, Seat, fetch
from txmq.client.protocol.consumer.settings import Settings
from txmq.errors import LocalProtocolError
from txmq.model.keys import tag_filter

FETCH_WAIT_S = 20.0


class Intake:
    """The fetches under way, one at a time; a second one, of other topics, makes the
    broker end the first.
    """

    def __init__(self, settings: Settings, holdings: Holdings) -> None:
        self._settings, self._holdings = settings, holdings
        self._is_paused = False
        self._left_out = frozenset[str]()
        self._under_way: dict[int, frozenset[str]] = {}  # what each leaves out
        self._numbers = count()

    @property
    def paused(self) -> frozenset[str]:
        """The topics of which nothing is handed out."""
        return frozenset(self._settings.topics) if self._is_paused else self._left_out

    def pause(self, topics: Collection[str], *, paused: bool) -> None:
        """Leaves these topics out, or everything where none is named, or no longer.

        Raises LocalProtocolError where the member does not read one of them.
        """
        for topic in topics:
            if topic not in self._settings.topics:
                hint = f"one of those that it reads: {', '.join(self._settings.topics)}"
                raise LocalProtocolError(
                    f"a consumer of {self._settings.group!r} does not read {topic!r}", hint=hint
                )
        if not topics:
            self._is_paused = paused
        elif paused:
            self._left_out = self._left_out.union(topics)
        else:
            self._left_out = self._left_out.difference(topics)

    def leaves_out(self, parcel: Parcel) -> bool:
        """Whether a parcel is of a paused topic."""
        return parcel.topic in self.paused

    @property
    def under_way(self) -> bool:
        """Whether a fetch has not been answered."""
        return bool(self._under_way)

    def lost(self) -> None:
        """What is under way will not be answered, or need not be waited for."""
        self._under_way.clear()

    def wanted(self) -> bool:
        """Whether half of what may wait here could be filled, and nobody is about
        to.
        """
        holdings, settings = self._holdings, self._settings
        if (
            holdings.ready > settings.prefetch_messages // 2
            or holdings.ready_bytes > settings.prefetch_bytes // 2
        ):
            return False
        if len(self._under_way) > 1 or self._left_out in self._under_way.values():
            return False
        return len(self.paused) < len(settings.topics)

    def fetch(
        self, seat: Seat, fetched: Callable[[bytes, float], None], refused: Refusal
    ) -> Request:
        """The next request."""
        number, settings = next(self._numbers), self._settings
        self._under_way[number] = self._left_out
        room = (
            settings.prefetch_messages - self._holdings.ready,
            settings.prefetch_bytes - self._holdings.ready_bytes,
        )
        tags = tag_filter(settings.tags or ())
        answers = partial(self._answered, number, fetched), partial(self._answered, number, refused)
        return fetch(
            seat, FETCH_WAIT_S, *room, *answers, tags=tags, without=tuple(sorted(self._left_out))
        )

    def _answered(self, number: int, then: Callable[..., None], answer: object, now: float) -> None:
        self._under_way.pop(number, None)
        then(answer, now)

"""Live parts of pages: event streams, bounded in number and in rate.

The browser closes its stream while its viewer scrolls, selects or types, and while the
tab is hidden; so a stream that is open has somebody who looks.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from txmq.admin.http_values import Sink
    from txmq.broker.reactor.interfaces import Clock, Timer

PERIOD_S = 2.0  # between the end of one rendering and the begin of the next
REST = 8  # times as long as a rendering took, the next one waits at least
LIFE_S = 600.0  # then the browser opens another one
STUCK_S = 30.0  # without reading: then another viewer gets the place
BEAT_EVERY = 7  # renderings of the same part, which is not sent again: a sign of life is
# of all viewers: other requests keep their connections. Beyond, a stream of whoever has
# the most gives way to whoever has fewer.
MAX_STREAMS = 24
MAX_OF_USER = 8  # where there are users

# renders the part; None = the viewer may not see it any more, nothing = not this time
Part = Callable[[Callable[[bytes | None], None]], None]


class LiveStream:
    """One open stream of the live part of a page."""

    def __init__(self, streams: Streams, part: Part, clock: Clock, owner: str) -> None:
        self._streams, self._part, self._clock = streams, part, clock
        self.owner = owner
        self._ends = clock.seconds() + LIFE_S
        self._stuck_since: float | None = None
        self._began = clock.seconds()
        self._seen = b""
        self._same = 0
        self._sink: Sink | None = None
        self._timer: Timer | None = None

    def opened(self, sink: Sink) -> None:
        """Begin to send. The browser has just got the page: it is not sent again."""
        self._sink = sink
        sink.write(b"retry: 3000\n\n")
        self._later()

    def closed(self) -> None:
        """End: the browser is gone."""
        self._sink = None
        self._streams.open.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def give_way(self) -> None:
        """End for another viewer; the browser tries again later."""
        sink = self._sink
        self.closed()
        if sink is not None:
            sink.end()

    def _later(self, took_s: float = 0.0) -> None:
        self._timer = self._clock.callLater(max(PERIOD_S, REST * took_s), self._tick)

    def _tick(self) -> None:
        self._timer = None
        sink = self._sink
        if sink is None:
            return
        if self._clock.seconds() >= self._ends or self._is_stuck(sink):
            sink.end()
        elif sink.is_full:  # a slow viewer misses states between
            self._later()
        else:
            self._began = self._clock.seconds()
            self._part(self._rendered)

    def _is_stuck(self, sink: Sink) -> bool:
        """Return whether the browser has not read what was sent for too long."""
        now = self._clock.seconds()
        if not sink.is_full:
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = now
        return self._stuck_since is not None and now >= self._stuck_since + STUCK_S

    def _rendered(self, part: bytes | None) -> None:
        sink = self._sink
        if sink is None:
            return
        if part is None:
            sink.write(b"event: gone\ndata: \n\n")
            sink.end()
            return
        took_s = self._clock.seconds() - self._began
        if not part:
            self._later(took_s)
            return
        seen = hashlib.blake2b(part, digest_size=16).digest()
        if seen != self._seen:
            self._seen, self._same = seen, 0
            sink.write(b"event: part\n" + _data(part) + b"\n")
        else:
            self._same += 1
            if self._same % BEAT_EVERY == 0:
                sink.write(b": the same\n\n")
        self._later(took_s)


class Streams:
    """The open streams of one console."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.open: dict[LiveStream, None] = {}  # the oldest first

    def make(self, part: Part, user: str | None, network: str = "") -> LiveStream | None:
        """Return a new stream; None = there are too many. Its owner is the user, or the
        viewer's host where the broker has no users.
        """
        owner = network if user is None else user
        counts = Counter(stream.owner for stream in self.open)
        if user is not None and counts[owner] >= MAX_OF_USER:
            return None
        if len(self.open) >= MAX_STREAMS:
            [(most, count)] = counts.most_common(1)
            # one fewer, and both would have the same: they would take turns for ever
            if count < counts[owner] + 2:
                return None
            next(stream for stream in self.open if stream.owner == most).give_way()
        stream = LiveStream(self, part, self._clock, owner)
        self.open[stream] = None
        return stream


def _data(part: bytes) -> bytes:
    lines = part.replace(b"\r", b"").split(b"\n")
    return b"".join(b"data: " + line + b"\n" for line in lines)

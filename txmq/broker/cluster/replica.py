"""A broker's copy of a shared log: it follows the others, and then leads.

    partition ──► node (rules) ──► log here ──► state and tables       follower
    engine ──► log here, in a thread
          └──► node ──► partition ──► replies                          leader

A follower appends the same bytes to its log and applies the same events, so its state
is warm. A leader ends its process when it is deposed: its memory is ahead of the log.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import structlog
from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from txmq.broker.data_directory.storage import roll_forward
from txmq.errors import NodeEnded, StoreError
from txmq.store.log.cut import LONGEST_COPY
from txmq.store.shared.node import End, Node
from txmq.store.shared.records import Claim, NodeStatus, PartitionRecord, Slice
from txmq.store.shared.rules import Place
from txmq.store.shared.slices import SliceReader, after, segment_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from txmq.broker.engine.engine import Engine
    from txmq.store.log.writer import Flush
    from txmq.store.shared.known_nodes import KnownNodes

# Memory is ahead of the log then, or behind all that the partition has.
FOLLOWS_AGAIN = (End.DEPOSED, End.RESIGNED, End.UNDELIVERED, End.FORGOTTEN)
_AGAIN = "start it again: it follows from where its copy ends"
_COPY = "empty its data directory: it copies the log of the node that leads"
HINTS = {
    **dict.fromkeys(FOLLOWS_AGAIN, _AGAIN),
    End.DIVERGED: f"{LONGEST_COPY}: this one is kept as it is",
    End.UNSUPPORTED: "install that version here",
}
log = structlog.get_logger()


class Replica:
    """The listener of a node. All calls come in the reactor's thread.

    `leading` fires with the place of this node's claim. It never fires where the node
    ends before; `on_end` is then told, as whenever a node ends.
    """

    def __init__(self, engine: Engine, seconds: Callable[[], float], known: KnownNodes) -> None:
        """`seconds` is CLOCK_BOOTTIME."""
        self._engine, self._seconds, self._known = engine, seconds, known
        last = engine.store.segments()[-1]
        self._slices = SliceReader(last.first, last.created_at)
        self._flushes: deque[tuple[int, Deferred[None]]] = deque()  # end of each
        self._written = 0  # by this leader: the end of the last flush
        self._place = Place()
        self.node: Node | None = None
        self.leading: Deferred[Place] = Deferred()
        self.on_end: Callable[[NodeEnded], None] = _log_end

    def follow(self, node: Node) -> None:
        """Begin to follow."""
        self.node, self._place = node, node.place
        node.start()

    @property
    def place(self) -> Place:
        """The last place of the partition where records are whole: what the tables
        stand for, or somewhat before it.
        """
        assert self.node is not None, "the node follows"
        now = self.node.place
        if now.end == now.whole:
            self._place = now
        return self._place

    def tick(self) -> None:
        """Timer, several times in each third of the lease. A node whose copy has failed
        neither beats nor claims.
        """
        if self.node is not None and self._engine.failed is None:
            self.node.has_space = not self._engine.disk.refusing
            self.node.is_whole = not self._engine.store.quarantined
            self.node.tick(self._seconds())

    # what the node tells

    def counted(self, record: PartitionRecord, place: Place) -> None:
        """Take over what another node wrote. A copy that lacks a record ends its
        process: a full disk, or an event that this version does not know.
        """
        engine = self._engine
        if engine.failed is not None:
            return
        try:
            self._count(record, place)
        except Exception:  # noqa: BLE001  # the node would go on without the record
            engine.fail(Failure())

    def heard(self, said: NodeStatus, place: Place, *, is_history: bool) -> None:
        """Take what a node has said of itself."""
        self._known.hear(said, place, self._seconds(), is_history=is_history)

    def leads(self, place: Place) -> None:
        """Lead from here on. A copy with more than counts, or less, must not: it would
        lead for ever, and serve nothing.
        """
        engine, end = self._engine, self._engine.store.end
        if engine.failed is not None:
            return
        if end != place.end:
            said = f"this copy of the shared log ends at {end}, what counts ends at {place.end}"
            engine.fail(Failure(StoreError(said, hint=_COPY)))
            return
        self._written = place.end
        self.leading.callback(place)

    def confirmed(self, position: int) -> None:
        """Let the flushes be answered that every node has or will have."""
        while self._flushes and self._flushes[0][0] <= position:
            self._flushes.popleft()[1].callback(None)

    def ended(self, end: End, detail: str) -> None:
        """Answer nothing more."""
        error = NodeEnded(f"this node has left the shared log: {end}: {detail}", hint=HINTS[end])
        error.may_follow = end in FOLLOWS_AGAIN
        for _end, waiting in self._flushes:
            waiting.errback(Failure(error))
        self._flushes.clear()
        try:
            if end is End.DIVERGED:
                self._engine.store.forbid_cut(str(error))
        finally:
            self.on_end(error)

    # what the engine asks

    def replicate(self, flush: Flush) -> Deferred[None]:
        """Bring a flush to the other nodes. One that resigns leaves it to its end."""
        node = self.node
        assert node is not None, "only a leader has something to write"
        if not node.is_resigning:
            for data, begins in segment_bytes(flush, self._engine.store.log_id, self._written):
                node.append(data, self._seconds(), begins_segment=begins)
            self._written = flush.end
        waiting: Deferred[None] = Deferred()
        self._flushes.append((flush.end, waiting))
        return waiting

    def _count(self, record: PartitionRecord, place: Place) -> None:
        if isinstance(record, Claim):
            self._slices.cut()
            log.info("cluster.claim", node=record.node, epoch=place.epoch)
        elif isinstance(record, Slice):
            flush = self._slices.add(record)
            flush = flush and after(flush, self._engine.store.end)
            if flush:
                self._take_over(flush)

    def _take_over(self, flush: Flush) -> None:
        engine, store = self._engine, self._engine.store
        began = store.end
        store.copy(flush.writes)
        own = store.cut()
        assert own is not None, "the flush has bytes"
        engine.disk.write_with_ballast(store.write, own, sync=False)
        store.complete(own)
        roll_forward(engine.state, store, began)
        engine.state.topics_with_new_entries.clear()


def _log_end(error: NodeEnded) -> None:
    log.critical("cluster.ended", error=str(error))

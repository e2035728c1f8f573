"""LETTERS: the messages of the letters that a replay plan holds, in bulk.

A job sends a million of them again, so they come as batches, as messages do. Pages of
JSON, one message at a time, cost thirty times as much.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.batch import BatchView, cut_rows
from txmq.broker.engine.log_reader import read_batches
from txmq.core.replay.orders import find_plan
from txmq.core.state import failed_messages
from txmq.core.state.failed_messages import Standing
from txmq.core.state.failed_rows import FailedKind, FailedMessage
from txmq.core.topics import topics
from txmq.errors import CorruptRecord, RequestRejected
from txmq.store import tables as t
from txmq.wire import data_requests
from txmq.wire.chunks import SUBSET, Chunk, chunk_size, pack_chunks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.broker.engine.engine import Engine
    from txmq.broker.engine.turn_work import TurnWork
    from txmq.broker.reactor.protocol import ClientSession
    from txmq.core.state.consumer_groups import MessageRef
    from txmq.core.state.plans import Plan
    from txmq.core.state.state import State, Topic
    from txmq.core.steps import Steps
    from txmq.wire.frames import Frame

MAX_BYTES = 4 << 20  # of the batches in one reply, unless the first is larger
STEP_ROWS = 256  # failed messages of a step, and the others of the last batch
MOST_ROWS = 512  # of a step
LETTER = int(FailedKind.LETTER)  # an int, because comparing a member is slower
WHOLE = 0.5  # of a batch's rows: so many at once come with the others of the batch


class LetterRun(NamedTuple):
    """Letters at neighbouring offsets, in neighbouring rows of one stored batch."""

    offset: int
    length: int
    first: FailedMessage


class LetterRequests:
    """Answers LETTERS. All methods belong to the reactor's thread."""

    def __init__(self, engine: Engine, turns: TurnWork) -> None:
        self._engine, self._turns = engine, turns

    def read(self, session: ClientSession, frame: Frame) -> None:
        request = data_requests.unpack_read_letters(frame.payload)
        self._turns.run(session, self._read(request), partial(_answer, session, frame))

    def _read(self, request: data_requests.ReadLetters) -> Steps[list[bytes]]:
        """Return the payload of the reply: as many letters as fit, one at least."""
        chunks: list[Chunk] = []
        at, room = request.offset, min(request.max_bytes, MAX_BYTES)
        while at < request.end:
            # whatever may have been deleted between two steps
            state = self._engine.state
            topic = topics.find_topic(state, request.topic, request.partition)
            plan = find_plan(state, request.plan)
            runs, following = _runs(state, plan, topic, request._replace(offset=at))
            found = list(self._chunks(topic, request.partition, runs))
            room -= sum(chunk_size(topic.name, len(chunk.batch)) for chunk in found)
            if chunks and room < 0:
                break
            chunks, at = chunks + found, following
            yield
        return pack_chunks(chunks, next_offset=at)

    def _chunks(self, topic: Topic, partition: int, runs: list[LetterRun]) -> Iterator[Chunk]:
        """Yield the messages of letters, but for damaged ones."""
        places = dict.fromkeys((run.first.position, run.first.length) for run in runs)
        batches = self._batches(list(places))
        several = Counter(run.first.position for run in runs)
        views: dict[int, BatchView] = {}
        for run in runs:
            first = run.first
            batch = batches.get(first.position)
            if batch is None:
                continue
            view = views.get(first.position)
            if view is None:
                view = views[first.position] = BatchView(batch)
            whole = several[first.position] == 1 and run.length >= WHOLE * view.header.count
            data = batch if whole else cut_rows(batch, first.row, run.length, view)
            row = first.row if whole else 0
            yield Chunk(
                *(topic.name, partition, run.offset - row, first.stored_at, first.position, 1),
                *(SUBSET, -1, row, run.length, data),
            )

    def _batches(self, places: list[tuple[int, int]]) -> dict[int, bytes]:
        """Return the batches that are not damaged, by their positions."""
        try:
            datas = read_batches(self._engine.store, places)
            return {place[0]: bytes(data) for place, data in zip(places, datas, strict=True)}
        except CorruptRecord:
            if len(places) == 1:
                return {}
        return {at: data for place in places for at, data in self._batches([place]).items()}


def _runs(
    state: State, plan: Plan, topic: Topic, request: data_requests.ReadLetters
) -> tuple[list[LetterRun], int]:
    """Return the letters that a plan holds among the next failed messages, and the
    offset to go on at.
    """
    group = state.groups.find(plan.group_id)
    if group is None or not plan.unfinished:  # deleted or ended since
        return [], request.end
    start, stop = (
        t.FAILED_KEY.pack(group.group_id, topic.topic_id, request.partition, offset)
        for offset in (request.offset, request.end)
    )
    runs: list[LetterRun] = []
    size = length = first = 0
    begun: FailedMessage | None = None
    rows: Any = state.failed_messages.range(start, stop)
    for examined, (key, fields) in enumerate(rows):
        offset = t.FAILED_KEY.unpack(key)[3]
        row: FailedMessage = tuple.__new__(FailedMessage, fields)  # as fast as it gets
        again = begun and row.position == begun.position  # in the batch of the letter before
        if examined >= STEP_ROWS and (not again or examined == MOST_ROWS):
            break
        if not _is_held(state, plan, (topic.topic_id, request.partition, offset), row):
            continue
        if begun and again and offset == first + length and row.row == begun.row + length:
            length += 1
            continue
        if begun:
            runs.append(LetterRun(first, length, begun))
        size += 0 if again else row.length
        if begun and size > MAX_BYTES:  # to be in memory at a time
            return runs, offset
        first, length, begun = offset, 1, row
    else:
        offset = request.end
    if begun:
        runs.append(LetterRun(first, length, begun))
    return runs, offset


def _is_held(state: State, plan: Plan, ref: MessageRef, row: FailedMessage) -> bool:
    """Return True if nobody but the plan may replay or edit this letter."""
    return (
        row.plan == plan.plan_id
        and row.kind == LETTER
        and not row.token
        and failed_messages.standing(state, ref, row) is Standing.STORED
    )


def _answer(session: ClientSession, frame: Frame, found: list[bytes] | RequestRejected) -> None:
    if isinstance(found, RequestRejected):
        session.refuse(frame, found)
    else:
        session.reply(frame, found)

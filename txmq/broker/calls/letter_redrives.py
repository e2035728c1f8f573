"""The control call that copies dead letters to a topic."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.batch import BatchView, edited_row, single_row
from txmq.broker.calls import operators
from txmq.broker.calls.dispatcher import CallContext, Handler, then, unless_refused
from txmq.broker.calls.group_redrives import GroupRedrives
from txmq.broker.calls.operators import audited
from txmq.broker.engine.log_reader import read_batches
from txmq.core.consumers.authorization import find_group
from txmq.core.consumers.failures import closed_reason, find_message
from txmq.core.consumers.letter_redrives import RedriveLetters, WantedCopy
from txmq.core.topics.topics import find_topic
from txmq.crashpoints import crashpoint
from txmq.errors import BadRequest, CorruptRecord, LocalProtocolError
from txmq.model.keys import partition_of
from txmq.model.origin import origin_headers

if TYPE_CHECKING:
    from txmq.broker.calls.letters import DeadLetterCalls
    from txmq.broker.engine.engine import Engine
    from txmq.broker.engine.turn_work import TurnWork
    from txmq.core.consumers.commands import TopicOffset
    from txmq.core.state.consumer_groups import ConsumerGroup, MessageRef
    from txmq.core.state.failed_rows import FailedMessage
    from txmq.core.state.state import Topic
    from txmq.core.steps import Steps
    from txmq.store.log.log import Log
    from txmq.wire.calls import letters as wire

MAX_COPIES = 500  # of one call
MAX_BYTES = 4 << 20  # of their batches, or one that is larger: they are one record
MAX_READ = 16 << 20  # bytes of batches, decompressed: letters may be rows of large ones
READ_PER_STEP = 256 << 10


class _Page(NamedTuple):
    """Letters that one call copies; `rest` are fields of the reply on what is left."""

    copies: tuple[WantedCopy, ...]
    epoch: int
    refused: tuple[tuple[str, int, int, str], ...]
    rest: dict[str, Any]


class _Source(NamedTuple):
    """Source and target of copies."""

    group: ConsumerGroup
    to: Topic
    by: str
    traceparent: str | None


class RedriveCalls:
    """Copies of letters: they are read in steps, then published in one record."""

    def __init__(self, engine: Engine, letters: DeadLetterCalls, turns: TurnWork) -> None:
        self._engine, self._letters, self._turns = engine, letters, turns
        self._state = engine.state
        self._groups = GroupRedrives(engine, letters)
        self.handlers: dict[str, Handler] = {"dlq.redrive": self.redrive}

    def redrive(self, call: CallContext, args: wire.DlqRedrive) -> None:
        _refuse_mistake(args)
        if args.to_group is not None:
            self._groups.give(call, args)
            return
        publish = partial(self._publish, call, args)
        self._turns.run(call.reader, self._read(args), unless_refused(call.answer, publish))

    def _publish(self, call: CallContext, args: wire.DlqRedrive, page: _Page) -> None:
        assert args.to is not None, "it is what the call wants"
        store, epoch = self._engine.store, self._state.boot_epoch
        # A producer id that nobody else has: no other record of this run begins there.
        producer = b"copy" + epoch.to_bytes(4, "big") + store.end.to_bytes(8, "big")
        command = RedriveLetters(
            args.group,
            args.to,
            page.epoch,
            page.copies,
            producer,
            args.abandon,
            args.again,
            args.operator,
            args.reason,
        )

        def published(reply: Any) -> dict[str, Any]:  # noqa: ANN401  # a RedriveReply
            crashpoint("redrive.after_publish")
            return {"done": reply.done, "refused": (*reply.refused, *page.refused), **page.rest}

        acted = audited("dlq.redrive", operators.group(args.group), args, command)
        self._engine.submit(acted, then(call.answer, published))

    def _read(self, args: wire.DlqRedrive) -> Steps[_Page]:
        assert args.to is not None, "it is what the call wants"
        group, to = find_group(self._state, args.group), find_topic(self._state, args.to)
        copies = _Copies(_Source(group, to, args.operator, args.traceparent))
        read = self._read_named if args.letters else self._read_selected
        rest = yield from read(args, copies)
        return _Page(tuple(copies.copies), to.epoch, tuple(copies.refused), rest)

    def _read_named(self, args: wire.DlqRedrive, copies: _Copies) -> Steps[dict[str, Any]]:
        left: list[TopicOffset] = []
        for letter in dict.fromkeys(args.letters):
            ref, row = find_message(self._state, copies.source.group, *letter)
            if ref is None or row is None or closed_reason(row):
                copies.refused.append((*letter, closed_reason(row)))
            elif not self._add(copies, letter, ref, row):
                left.append(letter)
            yield
        return {"left": left}

    def _read_selected(self, args: wire.DlqRedrive, copies: _Copies) -> Steps[dict[str, Any]]:
        selected = self._letters.selected(args, args.cursor)
        full = False
        while not (full or selected.scan.ended or selected.exhausted):
            for found, damaged in selected.places():
                topic_id, partition, offset = found.ref
                letter = (self._state.topics_by_id[topic_id].name, partition, offset)
                if damaged:
                    copies.refused.append((*letter, damaged))
                    continue
                if full := not self._add(copies, letter, found.ref, found.row):
                    selected.scan.step_back()
                if full or copies.step_is_over():
                    break
            yield
        return {"next": selected.following, "scanned": selected.scan.examined}

    def _add(
        self, copies: _Copies, letter: TopicOffset, ref: MessageRef, row: FailedMessage
    ) -> bool:
        """Add the copy of a letter, or the reason why it has none. False = there is no
        room for it.
        """
        if copies.is_full:
            return False
        try:
            copy = self._copy(copies, letter, ref, row)
        except (CorruptRecord, LocalProtocolError) as error:
            copies.refused.append((*letter, error.message))
        except ValueError as error:
            copies.refused.append((*letter, str(error)))
        else:
            return copies.add(copy)
        return True

    def _copy(
        self, copies: _Copies, letter: TopicOffset, ref: MessageRef, row: FailedMessage
    ) -> WantedCopy:
        """Return the copy of a letter; raises ValueError and errors of txmq."""
        batch, source = copies.batch_at(self._engine.store, row), copies.source
        view = BatchView(single_row(batch.buffer, row.row, batch))
        topic, partition, offset = letter
        headers = origin_headers(
            view.headers[0],
            topic=topic,
            partition=partition,
            offset=offset,
            group=source.group.name,
            message_id=view.message_ids[0],
            by=source.by,
            traceparent=source.traceparent,
        )
        copied = edited_row(view.buffer, 0, headers=headers, now=True)
        key, partitions = view.keys[0], len(source.to.end_offsets)
        place = ref[1] % partitions if key is None else partition_of(key, partitions)
        return WantedCopy(letter, row.number, row.edits, place, copied)


def _refuse_mistake(args: wire.DlqRedrive) -> None:
    if (args.to is None) == (args.to_group is None):
        message = "copies for neither or both"
        raise BadRequest(message, hint="send either `to`, a topic, or `to_group`")
    if bool(args.letters) == args.selects or len(args.letters) > MAX_COPIES:
        message = f"{len(args.letters)} letters{' and a selection' if args.selects else ''}"
        hint = f"send either a selection, or 1 to {MAX_COPIES} letters"
        raise BadRequest(message, hint=hint)


class _Copies:
    """The copies of one call, and the letters that get none."""

    def __init__(self, source: _Source) -> None:
        self.source = source
        self.copies: list[WantedCopy] = []
        self.refused: list[tuple[str, int, int, str]] = []
        self._bytes = self._read = self._read_before = 0
        self._batch: tuple[int, BatchView] | None = None  # the last one, and its position

    def batch_at(self, store: Log, row: FailedMessage) -> BatchView:
        """Return the batch of a letter. Neighbours are often rows of the same one."""
        if self._batch is None or self._batch[0] != row.position:
            [data] = read_batches(store, [(row.position, row.length)])
            view = BatchView(bytes(data))
            self._read += max(row.length, view.header.size)
            self._batch = row.position, view
        return self._batch[1]

    def step_is_over(self) -> bool:
        """Return True once a step has read so much that others are to have their
        turns.
        """
        over = self._read - self._read_before >= READ_PER_STEP
        self._read_before = self._read if over else self._read_before
        return over

    @property
    def is_full(self) -> bool:
        """Return True if nothing more is to be read."""
        return len(self.copies) >= MAX_COPIES or self._read >= MAX_READ

    def add(self, copy: WantedCopy) -> bool:
        """Add a copy, if it fits. The first one does."""
        if self.copies and self._bytes + len(copy.batch) > MAX_BYTES:
            return False
        self.copies.append(copy)
        self._bytes += len(copy.batch)
        return True

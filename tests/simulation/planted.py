"""Bugs planted on purpose: a checker that stays green with one of them is broken."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

from tests.simulation import actors, convoys, crowds, moves, node
from tests.simulation import delays as scheduling
from txmq.broker import bundle_requests, send_requests
from txmq.broker.checkback import checkback_service
from txmq.core import machine, persistence
from txmq.core.events.consumers import PositionReset
from txmq.core.state import visibility
from txmq.core.state.state import Outcome, Rejected, SendReceipt
from txmq.core.topics import delay_rules as delays
from txmq.core.topics import delayed, growth, key_order, sends
from txmq.core.transactions import batched, decisions, jobs, model, xa
from txmq.core.transactions.decisions import Decide
from txmq.model.bundle import GroupState
from txmq.model.message import Decision
from txmq.store.snapshot import write_snapshot
from txmq.wire.together import pack_answers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from txmq.broker.engine import Engine
    from txmq.store.writer import Flush
    from txmq.wire.headers import Acked


SLOW_DISK_S = 0.02


class Bug(NamedTuple):
    """`plant` changes one engine, `around` the whole process for the time of a seed."""

    name: str
    plant: Callable[[Engine], None] = lambda _engine: None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def _reply_before_flush(engine: Engine) -> None:
    def answer_now(deliver: Callable[[Any], None], reply: object) -> None:
        deliver(reply)
        engine._clock.callLater(
            SLOW_DISK_S, engine._tick_soon
        )  # at once, a power cut would hardly ever come between

    engine._answer_later = answer_now  # type: ignore[method-assign]


def _no_sync(engine: Engine) -> None:
    store = engine.store
    write = store.write

    def only_write(flush: Flush, *, sync: bool = True) -> None:
        del sync
        write(flush, sync=False)
        store._writer.synced = store._writer.end

    store.write = only_write  # type: ignore[method-assign]


def _publish_without_the_last(state: Any, waiting: Any, offsets: Any, place: Any) -> None:
    _publish(state, waiting._replace(batches=waiting.batches[:1]), offsets[:1], place)


def _decide_again(state: Any, command: Any, now: int) -> Any:
    state.tables["jobs"].delete(command.token)
    return _decide_job(
        state, command._replace(winners=tuple(jobs.members(state, command.token))), now
    )


def _unknown_is_no(self: Any, token: bytes, answer: Decision, *args: Any, **kwargs: Any) -> None:
    _answered(
        self, token, Decision.ROLLBACK if answer is Decision.UNKNOWN else answer, *args, **kwargs
    )


def _save_without_topics(state: Any) -> None:
    state.dirty_topics.clear()
    _save(state)


def _snapshot_at_once(engine: Engine) -> None:
    """Of what is in memory, not of what is durable."""
    record = engine._record

    def and_snapshot(*args: Any) -> None:
        record(*args)
        write_snapshot(
            engine.store._fs,
            node.DATA,
            engine.store.log_id,
            engine.store.end,
            node.dumped(engine.state),
        )

    engine._record = and_snapshot  # type: ignore[method-assign, assignment]


def _timed_out(self: Any, token: bytes, row: Any) -> None:
    if row.check_at and row.check_at <= self._engine.now():
        self._engine.submit(Decide(token, Decision.ROLLBACK, "timeout"), lambda _reply: None)


def _absent_is_rolled_back(state: Any, command: Any, now: int) -> Any:
    unknown = model.get(state, command.token) is None
    return (
        Outcome(reply=GroupState.ROLLED_BACK) if unknown else xa.decide_outcome(state, command, now)
    )


def _forgotten(
    state: Any, token: bytes, row: Any, large: Any, outcome: Decision, ticket: int
) -> Any:
    """A group that was never complete is rolled back as if it held nothing."""
    if not row.digest:
        return row
    return _settle_large(state, token, row, large, outcome, ticket)


def _no_gate(state: Any, topic_id: int, partition: int, _durable: int | None = None) -> int:
    return int(state.topics_by_id[topic_id].ends[partition])


def _not_gone_on(state: Any) -> None:
    """What is being done piece by piece is not known any more after a start."""
    _save(state)
    for key, _row in list(state.tables["backlog"].range(b"")):
        state.tables["backlog"].delete(key)


def _all_rows(state: Any, start: int = 0, stop: int | None = None, position: int = 0) -> Any:
    return _rows(state, start, None if stop is None else stop + 60_000, position)


def _only_told(state: Any, found: delayed.Id, at: int) -> None:
    """The recall is answered, and forgotten."""


def _over_gaps(ranges: list[Acked]) -> list[Acked]:
    """One range from the first to the last, with what failed between them."""
    return [ranges[0]._replace(end=ranges[-1].end)]


@contextmanager
def _with_delays(module: object, name: str, bug: object) -> Iterator[None]:
    """In worlds that have delayed messages, all of them."""
    with patch.object(scheduling, "SHARE", 1.0), patch.object(module, name, bug):
        yield


@contextmanager
def _with_crowds(module: object, name: str, bug: object) -> Iterator[None]:
    """In worlds where transactions share frames, all of them."""
    with patch.object(crowds, "SHARE", 1.0), patch.object(module, name, bug):
        yield


@contextmanager
def _with_convoys(module: object, name: str, bug: object) -> Iterator[None]:
    """In worlds where sends share frames, all of them."""
    with patch.object(convoys, "SHARE", 1.0), patch.object(module, name, bug):
        yield


@contextmanager
def _with_repeats_turned_round() -> Iterator[None]:
    with (
        patch.object(convoys, "SHARE", 1.0),
        patch.dict(machine.DECIDERS, {sends.SendTogether: _repeats_turned_round}),
    ):
        yield


@contextmanager
def _with_all_or_none() -> Iterator[None]:
    with (
        patch.object(crowds, "SHARE", 1.0),
        patch.dict(machine.DECIDERS, {batched.StoreTogether: _all_or_none}),
    ):
        yield


@contextmanager
def _with_growth() -> Iterator[None]:
    """In worlds where the topic grows, all of them."""
    with patch.object(moves, "EVERY", 1), patch.object(growth, "limit", lambda *_args: None):
        yield


@contextmanager
def _with_resets() -> Iterator[None]:
    with (
        patch.object(moves, "EVERY", 1),
        patch.dict(machine.APPLIERS, {PositionReset: _only_told_of}),
    ):
        yield


def _only_told_of(state: Any, event: Any, _place: Any) -> None:
    """The reset is over, and the group stands where it stood."""
    group = state.consumers.by_id[event.group_id]
    group.resets.clear()
    state.consumers.resetting.discard(group.group_id)


def _all_or_none(state: Any, command: Any, now: int) -> Any:
    made = batched.decide_store(state, command, now)
    replies: Any = made.reply
    refused = any(isinstance(reply, Rejected) for reply in replies)
    return made._replace(events=()) if refused else made


def _other_way_round(answers: Any) -> Any:
    return _answers(answers[::-1])


def _refused_last(answers: Any) -> Any:
    return _answers(sorted(answers, key=lambda answer: answer.status != 0))


def _repeats_turned_round(state: Any, command: Any, now: int) -> Any:
    made = sends.decide_together(state, command, now)
    replies: Any = made.reply
    known = [reply for reply in replies if isinstance(reply, SendReceipt) and reply.duplicate]
    return made._replace(reply=[known.pop() if reply in known else reply for reply in replies])


def _at_the_same_offset(self: Any, send: Any) -> Any:
    self._ends.clear()
    return _stored(self, send)


def _with_the_bytes_of_the_first(event: Any, place: Any) -> Any:
    for one, _position in _batches(event, place):
        yield one, place.attachment


def _without_mine(self: Any, ticket: int, token: bytes | None) -> Any:
    return decisions.committed(self._state, ticket, token)


def _one_ticket(event: Any, place: Any) -> Any:
    for one, its_place in _groups(event, place):
        yield one, its_place._replace(position=place.position)


_answers, _groups = pack_answers, batched._groups
_stored, _batches = sends._Made.stored, sends.batches
_rows = delayed.rows
_settle_large = decisions._settle_large
_publish, _decide_job, _answered, _save = (
    key_order.publish,
    jobs.decide_job,
    checkback_service.CheckBacks.answered,
    persistence.save,
)

BUGS = (
    Bug("replies go out before the flush", _reply_before_flush),
    Bug("a flush does not sync", _no_sync),
    Bug(
        "order tickets are ignored",
        around=lambda: patch.object(key_order.Release, "_free", lambda _self, _waiting: True),
    ),
    Bug(
        "plain sends pass held keys",
        around=lambda: patch.object(key_order, "any_held", lambda *_args: False),
    ),
    Bug(
        "a repeated send is stored again",
        around=lambda: patch.object(sends, "_seen_before", lambda *_args: None),
    ),
    Bug(
        "a group is published in part",
        around=lambda: patch.object(key_order, "publish", _publish_without_the_last),
    ),
    Bug(
        "a job decided again is carried out again",
        around=lambda: patch.dict(machine.DECIDERS, {jobs.DecideJob: _decide_again}),
    ),
    Bug(
        "no answer is taken for a rollback",
        around=lambda: patch.object(checkback_service.CheckBacks, "answered", _unknown_is_no),
    ),
    Bug(
        "a prepared foreign branch is timed out",
        around=lambda: patch.object(checkback_service.CheckBacks, "_due_branch", _timed_out),
    ),
    Bug(
        "absence is taken for a rollback",
        around=lambda: patch.dict(machine.DECIDERS, {xa.AskOutcome: _absent_is_rolled_back}),
    ),
    Bug(
        "a decision by hand is not kept",
        around=lambda: patch.object(xa, "_is_anothers", lambda *_args: False),
    ),
    Bug(
        "an older incarnation is accepted",
        around=lambda: patch.object(bundle_requests, "fenced", lambda *_args: None),
    ),
    Bug("a slice becomes visible early", around=lambda: patch.object(visibility, "end", _no_gate)),
    Bug(
        "an open group's holds are forgotten",
        around=lambda: patch.object(decisions, "_settle_large", _forgotten),
    ),
    Bug(
        "slices are not gone on with after a start",
        around=lambda: patch.object(machine, "save", _not_gone_on),
    ),
    Bug(
        "what waits for its time comes early",
        around=lambda: _with_delays(delayed, "rows", _all_rows),
    ),
    Bug(
        "a recalled message is published",
        around=lambda: _with_delays(delayed, "recall", _only_told),
    ),
    Bug(
        "a due message passes held keys",
        around=lambda: _with_delays(delays, "_meets_a_hold", lambda *_args: False),
    ),
    Bug("one refused group drops its neighbours", around=_with_all_or_none),
    Bug(
        "replies are swapped",
        around=lambda: _with_crowds(bundle_requests, "pack_answers", _other_way_round),
    ),
    Bug(
        "groups of one record share a ticket",
        around=lambda: _with_crowds(batched, "_groups", _one_ticket),
    ),
    Bug(
        "a decision does not see those before it in its record",
        around=lambda: _with_crowds(batched._Made, "_committed", _without_mine),
    ),
    Bug(
        "a refused send shifts the receipts",
        around=lambda: _with_convoys(send_requests, "pack_answers", _refused_last),
    ),
    Bug("repeated sends get each other's receipts", around=_with_repeats_turned_round),
    Bug(
        "sends of one record have the same offset",
        around=lambda: _with_convoys(sends._Made, "stored", _at_the_same_offset),
    ),
    Bug(
        "sends of one record have the same bytes",
        around=lambda: _with_convoys(sends, "batches", _with_the_bytes_of_the_first),
    ),
    Bug(
        "an ack of a run takes in what failed in it",
        around=lambda: patch.object(actors, "join", _over_gaps),
    ),
    Bug("grown partitions are read before the others are done with", around=_with_growth),
    Bug("a reset leaves its group where it stood", around=_with_resets),
    Bug("topics are not saved", around=lambda: patch.object(machine, "save", _save_without_topics)),
    Bug("a snapshot leads the log", _snapshot_at_once),
)

"""Bugs planted on purpose, to prove that the checks of the simulation find them.

A patch replaces a function in the module that calls it. After a rename, run `pytest
tests/simulation -k planted`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

from tests.simulation import (
    batched_services,
    client_consumers,
    consumers,
    delayed_producer,
    filtering_consumers,
    inbox_consumers,
    letter_mender,
    machine_clock,
    multi_send,
    operators,
    plan_operator,
    remade_topic,
    simulated_broker,
    store_consumers,
)
from txmq.broker.checkback import checkback_service
from txmq.broker.engine.engine import Engine
from txmq.broker.reactor import steady_clock
from txmq.broker.requests import bundles as bundle_requests
from txmq.broker.requests import multi_request
from txmq.broker.requests import sends as send_requests
from txmq.client.blocking.consumer import local_stores
from txmq.client.protocol.consumer import local_recovery
from txmq.client.protocol.consumer.fetched import DUPLICATE
from txmq.client.protocol.consumer.local_queue import LocalQueue
from txmq.client.protocol.consumer.membership import Membership
from txmq.client.protocol.consumer.settlement import Settlement
from txmq.core import machine, persistence
from txmq.core.consumers import (
    effects,
    letter_edits,
    membership,
    resets,
    retries,
    waiting_times,
)
from txmq.core.events.consumers import PositionReset, RetriesChanged
from txmq.core.events.letters import LetterEdited
from txmq.core.events.outcome import Outcome
from txmq.core.events.plans import PlanCreated, PolicyPlanned
from txmq.core.replay import orders
from txmq.core.retention import broker_time
from txmq.core.state import (
    failed_changes,
    failed_messages,
    failed_rows,
    letter_copies,
    plan_letters,
    visibility,
)
from txmq.core.state.failed_rows import FailedKind, FailedMessage
from txmq.core.state.group_registry import GroupRegistry
from txmq.core.state.positions import EffectsRecord
from txmq.core.topics import delay_rules, delayed, key_order, sends, topics
from txmq.core.transactions import batched, decisions, jobs, large_bundles, model, timers, xa
from txmq.core.transactions.decisions import DecideTransaction
from txmq.errors import RequestRejected
from txmq.model.bundle import BundleState
from txmq.model.message import Decision
from txmq.recover.local import Change, State
from txmq.store.log.writer import Flush
from txmq.store.snapshot import write_snapshot
from txmq.store.tables import FAILED_KEY
from txmq.wire.batched import pack_replies
from txmq.wire.data_requests import AckedRange, SendReceipt

SLOW_DISK_S = 0.02
LOOK_AHEAD_US = 60_000
Patches = AbstractContextManager[Any]


class Bug(NamedTuple):
    """A bug: `plant` changes one engine, `around` patches modules while a seed runs.

    `first`: the seed to begin with, one that soon finds the bug. A change of the
    simulation moves the scene to other seeds: the test then takes longer, and reports
    the seed that found the bug.
    """

    name: str
    plant: Callable[[Engine], None] | None = None
    around: Callable[[], Patches] = nullcontext
    first: int = 0


def _patching(target: object, name: str, replacement: object) -> Callable[[], Patches]:
    return lambda: patch.object(target, name, replacement)


def _deciding(command: type, decide: Callable[..., Any]) -> Callable[[], Patches]:
    return lambda: patch.dict(machine.DECIDERS, {command: decide})


def _applying(event: type, apply: Callable[..., Any]) -> Callable[[], Patches]:
    return lambda: patch.dict(machine.APPLIERS, {event: apply})


def _in_every_seed(actors: ModuleType, around: Callable[[], Patches]) -> Callable[[], Patches]:
    """Return the patches, for simulations that all have the actors of this module."""

    @contextmanager
    def both() -> Iterator[None]:
        with patch.object(actors, "SHARE", 1.0), around():
            yield

    return both


def _with_slow_handlers(around: Callable[[], Patches]) -> Callable[[], Patches]:
    """Return the patches, for simulations of slow handlers."""

    @contextmanager
    def both() -> Iterator[None]:
        with patch.multiple(client_consumers, **client_consumers.SLOW), around():
            yield

    return both


@contextmanager
def _settling_duplicates() -> Iterator[None]:
    """Let refused nacks settle duplicates, of one member with more handlers.

    A second member that joins after a restart ends the generation of the first one,
    before the first one has its messages anew.
    """
    with (
        patch.multiple(
            client_consumers, MEMBERS=("r0",), HANDLERS=4, QUICK_S=client_consumers.HANDLER_S
        ),
        patch.object(LocalQueue, "delivery", _delivery_but_no_duplicate),
    ):
        yield


# originals, which patched functions call
_pack_replies, _bundles = pack_replies, batched._bundles
_add_send, _with_positions = sends._SharedRecord.add, sends.with_positions
_scan, _start_pieces = delayed.scan, decisions._start_pieces
_publish, _decide_job, _save = key_order.publish, jobs.decide_job, persistence.save
_record_answer = checkback_service.CheckBackService.record_answer
_begin_reset, _mark_deleted = resets._begin, GroupRegistry.mark_deleted
_apply_edited = letter_edits.apply_edited
_unwanted, _new_row = LocalQueue._unwanted, failed_rows.new_row
_delivery, _put = LocalQueue.delivery, store_consumers.ModelStore.put


def _filter_everything(queue: LocalQueue, batch: Any) -> Iterator[AckedRange]:
    batch.accepted = False
    yield from _unwanted(queue, batch)


def _accepted_row(*arguments: Any, **options: Any) -> FailedMessage:
    return _new_row(*arguments, **options)._replace(accepted=True)


def _no_copy(*_arguments: Any) -> None:
    """Take no letter for one that has a copy."""


def _edit_in_the_list_only(state: Any, event: LetterEdited, context: Any) -> None:
    key = FAILED_KEY.pack(*event[:4])
    position, length, row = FailedMessage(*state.failed_messages.get(key))[4:7]
    _apply_edited(state, event, context)
    after = FailedMessage(*state.failed_messages.get(key))
    state.failed_messages.put(key, tuple(after._replace(position=position, length=length, row=row)))


def _forgetting(kind: FailedKind) -> Callable[[], Patches]:
    """Lose the messages that an operator makes a retry that is due, or a letter."""

    def apply(state: Any, event: RetriesChanged, context: Any) -> None:
        retries.apply_changed(state, event, context)
        group = state.groups.by_id[event.group_id]
        for topic_id, partition, offset, row in event.moves:
            if row[0] == kind:
                failed_changes.remove(state, group, (topic_id, partition, offset))

    return _applying(RetriesChanged, apply)


def _edit_in_all_groups(state: Any, event: LetterEdited, context: Any) -> None:
    _apply_edited(state, event, context)
    for group in state.groups.by_id.values():
        row = failed_messages.get(state, group, event[1:4])
        if row is not None and group.group_id != event.group_id:
            row = row._replace(position=event.position, length=event.length, row=0)
            state.failed_messages.put(FAILED_KEY.pack(group.group_id, *event[1:4]), tuple(row))


def _delivery_but_no_duplicate(self: Any, place: Any, state: int, *after: Any) -> Any:
    return None if state == DUPLICATE else _delivery(self, place, state, *after)


def _change_without_message(state: Any, audited: Any, now: int, deciders: Any) -> Any:
    return deciders[type(audited.command)](state, audited.command, now)


def _put_without_sync(self: Any, messages: Any) -> None:
    disk = self._disk
    with patch.object(disk, "sync", lambda: None):
        _put(self, messages)


def _count_nothing(_self: Any, message: Any, _job: Any) -> Change:
    return Change(message.place, State.STORED, message.attempt, 0)


def _all_as_heads(self: Any) -> list[Any]:
    return [row for row in self._disk.rows.values() if row.entry.state is State.STORED]


def _forget_all(_self: Any, store: Any, entry: Any, _word: str) -> None:
    store.job.forget.append(entry.place)


class _DeliveredAtOnce(deque[Any]):
    def append(self, pending: Any) -> None:  # a reply of the engine
        pending.deliver(pending.reply)


def _reply_before_flush(engine: Engine) -> None:
    plan_flush = engine._plan_flush
    engine._pending = _DeliveredAtOnce()

    def plan_late() -> None:
        # without the delay, hardly any power cut would come between reply and flush
        engine._clock.callLater(SLOW_DISK_S, plan_flush)

    engine._plan_flush = plan_late  # type: ignore[method-assign]


def _skip_sync(engine: Engine) -> None:
    store = engine.store
    write = store.write

    def only_write(flush: Flush, *, sync: bool = True) -> None:
        del sync
        write(flush, sync=False)
        store._writer.synced = store._writer.end

    store.write = only_write  # type: ignore[method-assign]


def _snapshot_at_each_record(engine: Engine) -> None:
    """Write snapshots of the state in memory, which is ahead of the durable log."""
    record = engine._record

    def record_and_snapshot(*args: Any) -> None:
        record(*args)
        write_snapshot(
            engine.store._fs,
            simulated_broker.DATA,
            engine.store.log_id,
            engine.store.end,
            simulated_broker.dump_tables(engine.state),
        )

    engine._record = record_and_snapshot  # type: ignore[method-assign, assignment]


def _ignore_earlier_tickets(plan: Any, unit: Any) -> Any:
    return {
        key: next((holder for holder in plan._holders(key) if holder[0] != unit.ticket), None)
        for key in key_order.keys_of(unit.batches)
    }


def _publish_first_batch_only(state: Any, waiting: Any, offsets: Any, place: Any) -> None:
    _publish(state, waiting._replace(batches=waiting.batches[:1]), offsets[:1], place)


def _forget_earlier_doubt(state: Any, wall: int, now: int) -> int:
    return now - min(wall, state.stored_at) if state.stored_at else 0


def _decide_job_again(state: Any, command: Any, now: int) -> Any:
    state.tables["jobs"].delete(command.token)
    winners = tuple(jobs.undecided_bundles(state, command.token))
    return _decide_job(state, command._replace(winners=winners), now)


def _record_unknown_as_rollback(
    self: Any, token: bytes, answer: Decision, *args: Any, **kwargs: Any
) -> None:
    answer = Decision.ROLLBACK if answer is Decision.UNKNOWN else answer
    _record_answer(self, token, answer, *args, **kwargs)


def _roll_back_after_time(self: Any, token: bytes, row: Any) -> None:
    if row.check_at and row.check_at <= self._engine.now():
        decide = DecideTransaction(token, Decision.ROLLBACK, "timeout")
        self._engine.submit(decide, lambda _reply: None)


def _resolve_unknown_as_rolled_back(state: Any, command: Any, now: int) -> Any:
    if model.get(state, command.token) is None:
        return Outcome(reply=BundleState.ROLLED_BACK)
    return xa.resolve_outcome(state, command, now)


@contextmanager
def _accept_any_incarnation() -> Iterator[None]:
    with (
        patch.object(bundle_requests, "check_incarnation", lambda *_args: None),
        patch.object(send_requests, "check_incarnation", lambda *_args: None),
    ):
        yield


def _end_without_barrier(
    state: Any, topic_id: int, partition: int, _durable: int | None = None
) -> int:
    return int(state.topics_by_id[topic_id].end_offsets[partition])


def _forget_keys_of_open_bundle(state: Any, token: bytes, row: Any, large: Any, ticket: int) -> Any:
    """Roll a bundle without a seal back as if it held no keys."""
    if not row.digest:
        return row
    return _start_pieces(state, token, row, large, ticket)


def _save_without_backlog(state: Any) -> None:
    _save(state)
    for key, _row in list(state.tables["backlog"].range(b"")):
        state.tables["backlog"].delete(key)


def _save_without_topics(state: Any) -> None:
    state.dirty_topics.clear()
    _save(state)


def _scan_ahead(state: Any, start: int = 0, stop: int | None = None, position: int = 0) -> Any:
    return _scan(state, start, None if stop is None else stop + LOOK_AHEAD_US, position)


def _recall_nothing(state: Any, found: delayed.DelayedId, at: int) -> None:
    """Leave the delayed message where it is, although the recall is acknowledged."""


def _store_all_or_none(state: Any, command: Any, now: int) -> Any:
    made = batched.store_bundles(state, command, now)
    replies: Any = made.reply
    refused = any(isinstance(reply, RequestRejected) for reply in replies)
    return made._replace(events=()) if refused else made


def _reverse_replies(replies: Any) -> Any:
    return _pack_replies(replies[::-1])


def _pack_refusals_last(replies: Any) -> Any:
    return _pack_replies(sorted(replies, key=lambda reply: reply.status != 0))


def _reverse_duplicate_receipts(state: Any, command: Any, now: int) -> Any:
    made = sends.decide_store_batches(state, command, now)
    replies: Any = made.reply
    known = [reply for reply in replies if isinstance(reply, SendReceipt) and reply.duplicate]
    return made._replace(reply=[known.pop() if reply in known else reply for reply in replies])


def _add_at_the_same_offset(self: Any, send: Any) -> Any:
    self._ends.clear()
    return _add_send(self, send)


def _with_bytes_of_the_first(event: Any, place: Any) -> Any:
    for batch, _position in _with_positions(event, place):
        yield batch, place.attachment_position


def _find_without_pending_decisions(self: Any, ticket: int, token: bytes | None) -> Any:
    return decisions.find_publishable(self._state, ticket, token)


def _bundles_with_one_ticket(event: Any, place: Any) -> Any:
    for bundle, its_place in _bundles(event, place):
        yield bundle, its_place._replace(position=place.position)


def _join_over_gaps(ranges: list[AckedRange]) -> list[AckedRange]:
    """Return one range, with the failed messages between the acknowledged ones."""
    return [ranges[0]._replace(end=ranges[-1].end)]


def _make_the_plan_only(state: Any, event: PolicyPlanned, context: Any) -> None:
    fields: Any = event[:-1]
    orders.apply_created(state, PlanCreated(*fields), context)


def _tell_nobody(*_args: object) -> None:
    """Do nothing."""


@contextmanager
def _read_grown_partitions_at_once() -> Iterator[None]:
    with (
        patch.object(operators, "EVERY", 1),
        patch.object(topics, "growth_limit", lambda *_args: None),
    ):
        yield


@contextmanager
def _finish_resets_without_moving() -> Iterator[None]:
    with (
        patch.object(operators, "EVERY", 1),
        patch.dict(machine.APPLIERS, {PositionReset: _end_reset}),
    ):
        yield


def _begin_without_generation(state: Any, group: Any, event: Any) -> None:
    _begin_reset(state, group, event._replace(generation=group.generation))


def _mark_deleted_with_epochs(self: Any, group: Any) -> None:
    _mark_deleted(self, group)
    self.past_epochs.clear()


def _restore_nothing(_state: Any, _command: Any, _now: int) -> Outcome:
    return Outcome(reply=effects.RestoreReply(0))


def _end_reset(state: Any, event: Any, _place: Any) -> None:
    group = state.groups.by_id[event.group_id]
    group.resets.clear()
    state.groups.resetting.discard(group.group_id)


BUGS = (
    Bug("replies go out before the flush", _reply_before_flush, first=23),
    Bug("a flush does not sync", _skip_sync),
    Bug("a snapshot leads the log", _snapshot_at_each_record, first=7),
    Bug(
        "order tickets are ignored",
        around=_patching(key_order.ReleasePlan, "_followers_if_free", _ignore_earlier_tickets),
        first=4,
    ),
    Bug(
        "plain sends pass held keys",
        around=_patching(key_order, "any_held", lambda *_args: False),
        first=2,
    ),
    Bug(
        "a repeated send is stored again",
        around=_patching(sends, "_check_sequence", lambda *_args: None),
        first=2,
    ),
    Bug(
        "a bundle is published in part",
        around=_patching(key_order, "publish", _publish_first_batch_only),
        first=1,
    ),
    Bug(
        "a job decided again is carried out again",
        around=_deciding(jobs.DecideJob, _decide_job_again),
        first=1,
    ),
    Bug(
        "no answer is taken for a rollback",
        around=_patching(
            checkback_service.CheckBackService, "record_answer", _record_unknown_as_rollback
        ),
        first=68,
    ),
    Bug(
        "a prepared foreign branch is timed out",
        around=_patching(checkback_service.CheckBackService, "_end_branch", _roll_back_after_time),
        first=5,
    ),
    Bug(
        "absence is taken for a rollback",
        around=_deciding(xa.ResolveOutcome, _resolve_unknown_as_rolled_back),
        first=27,
    ),
    Bug(
        "a decision of an operator is overruled",
        around=_patching(xa, "_is_anothers", lambda *_args: False),
        first=37,
    ),
    Bug("an older incarnation is accepted", around=_accept_any_incarnation, first=2),
    Bug(
        "a piece becomes visible early",
        around=_patching(visibility, "visible_end", _end_without_barrier),
        first=1,
    ),
    Bug(
        "held keys of an open bundle are forgotten",
        around=_patching(decisions, "_start_pieces", _forget_keys_of_open_bundle),
        first=3,
    ),
    Bug(
        "pieces are not continued after a start",
        around=_patching(machine, "save", _save_without_backlog),
        first=72,
    ),
    Bug("topics are not saved", around=_patching(machine, "save", _save_without_topics), first=3),
    Bug(
        "a delayed message is published early",
        around=_in_every_seed(delayed_producer, _patching(delayed, "scan", _scan_ahead)),
        first=27,
    ),
    Bug(
        "a recalled message is published",
        around=_in_every_seed(delayed_producer, _patching(delayed, "recall", _recall_nothing)),
        first=1,
    ),
    Bug(
        "a due message passes held keys",
        around=_in_every_seed(
            delayed_producer,
            _patching(delay_rules, "_meets_held_key", lambda *_args: False),
        ),
        first=9,
    ),
    Bug(
        "one refused bundle drops the others of its frame",
        around=_in_every_seed(
            batched_services, _deciding(batched.StoreBundles, _store_all_or_none)
        ),
    ),
    Bug(
        "replies are swapped",
        around=_in_every_seed(
            batched_services, _patching(multi_request, "pack_replies", _reverse_replies)
        ),
    ),
    Bug(
        "bundles of one record share a ticket",
        around=_in_every_seed(
            batched_services, _patching(batched, "_bundles", _bundles_with_one_ticket)
        ),
        first=2,
    ),
    Bug(
        "a decision does not see those before it in its record",
        around=_in_every_seed(
            batched_services,
            _patching(batched._BatchedDecisions, "_find", _find_without_pending_decisions),
        ),
        first=24,
    ),
    Bug(
        "a refused send shifts the receipts",
        around=_in_every_seed(
            multi_send, _patching(send_requests, "pack_replies", _pack_refusals_last)
        ),
    ),
    Bug(
        "repeated sends get each other's receipts",
        around=_in_every_seed(
            multi_send, _deciding(sends.StoreBatches, _reverse_duplicate_receipts)
        ),
        first=31,
    ),
    Bug(
        "sends of one record have the same offset",
        around=_in_every_seed(
            multi_send, _patching(sends._SharedRecord, "add", _add_at_the_same_offset)
        ),
        first=4,
    ),
    Bug(
        "sends of one record have the same bytes",
        around=_in_every_seed(
            multi_send, _patching(sends, "with_positions", _with_bytes_of_the_first)
        ),
        first=4,
    ),
    Bug(
        "an ack of a range includes failed messages",
        around=_patching(consumers, "join", _join_over_gaps),
        first=10,
    ),
    Bug(
        "a refused nack settles the message that was delivered anew",
        around=_in_every_seed(client_consumers, _settling_duplicates),
        first=149,
    ),
    Bug(
        "a member fetches before its repeated acks are answered",
        around=_with_slow_handlers(
            _patching(Settlement, "resending", property(lambda self: bool(self._nacks)))
        ),
        first=8,
    ),
    Bug(
        "a fence releases messages before those of earlier pieces",
        around=_in_every_seed(
            client_consumers,
            _patching(large_bundles.LargeBundle, "begun", property(lambda _self: 0)),
        ),
        first=43,
    ),
    Bug(
        "members keep a deleted topic",
        around=_in_every_seed(
            remade_topic,
            _patching(membership, "_present_topics", lambda _state, member: member.topics),
        ),
        first=17,
    ),
    Bug(
        "groups keep what they have of a deleted topic",
        around=_in_every_seed(
            remade_topic, _patching(GroupRegistry, "begin_to_tidy", lambda *_args: None)
        ),
    ),
    Bug(
        "grown partitions are read before the others",
        around=_read_grown_partitions_at_once,
        first=1,
    ),
    Bug("a reset does not move its group", around=_finish_resets_without_moving),
    Bug(
        "an epoch rises without a generation",
        around=_in_every_seed(
            inbox_consumers, _patching(resets, "_begin", _begin_without_generation)
        ),
        first=20,
    ),
    Bug(
        "a member keeps what was reset",
        around=_in_every_seed(inbox_consumers, _patching(Membership, "knows", lambda *_args: True)),
        first=333,
    ),
    Bug(
        "epochs of a deleted group are forgotten",
        around=_in_every_seed(
            inbox_consumers, _patching(GroupRegistry, "mark_deleted", _mark_deleted_with_epochs)
        ),
        first=27,
    ),
    Bug(
        "what was skipped is taken for lost effects",
        around=_in_every_seed(
            inbox_consumers, _patching(EffectsRecord, "pass_over", lambda *_args: None)
        ),
        first=24,
    ),
    Bug(
        "a restored inbox gets nothing again",
        around=_in_every_seed(inbox_consumers, _deciding(effects.RestoreEffects, _restore_nothing)),
        first=3,
    ),
    Bug(
        "a clock that jumps is believed",
        around=_in_every_seed(machine_clock, _patching(steady_clock, "BELIEVED_US", 1 << 60)),
        first=1,
    ),
    Bug(
        "a clock is believed at a start",
        around=_in_every_seed(
            machine_clock, _patching(broker_time, "doubt_at_start", lambda *_args: 0)
        ),
        first=4,
    ),
    Bug(
        "a restart ends a doubt",
        around=_in_every_seed(
            machine_clock, _patching(broker_time, "doubt_at_start", _forget_earlier_doubt)
        ),
        first=127,
    ),
    Bug(
        "check-backs do not go back with the time",
        around=_in_every_seed(machine_clock, _patching(timers, "set_back", lambda *_args: None)),
        first=70,
    ),
    Bug(
        "retries do not go back with the time",
        around=_in_every_seed(
            machine_clock, _patching(waiting_times, "set_back", lambda *_args: None)
        ),
        first=21,
    ),
    Bug(
        "an operator's change leaves no audit message",
        around=_patching(machine, "decide_audited", _change_without_message),
        first=4,
    ),
    Bug(
        "an edit leaves the letter where it was",
        around=_in_every_seed(letter_mender, _applying(LetterEdited, _edit_in_the_list_only)),
        first=4,
    ),
    Bug(
        "a member filters what the group has accepted",
        around=_in_every_seed(
            filtering_consumers, _patching(LocalQueue, "_unwanted", _filter_everything)
        ),
        first=1,
    ),
    Bug(
        "parked messages count as accepted",
        around=_in_every_seed(
            filtering_consumers, _patching(failed_rows, "new_row", _accepted_row)
        ),
        first=1,
    ),
    Bug(
        "a redrive copies a death again",
        around=_in_every_seed(letter_mender, _patching(letter_copies, "copy_of", _no_copy)),
        first=13,
    ),
    Bug(
        "an edit concerns all groups",
        around=_in_every_seed(letter_mender, _applying(LetterEdited, _edit_in_all_groups)),
        first=8,
    ),
    Bug(
        "a message that is retried at once is lost",
        around=_in_every_seed(letter_mender, _forgetting(FailedKind.RETRY)),
        first=11,
    ),
    Bug(
        "a buried message is lost",
        around=_in_every_seed(letter_mender, _forgetting(FailedKind.LETTER)),
        first=6,
    ),
    Bug(
        "an ack tells no plan",
        around=_in_every_seed(plan_operator, _patching(plan_letters, "ended", _tell_nobody)),
        first=21,
    ),
    Bug(
        "a policy forgets its plan",
        around=_in_every_seed(plan_operator, _applying(PolicyPlanned, _make_the_plan_only)),
        first=77,
    ),
    Bug(
        "a failed message is told of before it is on disk",
        around=_in_every_seed(
            store_consumers, _patching(store_consumers.ModelStore, "put", _put_without_sync)
        ),
        first=54,
    ),
    Bug(
        "a stored message is acked before its effect",
        around=_in_every_seed(
            store_consumers, _patching(store_consumers.StoreConsumer, "acks_first", True)
        ),
    ),
    Bug(
        "attempts at stored messages are not counted",
        around=_in_every_seed(
            store_consumers, _patching(local_stores.LocalStores, "_count", _count_nothing)
        ),
    ),
    Bug(
        "followers overtake a stored message",
        around=_in_every_seed(
            store_consumers, _patching(store_consumers.ModelStore, "_heads", _all_as_heads)
        ),
        first=50,
    ),
    Bug(
        "a store forgets what the broker has it keep",
        around=_in_every_seed(
            store_consumers, _patching(local_recovery.LocalRecovery, "_judge", _forget_all)
        ),
        first=5,
    ),
)

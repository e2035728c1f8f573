"""Retention in a broker: the log releases segments, dead letters outlive them, and a
power cut loses nothing.
"""

from __future__ import annotations

import errno
import json
from base64 import b64decode, b64encode
from random import Random
from typing import Any

import pytest

from tests.broker.data_directory.retention_world import (
    ARCHIVE,
    DATA,
    RetentionWorld,
    bodies,
    letters,
    recount,
    waiting,
)
from tests.broker.support import BEGAN, HELLO, Client
from tests.simulation.simulated_broker import recover
from tests.store.simfs import SimFS, crash_points
from txmq.batch import BatchView, decode, encode, verify
from txmq.batch.codecs import decompress
from txmq.batch.header import Codec
from txmq.broker.data_directory import retention_service
from txmq.core.audit import AUDIT_TOPIC_ID, Audited, AuditEntry
from txmq.core.consumers.candidates import FetchLimits
from txmq.core.consumers.commands import (
    AdvanceGroupWork,
    CandidateRead,
    Deliver,
    JoinGroup,
    NackMessage,
    RequestedSettings,
)
from txmq.core.consumers.fetch_choice import choose_candidates
from txmq.core.events.base import RecordContext
from txmq.core.events.delays import DelayedMoved
from txmq.core.events.topics import MessagesCopied
from txmq.core.replay.building import AddPlanLetters, FreezePlan
from txmq.core.replay.orders import CreatePlan, StartPlan
from txmq.core.replay.putting_back import AdvancePlan
from txmq.core.state import log_pins
from txmq.core.state.failed_rows import FailedMessage
from txmq.core.state.plans import PlanSettings
from txmq.core.state.state import State
from txmq.core.topics import delayed, topics
from txmq.core.topics.delay_rules import PublishDue, Recall, RecallReply
from txmq.core.topics.sends import StoreBatch
from txmq.core.topics.topics import AlterTopic, CreateTopic, DeleteTopic
from txmq.core.transactions.decisions import DecideTransaction
from txmq.core.transactions.half_storage import BundleBatch, StorePart
from txmq.errors import Conflict, OffsetOutOfRange, RequestRejected
from txmq.model.decider import ByChecker
from txmq.model.message import Decision, Message
from txmq.model.own_topics import AUDIT
from txmq.model.retry import FailureReport
from txmq.store import tables as t
from txmq.store.log.segment import list_segments
from txmq.wire.chunks import unpack_chunks
from txmq.wire.data_requests import Fetch, Opcode, Read, pack_fetch, pack_read
from txmq.wire.status import to_error

HOUR = 3_600
LARGE = 20_000  # three of those are a segment
TOKEN = (BEGAN // 1_000).to_bytes(6, "big") + bytes(10)


@pytest.fixture(autouse=True)
def _little_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_pins, "SLACK_BYTES", 1_000)


def new_disk() -> SimFS:
    fs = SimFS()
    fs.makedirs(DATA)
    fs.makedirs(ARCHIVE)
    return fs.copy()


def body(number: int) -> bytes:
    return number.to_bytes(4) * (LARGE // 4)


def made(**settings: Any) -> RetentionWorld:
    world = RetentionWorld(new_disk(), **settings)
    world.do(CreateTopic("t", 1))
    return world


def fill(world: RetentionWorld, count: int, begin: int = 0) -> None:
    for number in range(begin, begin + count):
        world.send(body(number))


def bury(world: RetentionWorld, *offsets: int, topic: str = "t") -> None:
    """Make the messages dead letters of group g."""
    reply = world.do(
        JoinGroup("g", "a", "a", "concurrent", topics=(topic,), wanted=RequestedSettings())
    )
    generation = reply.generation
    found: Any = choose_candidates(
        world.state, "g", "a", generation, world.log.durable, FetchLimits(100, 1 << 30), world.now()
    )
    world.do(
        Deliver(
            "g",
            "a",
            generation,
            tuple(CandidateRead(candidate, None) for candidate in found.candidates),
        )
    )
    report = FailureReport("E", "no", "f")
    for offset in offsets:
        world.do(NackMessage("g", "a", generation, topic, 0, offset, None, None, report, True))


def test_segments_go_when_all_of_them_is_too_old() -> None:
    world = made()
    fill(world, 9)
    world.retain()
    before = world.segments()
    assert len(before) > 2
    world.turn(2 * HOUR)
    fill(world, 2, 9)
    world.retain()
    world.retain()
    assert world.bodies() == {9: body(9), 10: body(10)}
    assert world.segments()[0] >= before[-1]
    assert [s.first for s in list_segments(world.fs, DATA)] == world.segments()
    assert world.fs.listdir(f"{ARCHIVE}/log") == []
    recount(world.state)


def test_a_reader_below_the_first_offset_gets_the_first_offset() -> None:
    world = made()
    fill(world, 3)
    world.turn(2 * HOUR)
    fill(world, 1, 3)
    world.retain()
    client = Client(world)  # type: ignore[arg-type]  # it has all that a client asks for
    client.send(HELLO)
    client.replies()
    reply = client.ask(Opcode.READ, pack_read(Read(0, 1, 0, 1 << 20, "t")))
    error = to_error(reply.status, reply.payload)
    assert isinstance(error, OffsetOutOfRange)
    assert error.detail == {"first": 3, "end": 4}
    shown = world.ask("topic.show", name="t")
    assert (shown["firsts"], shown["ends"]) == ([3], [4])


def test_a_letter_outlives_its_segment_again_and_again() -> None:
    world = made()
    fill(world, 6)
    bury(world, 1)
    for day in range(3):
        world.turn(2 * HOUR)
        fill(world, 6, 6 * (day + 1))
        world.retain()
        world.retain()
        shown = world.ask("dlq.show", group="g", topic="t", partition=0, offset=1)
        assert b64decode(shown["body"]) == body(1)
    assert world.segments()[0] > 10 * LARGE, "the copies did not hold up the log"
    assert letters(world.log.read, world.state) == {1: body(1)}
    recount(world.state)


def test_one_turn_opens_so_many_bytes_to_copy_messages_and_each_batch_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A batch of 1 KiB in the log may have 16 MiB of bodies."""
    monkeypatch.setattr(retention_service, "COPIED_BYTES", 25_000)
    world = made()
    for number in range(3):
        data = encode(
            [Message(bytes([number]) * 5_000)] * 4,
            producer_id=b"z" * 16, epoch=0, sequence=4 * number, born_at=1, codec=Codec.ZSTD,
        )  # fmt: skip
        world.do(StoreBatch("t", 0, 0, data, verify(data)))
    bury(world, *range(12))
    world.turn(2 * HOUR)
    fill(world, 6)
    opened = [0]

    def counted(codec: int, data: bytes, size: int) -> bytes:
        opened[-1] += size
        return decompress(codec, data, size)

    monkeypatch.setattr(decode, "decompress", counted)
    world.engine.listen(MessagesCopied, lambda _event, _place: opened.append(0))
    world.retain()
    assert opened == [20_000, 20_000, 20_000, 0]
    world.retain()
    assert letters(world.log.read, world.state) == {n: bytes([n // 4]) * 5_000 for n in range(12)}
    recount(world.state)


def test_one_record_stores_so_many_bytes_of_delayed_messages_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retention_service, "COPIED_BYTES", 3 * LARGE)
    world = made()
    for number in range(5):
        world.send(body(100 + number), delay=9 * HOUR)
    world.turn(2 * HOUR)
    fill(world, 6)
    stored: list[int] = []
    world.engine.listen(
        DelayedMoved,
        lambda event, _place: stored.append(sum(length for _due, _at, length in event.messages)),
    )
    world.retain()
    assert len(stored) > 1
    assert max(stored) <= 3 * LARGE
    assert waiting(world.log.read, world.state) == [body(100 + number) for number in range(5)]


def edit(world: RetentionWorld, edits: int, **changes: Any) -> Any:
    """Edit the dead letter of group g at offset 1; {} = return to the original."""
    changes = changes or {"revert": True}
    place = {"group": "g", "topic": "t", "partition": 0, "offset": 1}
    return world.ask("dlq.edit", **place, edits=edits, **changes, operator="ada", reason="test")


def version(world: RetentionWorld, number: int) -> bytes:
    place = {"group": "g", "topic": "t", "partition": 0, "offset": 1}
    return b64decode(world.ask("dlq.show", **place, version=number)["body"])


def encoded(data: bytes) -> str:
    return b64encode(data).decode()


def pins_of_messages(world: RetentionWorld) -> list[int]:
    """Return the pinned positions, without those of the audit topic."""
    return [
        pin.position
        for pin in log_pins.pins_below(world.state, t.SIGN)
        if pin.topic_id != AUDIT_TOPIC_ID
    ]


def test_all_versions_of_an_edited_letter_outlive_their_segments() -> None:
    world = made(letters_hours=20.0)
    fill(world, 6)
    bury(world, 1)
    world.turn(2 * HOUR)
    fill(world, 6, 6)
    world.retain()  # it is a copy already
    assert edit(world, 0, body=encoded(body(50))) == {"edits": 1}
    fill(world, 3, 12)
    assert edit(world, 1, body=encoded(body(51))) == {"edits": 2}
    assert edit(world, 2) == {"edits": 3}
    assert edit(world, 3, headers={"by": "ada"}) == {"edits": 4}
    wanted = [body(1), body(50), body(51), body(1), body(1)]
    for day in range(2):
        world.turn(2 * HOUR)
        fill(world, 6, 15 + 6 * day)
        world.retain()
        world.retain()
        assert [version(world, number) for number in range(5)] == wanted
    assert world.segments()[0] > 18 * LARGE, "the versions did not hold up the log"
    recount(world.state)
    pins = set(pins_of_messages(world))
    assert len(pins) == 4
    world.ask("dlq.abandon", group="g", letters=[["t", 0, 1]], operator="ada", reason="no")
    world.turn(20 * HOUR)
    fill(world, 6, 27)
    world.retain()
    world.retain()
    assert not [*world.state.tables[t.EDITS].range(b"")]
    assert not pins_of_messages(world)


def test_what_is_edited_while_retention_copies_stays_apart() -> None:
    """Both copies are in the log before either is durable."""
    world = made()
    fill(world, 6)
    bury(world, 1)
    bury(world, 2)
    world.turn(2 * HOUR)
    fill(world, 6, 6)
    place = {"group": "g", "topic": "t", "partition": 0, "offset": 2, "edits": 0}
    edited = {"body": encoded(body(50)), "operator": "ada", "reason": "test"}
    replies: list[Any] = []
    turns: list[int] = []  # ends of the copies in the log, and what was durable then

    def edit_beside(_event: object, place_in_log: RecordContext) -> None:
        if not turns:
            ask = world.assembly.calls.ask
            world.clock.callLater(0, ask, "dlq.edit", place | edited, replies.append)
        turns.extend((place_in_log.end, world.log.durable))

    world.engine.listen(MessagesCopied, edit_beside)
    world.retain()
    assert replies == [{"edits": 1}]
    assert turns[3] < turns[0], "the edit was not stored beside the copies"
    assert letters(world.log.read, world.state) == {1: body(1), 2: body(50)}


def test_letters_go_with_their_topic_once_an_export_has_what_is_kept() -> None:
    world = made()
    fill(world, 3)
    bury(world, 1)
    world.ask("group.alter", group="g", keep_until_exported=True, operator="ada")
    asked = {"name": "t", "operator": "ada", "reason": "moved"}
    refused = world.ask("topic.delete", **asked)
    assert type(refused) is Conflict
    world.ask("dlq.exported", group="g", letters=[["t", 0, 1, 1, 0]], operator="ada")
    assert world.ask("topic.delete", **asked) == {"name": "t", "groups": ("g",)}
    [entry] = world.ask("audit.list", about="topic:t")["entries"]
    assert entry["result"] == {"groups": 1}
    world.retain()
    assert world.ask("dlq.list", group="g")["letters"] == [], "nor anything that it was read with"
    assert world.ask("dlq.list", group="g", select={})["letters"] == []
    while world.do(AdvanceGroupWork()).more:
        pass
    assert failed_rows(world.state) == []
    world.retain()
    assert not pins_of_messages(world), "nothing was copied"


def test_a_group_keeps_its_letters_until_they_are_exported() -> None:
    world = made(letters_hours=2.0)
    fill(world, 3)
    bury(world, 1)
    altered = world.ask("group.alter", group="g", keep_until_exported=True, operator="ada")
    assert altered["settings"]["keep_until_exported"] is True
    world.ask("dlq.abandon", group="g", letters=[["t", 0, 1]], operator="ada", reason="no")
    world.turn(9 * HOUR)
    world.retain()
    place = {"group": "g", "topic": "t", "partition": 0, "offset": 1}
    assert world.ask("dlq.show", **place)["state"] == "abandoned"
    world.ask("dlq.exported", group="g", letters=[["t", 0, 1, 1, 0]], operator="ada")
    world.retain()
    assert isinstance(world.ask("dlq.show", **place), RequestRejected)


def test_no_power_cut_tears_an_edit_from_its_letter() -> None:
    """What was edited once its operator was told so is edited; otherwise it is the
    message as it was before, whole.
    """

    def work(fs: SimFS, told: list[int]) -> None:
        world = RetentionWorld(fs)
        world.do(CreateTopic("t", 1))
        fill(world, 2)
        bury(world, 1)
        told.append(0)
        for number in range(1, 4):
            changes = {"body": encoded(body(50 + number))} if number < 3 else {}
            assert edit(world, number - 1, **changes) == {"edits": number}
            told.append(number)

    wanted, seen = [body(1), body(51), body(52), body(1)], set[int]()
    for call, (fs, told) in enumerate(crash_points(new_disk(), work, list[int])):
        for image in (fs.crash(Random(call)), fs.restart()):
            log, state = recover(image, BEGAN)
            for row in failed_rows(state):
                data = log.read(row.position, row.length)
                verify(data)
                assert row.edits in {max(told, default=0), max(told, default=0) + 1}
                assert BatchView(data).bodies[row.row] == wanted[row.edits]
                seen.add(row.edits)
            assert told == [] or failed_rows(state)
            log.close()
    assert seen == {0, 1, 2, 3}


def failed_rows(state: State) -> list[FailedMessage]:
    return [FailedMessage(*row) for _key, row in state.tables[t.FAILED].range(b"")]


def test_a_letter_outlives_a_batch_that_was_pinned_itself() -> None:
    """A transaction's batch lies far below its neighbours, and its pin goes with it."""
    world = made()
    data = encode([Message(body(77))], producer_id=TOKEN, epoch=0, sequence=0, born_at=1)
    batch = BundleBatch("t", 0, 0, data, verify(data))
    world.do(StorePart(TOKEN, 0, (batch,), True, False, b"d" * 32, 0, ByChecker("s"), "s", (), 0))
    fill(world, 1)
    world.do(DecideTransaction(TOKEN, Decision.COMMIT, "test"))
    bury(world, 1)
    assert world.bodies()[1] == body(77)
    for day in range(2):
        world.turn(2 * HOUR)
        fill(world, 6, 2 + 6 * day)
        world.retain()
        world.retain()
    assert world.segments()[0] > 0
    assert letters(world.log.read, world.state) == {1: body(77)}


def plan_of_a_batch(world: RetentionWorld) -> None:
    """Start a plan of the letters of one batch, the first one of the topic."""
    many = [Message(body(number)[: LARGE // 4]) for number in range(4)]
    data = encode(many, producer_id=b"q" * 16, epoch=0, sequence=0, born_at=1)
    world.do(StoreBatch("t", 0, 0, data, verify(data)))
    fill(world, 6, 4)  # the rest of its segment
    for offset in range(4):
        bury(world, offset)
    world.do(CreatePlan("p", "g", PlanSettings(0, 0, in_flight=0, stop_after=0)))
    places = tuple(("t", 0, offset) for offset in range(4))
    world.do(AddPlanLetters("p", places, complete=True))
    world.do(FreezePlan(1, "digest"))
    world.do(StartPlan("p"))


@pytest.mark.parametrize("first", [True, False])
def test_letters_that_a_plan_puts_back_together_outlive_their_batch(*, first: bool) -> None:
    """Retention copies each by itself, before they are put back or while they wait."""
    world = made()
    plan_of_a_batch(world)
    if first:
        world.do(AdvancePlan(1, 100))
    world.turn(2 * HOUR)
    fill(world, 6, 10)
    world.retain()
    world.retain()
    assert world.segments()[0] > LARGE, "the batch is gone"
    world.do(AdvancePlan(1, 100))
    client = Client(world)  # type: ignore[arg-type]  # it has what a client needs
    client.send(HELLO)
    client.replies()
    generation = world.state.groups.by_name["g"].generation
    wanted = Fetch(generation, 0, 1 << 22, 10_000, "g", "a")
    found: dict[int, bytes] = {}
    for chunk in unpack_chunks(client.ask(Opcode.FETCH, pack_fetch(wanted)).payload).chunks:
        bodies = BatchView(bytes(chunk.batch)).bodies
        for row in range(chunk.first_row, chunk.first_row + chunk.rows):
            found[chunk.base_offset + row] = bodies[row]
    assert [found[at] for at in range(4)] == [body(at)[: LARGE // 4] for at in range(4)]


def test_a_delayed_message_outlives_its_segment_and_comes_in_its_turn() -> None:
    world = made()
    for number in range(3):
        world.send(body(100 + number), key="k", delay=9 * HOUR)
    fill(world, 3)
    for day in range(3):
        world.turn(2 * HOUR)
        fill(world, 6, 6 * (day + 1))
        world.retain()
        world.retain()
        assert waiting(world.log.read, world.state) == [body(100), body(101), body(102)]
    assert world.segments()[0] > 10 * LARGE, "what waits did not hold up the log"
    second = list(delayed.scan(world.state))[1].message
    assert world.do(Recall(((second.producer, second.sequence),))) == RecallReply(1)
    world.turn(4 * HOUR)
    world.do(PublishDue())
    assert [data for _offset, data in sorted(world.bodies().items())][-2:] == [body(100), body(102)]
    recount(world.state)


def act(world: RetentionWorld, reason: str) -> None:
    """Change the topic as an operator, which leaves an entry in the audit topic."""
    wide = world.state.topics["t"].settings.message_bytes < 0
    command = AlterTopic("t", {"message_bytes": 100_000 if wide else -1})
    world.do(Audited(command, AuditEntry("ada", "topic.alter", "topic:t", reason, {})))


def reasons(read: Any, state: State) -> list[str]:
    """Return the reasons in the audit topic, in the order of offsets."""
    found = bodies(read, state, AUDIT) if AUDIT in state.topics else {}
    return [json.loads(found[offset])["reason"] for offset in sorted(found)]


def test_audit_entries_outlive_their_segments_and_hold_up_nothing() -> None:
    world = made()
    told: list[str] = []
    for day in range(4):
        for number in range(3):
            told.append(f"{day}/{number}")
            act(world, told[-1])
        world.turn(2 * HOUR)
        fill(world, 6, 6 * day)
        world.retain()
        world.retain()
        assert reasons(world.log.read, world.state) == told
        listed = world.ask("audit.list")["entries"]
        assert [(entry["offset"], entry["reason"]) for entry in listed] == list(enumerate(told))
        recount(world.state)
    assert world.segments()[0] > 14 * LARGE, "the entries did not hold up the log"
    assert world.assembly.retention.free.held_by != f"topic {AUDIT}"
    world.turn(366 * 24 * HOUR)
    world.retain()
    world.retain()
    assert reasons(world.log.read, world.state) == [], "their own time is over"
    assert not list(log_pins.pins_below(world.state, t.SIGN))
    recount(world.state)


def test_a_failed_audit_entry_of_a_group_goes_with_its_copies() -> None:
    world = made()
    for number in range(3):
        act(world, str(number))
    bury(world, 1, topic=AUDIT)
    for day in range(3):
        world.turn(2 * HOUR)
        fill(world, 6, 6 * day)
        world.retain()
        world.retain()
        [data] = letters(world.log.read, world.state).values()
        assert json.loads(data)["reason"] == "1"
    assert world.segments()[0] > 10 * LARGE
    world.turn(366 * 24 * HOUR)
    world.retain()
    world.retain()
    [data] = letters(world.log.read, world.state).values()
    assert json.loads(data)["reason"] == "1", "a letter outlives its entry"
    recount(world.state)


def test_an_undecided_transaction_holds_up_the_log_and_is_published_whole() -> None:
    world = made()
    data = encode([Message(body(77), "k")], producer_id=TOKEN, epoch=0, sequence=0, born_at=1)
    part = StorePart(
        TOKEN,
        0,
        (BundleBatch("t", 0, 0, data, verify(data)),),
        True,
        False,
        b"d" * 32,
        0,
        ByChecker("s"),
        "s",
        (),
        0,
    )
    world.do(part)
    fill(world, 9)
    world.turn(2 * HOUR)
    world.retain()
    world.retain()
    assert world.segments()[0] == 0
    world.do(DecideTransaction(TOKEN, Decision.COMMIT, "test"))
    world.retain()
    assert world.bodies() == {9: body(77)}
    assert world.segments()[0] == 0, "it is pinned"
    recount(world.state)
    world.turn(2 * HOUR)
    fill(world, 4, 10)
    world.retain()
    world.retain()
    assert world.segments()[0] > 0


def test_the_holder_of_the_log_is_named() -> None:
    world = made()
    world.do(CreateTopic("kept", 1))
    world.do(AlterTopic("kept", {"retention_us": 0}))
    world.send(body(1), "kept")
    fill(world, 6)
    world.turn(2 * HOUR)
    world.retain()
    told = world.ask("broker.stats")["log"]
    assert told["held_by"] == "topic kept"
    assert told["needed_from"] < LARGE
    world.do(AlterTopic("kept", {"retention_us": 1}))
    world.turn(1)
    world.retain()
    assert world.ask("broker.stats")["log"]["held_by"] == "what is new"


def test_deleted_topics_without_messages_give_up_their_partitions() -> None:
    world = made()
    for name in ("gone", "read", "kept"):
        world.do(CreateTopic(name, 64))
    world.send(body(1), "gone")
    wanted = RequestedSettings()
    world.do(JoinGroup("g", "m", "i", "concurrent", topics=("read",), wanted=wanted))
    gone, read = (world.state.topics[name].topic_id for name in ("gone", "read"))
    world.do(DeleteTopic("gone"))
    world.do(DeleteTopic("read"))
    world.turn(1)
    world.retain()
    world.retain()
    emptied = world.state.topics_by_id[gone]
    assert (emptied.name, emptied.deleted, emptied.end_offsets) == ("gone", True, [])
    assert len(world.state.topics_by_id[read].end_offsets) == 64, "a group has positions in it"
    assert len(world.state.topics["kept"].end_offsets) == 64
    recount(world.state)


def test_a_deleted_topic_keeps_its_partitions_while_a_transaction_may_publish_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though nothing refuses to delete the topic."""
    monkeypatch.setattr(topics, "check_none_writes_to", lambda *_: None)
    world = made()
    world.do(CreateTopic("gone", 64))
    gone = world.state.topics["gone"].topic_id
    data = encode([Message(b"m")], producer_id=TOKEN, epoch=0, sequence=0, born_at=1)
    batch = BundleBatch("gone", 0, 0, data, verify(data))
    stored = world.do(
        StorePart(TOKEN, 0, (batch,), True, False, b"d" * 32, 0, ByChecker("c"), "shop", (), 0)
    )
    assert not isinstance(stored, RequestRejected)
    world.do(DeleteTopic("gone"))
    world.retain()
    world.retain()
    assert len(world.state.topics_by_id[gone].end_offsets) == 64
    world.do(DecideTransaction(TOKEN, Decision.COMMIT, "test"))
    world.turn(1)
    world.retain()
    world.retain()
    world.retain()
    assert world.state.topics_by_id[gone].end_offsets == []


def test_a_topic_s_settings_override_the_broker_s() -> None:
    world = made(hours=0.0)
    world.do(CreateTopic("short", 1))
    world.do(AlterTopic("short", {"retention_bytes": 3 * LARGE}))
    fill(world, 5)
    for number in range(5):
        world.send(body(number), "short")
    world.turn(1_000 * HOUR)
    world.retain()
    assert sorted(world.bodies("short")) == [3, 4], "a batch is a little larger than its body"
    assert len(world.bodies()) == 5


def test_segments_go_to_the_archive_where_a_topic_says_so() -> None:
    world = made()
    world.do(AlterTopic("t", {"policy": "archive"}))
    fill(world, 9)
    world.retain()
    before = {
        segment.first: _contents(world.fs, segment.path)
        for segment in list_segments(world.fs, DATA)
    }
    world.turn(2 * HOUR)
    fill(world, 3, 9)
    world.retain()
    world.retain()
    archived = list_segments(world.fs, ARCHIVE)
    assert archived
    assert [segment.first for segment in archived] == [
        first for first in before if first < world.log.first
    ]
    for segment in archived:
        assert _contents(world.fs, segment.path) == before[segment.first][: segment.size]


def _contents(fs: SimFS, path: str) -> bytes:
    return fs.open(path).pread(1 << 20, 0)


def test_an_archive_that_takes_nothing_is_an_alarm_and_is_tried_again() -> None:
    world = made(policy="archive")
    fill(world, 9)
    world.retain()
    world.turn(2 * HOUR)
    fill(world, 3, 9)
    create = world.fs.create

    def refuse(path: str) -> Any:
        if path.startswith(ARCHIVE):
            world.fs.errors = {world.fs.calls + 1: errno.EIO}
        return create(path)

    world.fs.create = refuse  # type: ignore[method-assign]
    world.retain()
    assert [alarm["name"] for alarm in world.ask("broker.alarms")["alarms"]] == ["disk.trouble"]
    assert world.bodies() == {number: body(number) for number in range(9, 12)}
    world.fs.create = create  # type: ignore[method-assign]
    for _ in range(4):
        world.retain()
    assert world.ask("broker.alarms")["alarms"] == []
    assert list_segments(world.fs, ARCHIVE)[0].first == 0


def test_a_snapshot_that_finds_no_space_is_an_alarm_and_is_made_later() -> None:
    world = made()
    fill(world, 9)
    world.turn(2 * HOUR)
    fill(world, 3, 9)
    create = world.fs.create

    def refuse(path: str) -> Any:
        if path.endswith(".tmp"):
            world.fs.errors = {world.fs.calls + 1: errno.ENOSPC}
        return create(path)

    world.fs.create = refuse  # type: ignore[method-assign]
    world.retain()
    [alarm] = world.ask("broker.alarms")["alarms"]
    assert (alarm["name"], alarm["text"][:9]) == ("disk.trouble", "snapshot:")
    assert world.send(body(12)).offset == 12
    world.fs.create = create  # type: ignore[method-assign]
    for _ in range(4):
        world.retain()
    assert world.ask("broker.alarms")["alarms"] == []
    assert world.fs.listdir(f"{DATA}/snapshot")


class Told:
    """The promises of one life to its clients: bodies by offset, and the first offset
    that must be there.
    """

    def __init__(self) -> None:
        self.sent: dict[int, bytes] = {}
        self.first = 0
        self.letter = self.delayed = False
        self.acts: list[str] = []


def life(fs: SimFS, told: Told) -> None:
    """Roll segments and run rounds, with a letter, the archive and a snapshot."""
    world = RetentionWorld(fs, policy="archive")
    world.do(CreateTopic("t", 1))
    for turn in range(2):
        for number in range(5):
            assert world.send(body(5 * turn + number)).offset == 5 * turn + number
            told.sent[5 * turn + number] = body(5 * turn + number)
        act(world, str(turn))
        told.acts.append(str(turn))
        if not turn:
            bury(world, 1)
            told.letter = True
            world.send(body(99), delay=100 * HOUR)
            told.delayed = True
        world.turn(2 * HOUR)
        told.first = len(told.sent)  # what a round may take, whether it has
        world.retain()
        world.retain()


def test_no_power_cut_in_retention_loses_kept_messages() -> None:
    dropped = archived = letter = moved = 0
    for call, (fs, told) in enumerate(crash_points(new_disk(), life, Told)):
        for image in (fs.crash(Random(call)), fs.restart()):
            log, state = recover(image, BEGAN)
            recount(state)
            if "t" not in state.topics:
                assert not told.sent
                continue
            found, first = bodies(log.read, state, "t"), state.topics["t"].start_offsets[0]
            assert first <= told.first
            assert (
                found.items() >= {n: data for n, data in told.sent.items() if n >= first}.items()
            ), "lost"
            assert min(found, default=first) == first
            kept = letters(log.read, state)
            assert kept == {1: body(1)} if told.letter else kept in ({}, {1: body(1)})
            late = waiting(log.read, state)
            assert late == [body(99)] if told.delayed else late in ([], [body(99)])
            acts = reasons(log.read, state)
            assert acts[: len(told.acts)] == told.acts, "what operators did is lost"
            assert len(acts) <= len(told.acts) + 1
            moved += bool(acts) and log.first > 0
            segments = [s.first for s in list_segments(image, ARCHIVE)]
            whole = sorted({*segments, *(s.first for s in list_segments(image, DATA))})
            assert whole[0] == 0, "a segment is in the log until it is in the archive"
            dropped += log.first > 0
            archived += bool(segments)
            letter += bool(kept) and first > 1
            log.close()
    assert min(dropped, archived, letter, moved) > 5, (dropped, archived, letter, moved)

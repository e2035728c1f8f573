"""`txmq log` on a data directory, a damaged one, and an archive."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import msgpack
import pytest
from twisted.internet.task import Clock

from tests.broker.support import at_once
from tests.cli import killed
from tests.cli.support import run
from txmq.batch import encode, verify
from txmq.broker.data_directory.storage import StorageService, open_directory
from txmq.broker.engine.engine import Engine
from txmq.config.broker import BrokerSettings
from txmq.core.consumers.candidates import FetchLimits
from txmq.core.consumers.commands import (
    CandidateRead,
    Deliver,
    JoinGroup,
    NackMessage,
    RequestedSettings,
)
from txmq.core.consumers.fetch_choice import choose_candidates
from txmq.core.events.audit import OperatorActed
from txmq.core.events.base import KINDS
from txmq.core.events.base import encode as encode_event
from txmq.core.events.topics import TopicCreated
from txmq.core.topics.sends import StoreBatch, StoreBatches
from txmq.core.topics.topics import CreateTopic
from txmq.core.transactions.batched import StoreBundles
from txmq.core.transactions.decisions import DecideTransaction
from txmq.core.transactions.half_storage import BundleBatch, StorePart
from txmq.errors import CorruptRecord
from txmq.model.decider import ByBroker, ByChecker
from txmq.model.message import Decision, Message
from txmq.model.retry import FailureReport
from txmq.store.filesystem import RealFileSystem
from txmq.store.index.lmdb_tables import LmdbTables
from txmq.store.log.segment import list_segments, read_log_id
from txmq.store.snapshot import write_snapshot
from txmq.store.tables import ENTRIES, FAILED
from txmq.testing.processes import running

NOW = 1_700_000_000_000_000
SEGMENT = 1 << 20
TOKEN = "018bcfe5680070008000000000000001"


def now() -> int:
    return NOW


class Life:
    """A broker without a reactor, on a real disk."""

    def __init__(self, data: Path, producer: bytes = b"p" * 16) -> None:
        self.producer, self.data = producer, data
        settings = BrokerSettings(data=data, segment_bytes=SEGMENT, preallocate_bytes=4_096)
        self.fs, self.clock = RealFileSystem(), Clock()
        opened = open_directory(self.fs, settings, NOW)
        self.log, self.state = opened.log, opened.state
        self.engine = Engine(self.log, self.state, clock=self.clock, now=now, in_thread=at_once)
        self.keeper = StorageService(self.fs, self.engine, opened.tables, settings, at_once)
        self.engine.boot("test")
        self.sequence = 0

    def do(self, command: object) -> Any:
        replies: list[Any] = []
        self.engine.submit(command, replies.append)
        for _ in range(5):
            self.clock.advance(0)
        [reply] = replies
        return reply

    def send(self, *bodies: bytes, topic: str = "t", partition: int = 0) -> None:
        self.do(self._batch(*bodies, topic=topic, partition=partition))

    def send_to(self, *topics: str) -> None:
        """Send to the topics in one frame."""
        self.do(
            StoreBatches(tuple(self._batch(topic.encode() * 3, topic=topic) for topic in topics))
        )

    def _batch(self, *bodies: bytes, topic: str, partition: int = 0) -> StoreBatch:
        data = encode(
            [Message(body, "k") for body in bodies],
            producer_id=self.producer,
            epoch=0,
            sequence=self.sequence,
            born_at=1,
        )
        self.sequence += len(bodies)
        return StoreBatch(topic, 0, partition, data, verify(data))

    def half(self, number: int, outcome: Decision | None) -> None:
        group = self.group(number)
        self.do(group)
        if outcome is not None:
            self.do(DecideTransaction(group.token, outcome, "test"))

    def group(self, number: int, topic: str = "t", *, local: bool = False) -> StorePart:
        token = bytes.fromhex(TOKEN)[:-1] + bytes([number])
        data = encode(
            [Message(b"half", f"key {number}")], producer_id=token, epoch=0, sequence=0, born_at=1
        )
        batch = BundleBatch(topic, 0, 1, data, verify(data))
        decider = ByBroker() if local else ByChecker("s")
        return StorePart(token, 0, (batch,), True, local, b"d" * 32, 0, decider, "s", (), 0)

    def delayed(self, topic: str) -> None:
        message = Message(b"later", deliver_at=NOW + 3_600_000_000)
        data = encode(
            [message], producer_id=self.producer, epoch=0, sequence=self.sequence, born_at=1
        )
        self.sequence += 1
        self.do(StoreBatch(topic, 0, 0, data, verify(data)))

    def bury(self) -> None:
        generation = self.do(
            JoinGroup("g", "a", "a", "concurrent", topics=("t",), wanted=RequestedSettings())
        ).generation
        found: Any = choose_candidates(
            self.state, "g", "a", generation, self.log.durable, FetchLimits(3, 1 << 30), NOW
        )
        self.do(
            Deliver(
                "g",
                "a",
                generation,
                tuple(CandidateRead(candidate, None) for candidate in found.candidates),
            )
        )
        candidate = found.candidates[0]
        place = ("t", candidate.partition, candidate.start)
        self.do(
            NackMessage(
                "g", "a", generation, *place, None, None, FailureReport("E", "no", "f"), True
            )
        )

    def fetched(self) -> list[int]:
        """Return the offsets that a new member of the group `g` gets."""
        generation = self.do(
            JoinGroup("g", "a", "a", "concurrent", topics=("t",), wanted=RequestedSettings())
        ).generation
        limits = FetchLimits(10, 1 << 30, max_run_rows=10)
        found: Any = choose_candidates(
            self.state, "g", "a", generation, self.log.durable, limits, NOW
        )
        reads = tuple(CandidateRead(one, unwanted=not one.wanted) for one in found.candidates)
        reply = self.do(Deliver("g", "a", generation, reads))
        return [n for one in reply.deliveries for n in range(one.start, one.end)]

    def close(self, *, snapshot: bool = False) -> None:
        self.keeper.close()
        if snapshot:
            tables = LmdbTables.open(self.data / "index", log_id=self.log.log_id)
            with tables.dump() as (position, rows):
                write_snapshot(self.fs, str(self.data), self.log.log_id, position, rows)
            tables.close()
        self.log.close()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The directory of a broker after an orderly shutdown: three segments, a dead
    letter, a half message and a delayed one.
    """
    directory = tmp_path / "data"
    life = Life(directory)
    life.do(CreateTopic("t", 2))
    life.do(CreateTopic("u", 1))
    life.send(b"one", b"two")
    life.bury()
    for number, outcome in enumerate((None, Decision.COMMIT, Decision.ROLLBACK), 1):
        life.half(number, outcome)
    for _ in range(5):
        life.send(bytes(500_000), topic="u")
    life.send_to("u", "t")
    life.close()
    return directory


def command_json(*arguments: str, status: int = 0) -> Any:
    ran = run("log", *arguments, "--json")
    assert ran.exit_code == status, ran.stderr
    return json.loads(ran.stdout)


def lines(*arguments: str, status: int = 0) -> list[Any]:
    ran = run("log", *arguments, "--json")
    assert ran.exit_code == status, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


def flip(data: Path, position: int) -> None:
    segment = next(
        s for s in reversed(list_segments(RealFileSystem(), str(data))) if s.first <= position
    )
    path = Path(segment.path)
    content = bytearray(path.read_bytes())
    content[position - segment.first] ^= 4
    path.write_bytes(content)


def kinds(data: Path, *options: str) -> list[str]:
    return [record["kind"] for record in lines("dump", "--data", str(data), *options)]


def test_a_whole_log_and_its_index_agree_row_by_row(data: Path) -> None:
    found = command_json("verify", "--data", str(data), "--deep")
    assert (found["damaged"], found["misplaced"], found["different"], found["torn"]) == (
        [],
        [],
        [],
        0,
    )
    assert (found["segments"], found["index"]) == (3, found["end"])
    assert found["records"] == len(kinds(data))
    assert found["index_rows"] > 20


def test_a_flipped_bit_is_named_by_verify_and_by_dump(data: Path) -> None:
    record = next(r for r in lines("dump", "--data", str(data)) if r["kind"] == "BatchStored")
    flip(data, record["position"] + 60)
    [damage] = command_json("verify", "--data", str(data), status=1)["damaged"]
    assert (damage["position"], damage["end"]) == (record["position"], record["end"])
    assert damage["reason"] == "checksum mismatch"
    *rest, last = lines("dump", "--data", str(data), status=1)
    assert last["damaged"]["position"] == record["position"]
    assert record["position"] not in [one["position"] for one in rest]


def test_a_row_of_the_index_that_points_elsewhere_is_named(data: Path) -> None:
    log_id = read_log_id(RealFileSystem(), str(data))
    assert log_id is not None
    tables = LmdbTables.open(data / "index", log_id=log_id)
    for name in (ENTRIES, FAILED):
        key, row = next(iter(tables[name].range(b"")))
        place = 0 if name == ENTRIES else 4
        tables[name].put(key, (*row[:place], row[place] + 8, *row[place + 1 :]))
    frozen = tables.freeze(tables.position)
    assert frozen is not None
    tables.commit(frozen, durable=tables.position)
    tables.release(frozen)
    tables.close()
    found = command_json("verify", "--data", str(data), "--deep", status=1)
    assert [row["table"] for row in found["misplaced"]] == [ENTRIES, FAILED]
    assert [row.split()[0] for row in found["different"]] == [ENTRIES, FAILED]
    assert command_json("verify", "--data", str(data), status=1)["different"] == []
    rebuilt = command_json("rebuild", "--data", str(data))
    assert (rebuilt["snapshot"], rebuilt["position"]) == (0, found["end"])
    assert (
        command_json("verify", "--data", str(data), "--deep")["index_rows"] == found["index_rows"]
    )


def test_records_are_printed_as_events_and_can_be_chosen(data: Path) -> None:
    records = lines("dump", "--data", str(data))
    first = ["Booted", "TopicCreated", "TopicAltered", "TopicCreated", "TopicCreated"]
    assert [r["kind"] for r in records[:5]] == first
    sent = next(r for r in records if r["kind"] == "BatchStored")
    assert (sent["event"]["topic"], sent["event"]["count"], sent["event"]["producer"]) == (
        "t",
        2,
        "70" * 16,
    )
    assert set(kinds(data, "--kind", "PartStored", "--kind", "Decided")) == {
        "PartStored",
        "Decided",
    }
    assert kinds(data, "--topic", "u") == ["TopicCreated", *["BatchStored"] * 5, "BatchesStored"]
    [several] = lines("dump", "--data", str(data), "--kind", "BatchesStored", "--topic", "t")
    assert [(b["topic"], b["base_offset"], b["count"]) for b in several["event"]["batches"]] == [
        ("u", 5, 1),
        ("t", 2, 1),
    ]
    assert kinds(data, "--token", TOKEN[:-1] + "2") == ["PartStored", "Decided"]
    middle = records[4]["position"]
    assert lines("dump", "--data", str(data), "--from", str(middle)) == records[4:]
    assert lines("dump", "--data", str(data), "--to", str(middle)) == records[:4]
    assert lines("dump", "--data", str(data), "--limit", "2") == records[:2]
    text = run("log", "dump", "--data", str(data), "--limit", "4").stdout
    assert text.splitlines()[3].endswith(
        'TopicCreated {"topic_id": 1, "name": "t", "partitions": 2, "epoch": 1, "topic": "t"}'
    )
    assert run("log", "dump", "--data", str(data), "--kind", "Nonsense").exit_code == 2


def test_messages_are_found_by_their_topic_however_they_were_stored(tmp_path: Path) -> None:
    life = Life(tmp_path)
    for topic in ("t", "u"):
        life.do(CreateTopic(topic, 2))
    life.do(StoreBundles((life.group(1), life.group(2, "u"))))
    life.do(life.group(3, local=True))
    life.do(life.group(4, "u", local=True))
    life.delayed("u")
    life.close()
    assert kinds(tmp_path, "--topic", "t") == ["TopicCreated", "GroupsStored", "PartStored"]
    assert kinds(tmp_path, "--topic", "u") == [
        "TopicCreated",
        "GroupsStored",
        "PartStored",
        "BatchDelayed",
    ]
    _created, several, local = lines("dump", "--data", str(tmp_path), "--topic", "t")
    first, second = several["event"]["groups"]
    assert [(batch["topic"], batch["count"]) for batch in first["batches"] + second["batches"]] == [
        ("t", 1),
        ("u", 1),
    ]
    assert (first["token"], several["event"]["topics"]) == (TOKEN[:-2] + "01", ["t", "u"])
    assert (local["event"]["topics"], local["event"]["decider"]) == (["t"], ["local"])


def test_a_log_that_refuses_to_start_is_repaired(data: Path) -> None:
    record = next(r for r in lines("dump", "--data", str(data)) if r["kind"] == "Decided")
    flip(data, record["position"] + 60)
    shutil.rmtree(data / "index")
    refused = run("log", "rebuild", "--data", str(data), "--json")
    assert (refused.exit_code, json.loads(refused.stderr)["error"]) == (1, "CorruptRecord")
    [lost] = command_json("repair", "--data", str(data), "--yes")["lost"]
    assert lost["position"] == record["position"]
    assert command_json("verify", "--data", str(data))["damaged"] == []
    assert "Lost" in kinds(data)
    assert command_json("rebuild", "--data", str(data))["position"] > 0


def test_a_repaired_log_is_whole_and_its_lost_messages_are_named(data: Path) -> None:
    record = next(r for r in lines("dump", "--data", str(data)) if r["kind"] == "BatchStored")
    flip(data, record["position"] + 60)
    [given_up] = command_json("repair", "--data", str(data), "--yes")["lost"]
    span = {"position": given_up["position"], "end": given_up["end"]}
    published = {"topic": "t", "partition": 0, "offset": 0, "count": 2, "group": ""}
    letter = published | {"count": 1, "group": "g"}
    for _rebuilt in (False, True):
        found = command_json("verify", "--data", str(data))
        assert (found["damaged"], found["given_up"]) == ([], [span])
        assert (found["misplaced"], found["different"]) == ([], [])
        assert [{name: row[name] for name in letter} for row in found["lost"]] == [
            published,
            letter,
        ]
        command_json("rebuild", "--data", str(data))
    shown = run("log", "verify", "--data", str(data), "--deep")
    assert shown.exit_code == 0, shown.output
    assert "no misplaced" in shown.stdout


@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("number", [0, 1])
def test_a_group_goes_on_behind_what_a_repair_lost(
    tmp_path: Path, number: int, *, snapshot: bool
) -> None:
    data = tmp_path / "data"
    life = Life(data)
    life.do(CreateTopic("t", 1))
    for body in (b"one", b"two", b"three"):
        life.send(body)
    life.close(snapshot=snapshot)
    stored = [r for r in lines("dump", "--data", str(data)) if r["kind"] == "BatchStored"]
    flip(data, stored[number]["position"] + 60)
    command_json("repair", "--data", str(data), "--yes")
    rebuilt = command_json("rebuild", "--data", str(data))
    assert bool(rebuilt["snapshot"]) is snapshot
    shutil.rmtree(data / "index")  # the loss is in snapshot or log as well
    life = Life(data)
    assert life.fetched() == [offset for offset in range(3) if offset != number]
    life.close()
    found = command_json("verify", "--data", str(data), "--deep")
    assert [(row["offset"], row["count"]) for row in found["lost"]] == [(number, 1)]


def test_an_archive_is_read_by_the_same_tools(data: Path, tmp_path: Path) -> None:
    archive = tmp_path / "cold"
    (archive / "log").mkdir(parents=True)
    segments = sorted((data / "log").glob("*.seg"))
    for path in segments[:2]:
        shutil.copy(path, archive / "log")
    found = command_json("verify", "--data", str(archive))
    assert (found["segments"], found["index"], found["damaged"]) == (2, None, [])
    assert found["records"] == len(kinds(archive)) > 5
    missing = run("log", "verify", "--data", str(tmp_path / "nothing"), "--json")
    assert (missing.exit_code, json.loads(missing.stderr)["error"]) == (1, "StoreError")


def test_nothing_is_compared_while_a_broker_runs(data: Path) -> None:
    life = Life(data)
    busy = run("log", "verify", "--data", str(data), "--json")
    assert (busy.exit_code, json.loads(busy.stderr)["error"]) == (1, "DirectoryInUse")
    life.close()


def test_a_rebuild_that_is_killed_anywhere_leaves_a_broker_what_it_had(
    data: Path, tmp_path: Path
) -> None:
    life = Life(data)
    life.keeper._write_snapshot()  # of what is in the index: a rebuild begins with it
    life.close()
    untouched = command_json("verify", "--data", str(data), "--deep")
    for nth in range(1, 20):
        with running(
            tmp_path, str(nth), "log", "rebuild", "--data", str(data), command=killed.run
        ) as process:
            status = process.status()
        if not status:
            break
        assert status == -signal.SIGKILL
        opened = open_directory(RealFileSystem(), BrokerSettings(data=data), NOW)
        assert (opened.log.end, opened.state.boot_epoch) == (untouched["end"], 2)
        opened.tables.close()
        opened.log.close()
        assert command_json("verify", "--data", str(data), "--deep")["different"] == []
    assert nth > 5
    assert command_json("verify", "--data", str(data), "--deep") == untouched


def test_messages_are_found_in_the_log_of_a_broker_that_is_stopped(data: Path) -> None:
    record = next(r for r in lines("dump", "--data", str(data)) if r["kind"] == "BatchStored")
    topic = record["event"]["topic"]
    everything = command_json("find", topic, "--data", str(data))
    first = everything["messages"][0]
    assert (first["position"], first["state"]) == (record["position"], "published")
    name = first["message_id"]
    assert [
        row["message_id"]
        for row in command_json("find", topic, "--data", str(data), "--id", name)["messages"]
    ] == [name]
    assert command_json("find", topic, "--data", str(data), "--key", "nobody's")["messages"] == []
    assert command_json("find", topic, "--data", str(data), "--limit", "1")["more"] is True
    flip(data, record["position"] + 60)
    damaged = command_json("find", topic, "--data", str(data), status=1)
    assert name not in [row["message_id"] for row in damaged["messages"]]
    assert [one["position"] for one in damaged["damaged"]] == [record["position"]]


NEWER = 250  # an event of a version to come
ACTED = OperatorActed(
    ((KINDS[TopicCreated], tuple(TopicCreated(9, "acted", 1, 1)), 0), (NEWER, (9, "secret"), 0))
)


@pytest.mark.parametrize(
    ("kind", "head"),
    [(KINDS[OperatorActed], encode_event(ACTED)), (NEWER, msgpack.packb((9, "secret")))],
    ids=["in an operator's record", "alone"],
)
def test_an_event_of_a_newer_version_is_named_and_never_a_traceback(
    data: Path, kind: int, head: bytes
) -> None:
    life = Life(data, b"q" * 16)
    position = life.log.append(kind, head, stored_at=NOW, boot_epoch=2).position
    life.send(b"behind it")
    life.close()
    for arguments in (
        ("find", "t", "--data", str(data)),
        ("verify", "--data", str(data), "--deep"),
    ):
        ran = run("log", *arguments, "--json")
        refused = json.loads(ran.stderr)
        assert (ran.exit_code, refused["error"]) == (1, "UnsupportedFormat")
        assert f"{position}: format version event {NEWER}" in refused["message"]
    newer, after = lines("dump", "--data", str(data), "--from", str(position))
    assert after["kind"] == "BatchStored"
    assert "secret" not in json.dumps(newer)
    if kind == NEWER:
        assert (newer["kind"], newer["bytes"] > 0) == (str(NEWER), True)
    else:
        created, unknown = newer["event"]["parts"]
        assert (created["kind"], created["topic"]) == ("TopicCreated", "acted")
        assert unknown == {"kind": str(NEWER)}


def test_a_flipped_byte_in_the_last_record_is_damage_where_the_index_has_seen_it(
    data: Path,
) -> None:
    """Without that it would pass for what a crash left unfinished."""
    last = lines("dump", "--data", str(data))[-1]
    flip(data, last["end"] - 9)
    found = command_json("verify", "--data", str(data), status=1)
    assert (found["end"], found["torn"] > 0) == (last["position"], True)
    assert found["damaged"][-1]["position"] == last["position"]
    assert f"known to have reached {last['end']}" in found["damaged"][-1]["reason"]


def test_a_copy_whose_index_is_ahead_of_its_log_gets_another_index(
    data: Path, tmp_path: Path
) -> None:
    """Files are copied one after the other while the broker writes them."""
    copy, before = tmp_path / "copy", command_json("verify", "--data", str(data))
    shutil.copytree(data, copy)
    life = Life(data)
    life.send(b"behind the copy of the log")
    life.close()
    life = Life(data)
    life.keeper._write_snapshot()
    life.close()
    for name in ("index", "snapshot"):
        shutil.rmtree(copy / name, ignore_errors=True)
        if (data / name).exists():
            shutil.copytree(data / name, copy / name)
    with pytest.raises(CorruptRecord, match=r"a copy .* `txmq log rebuild --data DIR --copy`"):
        Life(copy)
    ran = run("log", "rebuild", "--data", str(copy))
    assert ran.exit_code == 1
    assert "--copy" in ran.stderr
    assert command_json("verify", "--data", str(copy), status=1)["index"] > before["end"]
    rebuilt = command_json("rebuild", "--data", str(copy), "--copy")
    assert rebuilt["position"] == before["end"]
    assert command_json("verify", "--data", str(copy), "--deep")["end"] == before["end"]
    Life(copy).close()


def test_a_damaged_index_is_named_and_left_to_the_broker(data: Path) -> None:
    file = data / "index" / "data.mdb"
    damaged = file.read_bytes().replace(b"\xa1t", b"\xa1u", 1)
    assert damaged != file.read_bytes()
    file.write_bytes(damaged)
    found = command_json("verify", "--data", str(data), "--deep", status=1)
    assert "damaged" in found["different"][0]
    assert file.read_bytes() == damaged, "verify changes nothing"
    life = Life(data)
    assert set(life.state.topics) == {"_txmq.audit", "t", "u"}
    life.close()
    assert command_json("verify", "--data", str(data), "--deep")["different"] == []

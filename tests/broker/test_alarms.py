"""Each alarm is raised, told and logged once while its condition holds, and cleared when it holds no more."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.broker.support import SECOND, Broker, Oracle
from txmq import errors
from txmq.batch import encode, verify
from txmq.broker import reported
from txmq.broker.alarms import RULES
from txmq.broker.core.consumer_commands import Join, Wanted
from txmq.broker.core.decisions import Decide
from txmq.broker.core.retention import Keep, Retain, keep_of
from txmq.broker.core.sends import Send
from txmq.broker.core.topics import AlterTopic, CreateTopic
from txmq.broker.core.xa import DecideByHand, ForgetHeuristics
from txmq.broker.disk import DiskWatch
from txmq.broker.resolving import ResolverStatus
from txmq.broker.retaining import TRANSACTIONS, Free
from txmq.config import Settings
from txmq.config_storage import DiskSpace
from txmq.message import Decision, Message
from txmq.store.scan import Damage
from txmq.wire.group import Description, Part, PartBatch, group_digest, pack_part
from txmq.wire.headers import Fetch, Opcode, pack_fetch
from txmq.wire.status import to_error

SETTINGS = Settings.model_validate(
    {
        "broker": {"data": "/data"},
        "checks": {"first_s": 6.0, "then_s": 10.0, "longest_s": 10.0, "in_doubt_after": 2},
        "alarms": {
            "undecided_s": 60.0,
            "open_s": 40.0,
            "conflict_s": 100.0,
            "resolver_s": 5.0,
            "cleanup_s": 200.0,
            "fence_s": 300.0,
        },
    }
)
KNOWN = {"name", "severity", "since", "text", "action"}


class Desk:
    """A broker whose alarms are watched."""

    def __init__(self) -> None:
        self.oracle = Oracle()
        self.broker = Broker(self.oracle, SETTINGS)
        self.broker.start()

    def names(self) -> list[str]:
        return [alarm["name"] for alarm in self.alarms()]

    def alarms(self) -> list[dict[str, Any]]:
        alarms: list[dict[str, Any]] = self.broker.ask("broker.alarms")["alarms"]
        assert all(alarm.keys() == KNOWN and all(alarm.values()) for alarm in alarms)
        return alarms

    def half(self, number: int = 1, **options: Any) -> bytes:
        return bytes.fromhex(self.broker.half(number, Message(b"m", "k"), **options))

    def decide(self, token: bytes, outcome: Decision) -> None:
        self.broker.do(Decide(token, outcome, "producer shop"))

    def resolver(self, *, failing_s: float = 0.0, kept_s: float = 0.0) -> None:
        now = self.broker.now()
        since = [round(now - seconds * SECOND) if seconds else 0 for seconds in (failing_s, kept_s)]
        told = ("connection refused" if failing_s else "", "log 7 is silent" if kept_s else "")
        self.oracle.is_like = (ResolverStatus("shop", now, since[0], told[0], since[1], told[1]),)


def answers(desk: Desk, token: bytes, times: int) -> None:
    for _ in range(times):
        desk.broker.pass_time(11)
        desk.oracle.answer(token, Decision.UNKNOWN, "in progress")


def in_doubt(desk: Desk) -> Iterator[str]:
    token = desk.half()
    answers(desk, token, 1)
    yield ""
    answers(desk, token, 1)
    yield token.hex()
    desk.decide(token, Decision.COMMIT)


def oldest_undecided(desk: Desk) -> Iterator[str]:
    token = desk.half(check_after=0)
    desk.broker.pass_time(59)
    yield ""
    desk.broker.pass_time(2)
    yield f"{token.hex()} of service shop has been undecided for 0:01:01"
    desk.decide(token, Decision.ROLLBACK)


def missing_parts(desk: Desk) -> Iterator[str]:
    token = desk.half(sealed=False)
    desk.broker.pass_time(39)
    yield ""
    desk.broker.pass_time(2)
    yield token.hex()
    desk.decide(token, Decision.ROLLBACK)


def conflict(desk: Desk) -> Iterator[str]:
    token = desk.half()
    desk.decide(token, Decision.COMMIT)
    yield ""
    desk.decide(token, Decision.ROLLBACK)
    yield f"producer shop asked to ROLLBACK transaction {token.hex()}"
    desk.broker.pass_time(101)


def heuristic(desk: Desk) -> Iterator[str]:
    token = desk.half(decider=("home", b"l" * 16, b"t" * 16), check_after=0)
    yield ""
    desk.broker.do(
        DecideByHand(token, Decision.COMMIT, "ada", "the other site burnt down", desk.broker.log.log_id.bytes)
    )
    yield token.hex()
    desk.broker.do(ForgetHeuristics(token, "ada", "rows compared"))


def unreachable(desk: Desk) -> Iterator[str]:
    desk.resolver(failing_s=4)
    yield ""
    desk.resolver(failing_s=6)
    yield "shop, for 0:00:06: connection refused"
    desk.resolver()


def no_resolver(desk: Desk) -> Iterator[str]:
    desk.half()
    desk.oracle.known = False
    client = desk.broker.connect()
    yield ""
    part = Part(b"t" * 16, 0, 0, True, False, bytes(32), Description(("postgres", 1, 1, 5, None)), ())
    part = part._replace(batches=(PartBatch("t", 0, 0, b""),))
    reply = client.ask(Opcode.GROUP, b"".join(pack_part(part._replace(digest=group_digest([part])))))
    assert isinstance(to_error(reply.status, reply.payload), errors.NoResolver)
    yield "no resolver leads"
    desk.broker.pass_time(101)


def cleanup(desk: Desk) -> Iterator[str]:
    desk.resolver(kept_s=199)
    yield ""
    desk.resolver(kept_s=201)
    yield "shop, for 0:03:21: log 7 is silent"
    desk.resolver()


def disk_full(desk: Desk) -> Iterator[str]:
    desk.half()
    desk.broker.fs.capacity = 0
    yield ""
    desk.broker.half(2, Message(bytes(50_000)), wait=False)
    desk.broker.pass_time(1)
    yield "only read"
    desk.broker.fs.capacity = None
    assert desk.broker.log.try_space()
    desk.broker.pass_time(1)


class Handler:
    """A member of an ordered group that has one message."""

    def __init__(self, desk: Desk, **settings: Any) -> None:
        self._desk, self._client, self._numbers = desk, desk.broker.connect(), count(1)
        self.publish()
        options = {"mode": "ordered", "topics": ["t"], "instance": "i", "member": "m"} | settings
        joined: Any = self._client.call("consumer.join", group="billing", **options)
        self._known = {"group": "billing", "member": "m", "generation": joined["generation"]}
        self.fetch()

    def fail(self, **how: Any) -> None:
        self._client.call("consumer.nack", **self._known, topic="t", partition=0, offset=0, **how)

    def publish(self) -> None:
        self._desk.decide(self._desk.half(next(self._numbers)), Decision.COMMIT)

    def fetch(self) -> None:
        wanted = Fetch(self._known["generation"], 0, 1 << 20, 100, "billing", "m")
        self._client.ask(Opcode.FETCH, pack_fetch(wanted))

    def extend(self) -> None:
        self._client.call("consumer.extend", **self._known)

    def abandon(self) -> None:
        args: dict[str, Any] = {"group": "billing", "letters": [["t", 0, 0]], "operator": "ada", "reason": "no use"}
        self._client.call("dlq.abandon", **args)

    def resume(self) -> None:
        self._client.call("group.resume", group="billing", operator="ada")


def slow(desk: Desk) -> Iterator[str]:
    handler = Handler(desk, session_ms=3_600_000)
    yield ""
    for _ in range(29):
        desk.broker.pass_time(30)
        handler.extend()
    desk.broker.pass_time(29)
    desk.broker.pass_time(2)
    yield "member m of group billing has had messages for 0:15:"
    handler.fail()


def full_fence(desk: Desk) -> Iterator[str]:
    handler = Handler(desk, max_parked=0)
    handler.fail(dead=True)
    handler.fetch()
    yield ""
    handler.publish()
    handler.fetch()
    yield "1 partitions stand still, as t/0 for group billing: 0 messages wait"
    handler.abandon()
    handler.fetch()


def flood(desk: Desk) -> Iterator[str]:
    handler = Handler(desk, flood_keys=1)
    yield ""
    handler.fail(error={"type": "OSError", "fingerprint": "f"})
    yield "as billing for 0:00:00: many keys failed alike (OSError, fingerprint f); 0 probes failed"
    handler.resume()


def old_fence(desk: Desk) -> Iterator[str]:
    handler = Handler(desk)
    handler.fail(dead=True)
    desk.broker.pass_time(299)
    yield ""
    desk.broker.pass_time(2)
    yield "a key of group billing has been waiting for 0:05:"
    handler.abandon()


def _used(desk: Desk) -> int:
    space = desk.broker.fs.space("/data")
    return space.size - space.free


def low(desk: Desk) -> Iterator[str]:
    disk = desk.broker.engine.disk
    watch = DiskWatch(desk.broker.fs, "/data", disk, DiskSpace(warn_free_mib=3, resume_free_mib=2, refuse_free_mib=1))
    yield ""
    desk.broker.fs.capacity = _used(desk) + (5 << 19)
    watch.tick()
    yield "only 2 MiB are free"
    desk.broker.fs.capacity = None
    watch.tick()


def damaged(desk: Desk) -> Iterator[str]:
    yield ""
    desk.broker.log.quarantine([Damage("/data/log/1.seg", 64, 128, "checksum mismatch")])
    yield "1 spans of the log cannot be read; /data/log/1.seg, 64: checksum mismatch"
    desk.broker.log.quarantined = ()


def trouble(desk: Desk) -> Iterator[str]:
    yield ""
    desk.broker.engine.disk.troubles["snapshot"] = "no space"
    yield "snapshot: no space"
    desk.broker.engine.disk.troubles.clear()


def passed(desk: Desk) -> Iterator[str]:
    desk.broker.do(CreateTopic("t", 1))
    data = encode([Message(b"m")] * 3, producer_id=b"p" * 16, epoch=0, sequence=0, born_at=1)
    desk.broker.do(Send("t", 0, 0, data, verify(data)))
    desk.broker.do(Join("g", "a", "a", "concurrent", topics=("t",), wanted=Wanted()))
    yield ""
    desk.broker.do(AlterTopic("t", {"retention_us": 1}))
    desk.broker.pass_time(1)
    desk.broker.do(Retain(1, keep_of(desk.broker.engine.state.topics["t"], Keep(0, 0)), desk.broker.log.durable, 0))
    yield "retention took 3 messages that consumer groups had not processed"
    desk.broker.pass_time(101)


def held(desk: Desk) -> Iterator[str]:
    retaining, end = desk.broker.assembly.retaining, desk.broker.log.end
    retaining.free = Free(end - (2 << 30), 0, "topic t")
    yield ""
    retaining.free = Free(end - (2 << 30), 0, TRANSACTIONS)
    yield "2048 MiB of the log are kept because of undecided or waiting transactions"
    retaining.free = Free(end - 1, 0, TRANSACTIONS)


def outbox(desk: Desk) -> Iterator[str]:
    well = ResolverStatus("shop", desk.broker.now(), 0, "", 0, "")
    desk.oracle.is_like = (well,)
    yield ""
    desk.oracle.is_like = (well._replace(stuck_since=desk.broker.now() - 7 * SECOND, stuck="row 3: no topic"),)
    yield "shop, for 0:00:07: row 3: no topic"
    desk.oracle.is_like = (well,)


STORIES = {
    "retention.held": held,
    "outbox.stuck": outbox,
    "disk.trouble": trouble,
    "log.damaged": damaged,
    "disk.low": low,
    "retention.passed_group": passed,
    "disk.full": disk_full,
    "transaction.in_doubt": in_doubt,
    "transaction.oldest_undecided": oldest_undecided,
    "transaction.open": missing_parts,
    "transaction.conflict": conflict,
    "heuristic.mixed": heuristic,
    "resolver.unreachable": unreachable,
    "resolver.missing": no_resolver,
    "fence.full": full_fence,
    "group.guarded": flood,
    "group.slow": slow,
    "fence.old": old_fence,
    "token.cleanup_stuck": cleanup,
}


def test_each_alarm_has_its_story() -> None:
    assert STORIES.keys() == {rule.name for rule in RULES}


@pytest.mark.parametrize("name", STORIES)
def test_an_alarm_is_raised_and_cleared(name: str) -> None:
    desk = Desk()
    story = STORIES[name](desk)
    with capture_logs() as logs:
        assert next(story) == ""
        assert name not in desk.names()
        text = next(story)
        began = desk.broker.now()
        [alarm] = [alarm for alarm in desk.alarms() if alarm["name"] == name]
        assert text in alarm["text"]
        assert began - SECOND <= alarm["since"] <= began
        desk.broker.pass_time(3)
        assert alarm["since"] in [one["since"] for one in desk.alarms() if one["name"] == name]
        next(story, None)
        assert name not in desk.names()
        desk.broker.pass_time(3)
    told = [(log["event"], log["log_level"]) for log in logs if log.get("alarm") == name]
    assert told == [("alarm.raised", "error"), ("alarm.cleared", "info")]


def test_the_critical_ones_come_first() -> None:
    desk = Desk()
    token = desk.half(check_after=0)
    desk.broker.pass_time(70)
    desk.resolver(failing_s=100)
    assert desk.names() == ["resolver.unreachable", "transaction.oldest_undecided"]
    desk.decide(token, Decision.COMMIT)
    desk.resolver()
    assert desk.alarms() == []


TOLD = {"name": "xa.orphan", "severity": "critical", "text": "a branch stands", "action": "txmq xa doctor"}
LAG = TOLD | {"name": "relay.lag", "severity": "warning", "text": "60 s behind"}


def tell(desk: Desk, source: str, *alarms: dict[str, str], for_s: float = 30.0) -> object:
    return desk.broker.connect().call("alarms.report", source=source, alarms=list(alarms), for_s=for_s)


def test_what_others_see_is_listed_until_they_tell_otherwise_or_fall_silent() -> None:
    desk = Desk()
    began = desk.broker.now()
    assert tell(desk, "one", TOLD, LAG) == {}
    desk.broker.pass_time(10)
    tell(desk, "one", TOLD)
    tell(desk, "two", LAG, for_s=100.0)
    [first, second] = desk.alarms()
    assert (first["name"], first["since"], first["text"]) == ("xa.orphan", began, "one: a branch stands")
    assert (second["name"], second["text"]) == ("relay.lag", "two: 60 s behind")
    desk.broker.pass_time(31)
    assert desk.names() == ["relay.lag"]
    tell(desk, "two")
    assert desk.names() == []


def test_so_many_sources_are_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reported, "MOST_SOURCES", 2)
    desk = Desk()
    for source in ("one", "two", "one", "three"):
        told = tell(desk, source, LAG)
        assert (told == {}) == (source != "three")
    assert len(desk.alarms()) == 2
    desk.broker.pass_time(31)
    assert tell(desk, "three", LAG) == {}


@pytest.mark.parametrize("wrong", [{"name": "relay.odd"}, {"severity": "loud"}, {"text": ""}, {"text": "x" * 1_001}])
def test_an_alarm_that_cannot_be_is_refused(wrong: dict[str, str]) -> None:
    desk = Desk()
    assert "error" in dict(tell(desk, "one", TOLD | wrong))  # type: ignore[call-overload]  # a reply in JSON
    assert desk.alarms() == []

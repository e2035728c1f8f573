"""The causes of each alarm: a story yields before the alarm is raised, yields the
alarm's text, and ends with its cause.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred, fail

from tests.broker.monitoring.alarm_desk import STORE, AlarmBroker, Handler
from tests.broker.support import send_payload
from txmq import errors
from txmq.batch import encode, verify
from txmq.broker.checkback.resolvers import ResolverStatus
from txmq.broker.data_directory.retention_service import TRANSACTIONS, FreeLog
from txmq.broker.engine.disk_space import DiskWatch
from txmq.broker.reactor.tls import CertificateEnd
from txmq.config.broker import AlarmSettings, DiskSettings, WebhookSettings
from txmq.core import machine
from txmq.core.consumers.commands import JoinGroup, RequestedSettings
from txmq.core.events.base import LogRestored, RecordContext
from txmq.core.retention.broker_time import NoteTime
from txmq.core.retention.topic_retention import ApplyRetention, RetentionLimits, limits_of
from txmq.core.topics.restored_log import AcceptRestore, NoteBackup
from txmq.core.topics.sends import StoreBatch
from txmq.core.topics.topics import AlterTopic, CreateTopic
from txmq.core.transactions.unverified import CompareDecision, ForceDecision
from txmq.core.transactions.xa import DecideByHand, ForgetHeuristics
from txmq.model.decider import ByHome, ByPostgres
from txmq.model.message import Decision, Message
from txmq.model.units import DAY, HOUR, SECOND
from txmq.store.log.decoder import Damage
from txmq.wire.bundle import BundleDescription, BundlePart, PartBatch, bundle_digest, pack_part
from txmq.wire.data_requests import Opcode
from txmq.wire.frames import encode_frame
from txmq.wire.status import to_error


def answers(desk: AlarmBroker, token: bytes, times: int) -> None:
    for _ in range(times):
        desk.broker.pass_time(11)
        desk.oracle.answer(token, Decision.UNKNOWN, "in progress")


def in_doubt(desk: AlarmBroker) -> Iterator[str]:
    token = desk.half()
    answers(desk, token, 1)
    yield ""
    answers(desk, token, 1)
    yield token.hex()
    desk.decide(token, Decision.COMMIT)


def oldest_undecided(desk: AlarmBroker) -> Iterator[str]:
    token = desk.half(check_after=0)
    desk.broker.pass_time(59)
    yield ""
    desk.broker.pass_time(2)
    yield f"{token.hex()} of service shop has been undecided for 0:01:01"
    desk.decide(token, Decision.ROLLBACK)


def missing_parts(desk: AlarmBroker) -> Iterator[str]:
    token = desk.half(sealed=False)
    desk.broker.pass_time(39)
    yield ""
    desk.broker.pass_time(2)
    yield token.hex()
    desk.decide(token, Decision.ROLLBACK)


def conflict(desk: AlarmBroker) -> Iterator[str]:
    token = desk.half()
    desk.decide(token, Decision.COMMIT)
    yield ""
    desk.decide(token, Decision.ROLLBACK)
    yield f"producer shop asked to ROLLBACK transaction {token.hex()}"
    desk.broker.pass_time(101)


def heuristic(desk: AlarmBroker) -> Iterator[str]:
    token = desk.half(decider=ByHome(b"l" * 16, b"t" * 16), check_after=0)
    yield ""
    desk.broker.do(
        DecideByHand(
            token, Decision.COMMIT, "ada", "the other site burnt down", desk.broker.log.log_id.bytes
        )
    )
    yield token.hex()
    desk.broker.do(ForgetHeuristics(token, "ada", "rows compared"))


def unreachable(desk: AlarmBroker) -> Iterator[str]:
    desk.resolver(failing_s=4)
    yield ""
    desk.resolver(failing_s=6)
    yield "shop, for 0:00:06: connection refused"
    desk.resolver()


def blocked(desk: AlarmBroker) -> Iterator[str]:
    def since(seconds: int) -> int:
        return desk.broker.now() - seconds * SECOND

    for seconds in (4, 6):
        told = ResolverStatus("shop", desk.broker.now(), 0, "", 0, "")
        told = told._replace(blocked_since=since(seconds), blocked="session 7 holds locks")
        desk.oracle.is_like = (told, told._replace(name="other", busy_since=since(seconds)))
        yield "shop, for 0:00:06: session 7 holds locks" if seconds == 6 else ""
    desk.resolver()


def unverified(desk: AlarmBroker) -> Iterator[str]:
    token, log_id = desk.half(), desk.broker.log.log_id.bytes
    yield ""
    forced = DecideByHand(token, Decision.ROLLBACK, "ada", "the disk is lost", log_id)
    desk.broker.do(ForceDecision(forced))
    yield f"transactions decided by hand without their database: 1, the oldest is {token.hex()}"
    desk.broker.do(CompareDecision(token, Decision.ROLLBACK, "resolver shop", ""))


def no_resolver(desk: AlarmBroker) -> Iterator[str]:
    desk.half()
    desk.oracle.known = False
    client = desk.broker.connect()
    yield ""
    part = BundlePart(
        b"t" * 16, 0, 0, True, False, bytes(32), BundleDescription(ByPostgres(1, 1, 5, None, 1)), ()
    )
    part = part._replace(batches=(PartBatch("t", 0, 0, b""),))
    reply = client.ask(
        Opcode.GROUP, b"".join(pack_part(part._replace(digest=bundle_digest([part]))))
    )
    assert isinstance(to_error(reply.status, reply.payload), errors.NoResolver)
    yield "no resolver leads"
    desk.broker.pass_time(101)


def cleanup(desk: AlarmBroker) -> Iterator[str]:
    desk.resolver(kept_s=199)
    yield ""
    desk.resolver(kept_s=201)
    yield "shop, for 0:03:21: log 7 is silent"
    desk.resolver()


def disk_full(desk: AlarmBroker) -> Iterator[str]:
    desk.half()
    desk.broker.fs.capacity = 0
    yield ""
    desk.broker.half(2, Message(bytes(50_000)), wait=False)
    desk.broker.pass_time(1)
    yield "only read"
    desk.broker.fs.capacity = None
    assert desk.broker.log.try_space()
    desk.broker.pass_time(1)


def slow(desk: AlarmBroker) -> Iterator[str]:
    handler = Handler(desk, session_ms=3_600_000)
    yield ""
    for _ in range(29):
        desk.broker.pass_time(30)
        handler.extend()
    desk.broker.pass_time(29)
    desk.broker.pass_time(2)
    yield "member m of group billing has had messages for 0:15:"
    handler.fail()


def full_fence(desk: AlarmBroker) -> Iterator[str]:
    handler = Handler(desk, max_parked=0)
    handler.fail(dead=True)
    handler.fetch()
    yield ""
    handler.publish()
    handler.fetch()
    yield "partitions that stand still: 1, as t/0 for group billing: 0 messages parked"
    handler.abandon()
    handler.fetch()


def flood(desk: AlarmBroker) -> Iterator[str]:
    handler = Handler(desk, flood_keys=1)
    yield ""
    handler.fail(error={"type": "OSError", "fingerprint": "f"})
    yield (
        "the circuit breaker of group billing has been open for 0:00:00: many keys failed alike "
        "(OSError, fingerprint f); 0 probes failed"
    )
    handler.resume()


def paused_plan(desk: AlarmBroker) -> Iterator[str]:
    handler = Handler(desk)
    handler.fail(dead=True)
    handler.plan("create", group="billing", select={}, settings={"start": True})
    desk.broker.pass_time(1)
    yield ""
    handler.plan("pause")
    yield "paused replay plans: 1, as p of group billing for 0:00:00: by an operator"
    handler.plan("cancel")


def waiting_plan(desk: AlarmBroker) -> Iterator[str]:
    handler = Handler(desk)
    handler.fail(dead=True)
    yield ""
    handler.plan("create", group="billing", select={}, settings={"second_approver": True})
    desk.broker.pass_time(1)
    yield "for an approval: 1, as p of group billing for 0:00:00: 1 letter, made by ada"
    handler.plan("approve", operator="bob")


def differing_filters(desk: AlarmBroker) -> Iterator[str]:
    desk.broker.do(CreateTopic("orders", 1))
    desk.broker.do(CreateTopic("others", 1))
    client = desk.broker.connect()

    def join(member: str, topic: str, wanted: str = "", group: str = "billing") -> None:
        joined: Any = client.call(
            "consumer.join", group=group, topics=[topic], instance="i", member=member,
            session_ms=3_600_000, filter=wanted,
        )  # fmt: skip
        assert "error" not in joined

    join("m", "orders", "tags 'paid'")
    join("n", "orders", "tags 'paid'")
    join("o", "others", "tags 'new'")
    join("m", "orders", group="audit")
    yield ""
    join("n", "orders")
    yield (
        "members of group billing take different messages of topic orders: m tags 'paid', "
        "n everything"
    )
    join("m", "orders")


def dead_letters(desk: AlarmBroker) -> Iterator[str]:
    handler = Handler(desk)
    yield ""
    handler.fail(dead=True, error={"type": "KeyError", "fingerprint": "f1"})
    yield (
        "open dead letters of group billing: 1, by error: KeyError f1 (1); "
        "keys that stand behind letters or retries: 1, as t/0/0"
    )
    handler.abandon()


def no_receiver(desk: AlarmBroker) -> Iterator[str]:
    delivery = desk.broker.assembly.alarms.delivery
    settings = AlarmSettings(webhook=(WebhookSettings(name="oncall", url="http://h"),))
    delivery.use(settings)
    delivery.in_thread = lambda *_call: fail(ConnectionRefusedError("refused"))
    handler = Handler(desk)
    handler.fail(dead=True)
    desk.broker.pass_time(2)
    yield ""
    desk.broker.pass_time(29.5)
    yield "receiver oncall has not taken alarms for "
    delivery.use(AlarmSettings())


def old_fence(desk: AlarmBroker) -> Iterator[str]:
    handler = Handler(desk)
    handler.fail(dead=True)
    desk.broker.pass_time(299)
    yield ""
    desk.broker.pass_time(2)
    yield "keys of group billing that stand, their later messages parked: 1, one for 0:05:"
    handler.abandon()


def old_store(desk: AlarmBroker) -> Iterator[str]:
    handler = Handler(desk, session_ms=3_600_000)
    handler.store()
    desk.broker.pass_time(199)
    yield ""
    desk.broker.pass_time(2)
    yield f"a message has been failing in local store {STORE} of group billing for 0:03:"
    handler.store("acked")


def lost_store(desk: AlarmBroker) -> Iterator[str]:
    handler = Handler(desk)
    handler.store()
    handler.leave()
    desk.broker.pass_time(59)
    yield ""
    desk.broker.pass_time(2)
    yield (
        f"local stores of group billing without an owner: 1, with 1 message, as {STORE} for 0:01:"
    )
    desk.broker.ask("recover.adopt", group="billing", store=STORE)


def no_member(desk: AlarmBroker) -> Iterator[str]:
    handler = Handler(desk)
    handler.fail(dead=True)  # a dead letter waits for no member
    handler.leave()
    desk.broker.pass_time(6)
    desk.broker.pass_time(200)
    handler.publish()
    desk.broker.pass_time(6)  # to the next sample
    desk.broker.pass_time(119)
    yield ""
    desk.broker.pass_time(2)
    yield "group billing has had no member for 0:02:0"
    Handler(desk)


def _used(desk: AlarmBroker) -> int:
    space = desk.broker.fs.space("/data")
    return space.size - space.free


def low(desk: AlarmBroker) -> Iterator[str]:
    disk = desk.broker.engine.disk
    watch = DiskWatch(
        desk.broker.fs,
        "/data",
        disk,
        DiskSettings(warn_free_mib=3, resume_free_mib=2, refuse_free_mib=1),
    )
    yield ""
    desk.broker.fs.capacity = _used(desk) + (5 << 19)
    watch.tick()
    yield "only 2 MiB are free"
    desk.broker.fs.capacity = None
    watch.tick()


def damaged(desk: AlarmBroker) -> Iterator[str]:
    yield ""
    desk.broker.log.quarantine([Damage("/data/log/1.seg", 64, 128, "checksum mismatch")])
    yield "spans of the log that cannot be read: 1, as /data/log/1.seg, 64: checksum mismatch"
    desk.broker.log.quarantined = ()


def trouble(desk: AlarmBroker) -> Iterator[str]:
    yield ""
    desk.broker.engine.disk.troubles["snapshot"] = "no space"
    yield "snapshot: no space"
    desk.broker.engine.disk.troubles.clear()


def passed(desk: AlarmBroker) -> Iterator[str]:
    desk.broker.do(CreateTopic("t", 1))
    data = encode([Message(b"m")] * 3, producer_id=b"p" * 16, epoch=0, sequence=0, born_at=1)
    desk.broker.do(StoreBatch("t", 0, 0, data, verify(data)))
    desk.broker.do(
        JoinGroup("g", "a", "a", "concurrent", topics=("t",), wanted=RequestedSettings())
    )
    yield ""
    desk.broker.do(AlterTopic("t", {"retention_us": 1}))
    desk.broker.pass_time(1)
    desk.broker.do(
        ApplyRetention(
            1,
            limits_of(desk.broker.engine.state.topics["t"], RetentionLimits(0, 0)),
            desk.broker.log.durable,
            0,
        )
    )
    yield "retention took 3 messages that consumer groups had not processed"
    desk.broker.pass_time(101)


def held(desk: AlarmBroker) -> Iterator[str]:
    retaining, end = desk.broker.assembly.retention, desk.broker.log.end
    retaining.free = FreeLog(end - (2 << 30), 0, "topic t")
    yield ""
    retaining.free = FreeLog(end - (2 << 30), 0, TRANSACTIONS)
    yield "2048 MiB of the log are kept because of undecided or waiting transactions"
    retaining.free = FreeLog(end - 1, 0, TRANSACTIONS)


def outbox(desk: AlarmBroker) -> Iterator[str]:
    well = ResolverStatus("shop", desk.broker.now(), 0, "", 0, "")
    desk.oracle.is_like = (well,)
    yield ""
    desk.oracle.is_like = (
        well._replace(
            outbox_stuck_since=desk.broker.now() - 7 * SECOND, outbox_error="row 3: no topic"
        ),
    )
    yield "shop, for 0:00:07: row 3: no topic"
    desk.oracle.is_like = (well,)


def jumped(desk: AlarmBroker) -> Iterator[str]:
    yield ""
    desk.broker.wall_wrong = 30 * DAY
    yield "the machine's clock is 30 days, 0:00:00 ahead of the time that has passed"
    desk.broker.wall_wrong = 0


def doubted(desk: AlarmBroker) -> Iterator[str]:
    desk.broker.do(NoteTime(DAY - SECOND))
    yield ""
    desk.broker.do(NoteTime(3 * DAY))
    yield "the broker's time may be 3 days, 0:00:00 ahead: retention and expiry wait"
    desk.broker.ask("clock.confirm", operator="ada", reason="it was down")


def differs(desk: AlarmBroker) -> Iterator[str]:
    well = ResolverStatus("shop", desk.broker.now(), 0, "", 0, "", time=desk.broker.now())
    desk.oracle.is_like = (well,)
    yield ""
    desk.oracle.is_like = (well._replace(time=desk.broker.now() + HOUR),)
    yield "clocks of databases differ from the broker's time: shop by 1:00:00"
    desk.oracle.is_like = (well,)


def fault(desk: AlarmBroker) -> Iterator[str]:
    yield ""
    desk.broker.engine.faults.record("retention", KeyError("topic 7"))
    yield "internal errors since the start: 1, the last in retention: KeyError: 'topic 7'"
    desk.broker.pass_time(3_601)


def rebuilt(desk: AlarmBroker) -> Iterator[str]:
    yield ""
    desk.broker.engine.faults.note_rebuilt("unreadable: page 7 is used twice")
    yield "the index was made anew 0:00:00 ago: unreadable: page 7 is used twice"
    desk.broker.pass_time(3_601)


def silent(desk: AlarmBroker) -> Iterator[str]:
    """A write that hangs in its thread; two replies wait, so it is made in one."""
    hanging = Deferred[None]()
    desk.broker.hanging = hanging
    for name in ("a", "b"):
        desk.broker.engine.submit(CreateTopic(name, 1), lambda _reply: None)
    desk.broker.pass_time(9)
    yield ""
    desk.broker.pass_time(2)
    yield "replies have waited for the disk for 11 s"
    hanging.callback(None)


def behind(desk: AlarmBroker) -> Iterator[str]:
    """Sends that wait for a write that hangs."""
    hanging = desk.broker.hanging = Deferred[None]()
    for name in ("a", "b"):
        desk.broker.engine.submit(CreateTopic(name, 1), lambda _reply: None)
    desk.broker.engine.budget.bytes = 1
    desk.broker.clock.advance(0)
    client = desk.broker.connect()
    client.send(encode_frame(Opcode.SEND, 1, send_payload(topic="a")))
    desk.broker.pass_time(9)
    yield ""
    desk.broker.pass_time(2)
    yield "sends have been waiting for the disk for 11 s"
    hanging.callback(None)
    desk.broker.hanging = None
    desk.broker.pass_time(1)


def refused(desk: AlarmBroker) -> Iterator[str]:
    well = ResolverStatus("shop", desk.broker.now(), 0, "", 0, "")
    desk.oracle.is_like = (well,)
    yield ""
    desk.oracle.is_like = (well._replace(refusal="data directory 7 works on this database"),)
    yield "shop: data directory 7 works on this database"
    desk.oracle.is_like = (well,)


def restored(desk: AlarmBroker) -> Iterator[str]:
    engine = desk.broker.engine
    yield ""
    event = LogRestored(b"i" * 16, engine.now() - 60 * SECOND, SECOND, engine.state.boot_epoch)
    machine.apply(engine.state, event, RecordContext(77, 77, 77, engine.now(), 1))
    yield "restored from a backup 0:01:00 ago, to position 77 and the state of 1970-01-01T00:00:01Z"
    desk.broker.do(AcceptRestore("ada", "the test"))


def silent_node(desk: AlarmBroker) -> Iterator[str]:
    node, [follower] = desk.node, desk.node.others
    yield ""
    node.others = [follower, follower._replace(name="n3", role="silent", heard_s=100.0)]
    yield "n3 at 127.0.0.1:7652 was not heard of for 100 s"
    node.others = [follower, follower._replace(name="n3", role="left", heard_s=100.0)]


def late_node(desk: AlarmBroker) -> Iterator[str]:
    node, [follower] = desk.node, desk.node.others
    node.others = [follower._replace(lag_s=30.0)]
    yield ""
    node.others = [follower._replace(lag_s=31.0, lag_bytes=5 << 20)]
    yield "n2 has read the log up to 31 s ago, and lacks 5 MiB"
    node.others = [follower]


def lonely_node(desk: AlarmBroker) -> Iterator[str]:
    node, [follower] = desk.node, desk.node.others
    yield ""
    node.others = [follower._replace(role="left")]
    yield "no other node follows the log"
    node.others = [follower]


def old_backup(desk: AlarmBroker) -> Iterator[str]:
    yield ""
    desk.broker.do(NoteBackup(desk.broker.now() - 36 * HOUR - SECOND))
    yield "the newest backup of the log is 1 day, 12:00:01 old"
    desk.broker.do(NoteBackup(desk.broker.now()))


class Certificates:
    """Those of a broker, whose end a test sets."""

    def __init__(self, desk: AlarmBroker) -> None:
        self.desk, self.trouble = desk, ""
        self.at = desk.broker.now() + 15 * DAY
        service: Any = desk.broker.assembly.alarms
        service.certificates = self

    def ends(self) -> list[CertificateEnd]:
        return [CertificateEnd("cert", Path("/etc/txmq/broker.pem"), self.at, self.trouble)]


def ending_certificate(desk: AlarmBroker) -> Iterator[str]:
    certificates = Certificates(desk)
    yield ""
    certificates.at, certificates.trouble = desk.broker.now() + 13 * DAY, "this is no key"
    yield (
        "the broker's certificate /etc/txmq/broker.pem ends in 13 days, 0:00:00; its new file is "
        "not used: this is no key"
    )
    certificates.at, certificates.trouble = desk.broker.now() + 90 * DAY, ""


STORIES = {
    "cluster.node_silent": silent_node,
    "cluster.node_behind": late_node,
    "cluster.no_follower": lonely_node,
    "log.restored": restored,
    "log.backup_old": old_backup,
    "certificate.ends": ending_certificate,
    "resolver.refused": refused,
    "clock.jumped": jumped,
    "clock.doubted": doubted,
    "clock.differs": differs,
    "broker.fault": fault,
    "index.rebuilt": rebuilt,
    "broker.silent": silent,
    "retention.held": held,
    "outbox.stuck": outbox,
    "disk.trouble": trouble,
    "log.damaged": damaged,
    "disk.low": low,
    "disk.behind": behind,
    "retention.passed_group": passed,
    "disk.full": disk_full,
    "transaction.in_doubt": in_doubt,
    "transaction.oldest_undecided": oldest_undecided,
    "transaction.open": missing_parts,
    "transaction.conflict": conflict,
    "heuristic.mixed": heuristic,
    "resolver.unreachable": unreachable,
    "transaction.unverified": unverified,
    "resolver.blocked": blocked,
    "resolver.missing": no_resolver,
    "fence.full": full_fence,
    "group.guarded": flood,
    "group.slow": slow,
    "group.filters_differ": differing_filters,
    "group.letters": dead_letters,
    "alarms.undelivered": no_receiver,
    "fence.old": old_fence,
    "plan.paused": paused_plan,
    "plan.waiting": waiting_plan,
    "store.old": old_store,
    "store.no_owner": lost_store,
    "group.no_member": no_member,
    "token.cleanup_stuck": cleanup,
}

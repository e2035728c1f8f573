"""Hostile input at a real broker, by the numbers of docs/FAULTS.md, section 4. In each
test the witness, another client, has all its requests answered beside the attack.
"""

from __future__ import annotations

import os
import pickle
import resource
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from random import Random

import pytest

from tests.cli.peer import peer
from tests.system.stranger import (
    HELLO,
    PING,
    AttackedBroker,
    Stranger,
    batch,
    half,
    hello,
    refusal,
    send_of,
)
from txmq.client.protocol.transaction.tokens import new_token
from txmq.model import limits
from txmq.model.decider import ByPostgres
from txmq.model.message import COMMIT, ROLLBACK
from txmq.testing.wait import PATIENCE_S
from txmq.wire.calls.encoding import encode_call
from txmq.wire.data_requests import (
    Ack,
    AckedRange,
    Decide,
    Fetch,
    Opcode,
    Read,
    pack_ack,
    pack_decide,
    pack_fetch,
    pack_read,
)
from txmq.wire.frames import FIELDS, HEADER, MIN_LENGTH, encode_frame
from txmq.wire.json import dump
from txmq.wire.status import to_error

SECRET = b"a-word-that-nobody-may-see"
FORGED = 'x\n{"event":"forged","level":"error"}\x1b[2J'
CPU_S = 10.0  # of the broker, in one test: 10,000 connections are the dearest


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedBroker]:
    attacked = AttackedBroker(tmp_path_factory.mktemp("attacked"))
    ends(attacked.connect(), b"no frame, so that the log has something to look for\n")
    yield attacked
    attacked.close()
    events = {line["event"] for line in attacked.lines()}
    assert "session.protocol_error" in events, "else nobody has looked at the log"
    assert not events & {"forged", "broker.fault", "session.failed"}
    log = attacked.broker.log
    assert SECRET.decode() not in log
    assert "Traceback" not in log
    assert "\x1b" not in log


@pytest.fixture(autouse=True)
def _unharmed(attacked: AttackedBroker) -> Iterator[None]:
    with attacked.unharmed(CPU_S):
        yield


def ends(stranger: Stranger, data: bytes, error: str = "BadRequest") -> None:
    """Send what must end the connection, with an error at most."""
    stranger.send(data)
    answers = [answer for answer in stranger.rest() if answer.status]
    assert {refusal(to_error(one.status, one.payload)) for one in answers} <= {error}


def length(number: int) -> bytes:
    return struct.pack("<I", number) + SECRET * 4


# frames


@pytest.mark.parametrize("number", [0xFFFFFFFF, 0, 1, MIN_LENGTH - 1, 0x80000000, limits.FRAME + 1])
def test_hostile_01_02_03_04_a_length_that_no_frame_has(
    attacked: AttackedBroker, number: int
) -> None:
    ends(attacked.connect(), length(number))
    ends(attacked.greeted(), length(number))


def test_hostile_03_a_frame_at_the_limit_is_taken_whole(attacked: AttackedBroker) -> None:
    stranger = attacked.greeted()
    for size in (limits.FRAME - 1, limits.FRAME):
        answer = stranger.ask(Opcode.SEND, bytes(size - MIN_LENGTH))
        assert refusal(answer) == "BadRequest"


def test_hostile_05_06_a_length_and_then_silence(attacked: AttackedBroker) -> None:
    for _ in range(50):
        attacked.greeted().send(struct.pack("<I", limits.FRAME) + bytes(100))
        attacked.connect().send(b"\x20")


def test_hostile_07_a_request_byte_by_byte(attacked: AttackedBroker) -> None:
    stranger = attacked.greeted()
    frame = encode_frame(Opcode.SEND, 7, send_of(batch(bytes(4_000))))
    for at in range(len(frame)):
        stranger.socket.send(frame[at : at + 1])
    assert stranger.next().status == 0


def test_hostile_08_ten_thousand_empty_frames(attacked: AttackedBroker) -> None:
    stranger = attacked.greeted()
    for _ in range(10):
        stranger.send(PING * 1_000)
        assert [stranger.next().status for _ in range(1_000)] == [0] * 1_000


def test_hostile_09_requests_whose_replies_nobody_reads(attacked: AttackedBroker) -> None:
    stranger = attacked.greeted()
    stranger.socket.setblocking(False)
    call = encode_frame(Opcode.CALL, 3, encode_call("broker.settings", {}))
    with suppress(BlockingIOError):
        for _ in range(1_000):
            stranger.socket.sendall(call * 100)
        raise AssertionError("somebody keeps 100,000 requests")


def test_hostile_10_a_member_that_never_reads(attacked: AttackedBroker) -> None:
    stranger = attacked.greeted()
    for number in range(20):
        data = batch(bytes(1 << 20), sequence=number, producer=b"q" * 16)
        stranger.ask(Opcode.SEND, send_of(data))
    joined = stranger.call("consumer.join", group="hot", topics=["t"], member="m", instance="i",
                           start="first")  # fmt: skip
    fetch = Fetch(joined["generation"], 60_000, limits.FRAME, 10_000, "hot", joined["member"])
    read = encode_frame(Opcode.READ, 9, pack_read(Read(0, 0, 0, 2**32 - 1, "t")))
    stranger.send((encode_frame(Opcode.FETCH, 8, pack_fetch(fetch)) + read) * 500)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        Random(1).randbytes(5_000),
        b"\x00" * 5_000,
        b"\xff" * 5_000,
        SECRET * 100,
    ],
    ids=["11 http", "12 tls", "13 random", "13 zeros", "13 ones", "13 text"],
)
def test_hostile_11_12_13_another_protocol(attacked: AttackedBroker, data: bytes) -> None:
    ends(attacked.connect(), data)
    ends(attacked.greeted(), data)


def test_hostile_14_a_bit_flipped_at_every_position(attacked: AttackedBroker) -> None:
    for bit in range(len(PING) * 8):
        flipped = bytearray(PING)
        flipped[bit // 8] ^= 1 << bit % 8
        stranger = attacked.greeted()
        stranger.send(bytes(flipped))
        stranger.socket.shutdown(socket.SHUT_WR)
        assert all(answer.status for answer in stranger.rest()), bit


def test_hostile_15_a_frame_that_ends_early(attacked: AttackedBroker) -> None:
    for end in range(len(HELLO)):
        stranger = attacked.connect()
        stranger.send(HELLO[:end])
        stranger.socket.shutdown(socket.SHUT_WR)
        assert stranger.rest() == []


def test_hostile_16_an_unknown_version_opcode_or_flag(attacked: AttackedBroker) -> None:
    ends(attacked.connect(), encode_frame(Opcode.HELLO, 1, hello().replace(b"[1,1]", b"[9,9]")))
    stranger = attacked.greeted()
    for opcode in {*range(256)} - {*Opcode}:
        assert refusal(stranger.ask(opcode, SECRET)) == "BadRequest"
    flagged = struct.pack("<HHIB", 1, 0, 0, 1) + b"t" + batch()
    assert refusal(stranger.ask(Opcode.SEND, flagged)) == "BadRequest"
    other = bytearray(PING)
    other[HEADER.size - FIELDS.size] = 2
    ends(stranger, bytes(other))


def test_hostile_17_two_requests_with_one_correlation_id(attacked: AttackedBroker) -> None:
    stranger = attacked.greeted()
    read = encode_frame(Opcode.READ, 2, pack_read(Read(0, 0, 0, 100, "t")))
    stranger.send(PING + read + PING)
    answers = [stranger.next() for _ in range(3)]
    assert sorted(one.opcode for one in answers) == [Opcode.PING, Opcode.PING, Opcode.READ]
    assert {one.correlation for one in answers} == {2}


def test_hostile_18_a_reply_sent_to_the_broker(attacked: AttackedBroker) -> None:
    for frame in (
        encode_frame(Opcode.PING, 2, status=7),
        encode_frame(Opcode.SEND, 2, bytes(17), status=1),
    ):
        stranger = attacked.greeted()
        stranger.send(frame)
        answer = stranger.next()
        assert refusal(to_error(answer.status, answer.payload)) == "BadRequest"
    ends(attacked.connect(), encode_frame(Opcode.HELLO, 1, hello(), status=3))


@pytest.mark.parametrize("number", [3_000, pytest.param(10_000, marks=pytest.mark.soak)])
def test_hostile_19_very_many_connections_without_a_login(
    attacked: AttackedBroker, number: int
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard > number + 500, "ulimit -Hn is too low for this test"
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        for _ in range(number):
            attacked.open.append(socket.create_connection(attacked.address, PATIENCE_S))
        attacked.witness_is_served()
    finally:
        for one in attacked.open:
            one.close()
        attacked.open.clear()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("number", [1_000, pytest.param(10_000, marks=pytest.mark.soak)])
def test_hostile_20_connections_opened_and_closed(attacked: AttackedBroker, number: int) -> None:
    for _ in range(number):
        socket.create_connection(attacked.address, PATIENCE_S).close()


def test_hostile_21_a_reset_after_each_request(attacked: AttackedBroker) -> None:
    for number in range(300):
        stranger = Stranger(attacked.address)
        stranger.send(HELLO + PING + encode_frame(Opcode.SEND, 3, send_of(batch(sequence=number))))
        stranger.reset()


def test_hostile_22_a_half_closed_connection_that_still_reads(attacked: AttackedBroker) -> None:
    stranger = attacked.greeted()
    stranger.send(PING * 100)
    stranger.socket.shutdown(socket.SHUT_WR)
    assert len(stranger.rest()) <= 100


# login; with users and TLS: test_security.py


@pytest.mark.parametrize("opcode", [opcode for opcode in Opcode if opcode != Opcode.HELLO])
def test_hostile_23_a_request_before_the_greeting(attacked: AttackedBroker, opcode: int) -> None:
    ends(attacked.connect(), encode_frame(opcode, 1, SECRET))


@pytest.mark.parametrize("field", ["client", "service", "instance", "process"])
def test_hostile_78_a_greeting_that_forges_a_line(attacked: AttackedBroker, field: str) -> None:
    fields = {"versions": [1, 1], "client": "c", "service": "s", field: FORGED}
    ends(attacked.connect(), encode_frame(Opcode.HELLO, 1, dump(fields)))


# names

NAMES = {
    "30": ["../../etc/passwd"],
    "31": ["/abs"],
    "32": ["..", ".", ""],
    "33": ["a/../b", "a\\..\\b", "%2e%2e%2f"],
    "34": ["a\0b", "\0"],
    "35": ["n" * 128, "n" * 255, "n" * 256, "n" * 65_536],
    "36": ["a\nb", FORGED, "\x1b[31mred"],
    "37": ["\uff41dmin", "\u212a", "a\u202eb"],
    "38": ["a ", "con "],
    "39": ["%RETRY%g", "%DLQ%g"],
    "41": ["*", "(a+)+$", "n" * 1_000_000],
    "42": ["'; drop table txmq_token;--"],
    "75": ["<script>alert(1)</script>"],
}


@pytest.mark.parametrize("number", NAMES)
def test_hostile_30_to_42_names_that_are_none(attacked: AttackedBroker, number: str) -> None:
    stranger = attacked.greeted()
    for name in NAMES[number]:
        assert stranger.refused("topic.create", name=name, partitions=1) == "BadRequest"
        assert stranger.refused("consumer.join", group=name, topics=["t"], instance="i")
        assert stranger.refused("group.clone", group="g", to=name)
        assert stranger.refused("plan.create", group="g", name=name)
        assert stranger.refused("user.set", name=name, roles=["admin"], new=True)
        assert stranger.refused("producer.register", service=name, instance="i")
        assert stranger.refused("log.hold", hold=name, position=0)
        raw = name.encode()[:255]
        header = struct.pack("<HHIB", 0, 0, 0, len(raw)) + raw
        assert refusal(stranger.ask(Opcode.SEND, header + batch())) == "BadRequest"


def test_hostile_38_39_40_names_that_are_only_names(attacked: AttackedBroker) -> None:
    stranger = attacked.greeted()
    for name in ("CON", "nul", "a.", "Orders", "orders"):
        assert stranger.call("topic.create", name=name, partitions=1)["name"] == name
    sent = send_of(batch(SECRET, producer=b"c" * 16), "Orders")
    assert isinstance(stranger.ask(Opcode.SEND, sent), bytes)
    assert SECRET in stranger.ask(Opcode.READ, pack_read(Read(0, 0, 0, 1_000, "Orders")))
    assert SECRET not in stranger.ask(Opcode.READ, pack_read(Read(0, 0, 0, 1_000, "orders")))


def test_hostile_43_partitions_are_bounded(attacked: AttackedBroker) -> None:
    stranger = attacked.greeted()
    for number in (0, -1, 4_097, 1_000_000, 2**31, 2**63, 10**30):
        assert stranger.refused("topic.create", name="wide", partitions=number) == "BadRequest"


# payloads

JSON = [
    b"[" * 100_000,
    b'{"call":' * 50_000,
    b'{"call":"topic.list","args":{"limit":' + b"9" * 5_000 + b"}}",
    b'{"call":"topic.list","args":{"limit":NaN}}',
    b'{"call":"topic.list","args":{"limit":1e999}}',
    b'{"call":"topic.list","args":{"limit":1,"limit":2}}',
    b'{"call":"topic.show","args":{"name":"\\ud800"}}',
    b'{"call":"topic.show","args":{"name":"\xff"}}',
    b'\xef\xbb\xbf{"call":"topic.list","args":{}}',
    b'{"call":"topic.list","args":{"__class__":"os.system"}}',
    b'{"call":"topic.list","args":{},"more":' + b'"%s"}' % SECRET,
    b'{"call":["topic.list"],"args":{}}',
    b"null",
    b"",
]


def test_hostile_45_json_that_parsers_read_differently(attacked: AttackedBroker) -> None:
    stranger = attacked.greeted()
    for payload in JSON:
        assert refusal(stranger.ask(Opcode.CALL, payload)) == "BadRequest"


def test_hostile_44_46_47_51_batches_that_lie(attacked: AttackedBroker) -> None:
    stranger, good, random = attacked.greeted(), batch(SECRET * 20), Random(2)
    lies = [good[:end] for end in range(0, len(good), 7)]
    lies += [good + b"x", good + good, b""]
    for _ in range(300):
        flipped = bytearray(good)
        flipped[random.randrange(len(good))] ^= 1 << random.randrange(8)
        lies.append(bytes(flipped))
    for lie in lies:
        assert isinstance(refusal(stranger.ask(Opcode.SEND, send_of(lie))), str)


@pytest.mark.parametrize("number", [-1, 10**18, 2**63, 2**64])
def test_hostile_47_times_that_are_none(attacked: AttackedBroker, number: int) -> None:
    stranger = attacked.greeted()
    assert stranger.refused("message.find", topic="t", start=number, end=-number)
    assert stranger.refused("topic.create", name="times", partitions=1, retention_ms=-abs(number))
    assert stranger.refused("consumer.nack", group="g", member="m", generation=1, topic="t",
                            partition=0, offset=0, delay_ms=number)  # fmt: skip


def test_hostile_49_a_body_stays_opaque(attacked: AttackedBroker) -> None:
    stranger = attacked.greeted()
    stranger.call("topic.create", name="opaque", partitions=1)
    bodies = [pickle.dumps(os.getcwd), b"!!python/object/apply:os.system [id]", b"\xc7\x01\x05x"]
    for sequence, body in enumerate(bodies):
        data = batch(body, sequence=sequence, producer=b"o" * 16)
        assert isinstance(stranger.ask(Opcode.SEND, send_of(data, "opaque")), bytes)
    read = stranger.ask(Opcode.READ, pack_read(Read(0, 0, 0, 100_000, "opaque")))
    assert all(body in read for body in bodies)


def test_hostile_82_a_schema_that_takes_for_ever(attacked: AttackedBroker) -> None:
    stranger = attacked.greeted()
    for schema in (
        '{"$ref": "#"}',
        '{"$ref": "http://127.0.0.1:1/x"}',
        '{"pattern": "(a+)+$"}',
        "{" * 100_000,
        '{"allOf": [' + ",".join(['{"$ref": "#/$defs/a"}'] * 5_000) + "]}",
    ):
        stranger.call("topic.schema", name="t", json_schema=schema)
    stranger.call("topic.schema", name="t", json_schema=None)


# transactions


def decide(token: bytes, outcome: object = COMMIT, epoch: int = 0) -> bytes:
    return pack_decide(Decide(outcome, token, epoch, "stranger"))  # type: ignore[arg-type]


def test_hostile_53_54_decisions_that_are_none(attacked: AttackedBroker) -> None:
    stranger = attacked.greeted()
    unknown = refusal(stranger.ask(Opcode.DECIDE, decide(new_token().bytes)))
    assert unknown == "UnknownTransaction"
    for first, second in ((COMMIT, ROLLBACK), (ROLLBACK, COMMIT)):
        token = new_token().bytes
        assert isinstance(stranger.ask(Opcode.GROUP, half(token)), bytes)
        assert isinstance(stranger.ask(Opcode.DECIDE, decide(token, first)), bytes)
        assert refusal(stranger.ask(Opcode.DECIDE, decide(token, second))) == "Conflict"
    for outcome in (0, 3, 255):
        assert refusal(stranger.ask(Opcode.DECIDE, decide(new_token().bytes, outcome)))


@pytest.mark.parametrize("token", [-1, 0, 3, "0x10", 2**64, "zz", "f" * 32, "", SECRET.decode()])
def test_hostile_56_a_transaction_s_name_that_is_none(
    attacked: AttackedBroker, token: object
) -> None:
    stranger = attacked.greeted()
    for name, args in (
        ("tx.show", {}),
        ("tx.decide", {"outcome": "commit", "operator": "eve", "reason": "r"}),
        ("tx.check", {}),
        ("job.show", {}),
        ("xa.outcome", {"log_id": "x", "by": "eve"}),
        ("checks.answer", {"answer": "commit"}),
    ):
        answer = stranger.call(name, token=token, **args)
        assert isinstance(answer, Exception) or not answer.get("outcome"), (name, answer)


def test_hostile_57_a_database_that_nobody_configured(attacked: AttackedBroker) -> None:
    stranger = attacked.greeted()
    forged = half(new_token().bytes, decider=ByPostgres(2**63 - 1, 1, 5, 7, 1))
    assert refusal(stranger.ask(Opcode.GROUP, forged)) == "NoResolver"


def test_hostile_58_an_answer_that_nobody_asked_for(attacked: AttackedBroker) -> None:
    token = new_token()
    attacked.greeted().ask(Opcode.GROUP, half(token.bytes))
    other = attacked.connect()
    other.send(encode_frame(Opcode.HELLO, 1, hello().replace(b'"s"', b'"another"')))
    assert other.next().status == 0
    assert other.refused("checks.answer", token=token.hex, answer="commit")
    assert other.refused("checks.answer", token=new_token().hex, answer="rollback")


@pytest.mark.parametrize("gtrid", ["x" * 200, "'; drop table t;--", "", "7478", "zz", FORGED])
def test_hostile_59_names_of_branches(attacked: AttackedBroker, gtrid: str) -> None:
    answer = attacked.greeted().call("xa.find", format=2**31, gtrid=gtrid, bqual=gtrid)
    assert isinstance(answer, Exception) or not answer.get("token")


def test_hostile_60_epochs_that_go_back_or_beyond(attacked: AttackedBroker) -> None:
    stranger, token = attacked.greeted(), new_token().bytes
    assert isinstance(stranger.ask(Opcode.GROUP, half(token, epoch=2**32 - 1)), bytes)
    assert refusal(stranger.ask(Opcode.GROUP, half(token, b"other", epoch=0)))
    for epoch in (-1, 2**32, 2**63):
        producer = "ab" * 16
        assert stranger.refused("producer.skip", producer=producer, epoch=epoch, sequence=1)


def test_hostile_61_one_token_from_two_producers(attacked: AttackedBroker) -> None:
    token = new_token().bytes
    assert isinstance(attacked.greeted().ask(Opcode.GROUP, half(token, b"mine")), bytes)
    other = attacked.greeted().ask(Opcode.GROUP, half(token, SECRET))
    assert refusal(other) == "DigestMismatch"


def test_hostile_62_63_half_messages_without_an_end(attacked: AttackedBroker) -> None:
    stranger, token = attacked.greeted(), new_token().bytes
    whole = half(token)
    for end in range(0, len(whole), 9):
        assert refusal(stranger.ask(Opcode.GROUP, whole[:end])) == "BadRequest"
    assert isinstance(stranger.ask(Opcode.GROUP, half(token)), bytes)
    assert stranger.refused("topic.delete", name="t", operator="eve", reason="r")


# consumers and dead letters


def test_hostile_64_acks_of_what_was_not_delivered(attacked: AttackedBroker) -> None:
    stranger = attacked.greeted()
    joined = stranger.call("consumer.join", group="acks", topics=["t"], member="m", instance="i")
    for start, end in ((0, 1), (2**62, 2**63 - 1), (5, 5), (9, 3)):
        ack = Ack(joined["generation"], "acks", "m", (AckedRange("t", 0, start, end),))
        assert stranger.ask(Opcode.ACK, pack_ack(ack)) != b"", "it was taken for an ack"
    mine = joined["generation"]
    for group, member, generation in (
        ("acks", "another", mine),
        ("acks", "m", 2**32 - 1),
        ("unknown", "m", 1),
    ):
        ack = Ack(generation, group, member, (AckedRange("t", 0, 0, 1),))
        assert stranger.ask(Opcode.ACK, pack_ack(ack)) != b"", "it was taken for an ack"


def test_hostile_65_66_67_numbers_of_groups(attacked: AttackedBroker) -> None:
    stranger = attacked.greeted()
    join = {"group": "numbers", "topics": ["t"], "member": "m", "instance": "i"}
    assert stranger.call("consumer.join", **join)["generation"]
    for to in ("-1", {0: -1}, {0: 2**63}, {-1: 0}, {2**63: 0}, "NaN", None):
        assert stranger.refused("group.reset", group="numbers", topic="t", to=to, operator="e")
    for session in (0, -1, 10**12, 2**63):
        assert stranger.refused("consumer.join", **join | {"group": "x"}, session_ms=session)
    big = SECRET.decode() * 100_000
    assert stranger.refused("consumer.nack", group="numbers", member="m", generation=1,
                            topic="t", partition=0, offset=0, error=big)  # fmt: skip
    assert stranger.refused("tx.decide", token=new_token().hex, outcome="commit",
                            operator=FORGED, reason=big)  # fmt: skip


def test_hostile_83_criteria_and_bodies_of_a_search(attacked: AttackedBroker) -> None:
    for body in (b"[" * 100_000, b'{"a":' * 20_000, b'{"a":' + b"9" * 10_000 + b"}"):
        attacked.witness.send("t", body)
    stranger = attacked.greeted()
    for path in ("", "$.", "$[", "$.a", "$..a=1", "$[x]=1", "$['a=1", "$.a=1" * 1_000):
        assert stranger.refused("message.find", topic="t", body=path) == "BadRequest", path
        assert stranger.refused("message.search", body=path, limit=1) == "BadRequest", path
    assert stranger.call("message.find", topic="t", body="$.a=1")["messages"] == []


FORGED_FIELDS = {"attempt": 0, "attempts": 99, "reconsumeTimes": 16, "replays": 0, "number": 1,
                 "origin": "x", "message_id": "0" * 32, "inbox_id": "0" * 32,
                 "__class__": "x"}  # fmt: skip


def test_hostile_48_a_history_that_a_client_gives(attacked: AttackedBroker) -> None:
    stranger = attacked.greeted()
    joined = stranger.call("consumer.join", group="forged", topics=["t"], member="m", instance="i")
    place = {"group": "forged", "topic": "t", "partition": 0, "offset": 0}
    member = {"member": "m", "generation": joined["generation"]}
    for name, args in (
        ("consumer.nack", place | member),
        ("dlq.edit", place | {"edits": 0, "body": "eA==", "operator": "eve", "reason": "r"}),
        ("dlq.try", place | {"member": "m", "operator": "eve", "reason": "r"}),
    ):
        for field, value in FORGED_FIELDS.items():
            assert stranger.refused(name, **args, **{field: value}) == "BadRequest", (name, field)


def test_hostile_68_letters_in_a_circle(attacked: AttackedBroker) -> None:
    attacked.witness.call("topic.create", name="circle", partitions=1)
    for number in range(5):
        attacked.witness.send("circle", b"%d" % number)
    with peer(attacked.broker.url) as shop:
        shop.call("consumer.join", group="back", member="m", instance="i", topics=["circle"])
        shop.call("group.reset", group="back", topic="circle", to="last", operator="eve")
        shop.dead_letters("there", "circle", 5)
        ends = shop.call("topic.show", name="circle")["ends"]

        def given(group: str, to: str) -> int:
            who = {"operator": "eve", "reason": "r"}
            reply = shop.call("dlq.redrive", group=group, to_group=to, select={}, again=True, **who)
            return len(reply["done"])

        assert given("there", "back") == 5
        shop.dead_letters("back", "circle", 5)
        rounds = [given("back", "there") + given("there", "back") for _ in range(20)]
        assert rounds == [0] * 20
        stats = [shop.call("dlq.stats", group=group)["letters"] for group in ("there", "back")]
        assert stats == [5, 5]
        assert shop.call("topic.show", name="circle")["ends"] == ends


# administration

GET = b"GET %s HTTP/1.1\r\nHost: localhost\r\n%sConnection: close\r\n\r\n"
REFUSED = {
    "71 a GET of a call": GET % (b"/act/topic.delete?name=t", b""),
    "71 a form from elsewhere": b"POST /act/topic.delete HTTP/1.1\r\nHost: localhost\r\n"
    b"Origin: http://evil.example\r\nContent-Length: 6\r\n\r\nname=t",
    "71 a form without a token": b"POST /act/topic.delete HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 6\r\n\r\nname=t",
    "71 JSON as text": b"POST /api/v1/topics HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}",
    "71 a foreign host": GET.replace(b"localhost", b"evil.example") % (b"/api/v1/topics", b""),
    "71 a foreign origin": GET % (b"/api/v1/topics", b"Origin: http://evil.example\r\n"),
    "72 two lengths": b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n"
    b"Content-Length: 2\r\n\r\nab",
    "72 a body of 2 GB": b"POST / HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Length: 2147483648\r\n\r\n",
    "72 an endless body": b"POST / HTTP/1.1\r\nHost: localhost\r\n"
    b"Transfer-Encoding: chunked\r\n\r\nffff\r\n%b\r\n" % bytes(65_535),
    "72 many headers": GET % (b"/", b"X: y\r\n" * 20_000),
    "72 a long line": GET % (b"/" + b"a" * 1_000_000, b""),
    "74 a path to a file": GET % (b"/static/../../../../etc/passwd", b""),
    "74 a path in percents": GET % (b"/static/%2e%2e/%2e%2e/etc/passwd", b""),
    "74 an absolute path": GET % (b"//etc/passwd", b""),
    "76 a secret in a path": GET % (b"/api/v1/topics/" + SECRET, b"Authorization: Basic eHh4\r\n"),
    "79 a number without end": GET % (b"/api/v1/topics?limit=" + b"9" * 1_000, b""),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_hostile_71_72_74_76_by_http(attacked: AttackedBroker, what: str) -> None:
    answer = attacked.get(REFUSED[what])
    assert answer == b"" or answer.split()[1][:1] == b"4", answer[:200]
    assert b"root:" not in answer
    assert attacked.witness.call("topic.show", name="t")["name"] == "t"


def test_hostile_72_slow_headers_on_many_connections(attacked: AttackedBroker) -> None:
    for _ in range(40):
        one = socket.create_connection(attacked.http, PATIENCE_S)
        one.sendall(b"GET / HTTP/1.1\r\nX: ")
        attacked.open.append(one)


@pytest.mark.parametrize(
    "name",
    ["broker.config", "broker.set", "os.system", "__class__", "log.dump", "UPDATE_BROKER_CONFIG"],
)
def test_hostile_73_a_call_that_configures(attacked: AttackedBroker, name: str) -> None:
    stranger = attacked.greeted()
    assert stranger.refused(name, data="/tmp/x", command="id") == "BadRequest"
    assert stranger.refused("broker.reload", path="/etc/passwd") == "BadRequest"

"""Parts of bundles: read back, digested, and refused if they are inconsistent."""

from __future__ import annotations

import hashlib
import pickle
import struct
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import strategies as our
from txmq.batch import encode_columns
from txmq.errors import RemoteProtocolError
from txmq.model.decider import ByPostgres, Decider, read_decider
from txmq.wire.bundle import (
    BundleDescription,
    BundlePart,
    PartBatch,
    bundle_digest,
    pack_part,
    unpack_part,
)
from txmq.wire.decider import parse_decider

TOKEN = bytes(range(16))
DIGEST = b"\x01" * 32
BATCH = encode_columns([b"body"], ["key"], producer_id=TOKEN, epoch=0, sequence=0, born_at=0)
POSTGRES = ByPostgres(7_000_000_000_000_000_001, 1, 16_384, 742, 1)
PART = BundlePart(
    TOKEN,
    0,
    1,
    True,
    False,
    DIGEST,
    BundleDescription(POSTGRES, "orders"),
    (PartBatch("orders", 3, 1, BATCH),),
)


def payload_of(part: BundlePart) -> bytes:
    return b"".join(pack_part(part))


def payload(
    head: object,
    *,
    flags: int = 1,
    part: int = 0,
    digest: bytes = DIGEST,
    batches: bytes = BATCH,
    more: bytes = b"",
) -> bytes:
    packed = bytes(msgpack.packb(head)) + more
    return struct.pack("<HH16sI32sI", flags, part, TOKEN, 1, digest, len(packed)) + packed + batches


def head(**changed: object) -> list[object]:
    fields: dict[str, object] = {
        "decider": POSTGRES,
        "service": "orders",
        "actions": [],
        "check_after": 6_000_000,
        "participants": [],
        "entries": [["orders", 3, 1, len(BATCH)]],
    }
    return list((fields | changed).values())


def branch(**changed: object) -> list[object]:
    fields: dict[str, object] = {
        "kind": "postgres",
        "system_id": 1,
        "oid": 5,
        "database": "shop",
        "owner": "orders",
    }
    return list((fields | {"gid": "1_YQ==_Yg==", "xid": 742} | changed).values())


@given(our.parts())
def test_parts_are_read_back(part: BundlePart) -> None:
    assert unpack_part(payload_of(part)) == part


def test_a_part_has_the_bytes_of_the_format() -> None:
    assert PART.description is not None
    description = PART.description._replace(check_after=6_000_000)
    assert payload_of(PART._replace(description=description)) == payload(head())


def test_every_truncation_is_refused() -> None:
    whole = payload_of(PART)
    for end in range(len(whole)):
        with pytest.raises(RemoteProtocolError):
            unpack_part(whole[:end])


def test_every_flipped_bit_is_refused_or_another_part() -> None:
    whole = payload_of(PART)
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            assert unpack_part(bytes(damaged)) != PART
        except RemoteProtocolError:
            continue


@given(st.binary(max_size=200), st.binary(max_size=100))
def test_noise_is_refused(noise: bytes, tail: bytes) -> None:
    for stuff in (
        noise,
        struct.pack("<HH16sI32sI", 1, 0, TOKEN, 1, DIGEST, len(noise)) + noise + tail,
    ):
        with pytest.raises(RemoteProtocolError):
            unpack_part(stuff)


def test_the_digest_is_that_of_the_bodies_of_all_parts() -> None:
    first = BundlePart(
        TOKEN,
        0,
        1,
        False,
        False,
        bytes(32),
        BundleDescription(POSTGRES),
        (PartBatch("a", 0, 0, BATCH),),
    )
    last = BundlePart(TOKEN, 1, 1, True, False, DIGEST, None, (PartBatch("b", 0, 0, BATCH),))
    bodies = b"".join(payload_of(part)[struct.calcsize("<HH16sI32s") :] for part in (first, last))
    assert bundle_digest([first, last]) == hashlib.sha256(bodies).digest()
    assert bundle_digest([first, last._replace(digest=bytes(32), epoch=9)]) == bundle_digest(
        [first, last]
    )
    assert bundle_digest([last, first]) != bundle_digest([first, last])


@pytest.mark.parametrize(
    "changed",
    [
        {"decider": None},
        {"decider": []},
        {"decider": "local"},
        {"decider": ["nobody"]},
        {"decider": [["local"]]},
        {"decider": ["local", 1]},
        {"decider": ["checker"]},
        {"service": None},
        {"service": 7},
        {"service": "../x"},
        {"service": b"orders"},
        {"actions": None},
        {"actions": [1]},
        {"actions": [[]]},
        {"check_after": -1},
        {"check_after": 1 << 62},
        {"check_after": 1.5},
        {"check_after": True},
        {"check_after": None},
        {"participants": None},
        {"participants": "all"},
        {"participants": ["broker-1"]},
        {"participants": [["broker", "broker-1"]]},
        {"participants": [["broker", bytes(15)]]},
        {"participants": [["mysql", 1]]},
        {"participants": [["broker", bytes(16)]] * 1_025},
        {"participants": [branch(gid="g" * 200)]},
        {"participants": [branch(gid="")]},
        {"participants": [branch(gid="it's")]},
        {"participants": [branch(gid="back\\slash")]},
        {"participants": [branch(gid="two\nlines")]},
        {"participants": [branch(gid="ünlaut")]},
        {"participants": [branch(gid=b"1_YQ==_Yg==")]},
        {"participants": [branch(xid=2)]},
        {"participants": [branch(database="")]},
        {"participants": [branch(database="d" * 64)]},
        {"participants": [branch(owner="o\0")]},
        {"participants": [branch(system_id=0)]},
        {"entries": None},
        {"entries": [[]]},
        {"entries": [["orders", 3, 1]]},
        {"entries": [["orders", 3, 1, len(BATCH) - 1]]},
        {"entries": [["orders", 3, 1, len(BATCH) + 1]]},
        {"entries": [["orders", 3, 1, -1]]},
        {"entries": [["orders", 3, 1, 1 << 40]]},
        {"entries": [["orders", 3, 1, float(len(BATCH))]]},
        {"entries": [["orders", -1, 1, len(BATCH)]]},
        {"entries": [["orders", 1 << 32, 1, len(BATCH)]]},
        {"entries": [["orders", 3, 1 << 16, len(BATCH)]]},
        {"entries": [["orders", True, 1, len(BATCH)]]},
        {"entries": [["../x", 3, 1, len(BATCH)]]},
        {"entries": [[b"orders", 3, 1, len(BATCH)]]},
        {"entries": []},
    ],
    ids=str,
)
def test_impossible_heads_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(RemoteProtocolError):
        unpack_part(payload(head(**changed)))


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\xc1",
        b"\x91" * 5_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xc7\x01\x05x",
        msgpack.packb(msgpack.Timestamp(1)),
        msgpack.packb(7),
        msgpack.packb([None] * 5),
        msgpack.packb([None] * 7),
        msgpack.packb({"decider": 1}),
        msgpack.packb(head()) + b"\0",
    ],
)
def test_damaged_heads_are_refused(packed: bytes) -> None:
    head_of = struct.pack("<HH16sI32sI", 1, 0, TOKEN, 1, DIGEST, len(packed)) + packed
    with pytest.raises(RemoteProtocolError, match="head"):
        unpack_part(head_of + BATCH)


LATER = [None] * 5 + [[["orders", 3, 1, len(BATCH)]]]


def test_flags_say_what_is_possible() -> None:
    local = head(decider=["local"])
    assert unpack_part(payload(head(), flags=0, digest=bytes(32))).sealed is False
    assert unpack_part(payload(local, flags=3)).commit is True
    assert unpack_part(payload(head(decider=["foreign", 1, b"g", b"b"]), flags=3)).commit is True
    assert unpack_part(payload(LATER, flags=3, part=1)).commit is True
    assert unpack_part(payload(LATER, part=2)).description is None
    impossible = [
        payload(head(), flags=4),
        payload(head(), flags=0x8001),
        payload(head(), flags=0),  # a digest without the seal
        payload(head(), flags=1, digest=bytes(32)),  # the seal without a digest
        payload(head(), flags=3),  # decided at once, but by PostgreSQL
        payload(head(decider=["home", bytes(16), bytes(16)]), flags=3),
        payload(local, flags=2, digest=bytes(32)),  # decided at once, but not complete
        payload(head(), part=1),  # described a second time
        payload(LATER, part=0),  # not described at all
    ]
    for case in impossible:
        with pytest.raises(RemoteProtocolError):
            unpack_part(case)


@given(our.deciders)
def test_every_form_of_a_decider_is_known(decider: Decider) -> None:
    assert parse_decider(tuple(decider)) == decider


def test_a_decider_is_read_and_copied_as_it_was() -> None:
    named = ByPostgres(1, 2, 3, None, 1 << 40)
    assert tuple(named) == ("postgres", 1, 2, 3, None, 1 << 40)
    assert (read_decider(tuple(named)), named.position) == (named, 1 << 40)
    assert pickle.loads(pickle.dumps(named)) == named  # our own


def test_the_position_is_checked_though_the_rest_of_the_head_is_known() -> None:
    decider, size = ("postgres", 7, 1, 16_384, None), len(BATCH)
    for position in (1, 2, (1 << 64) - 1):
        found = unpack_part(payload(head_with((*decider, position), size)))
        assert found.description == BundleDescription(read_decider((*decider, position)), "orders")
    for wrong in (0, -1, True, 1.0, "1", None, (1,)):
        with pytest.raises(RemoteProtocolError, match="invalid decider"):
            unpack_part(payload(head_with((*decider, wrong), size)))
    with pytest.raises(RemoteProtocolError, match="damaged"):
        unpack_part(payload(head_with((*decider, 1), size), more=b"more", batches=b""))


def head_with(decider: tuple[object, ...], size: int) -> tuple[object, ...]:
    return (decider, "orders", (), 0, (), (("orders", 0, 1, size),))


@pytest.mark.parametrize("xid", [-1, 0, 1, 2, 1 << 64, "742", "0x2e7", "zz", 7.0, True, b"742"])
def test_an_xid_is_one_that_postgres_gives_to_a_transaction(xid: object) -> None:
    assert parse_decider(("postgres", 1, 1, 1, 742, 1)) == ByPostgres(1, 1, 1, 742, 1)
    assert parse_decider(("postgres", 1, 1, 1, xid, 1)) is None


@pytest.mark.parametrize(
    "decider",
    [
        ("postgres", 0, 1, 1, None, 1),
        ("postgres", 1 << 64, 1, 1, None, 1),
        ("postgres", 1, 0, 1, None, 1),
        ("postgres", 1, 1, 1 << 32, None, 1),
        ("postgres", 1, 1, 1, 1),
        ("postgres", 1, 1, 1, None),
        ("postgres", 1, 1, 1, None, 0),
        ("postgres", 1, 1, 1, None, None),
        ("postgres", 1, 1, 1, None, 1 << 64),
        ("postgres", 1, 1, 1, None, 7, 7),
        ("postgres", "dsn", 1, 1, None, 1),
        ("checker", ""),
        ("checker", b"billing"),
        ("home", TOKEN),
        ("home", TOKEN, TOKEN[:15]),
        ("home", str(TOKEN), TOKEN),
        ("job", TOKEN + b"\0"),
        ("foreign", -1, b"g", b"b"),
        ("foreign", 1 << 31, b"g", b"b"),
        ("foreign", 1, b"g" * 65, b"b"),
        ("foreign", 1, "g", b"b"),
    ],
)
def test_deciders_out_of_range_are_none(decider: tuple[object, ...]) -> None:
    assert parse_decider(decider) is None

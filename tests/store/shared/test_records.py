"""The bytes of a partition's records, and bytes that are none."""

from __future__ import annotations

from pathlib import Path
from struct import pack_into
from uuid import UUID

import pytest
from google_crc32c import value
from hypothesis import given
from hypothesis import strategies as st

from txmq.errors import UnsupportedFormat
from txmq.store.shared.records import (
    HEADER_SIZE,
    MAGIC,
    Claim,
    Genesis,
    NodeStatus,
    PartitionRecord,
    Slice,
    checksum_of,
    decode,
    encode,
)

GOLDEN = Path(__file__).parents[2] / "golden"
LOG_ID = UUID("00112233-4455-6677-8899-aabbccddeeff")
NONCE = bytes(range(16))
RECORDS: dict[str, PartitionRecord] = {
    "partition-genesis-v1.bin": Genesis(LOG_ID, 6, 4_096, 1_800_000_000_000_000),
    "partition-claim-v1.bin": Claim(LOG_ID, 7, NONCE, "nöde-1"),
    "partition-slice-v1.bin": Slice(LOG_ID, 7, NONCE, 4_096, 4_100, b"\0TXM whole", True),
    "partition-beat-v1.bin": Slice(LOG_ID, 7, NONCE, 4_106, 4_106, b""),
    "partition-status-v1.bin": NodeStatus(
        LOG_ID, 7, NONCE, 4_106, 250, "nöde-1", "0.1.0", "node-1.example:7650", True
    ),
}
I64 = st.integers(-(2**63), 2**63 - 1)
logs, epochs = st.uuids(), st.integers(0, 2**32 - 1)
nonces, data = st.binary(min_size=16, max_size=16), st.binary(max_size=80)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
lines = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n"), max_size=20)
records: st.SearchStrategy[PartitionRecord] = st.one_of(
    st.builds(Genesis, logs, epochs, I64, I64),
    st.builds(Claim, logs, epochs, nonces, names),
    st.builds(Slice, logs, epochs, nonces, I64, I64, data, st.booleans()),
    st.builds(NodeStatus, logs, epochs, nonces, I64, I64, lines, lines, lines, st.booleans()),
)


def sealed(record: bytes, at: int, byte: int) -> bytes:
    """Return the record with another byte, and a checksum that fits."""
    changed = bytearray(record)
    changed[at] = byte
    pack_into("<I", changed, 4, value(bytes(changed[8:])))
    return bytes(changed)


@pytest.mark.parametrize("name", RECORDS)
def test_the_format_is_the_one_in_the_golden_file(name: str) -> None:
    golden = (GOLDEN / name).read_bytes()
    assert encode(RECORDS[name]) == golden
    assert decode(golden) == RECORDS[name]


@given(record=records)
def test_every_record_comes_back(record: PartitionRecord) -> None:
    assert decode(encode(record)) == record


@given(record=records, place=st.integers(0), bit=st.integers(0, 7))
def test_a_flipped_bit_makes_it_no_record(record: PartitionRecord, place: int, bit: int) -> None:
    flipped = bytearray(encode(record))
    flipped[place % len(flipped)] ^= 1 << bit
    assert decode(bytes(flipped)) is None


@given(record=records, length=st.integers(0))
def test_the_beginning_of_a_record_is_no_record(record: PartitionRecord, length: int) -> None:
    whole = encode(record)
    assert decode(whole[: length % len(whole)]) is None


@given(data=st.binary(max_size=200))
def test_bytes_of_others_are_no_record(data: bytes) -> None:
    assert decode(data) is decode(MAGIC + data) is None
    assert isinstance(checksum_of(data), int)


@pytest.mark.parametrize(("at", "byte"), [(8, 2), (8, 0), (9, 5), (9, 0)])
def test_another_version_or_kind_is_refused(at: int, byte: int) -> None:
    claim = encode(Claim(LOG_ID, 7, NONCE, "n"))
    with pytest.raises(UnsupportedFormat, match="partition"):
        decode(sealed(claim, at, byte))


def test_a_name_that_is_not_utf_8_is_read() -> None:
    claim = encode(Claim(LOG_ID, 7, NONCE, "n"))
    assert decode(sealed(claim, HEADER_SIZE, 0xFF)) == Claim(
        LOG_ID, 7, NONCE, "\N{REPLACEMENT CHARACTER}"
    )


@pytest.mark.parametrize("said", [b"", b"n\n1.0", b"\xff\n1\nh:1"])
def test_a_status_that_says_something_else_is_no_record(said: bytes) -> None:
    header = encode(RECORDS["partition-status-v1.bin"])[:HEADER_SIZE]
    assert decode(sealed(header + said, 9, 4)) is None


def test_a_later_version_may_say_more() -> None:
    status = RECORDS["partition-status-v1.bin"]
    assert decode(sealed(encode(status) + b"\nmore", 9, 4)) == status

"""Payloads of logical messages: round trips, every truncation, invalid ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txmq.errors import LocalProtocolError, MessageTooLarge, RemoteProtocolError
from txmq.model import limits
from txmq.model.message import Message
from txmq.wire.logical_message import HEADER, EmittedMessage, pack_emitted, unpack_emitted

BORN = 1_795_255_200_000_000
GOLDEN = Path(__file__).parents[1] / "golden" / "emitted-v1.bin"
FULL = EmittedMessage(
    "orders", Message("zwölf".encode(), "order-1", "created", {"trace": "a-1"}), 3, BORN
)
BARE = EmittedMessage("orders", Message(b""), None, BORN)
texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)


@given(
    st.binary(max_size=200), st.none() | texts, st.none() | texts, st.none() | st.integers(0, 4_095)
)
def test_what_is_packed_is_unpacked(
    body: bytes, key: str | None, tag: str | None, partition: int | None
) -> None:
    emitted = EmittedMessage("t.1", Message(body, key, tag), partition, BORN)
    assert unpack_emitted(pack_emitted(emitted)) == emitted


def test_headers_travel_along() -> None:
    assert dict(unpack_emitted(pack_emitted(FULL)).message.headers or {}) == {"trace": "a-1"}


def test_version_1_is_written_and_read_as_ever() -> None:
    assert pack_emitted(FULL) == GOLDEN.read_bytes()
    assert unpack_emitted(GOLDEN.read_bytes()) == FULL


@pytest.mark.parametrize("size", range(len(pack_emitted(FULL)) - len(FULL.message.body)))
def test_a_payload_cut_before_its_body_is_refused(size: int) -> None:
    with pytest.raises(RemoteProtocolError):
        unpack_emitted(pack_emitted(FULL)[:size])


@pytest.mark.parametrize("at", range(HEADER.size + 1))
def test_a_byte_that_is_another_is_refused_or_stays_in_bounds(at: int) -> None:
    payload = bytearray(pack_emitted(FULL))
    payload[at] ^= 0xFF
    try:
        found = unpack_emitted(bytes(payload))
    except RemoteProtocolError:
        return
    assert at in range(4, 16), "only another partition or another time are still a message"
    assert found._replace(partition=3, born_at=BORN) == FULL


def test_another_version_is_refused_and_named() -> None:
    with pytest.raises(RemoteProtocolError, match="version 2"):
        unpack_emitted(b"\2" + pack_emitted(BARE)[1:])


@pytest.mark.parametrize(
    ("emitted", "error"),
    [
        (BARE._replace(topic="no such name"), LocalProtocolError),
        (BARE._replace(partition=-1), LocalProtocolError),
        (BARE._replace(partition=True), LocalProtocolError),
        (BARE._replace(message=Message(b"", "k" * (limits.KEY + 1))), LocalProtocolError),
        (BARE._replace(message=Message("text")), LocalProtocolError),  # type: ignore[arg-type]  # what users do
        (BARE._replace(message=Message(bytes(limits.MESSAGE + 1))), MessageTooLarge),
        (BARE._replace(message=Message(b"", deliver_at=BORN)), LocalProtocolError),
    ],
)
def test_invalid_messages_are_not_packed(emitted: EmittedMessage, error: type[Exception]) -> None:
    with pytest.raises(error):
        pack_emitted(emitted)


def test_a_body_beyond_the_limit_is_refused() -> None:
    payload = pack_emitted(BARE) + bytes(limits.MESSAGE + 1)
    with pytest.raises(RemoteProtocolError, match="no broker accepts"):
        unpack_emitted(payload)

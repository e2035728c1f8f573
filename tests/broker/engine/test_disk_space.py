"""A disk that runs full: writes are refused before that, reads and acks continue, and
writes resume once there is space.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.broker.support import BrokerInMemory, send_payload
from txmq.broker.engine.disk_space import DiskWatch
from txmq.config.broker import DiskSettings
from txmq.core.topics.topics import CreateTopic
from txmq.errors import ReadOnly
from txmq.model.message import Message
from txmq.model.units import MIB
from txmq.wire.data_requests import Opcode, Read, pack_read
from txmq.wire.status import to_error

LIMITS = DiskSettings(warn_free_mib=30, resume_free_mib=20, refuse_free_mib=10)


class WatchedDisk:
    """A broker and its disk watch, with so many MiB left."""

    def __init__(self) -> None:
        self.broker = BrokerInMemory()
        self.broker.do(CreateTopic("t", 1))
        self.watch = DiskWatch(self.broker.fs, "/data", self.broker.engine.disk, LIMITS)

    def left(self, mib: int) -> bool:
        """Set the space that is left. Return whether writes are refused then."""
        space = self.broker.fs.space("/data")
        self.broker.fs.capacity = space.size - space.free + mib * MIB
        self.watch.tick()
        return self.broker.engine.disk.refusing


@pytest.fixture
def full() -> WatchedDisk:
    return WatchedDisk()


def test_writes_are_refused_below_one_limit_and_resume_above_another(full: WatchedDisk) -> None:
    assert [full.left(mib) for mib in (40, 15, 10, 9, 10, 19, 20, 11, 9)] == [
        False, False, False, True, True, True, False, False, True,
    ]  # fmt: skip


def test_only_messages_are_refused_and_with_a_clear_error(full: WatchedDisk) -> None:
    client = full.broker.connect()
    assert client.ask(Opcode.SEND, send_payload()).status == 0
    token = bytes.fromhex(full.broker.half(1, Message(b"half")))
    full.left(5)
    refused = client.ask(Opcode.SEND, send_payload(1))
    error = to_error(refused.status, refused.payload)
    assert isinstance(error, ReadOnly)
    assert error.retriable
    assert "5 MiB left" in error.message
    with pytest.raises(AssertionError, match="MiB left"):
        full.broker.half(2, Message(b"another"))
    reply: Any = full.broker.ask(
        "tx.decide",
        token=token.hex(),
        outcome="COMMIT",
        operator="ada",
        reason="it is in the books",
        force=True,
    )
    assert reply["state"] == "PUBLISHED"
    assert client.ask(Opcode.READ, pack_read(Read(0, 0, 0, 1 << 20, "t"))).status == 0
    full.left(25)
    assert client.ask(Opcode.SEND, send_payload(1)).status == 0


def test_a_send_repeated_gets_its_receipt_though_nothing_more_is_taken(full: WatchedDisk) -> None:
    client = full.broker.connect()
    first = client.ask(Opcode.SEND, send_payload())
    full.left(5)
    assert client.ask(Opcode.SEND, send_payload()).payload[:16] == first.payload[:16]


def test_the_limits_are_in_order() -> None:
    with pytest.raises(ValueError, match="must rise"):
        DiskSettings(warn_free_mib=1, resume_free_mib=2, refuse_free_mib=3)

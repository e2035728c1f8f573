"""Topic settings: creation, changes, and the admission of sends and reads."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.consumers.world import ConsumersWorld
from tests.core.driver import Driver, token
from txmq.batch import Codec, encode, largest_body, read_header, verify
from txmq.core import machine
from txmq.core.state.state import DEFAULT_SETTINGS, TopicSettings
from txmq.core.topics.sends import StoreBatch
from txmq.core.topics.topics import AlterTopic, CreateTopic, DeleteTopic, GrowTopic
from txmq.core.transactions.decisions import DecideTransaction
from txmq.errors import MessageTooLarge, RequestRejected, TopicClosed, TopicExists, UnknownTopic
from txmq.model.bundle import BundleReceipt
from txmq.model.decider import ByPostgres
from txmq.model.message import Decision, Message
from txmq.wire.data_requests import SendReceipt

POSTGRES = ByPostgres(1, 1, 5, 7, 1)


def error_of(reply: Any) -> type[Exception]:
    assert isinstance(reply, RequestRejected), reply
    return type(reply)


def test_a_topic_closed_for_writing_rejects_sends_and_undecided_bundles_can_be_decided(
    core: Driver,
) -> None:
    number = token(core, 1)
    core.store(number, [("t", 0, "k", "half")], POSTGRES)
    core.do(AlterTopic("t", {"writable": False}))
    assert error_of(core.send("t", "a")) is TopicClosed
    assert error_of(core.store(token(core, 2), [("t", 0, "k", "another")], POSTGRES)) is TopicClosed
    core.do(DecideTransaction(number, Decision.COMMIT, "test"))
    assert core.bodies("t") == ["half"]
    core.do(AlterTopic("t", {"writable": True}))
    assert isinstance(core.send("t", "a"), SendReceipt)
    assert isinstance(
        core.store(token(core, 2), [("t", 0, "k", "another")], POSTGRES), BundleReceipt
    )


def test_a_topic_closed_for_reading_delivers_nothing_until_it_is_open() -> None:
    world = ConsumersWorld(t=1)
    world.publish("t", None)
    world.join("a")
    world.do(AlterTopic("t", {"readable": False}))
    assert world.fetch("a") == []
    world.do(AlterTopic("t", {"readable": True}))
    assert len(world.fetch("a")) == 1


def send_bodies(core: Driver, bodies: list[bytes], codec: Codec = Codec.NONE) -> Any:
    data = encode(
        [Message(body) for body in bodies],
        producer_id=b"q" * 16,
        epoch=len(core.log),
        sequence=0,
        born_at=1,
        codec=codec,
    )
    return core.do(StoreBatch("t", 0, 0, data, verify(data)))


@pytest.mark.parametrize("codec", Codec)
def test_the_size_limit_applies_to_the_largest_message_not_to_the_batch(
    core: Driver, codec: Codec
) -> None:
    core.do(AlterTopic("t", {"message_bytes": 100}))
    assert isinstance(send_bodies(core, [b"x" * 100] * 5, codec), SendReceipt)
    reply = send_bodies(core, [b"", b"x" * 101, b"x"], codec)
    assert error_of(reply) is MessageTooLarge
    assert "101 bytes" in reply.message
    assert error_of(send_bodies(core, [b"x" * 101], codec)) is MessageTooLarge
    core.do(AlterTopic("t", {"message_bytes": -1}))
    assert isinstance(send_bodies(core, [b"x" * 101], codec), SendReceipt)


def test_the_largest_body_is_that_before_compression() -> None:
    data = encode(
        [Message(b"a" * 7), Message(b"b" * 900), Message(b"")],
        producer_id=b"q" * 16, epoch=0, sequence=0, born_at=1, codec=Codec.ZSTD,
    )  # fmt: skip
    assert largest_body(data, read_header(data)) == 900


def test_topic_settings_are_set_at_creation_changed_later_and_saved(core: Driver) -> None:
    core.do(CreateTopic("s", 1, TopicSettings(retention_us=5, flush=(10, 100))))
    core.do(AlterTopic("s", {"policy": "archive", "writable": False, "note": "n"}))
    expected = TopicSettings(
        retention_us=5, flush=(10, 100), policy="archive", writable=False, note="n"
    )
    again = core.replayed()
    machine.save(again)
    for state in (core.state, again, machine.load(again.tables)):
        assert state.topics["s"].settings == expected
        assert state.topics["t"].settings == DEFAULT_SETTINGS
    records = len(core.log)
    core.do(AlterTopic("s", {"policy": "archive"}))
    assert len(core.log) == records, "nothing changed"
    assert error_of(core.do(AlterTopic("none", {}))) is UnknownTopic
    assert error_of(core.do(CreateTopic("s", 1, TopicSettings(retention_us=6)))) is TopicExists


def test_a_topic_that_is_made_again_has_a_later_epoch_and_another_id() -> None:
    core = Driver()
    first = core.do(CreateTopic("t", 2))
    core.do(GrowTopic("t", 3))
    core.do(DeleteTopic("t"))
    again = core.do(CreateTopic("t", 4))
    assert (again.epoch, again.topic_id) == (first.epoch + 2, first.topic_id + 1)
    assert core.do(CreateTopic("u", 4)).epoch == 1
    assert core.replayed().topics["t"].epoch == again.epoch

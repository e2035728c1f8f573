"""Producers of other users: their ids are no secret, because each message's id has
one.
"""

from __future__ import annotations

import pytest

from tests.broker.access.support import VERIFIER, BrokerWithUsers
from tests.broker.support import Client, send_payload
from tests.core.driver import Driver
from txmq import errors
from txmq.batch import encode, verify
from txmq.core import machine
from txmq.core.events import base
from txmq.core.events.users import ProducerOwned
from txmq.core.topics.sends import StoreBatch, StoreBatches
from txmq.core.topics.topics import CreateTopic
from txmq.core.users import DeleteUser, SetUser
from txmq.model.message import Message, message_id
from txmq.wire import data_requests
from txmq.wire.batched import pack_requests, unpack_replies
from txmq.wire.calls.encoding import encode_call
from txmq.wire.data_requests import Opcode, unpack_send_receipt
from txmq.wire.frames import Frame
from txmq.wire.status import to_error

PRODUCER = b"p" * 16  # of `send_payload`


def broker_of_two() -> tuple[BrokerWithUsers, Client, Client]:
    """Return a broker, a producer of topic t, and one that reads t and writes only to
    another topic.
    """
    broker = BrokerWithUsers()
    for topic in ("t", "other"):
        broker.do(CreateTopic(topic, 1))
    broker.grant("nobody", "read", "topic:t")
    broker.grant("nobody", "write", "topic:other")
    return broker, broker.log_in("shop"), broker.log_in("nobody")


def refusal(reply: Frame) -> errors.TxmqError:
    return to_error(reply.status, reply.payload)


def is_stored(reply: Frame) -> bool:
    """Return whether a send was stored, by its first attempt."""
    return not reply.status and not unpack_send_receipt(reply.payload).duplicate


def in_many(payload: bytes) -> bytes:
    return b"".join(pack_requests([payload, send_payload(topic="nowhere")]))


def test_a_reader_cannot_use_up_the_sequences_of_another_user_s_producer() -> None:
    broker, shop, thief = broker_of_two()
    assert is_stored(shop.ask(Opcode.SEND, send_payload(0)))
    stolen = thief.ask(Opcode.SEND, send_payload(1, "other"))
    # else this message had the receipt of the thief's, and was in no topic
    assert is_stored(shop.ask(Opcode.SEND, send_payload(1)))
    assert isinstance(refusal(stolen), errors.NotPermitted)
    assert broker.engine.state.topics["t"].end_offsets == [2]


def test_nor_in_a_frame_of_several_sends() -> None:
    broker, shop, thief = broker_of_two()
    [first, _] = unpack_replies(shop.ask(Opcode.SENDS, in_many(send_payload(0))).payload)
    assert not first.status
    [stolen, _] = unpack_replies(thief.ask(Opcode.SENDS, in_many(send_payload(1, "other"))).payload)
    assert isinstance(to_error(stolen.status, stolen.payload), errors.NotPermitted)
    several = b"".join(pack_requests([send_payload(1), send_payload(2)]))
    assert [one.status for one in unpack_replies(shop.ask(Opcode.SENDS, several).payload)] == [0, 0]
    assert broker.engine.state.topics["t"].end_offsets == [3]


def test_nor_fence_the_producer_by_a_later_epoch_nor_skip_its_sequences() -> None:
    _broker, shop, thief = broker_of_two()
    assert is_stored(shop.ask(Opcode.SEND, send_payload(0)))
    batch = encode([Message(b"m")], producer_id=PRODUCER, epoch=9, sequence=0, born_at=1)
    fencing = thief.ask(Opcode.SEND, data_requests.send_header("other", 0, 0) + batch)
    assert isinstance(refusal(fencing), errors.NotPermitted)
    skip = encode_call("producer.skip", {"producer": PRODUCER.hex(), "sequence": 100})
    assert isinstance(refusal(thief.ask(Opcode.CALL, skip)), errors.NotPermitted)
    assert is_stored(shop.ask(Opcode.SEND, send_payload(1)))
    assert shop.ask(Opcode.CALL, skip).status == 0


@pytest.mark.parametrize("topic", ["t", "other"])
def test_nor_recall_its_delayed_messages(topic: str) -> None:
    broker, shop, thief = broker_of_two()
    if topic == "other":  # where the thief may write, too
        broker.grant("shop", "write", "topic:other")
    delayed = [Message(b"m", delay=3_600)]
    batch = encode(delayed, producer_id=PRODUCER, epoch=0, sequence=0, born_at=broker.engine.now())
    assert not shop.ask(Opcode.SEND, data_requests.send_header(topic, 0, 0) + batch).status
    recall = encode_call("message.recall", {"ids": [message_id(PRODUCER, 0)]})
    assert isinstance(refusal(thief.ask(Opcode.CALL, recall)), errors.NotPermitted)
    assert broker.engine.state.delayed_count == 1
    assert shop.ask(Opcode.CALL, recall).status == 0
    assert broker.engine.state.delayed_count == 0


def test_an_admin_sends_what_others_have_left_and_it_stays_theirs() -> None:
    broker, shop, thief = broker_of_two()
    assert is_stored(shop.ask(Opcode.SEND, send_payload(0)))
    assert is_stored(broker.log_in("root").ask(Opcode.SEND, send_payload(1)))
    assert isinstance(
        refusal(thief.ask(Opcode.SEND, send_payload(2, "other"))), errors.NotPermitted
    )
    assert is_stored(shop.ask(Opcode.SEND, send_payload(2)))


def test_what_a_deleted_user_has_left_goes_to_whoever_sends_it() -> None:
    broker, shop, _thief = broker_of_two()
    assert is_stored(shop.ask(Opcode.SEND, send_payload(0)))
    broker.do(SetUser("heir", ("producer",), tuple(VERIFIER), "test", b"x" * 32))  # type: ignore[arg-type]  # a plain tuple
    broker.do(DeleteUser("shop", "test"))
    broker.assembly.guard.forget()
    assert is_stored(broker.log_in("heir").ask(Opcode.SEND, send_payload(1)))
    assert broker.engine.state.producers[PRODUCER].owner == "heir"


def test_the_owner_is_in_the_log_and_in_the_tables() -> None:
    core = Driver()
    core.do(CreateTopic("t", 1))
    for name in ("shop", "nobody"):
        core.do(SetUser(name, ("admin",) if name == "shop" else (), (), "test", b"x" * 32))
    batch = encode([Message(b"m")], producer_id=PRODUCER, epoch=0, sequence=0, born_at=1)
    core.do(StoreBatches((StoreBatch("t", 0, 0, batch, verify(batch), "shop"),)))
    machine.save(core.state)
    for state in (core.state, core.replayed(), machine.load(core.state.tables)):
        assert state.producers[PRODUCER].owner == "shop"
    [owned] = [one for _place, one in core.log if isinstance(one, ProducerOwned)]
    assert base.KINDS[ProducerOwned] == 214
    assert base.encode(owned).hex() == "92c410" + PRODUCER.hex() + "a4" + b"shop".hex()


def test_a_later_epoch_of_the_same_user_stays_the_user_s() -> None:
    broker, shop, thief = broker_of_two()
    assert is_stored(shop.ask(Opcode.SEND, send_payload(0)))
    batch = encode([Message(b"m")], producer_id=PRODUCER, epoch=1, sequence=0, born_at=1)
    assert is_stored(shop.ask(Opcode.SEND, data_requests.send_header("t", 0, 0) + batch))
    refused = thief.ask(Opcode.SEND, data_requests.send_header("other", 0, 0) + batch)
    assert isinstance(refusal(refused), errors.NotPermitted)
    assert broker.engine.state.producers[PRODUCER].owner == "shop"

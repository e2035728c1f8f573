"""Quotas of users: what is refused and for how long, and what never is."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import pytest

from tests.broker.access.support import PASSWORD, BrokerWithUsers
from tests.broker.support import Client, send_payload
from txmq import errors
from txmq.batch import encode
from txmq.core.topics.topics import CreateTopic
from txmq.model.decider import ByChecker
from txmq.model.message import Decision, Message
from txmq.wire.batched import pack_requests
from txmq.wire.bundle import BundleDescription, BundlePart, PartBatch, pack_part
from txmq.wire.data_requests import Decide, Opcode, pack_decide
from txmq.wire.status import to_error


class Limited(BrokerWithUsers):
    """A broker whose user shop has a quota, and an admin who sees what became of it."""

    def __init__(self, **quota: int) -> None:
        super().__init__()
        self.do(CreateTopic("t", 1))
        self.root = self.log_in("root")
        self.shop = self.log_in("shop")
        self.set(**quota)

    def set(self, **quota: int) -> None:
        reply: Any = self.root.call("user.quota", name="shop", **quota)
        assert reply == {"user": "shop", "changed": True}
        self.pass_time(0)

    @property
    def seen(self) -> dict[str, Any]:
        reply: Any = self.root.call("user.list", name="shop")
        [user] = reply["users"]
        throttled: dict[str, Any] = user["throttled"]
        return throttled


def error_of(client: Client, opcode: int, payload: bytes) -> errors.TxmqError | None:
    reply = client.ask(opcode, payload)
    return to_error(reply.status, reply.payload) if reply.status else None


def half(token: bytes) -> bytes:
    batch = encode([Message(b"m")], producer_id=token, epoch=0, sequence=0, born_at=1)
    part = BundlePart(
        token, 0, 0, True, False, b"d" * 32, BundleDescription(ByChecker("c"), "shop"),
        (PartBatch("t", 0, 0, batch),),
    )  # fmt: skip
    return b"".join(pack_part(part))


def test_sends_beyond_the_bytes_of_a_second_are_told_how_long_to_wait() -> None:
    broker = Limited(bytes_per_s=len(send_payload()))
    sequence = 0
    for _ in range(5):  # each a second
        for _ in range(2):
            refused = error_of(broker.shop, Opcode.SEND, send_payload(sequence))
            if refused is None:
                sequence += 1
                continue
            assert isinstance(refused, errors.Throttled)
            assert 0 < refused.retry_after_s <= 2.0
            assert "bytes_per_s" in refused.message
        broker.pass_time(1.0)
    assert sequence in (5, 6), "one in a second, and one at the beginning"
    seen = broker.seen
    assert seen["refused"] == {"bytes_per_s": 10 - sequence}
    assert seen["waited_s"] > 0
    assert error_of(broker.root, Opcode.SEND, send_payload(sequence)) is None, "others go on"


def test_requests_are_counted_and_what_ends_work_goes_through() -> None:
    broker = Limited(requests_per_s=3)
    errors_of_calls = [broker.shop.call("topic.describe", names=["t"]) for _ in range(5)]
    assert sum("error" in reply for reply in errors_of_calls) == 2  # type: ignore[operator]  # dicts
    assert isinstance(error_of(broker.shop, Opcode.SEND, send_payload()), errors.Throttled)
    token = broker.token(1)
    decide = pack_decide(Decide(Decision.COMMIT, token, 0, "shop"))
    assert not isinstance(error_of(broker.shop, Opcode.DECIDE, decide), errors.Throttled)
    assert error_of(broker.shop, Opcode.PING, b"") is None
    reply: Any = broker.shop.call("user.me")
    assert reply["user"] == "shop"


def test_a_user_with_too_many_undecided_halves_decides_some_first() -> None:
    broker = Limited(undecided=2)
    tokens = [broker.token(number) for number in range(4)]
    assert error_of(broker.shop, Opcode.GROUP, half(tokens[0])) is None
    both = b"".join(pack_requests([half(tokens[0]), half(tokens[1])]))
    assert error_of(broker.shop, Opcode.GROUPS, both) is None
    for _ in range(2):
        refused = error_of(broker.shop, Opcode.GROUP, half(tokens[2]))
        assert isinstance(refused, errors.Throttled)
        assert refused.retry_after_s == 1.0
    assert error_of(broker.shop, Opcode.GROUP, half(tokens[1])) is None, "it is there already"
    decide = pack_decide(Decide(Decision.ROLLBACK, tokens[0], 0, "shop"))
    assert error_of(broker.shop, Opcode.DECIDE, decide) is None
    broker.pass_time(1.1)
    assert error_of(broker.shop, Opcode.GROUP, half(tokens[2])) is None
    assert isinstance(error_of(broker.shop, Opcode.GROUP, half(tokens[3])), errors.Throttled)


def test_connections_of_a_user_are_counted_and_given_back() -> None:
    broker = Limited(connections=2)
    second = broker.log_in("shop")
    with pytest.raises(errors.Throttled, match="connections of 2"):
        broker.log_in("shop")
    broker.log_in("billing")
    second.session.connectionLost()  # type: ignore[attr-defined]
    broker.log_in("shop")
    assert broker.seen["refused"] == {"connections": 1}


def test_topics_count_for_who_makes_them() -> None:
    broker = Limited(topics=1)
    broker.grant("shop", "create", "topic:*")
    made: Any = broker.shop.call("topic.create", name="one", partitions=1)
    assert made["name"] == "one"
    refused: Any = broker.shop.call("topic.create", name="two", partitions=1)
    assert refused["error"] == "NotPermitted"
    assert broker.root.call("topic.create", name="two", partitions=1)
    broker.set(topics=0)
    made = broker.shop.call("topic.create", name="three", partitions=1)
    assert made["name"] == "three"


def test_a_quota_that_stays_keeps_its_counts_when_other_users_change() -> None:
    broker = Limited(requests_per_s=1)
    for _ in range(2):
        broker.shop.call("topic.describe", names=["t"])
    broker.grant("billing", "read", "topic:t")
    assert broker.seen["refused"] == {"requests_per_s": 1}
    broker.root.call("user.quota", name="shop", requests_per_s=0)
    assert error_of(broker.shop, Opcode.SEND, send_payload()) is None


def test_a_debt_stays_when_the_quota_changes() -> None:
    size = len(send_payload())
    broker = Limited(bytes_per_s=size)
    assert error_of(broker.shop, Opcode.SEND, send_payload(0)) is None
    broker.set(bytes_per_s=size // 100)
    broker.set(bytes_per_s=0)
    broker.set(bytes_per_s=size // 2)
    refused = error_of(broker.shop, Opcode.SEND, send_payload(1))
    assert isinstance(refused, errors.Throttled)
    assert broker.seen["refused"] == {"bytes_per_s": 1}
    broker.set(bytes_per_s=1_000_000_000_000)
    broker.pass_time(0.001)
    assert error_of(broker.shop, Opcode.SEND, send_payload(1)) is None


def test_a_debt_stays_when_one_of_two_limits_is_removed_and_set_again() -> None:
    size = len(send_payload())
    broker = Limited(bytes_per_s=size // 100, requests_per_s=1_000)
    assert error_of(broker.shop, Opcode.SEND, send_payload(0)) is None
    broker.set(bytes_per_s=0)
    assert error_of(broker.shop, Opcode.SEND, send_payload(1)) is None
    broker.set(bytes_per_s=size // 100)
    assert isinstance(error_of(broker.shop, Opcode.SEND, send_payload(2)), errors.Throttled)


def test_requests_by_http_count() -> None:
    broker = Limited(requests_per_s=2)
    log_in = broker.assembly.guard.log_in_by_http
    header = "Basic " + b64encode(f"shop:{PASSWORD}".encode()).decode()
    for _ in range(2):
        assert log_in("127.0.0.1", header)
    with pytest.raises(errors.Throttled, match="requests_per_s of 2"):
        log_in("127.0.0.1", header)
    refused: Any = broker.shop.call("user.list")
    assert refused["error"] == "Throttled"
    broker.pass_time(2)
    assert log_in("127.0.0.1", header)

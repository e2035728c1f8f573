"""The order in which the processes of a service get check-backs: the origin first."""

from __future__ import annotations

from typing import Any

import pytest

from tests.broker.support import BrokerInMemory, Client
from txmq.batch import encode
from txmq.broker.checkback import checkers as offers
from txmq.core.transactions.half_storage import StorePart
from txmq.core.transactions.model import get
from txmq.model.decider import ByChecker, ByJob
from txmq.model.message import Message
from txmq.model.units import SECOND
from txmq.wire.bundle import NO_DIGEST, BundleDescription, BundlePart, PartBatch, pack_part
from txmq.wire.data_requests import Opcode
from txmq.wire.frames import encode_frame
from txmq.wire.hello import Hello

ORIGIN, OTHER = "a" * 32, "b" * 32
FIRST_CHECK = 6
RETURN_S = offers.RETURN_US / SECOND + 0.1


def started() -> BrokerInMemory:
    broker = BrokerInMemory()
    broker.start()
    broker.connect().call("topic.create", name="t", partitions=1)
    return broker


@pytest.fixture
def broker() -> BrokerInMemory:
    broker = started()
    broker.pass_time(RETURN_S)  # no process is waited for any more
    return broker


def connect(broker: BrokerInMemory, process: str | None) -> Client:
    hello = Hello(versions=(1, 1), client="test", service="shop", process=process)
    return broker.connect(encode_frame(Opcode.HELLO, 1, hello.encode()))


def store(
    client: Client, number: int = 1, *, parts: int = 1, check_after: int = FIRST_CHECK * SECOND
) -> str:
    """Store a half message of service shop, whose checker is billing."""
    token = client.broker.token(number)
    for part in range(parts):
        sealed = part == parts - 1
        batch = encode([Message(b"m")], producer_id=token, epoch=0, sequence=part, born_at=1)
        description = (
            None if part else BundleDescription(ByChecker("billing"), "shop", (), check_after)
        )
        digest = b"d" * 32 if sealed else NO_DIGEST
        sent = BundlePart(
            token, part, 0, sealed, False, digest, description, (PartBatch("t", 0, 0, batch),)
        )
        client.ask(Opcode.GROUP, b"".join(pack_part(sent)))
    return token.hex()


def taken(client: Client, *checkers: str, most: int = 16, own: bool = False) -> list[str]:
    reply: Any = client.call(
        "checks.wait", service="shop", checkers=checkers, max=most, wait_ms=0, own=own
    )
    return [check["token"] for check in reply["checks"]]


def state(broker: BrokerInMemory, token: str) -> str:
    return str(broker.ask("tx.show", token=token)["state"])


@pytest.mark.parametrize("parts", [1, 2], ids=["in one part", "in two parts"])
def test_the_origin_is_asked_before_the_others_of_its_service(
    broker: BrokerInMemory, parts: int
) -> None:
    origin, other = connect(broker, ORIGIN), connect(broker, OTHER)
    assert taken(origin, "billing") == taken(other, "billing") == []
    token = store(connect(broker, ORIGIN), parts=parts)
    broker.pass_time(FIRST_CHECK + 0.1)
    assert taken(other, "billing") == []
    assert taken(origin, "billing") == [token]
    origin.call("checks.answer", token=token, answer="COMMIT")
    assert state(broker, token) == "PUBLISHED"


def test_a_check_that_the_origin_could_not_answer_goes_to_any_process_next(
    broker: BrokerInMemory,
) -> None:
    origin, other = connect(broker, ORIGIN), connect(broker, OTHER)
    taken(origin, "billing")
    token = store(origin)
    broker.pass_time(FIRST_CHECK + 0.1)
    assert taken(origin, "billing") == [token]
    origin.call("checks.answer", token=token, answer="UNKNOWN", reason="the books are closed")
    broker.ask("tx.check", token=token)
    assert taken(other, "billing") == [token]
    other.call("checks.answer", token=token, answer="ROLLBACK")
    assert state(broker, token) == "ROLLED_BACK"


def test_an_origin_that_does_not_ask_in_time_is_passed_over(broker: BrokerInMemory) -> None:
    origin, other = connect(broker, ORIGIN), connect(broker, OTHER)
    taken(origin, "billing")
    token = store(origin)
    broker.pass_time(FIRST_CHECK + 0.1)
    assert taken(other, "billing") == []
    broker.pass_time(offers.ORIGIN_US / SECOND + 0.1)
    assert taken(other, "billing") == [token]
    assert taken(origin, "billing") == []


@pytest.mark.parametrize("returns", [False, True])
def test_an_origin_whose_connection_is_lost_has_time_to_return(
    broker: BrokerInMemory, *, returns: bool
) -> None:
    origin, other = connect(broker, ORIGIN), connect(broker, OTHER)
    taken(origin, "billing")
    token = store(origin)
    broker.pass_time(FIRST_CHECK - 1)
    origin.session.connectionLost()  # type: ignore[attr-defined]
    broker.pass_time(1.1)
    assert taken(other, "billing") == []
    if returns:
        assert taken(connect(broker, ORIGIN), own=True) == [token]
        return
    broker.pass_time(RETURN_S)
    assert taken(other, "billing") == [token]


def test_after_a_start_of_the_broker_origins_have_time_to_return() -> None:
    broker = started()
    token = store(connect(broker, ORIGIN))
    other = connect(broker, OTHER)
    broker.pass_time(FIRST_CHECK + 0.1)
    assert taken(other, "billing") == []
    origin = connect(broker, ORIGIN)
    assert taken(origin, own=True) == [token]
    origin.call("checks.answer", token=token, answer="UNKNOWN", open=True)
    broker.ask("tx.check", token=token)
    broker.pass_time(RETURN_S)
    assert taken(other, "billing") == []


def test_an_origin_without_the_checker_passes_on_what_is_over(broker: BrokerInMemory) -> None:
    origin, other = connect(broker, ORIGIN), connect(broker, OTHER)
    assert taken(origin, own=True) == taken(other, "billing", own=True) == []
    anybodys, token = store(connect(broker, "c" * 32), 1), store(origin, 2)
    broker.pass_time(FIRST_CHECK + 0.1)
    assert taken(other, "billing", own=True) == [anybodys]
    assert taken(origin, own=True) == [token]
    origin.call("checks.answer", token=token, answer="UNKNOWN", passed=True)
    assert state(broker, token) == "UNDECIDED"
    assert taken(origin, own=True) == []
    assert taken(other, "billing", own=True) == [token]


def test_the_client_with_the_checker_is_asked_first_in_its_process(broker: BrokerInMemory) -> None:
    stores, checks = connect(broker, ORIGIN), connect(broker, ORIGIN)
    assert taken(stores, own=True) == taken(checks, "billing", own=True) == []
    token = store(stores)
    broker.pass_time(FIRST_CHECK + 0.1)
    assert taken(stores, own=True) == []
    assert taken(checks, "billing", own=True) == [token]


@pytest.mark.parametrize(
    "process", [None, ORIGIN], ids=["of no known process", "of one that takes no check-backs"]
)
def test_without_a_connected_origin_any_process_gets_the_check(
    broker: BrokerInMemory, process: str | None
) -> None:
    token = store(connect(broker, process))
    other = connect(broker, OTHER)
    broker.pass_time(FIRST_CHECK + 0.1)
    assert taken(other, "billing") == [token]


def test_an_origin_without_the_checker_is_not_asked(broker: BrokerInMemory) -> None:
    origin, other = connect(broker, ORIGIN), connect(broker, OTHER)
    token = store(origin)
    taken(origin, "stock")
    broker.pass_time(FIRST_CHECK + 0.1)
    assert taken(origin, "stock") == []
    assert taken(other, "stock", "billing") == [token]


def test_a_process_gets_its_own_check_backs_before_others(broker: BrokerInMemory) -> None:
    origin = connect(broker, ORIGIN)
    taken(origin, "billing")
    anybodys, own = store(connect(broker, OTHER), 1), store(origin, 2)
    broker.pass_time(FIRST_CHECK + 0.1)
    assert taken(origin, "billing", most=1) == [own]
    assert taken(origin, "billing", most=1) == [anybodys]


def test_the_origin_is_kept_with_the_transaction(broker: BrokerInMemory) -> None:
    stored = get(broker.engine.state, bytes.fromhex(store(connect(broker, ORIGIN))))
    assert stored is not None
    assert stored.origin == bytes.fromhex(ORIGIN)


def test_without_a_checker_no_origin_is_stored(broker: BrokerInMemory) -> None:
    command = StorePart(
        b"t" * 16,
        0,
        (),
        True,
        False,
        b"d" * 32,
        0,
        ByJob(b"j" * 16),
        "shop",
        (),
        0,
        origin=bytes.fromhex(ORIGIN),
    )
    broker.do(command)
    stored = get(broker.engine.state, b"t" * 16)
    assert stored is not None
    assert stored.origin == b""

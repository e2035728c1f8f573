"""XA and producer instances through control calls: outcomes, times, and malicious
input.
"""

from __future__ import annotations

from base64 import b64encode
from typing import Any
from uuid import UUID

import pytest

from tests.broker.support import BEGAN, BrokerInMemory, Client, send_payload
from txmq import errors
from txmq.batch import encode
from txmq.core.retention import outcome_expiry
from txmq.core.transactions import model
from txmq.model.bundle import BundleState
from txmq.model.decider import BrokerBranch, ByBroker, ByForeign, ByHome, Decider
from txmq.model.message import COMMIT, ROLLBACK, Decision, Message
from txmq.model.units import SECOND
from txmq.wire import data_requests
from txmq.wire.bundle import (
    BundleDescription,
    BundlePart,
    PartBatch,
    bundle_digest,
    pack_part,
    unpack_bundle_receipt,
)
from txmq.wire.calls.encoding import encode_call
from txmq.wire.data_requests import Opcode
from txmq.wire.frames import encode_frame
from txmq.wire.hello import Hello
from txmq.wire.status import to_error

OTHER = UUID(int=1)
XID = ByForeign(7, b"gtrid", b"bqual")
NAMED = {"format": 7, "gtrid": b64encode(b"gtrid").decode(), "bqual": b64encode(b"bqual").decode()}


@pytest.fixture
def broker() -> BrokerInMemory:
    broker = BrokerInMemory()
    broker.start()
    broker.connect().call("topic.create", name="t", partitions=1)
    return broker


def token(number: int) -> bytes:
    return (BEGAN // 1_000).to_bytes(6, "big") + number.to_bytes(10, "big")


def log_id(broker: BrokerInMemory) -> UUID:
    return broker.engine.store.log_id


def part(
    number: int,
    decider: Decider,
    *,
    check_after: int = 0,
    commit: bool = False,
    messages: int = 1,
) -> bytes:
    name = token(number)
    batches = [
        encode([Message(b"m")], producer_id=name, epoch=0, sequence=n, born_at=1)
        for n in range(messages)
    ]
    described = BundleDescription(decider, "orders", (), check_after, (BrokerBranch(bytes(16)),))
    whole = BundlePart(
        name,
        0,
        0,
        True,
        commit,
        bytes(32),
        described,
        tuple(PartBatch("t", 0, 0, batch) for batch in batches),
    )
    return b"".join(pack_part(whole._replace(digest=bundle_digest([whole]))))


def store(client: Client, number: int, decider: Decider, **options: Any) -> BundleState:
    reply = client.ask(Opcode.GROUP, part(number, decider, **options))
    assert reply.status == 0, reply.payload
    return BundleState(unpack_bundle_receipt(reply.payload).state)


def decide(client: Client, number: int, outcome: Decision = COMMIT) -> object:
    reply = client.ask(
        Opcode.DECIDE,
        data_requests.pack_decide(data_requests.Decide(outcome, token(number), 0, "producer")),
    )
    if reply.status:
        return type(to_error(reply.status, reply.payload))
    return BundleState(data_requests.unpack_decide_receipt(reply.payload).state)


def refused(client: Client, name: str, /, **args: object) -> type[Exception]:
    reply = client.ask(Opcode.CALL, encode_call(name, args))
    assert reply.status
    return type(to_error(reply.status, reply.payload))


def outcome(client: Client, number: int, **args: object) -> str:
    told: Any = client.call(
        "xa.outcome", token=token(number).hex(), **({"decide": True, "by": "recoverer"} | args)
    )
    return str(told["state"])


def listed(client: Client, **args: object) -> list[dict[str, Any]]:
    told: Any = client.call("xa.list", **args)
    found: list[dict[str, Any]] = told["transactions"]
    return found


def wait(broker: BrokerInMemory, seconds: float) -> None:
    for _ in range(int(seconds * 10)):
        broker.clock.advance(0.1)


def test_a_home_broker_is_asked_for_an_outcome(broker: BrokerInMemory) -> None:
    client, own = broker.connect(), str(log_id(broker))
    home = ByHome(log_id(broker).bytes, token(1))
    assert store(client, 1, home, messages=0) is BundleState.UNDECIDED
    assert outcome(client, 1, log_id=own, decide=False) == "UNDECIDED"
    assert outcome(client, 2, log_id=own, decide=False) == "UNKNOWN"
    assert decide(client, 1) is BundleState.PUBLISHED
    assert outcome(client, 1, log_id=own) == "PUBLISHED"
    assert outcome(client, 2, log_id=own) == "ROLLED_BACK"
    assert store(client, 2, ByHome(log_id(broker).bytes, token(2))) is BundleState.ROLLED_BACK


def test_the_outcome_of_another_log_is_not_guessed(broker: BrokerInMemory) -> None:
    client = broker.connect()
    question = {"token": token(1).hex(), "log_id": str(OTHER), "decide": True, "by": "recoverer"}
    assert refused(client, "xa.outcome", **question) is errors.OtherLog
    assert issubclass(errors.OtherLog, errors.LogChanged)
    assert outcome(client, 1, log_id=str(log_id(broker)), decide=False) == "UNKNOWN"


def test_a_home_group_left_alone_is_rolled_back_after_its_time(broker: BrokerInMemory) -> None:
    client = broker.connect()
    store(client, 1, ByHome(log_id(broker).bytes, token(1)), check_after=2 * SECOND)
    client.call("tx.check", token=token(1).hex())
    wait(broker, 1.5)
    assert outcome(client, 1, log_id=str(log_id(broker)), decide=False) == "UNDECIDED"
    wait(broker, 1)
    assert decide(client, 1) is errors.Conflict
    assert decide(client, 1, ROLLBACK) is BundleState.ROLLED_BACK


@pytest.mark.parametrize("decider", [XID, ByHome(OTHER.bytes, token(1))], ids=str)
def test_a_prepared_branch_of_another_is_flagged_and_never_timed_out(
    broker: BrokerInMemory, decider: Decider
) -> None:
    client = broker.connect()
    store(client, 1, decider, check_after=SECOND)
    wait(broker, 2)
    assert listed(client)[0]["tries"] == 1
    for _ in range(20):
        broker.clock.advance(1_000)
        wait(broker, 0.2)
    client.call("tx.check", token=None)
    [row] = listed(client)
    assert (row["state"], row["in_doubt"]) == ("UNDECIDED", True)
    assert decide(client, 1) is BundleState.PUBLISHED


def test_foreign_branches_are_found_by_xid_and_listed_by_owner(broker: BrokerInMemory) -> None:
    client = broker.connect()
    store(client, 1, XID)
    store(client, 2, ByHome(OTHER.bytes, token(2)))
    assert client.call("xa.find", **NAMED) == {
        "token": token(1).hex(),
        "state": "UNDECIDED",
        "service": "orders",
    }
    assert refused(client, "xa.find", **(NAMED | {"format": 8})) is errors.UnknownTransaction
    assert [row["xid"] for row in listed(client, kind="foreign", owner="orders")] == [NAMED]
    assert [row["participants"] for row in listed(client, kind="home")] == [[["broker", "00" * 16]]]
    assert listed(client, owner="billing") == []
    assert len(listed(client)) == 2
    reply = client.ask(Opcode.GROUP, part(3, XID))
    assert type(to_error(reply.status, reply.payload)) is errors.DuplicateXid


def test_transactions_committed_by_this_home_are_listed_by_pages_of_scanned_rows(
    broker: BrokerInMemory,
) -> None:
    client = broker.connect()
    for number in (1, 2, 4):
        store(client, number, ByHome(log_id(broker).bytes, token(number)))
    store(client, 3, ByHome(OTHER.bytes, token(3)))
    for number, outcome in ((1, "COMMIT"), (2, "ROLLBACK"), (3, "COMMIT")):
        client.call(
            "tx.decide", token=token(number).hex(), outcome=outcome, operator="ada", reason="test"
        )
    found: list[Any] = []
    after, pages = None, 0
    while pages == 0 or after is not None:
        page: Any = client.call("xa.decided", after=after, limit=2)
        found, after, pages = found + page["transactions"], page["next"], pages + 1
    assert [(row["token"], row["participants"]) for row in found] == [
        (token(1).hex(), [["broker", "00" * 16]])
    ]
    assert pages == 3
    rest: Any = client.call("xa.decided", after=token(1).hex())
    assert rest["transactions"] == []


def test_long_lists_come_in_pages(broker: BrokerInMemory) -> None:
    client = broker.connect()
    for number in range(5):
        store(client, number, ByForeign(number, b"", b""))
    seen: list[str] = []
    page: Any = {"next": None}
    for _ in range(3):
        page = client.call("xa.list", limit=2, after=page["next"])
        seen += [row["token"] for row in page["transactions"]]
    assert (seen, page["next"]) == ([token(number).hex() for number in range(5)], None)


def test_a_foreign_manager_commits_in_one_phase(broker: BrokerInMemory) -> None:
    client = broker.connect()
    assert store(client, 1, XID, commit=True) is BundleState.PUBLISHED
    assert client.call("xa.find", **NAMED) == {
        "token": token(1).hex(),
        "state": "PUBLISHED",
        "service": "orders",
    }


def test_an_operator_s_decision_is_shown_until_it_is_dealt_with(broker: BrokerInMemory) -> None:
    client = broker.connect()
    store(client, 1, XID)
    name = token(1).hex()
    client.call(
        "tx.decide", token=name, outcome="ROLLBACK", operator="ann", reason="its manager burnt down"
    )
    assert decide(client, 1) is errors.HeuristicOutcome
    assert decide(client, 1, ROLLBACK) is BundleState.ROLLED_BACK
    [row] = listed(client, heuristic=True)
    [seen] = row["heuristics"]
    assert (seen["decided"], seen["operator"], seen["found"]) == ("ROLLBACK", "ann", "rolled back")
    client.call("xa.forget", token=name, operator="ann", reason="told them")
    assert listed(client) == []
    assert decide(client, 1) is errors.Conflict


def test_a_branch_found_otherwise_is_kept(broker: BrokerInMemory) -> None:
    client = broker.connect()
    store(client, 1, ByHome(log_id(broker).bytes, token(1)))
    decide(client, 1)
    note = {
        "token": token(1).hex(),
        "branch": "1_YQ==_Yg==",
        "decided": "COMMIT",
        "found": "rolled back",
    }
    who = {"operator": "recoverer", "reason": "42704 after the decision"}
    client.call("xa.heuristic", **note, **who)
    client.call("xa.heuristic", **note, **who)
    [row] = listed(client, heuristic=True)
    assert row["heuristics"] == [
        {
            "branch": "1_YQ==_Yg==",
            "decided": "COMMIT",
            "found": "rolled back",
            "at": broker.now(),
            **who,
        }
    ]
    assert (
        refused(client, "xa.heuristic", **(note | who | {"token": token(9).hex()}))
        is errors.UnknownTransaction
    )


@pytest.mark.parametrize(
    ("call", "args"),
    [
        ("xa.find", NAMED | {"format": -1}),
        ("xa.find", NAMED | {"format": 1 << 31}),
        ("xa.find", NAMED | {"gtrid": "no base64"}),
        ("xa.find", NAMED | {"gtrid": b64encode(bytes(65)).decode()}),
        ("xa.outcome", {"token": "zz", "log_id": str(OTHER), "by": "x"}),
        ("xa.outcome", {"token": "00" * 16, "log_id": "no id", "by": "x"}),
        ("xa.outcome", {"token": "00" * 16, "log_id": str(OTHER), "by": "two\nlines"}),
        ("xa.heuristic", {"token": "00" * 16, "branch": "g" * 200, "decided": "COMMIT"}),
        ("xa.forget", {"token": "00" * 16, "operator": "ann", "reason": ""}),
        ("producer.register", {"service": "s", "instance": "../../x"}),
        ("xa.list", {"limit": 10_001}),
    ],
)
def test_impossible_arguments_are_refused(
    broker: BrokerInMemory, call: str, args: dict[str, object]
) -> None:
    assert refused(broker.connect(), call, **args) is errors.BadRequest


def test_as_many_outcomes_are_forgotten_as_there_were(
    broker: BrokerInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcome_expiry, "STEP_ROWS", 3)
    client = broker.connect()
    for number in range(20):
        store(client, number, ByBroker(), commit=True)
    broker.clock.advance(model.OUTCOME_RETENTION / SECOND + 1)
    broker.clock.advance(600)
    wait(broker, 1)
    assert not list(broker.engine.state.transactions.range(b""))


def test_two_producers_of_one_token_are_distinguished(broker: BrokerInMemory) -> None:
    one, other = broker.connect(), broker.connect()
    assert store(one, 1, XID) is BundleState.UNDECIDED
    reply = other.ask(Opcode.GROUP, part(1, XID, messages=2))
    assert type(to_error(reply.status, reply.payload)) is errors.DigestMismatch
    assert store(other, 1, XID) is BundleState.UNDECIDED


def test_a_decision_for_an_unknown_transaction_is_refused(broker: BrokerInMemory) -> None:
    client = broker.connect()
    assert decide(client, 1) is errors.UnknownTransaction
    assert decide(client, 1, ROLLBACK) is errors.UnknownTransaction


def instance(broker: BrokerInMemory, incarnation: int = 0) -> Client:
    hello = Hello(
        versions=(1, 1), client="test", service="s", instance="one", incarnation=incarnation
    )
    return broker.connect(encode_frame(Opcode.HELLO, 1, hello.encode()))


def send(client: Client, sequence: int) -> object:
    reply = client.ask(Opcode.SEND, send_payload(sequence))
    return type(to_error(reply.status, reply.payload)) if reply.status else None


def test_an_older_incarnation_sends_nothing_but_decides_what_it_stored(
    broker: BrokerInMemory,
) -> None:
    older = instance(broker)
    assert older.call("producer.register", service="s", instance="one") == {"epoch": 1}
    beside = instance(broker, 1)
    assert (send(older, 0), send(beside, 1)) == (None, None)
    assert store(older, 1, XID) is BundleState.UNDECIDED

    newer = instance(broker)
    assert send(newer, 2) is errors.ProducerFenced  # it has not registered yet
    assert newer.call("producer.register", service="s", instance="one") == {"epoch": 2}
    assert send(newer, 2) is None
    for fenced in (older, beside, instance(broker, 1), instance(broker, 3)):
        assert send(fenced, 3) is errors.ProducerFenced
        reply = fenced.ask(Opcode.GROUP, part(2, ByBroker(), commit=True))
        assert type(to_error(reply.status, reply.payload)) is errors.ProducerFenced
    assert send(older, 0) is None  # it was stored: repeated, it gets its receipt
    assert store(older, 1, XID) is BundleState.UNDECIDED
    assert decide(older, 1) is BundleState.PUBLISHED
    assert send(broker.connect(), 3) is None


def test_decisions_as_a_home_are_listed_as_they_come(broker: BrokerInMemory) -> None:
    client, home = broker.connect(), ByHome(log_id(broker).bytes, b"t" * 16)
    for number, decider in ((1, home), (2, XID), (3, home), (4, home)):
        store(client, number, decider)
    for number, outcome in ((4, COMMIT), (2, COMMIT), (3, ROLLBACK), (1, COMMIT)):
        decide(client, number, outcome)
    told: Any = client.call("xa.committed")
    tokens = [row["token"] for row in told["transactions"]]
    assert tokens == [token(number).hex() for number in (4, 1)]
    assert (told["next"], told["missed"]) == (2, True)
    epoch = told["boot_epoch"]
    told = client.call("xa.committed", boot_epoch=epoch, after=1)
    assert ([row["token"] for row in told["transactions"]], told["missed"]) == (tokens[1:], False)
    last: Any = client.call("xa.committed", boot_epoch=epoch, after=2)
    assert (last["transactions"], last["missed"]) == ([], False)
    beyond: Any = client.call("xa.committed", boot_epoch=epoch, after=2**63 - 1)
    assert (beyond["transactions"], beyond["next"]) == ([], 2)

"""Check-backs: which of them count as tries, and the record of those without an
outcome.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests.broker.support import DATABASE, BrokerInMemory, Client, FakeResolver
from txmq.broker.checkback import checkback_service
from txmq.config.broker import SettingsFile
from txmq.core.transactions import lost_records
from txmq.errors import Conflict
from txmq.model.decider import ByBroker, ByChecker, ByHome, ByJob, ByPostgres, Decider
from txmq.model.message import Decision, Message
from txmq.model.units import SECOND
from txmq.wire.data_requests import Opcode
from txmq.wire.frames import encode_frame
from txmq.wire.hello import Hello

CHECKER = ByChecker("billing")
SHOPS_HELLO = Hello(versions=(1, 1), client="test", service="shop")
OF_SHOP = encode_frame(Opcode.HELLO, 1, SHOPS_HELLO.encode())
SETTINGS = SettingsFile.model_validate(
    {
        "broker": {"data": "/data"},
        "checks": {
            "first_s": 6.0,
            "then_s": 10.0,
            "longest_s": 10.0,
            "in_doubt_after": 2,
            "in_doubt_after_s": 60.0,
        },
    }
)


@pytest.fixture
def oracle() -> FakeResolver:
    return FakeResolver()


@pytest.fixture
def broker(oracle: FakeResolver) -> BrokerInMemory:
    broker = BrokerInMemory(oracle, SETTINGS)
    broker.start()
    return broker


def half(broker: BrokerInMemory, number: int = 1, decider: Decider = DATABASE) -> bytes:
    return bytes.fromhex(broker.half(number, Message(b"m"), decider=decider))


def shown(broker: BrokerInMemory, token: bytes) -> Any:
    return broker.ask("tx.show", token=token.hex())


def test_a_transaction_is_asked_about_ever_more_slowly_and_never_for_the_last_time(
    oracle: FakeResolver,
) -> None:
    broker = BrokerInMemory(oracle, SettingsFile.model_validate({"broker": {"data": "/data"}}))
    broker.start()
    token = half(broker)
    waits, flags = [], []
    for _ in range(20):
        row = shown(broker, token)
        waits.append((row["check_at"] - broker.now()) / SECOND)
        flags.append(row["in_doubt"])
        broker.pass_time(waits[-1] + 1)
        oracle.answer(token, Decision.UNKNOWN, "in progress")
    assert waits[0] == pytest.approx(6, abs=1)
    assert waits[1] == pytest.approx(28.5, abs=2.5)
    assert all(later > earlier for earlier, later in pairwise(waits[:8]))
    assert all(530 <= wait <= 601 for wait in waits[10:])
    assert (flags[5], flags[15:]) == (False, [True] * 5)
    broker.pass_time(602)
    oracle.answer(token, Decision.COMMIT)
    assert shown(broker, token)["state"] == "PUBLISHED"


def test_a_check_asked_for_by_hand_is_no_try_and_puts_nothing_off(
    broker: BrokerInMemory, oracle: FakeResolver
) -> None:
    token = half(broker)
    due = shown(broker, token)["check_at"]
    for _ in range(5):
        assert broker.ask("tx.check", token=token.hex()) == {"due": 1}
        assert broker.ask("tx.check", token=None) == {"due": 0}
        oracle.answer(token, Decision.UNKNOWN, "in progress")
    assert (shown(broker, token)["tries"], shown(broker, token)["check_at"]) == (0, due)
    broker.pass_time(7)
    oracle.answer(token, Decision.UNKNOWN, "in progress")
    assert shown(broker, token)["tries"] == 1


def test_a_check_that_becomes_due_while_it_is_under_way_counts(
    broker: BrokerInMemory, oracle: FakeResolver
) -> None:
    token = half(broker)
    broker.ask("tx.check", token=token.hex())
    broker.pass_time(7)
    oracle.answer(token, Decision.UNKNOWN, "in progress")
    assert shown(broker, token)["tries"] == 1
    broker.pass_time(11)
    assert token in oracle.asked


def test_the_reason_of_a_check_without_outcome_is_shown_until_the_decision(
    broker: BrokerInMemory, oracle: FakeResolver
) -> None:
    token = half(broker)
    assert (shown(broker, token)["checked_at"], shown(broker, token)["check_reason"]) == (0, "")
    for tries, reason in ((1, "the transaction is in progress"), (2, "connection refused")):
        broker.pass_time(11)
        oracle.answer(token, Decision.UNKNOWN, reason)
        told = shown(broker, token)
        assert (told["tries"], told["checked_by"], told["check_reason"]) == (
            tries,
            "resolver shop",
            reason,
        )
        assert told["checked_at"] == broker.now()
        assert told["in_doubt"] == (tries == 2)
    [listed] = broker.ask("tx.list", state="in-doubt")["transactions"]
    assert (listed["token"], listed["check_reason"]) == (token.hex(), "connection refused")
    broker.pass_time(11)
    oracle.answer(token, Decision.COMMIT)
    told = shown(broker, token)
    assert (told["state"], told["checked_at"], told["check_reason"]) == ("PUBLISHED", 0, "")


def test_a_service_that_takes_no_check_backs_is_named_as_the_reason(broker: BrokerInMemory) -> None:
    token = half(broker, decider=CHECKER)
    broker.pass_time(7)
    assert "no process of service 'shop' has taken" in shown(broker, token)["check_reason"]
    wait(broker.connect())
    assert "has not answered" in shown(broker, token)["check_reason"]


def wait(client: Client) -> list[str]:
    reply: Any = client.call("checks.wait", service="shop", wait_ms=0)
    return [check["token"] for check in reply["checks"]]


def test_a_checker_s_answer_counts_only_where_the_check_was_due(broker: BrokerInMemory) -> None:
    client, token = broker.connect(OF_SHOP), half(broker, decider=CHECKER)
    due = shown(broker, token)["check_at"]
    for _ in range(3):
        broker.ask("tx.check", token=token.hex())
        assert wait(client) == [token.hex()]
        client.call(
            "checks.answer", token=token.hex(), answer="UNKNOWN", reason="the books are closed"
        )
    assert (shown(broker, token)["tries"], shown(broker, token)["check_at"]) == (0, due)
    assert shown(broker, token)["check_reason"] == "the books are closed"
    broker.pass_time(7)
    assert wait(client) == [token.hex()]
    client.call("checks.answer", token=token.hex(), answer="UNKNOWN")
    assert shown(broker, token)["tries"] == 1
    assert shown(broker, token)["check_at"] > broker.now() + 8 * SECOND


def test_a_checker_that_does_not_answer_is_asked_again_and_that_is_no_try(
    broker: BrokerInMemory,
) -> None:
    client, token = broker.connect(), half(broker, decider=CHECKER)
    for _ in range(3):
        broker.pass_time(11)
        assert wait(client) == [token.hex()]
    assert shown(broker, token)["tries"] == 0


def test_a_job_is_not_ended_by_a_check_before_its_time(broker: BrokerInMemory) -> None:
    token = half(broker, decider=ByJob(b"j" * 16))
    assert broker.ask("tx.check", token=None) == {"due": 0}
    assert shown(broker, token)["state"] == "UNDECIDED"
    broker.pass_time(7)
    assert shown(broker, token)["state"] == "ROLLED_BACK"


def test_a_check_of_an_unknown_transaction_is_refused(broker: BrokerInMemory) -> None:
    assert "never stored" in broker.ask("tx.check", token="0" * 32).message


def test_a_transaction_that_nothing_can_resolve_is_in_doubt_after_a_while(
    broker: BrokerInMemory,
) -> None:
    asked_of_nobody = half(broker, decider=CHECKER)
    never_due = bytes.fromhex(broker.half(2, Message(b"m"), decider=CHECKER, check_after=0))
    job = bytes.fromhex(broker.half(3, Message(b"m"), decider=ByJob(b"j" * 16), check_after=0))
    broker.pass_time(59)
    younger = half(broker, 4, decider=CHECKER)
    assert broker.ask("tx.list", state="in-doubt")["transactions"] == []
    broker.pass_time(3)
    listed = broker.ask("tx.list", state="in-doubt")["transactions"]
    assert [line["token"] for line in listed] == [asked_of_nobody.hex(), never_due.hex()]
    assert not shown(broker, job)["in_doubt"]
    assert not shown(broker, younger)["in_doubt"]
    assert (shown(broker, never_due)["check_at"], shown(broker, never_due)["tries"]) == (0, 0)


def test_a_flag_once_set_stays_until_the_decision(
    broker: BrokerInMemory, oracle: FakeResolver
) -> None:
    token = half(broker)
    broker.pass_time(62)
    assert shown(broker, token)["in_doubt"]
    oracle.answer(token, Decision.UNKNOWN, "in progress")
    assert shown(broker, token)["in_doubt"]


def test_a_service_that_is_gone_leaves_only_its_own_waiting(
    broker: BrokerInMemory, oracle: FakeResolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkback_service, "MAX_ASKED", 2)
    monkeypatch.setattr(checkback_service, "MAX_QUEUED", 4)
    waiting = [half(broker, number, decider=CHECKER) for number in range(9)]
    asked = [half(broker, number) for number in range(9, 12)]
    broker.pass_time(7)
    assert list(oracle.asked) == asked[:2]
    oracle.answer(asked[0], Decision.COMMIT)
    broker.pass_time(0.1)
    assert list(oracle.asked) == asked[1:]
    for token in asked[1:]:
        oracle.answer(token, Decision.COMMIT)
    client, taken = broker.connect(), list[str]()
    for _ in range(9):
        taken += wait_for(client, 1)
        broker.pass_time(0.1)
    assert sorted(taken) == sorted(token.hex() for token in waiting)


def wait_for(client: Client, most: int) -> list[str]:
    reply: Any = client.call("checks.wait", service="shop", wait_ms=0, max=most)
    return [check["token"] for check in reply["checks"]]


@pytest.mark.parametrize("decider", [ByJob(b"j" * 16), ByHome(b"", b"t" * 16)], ids=str)
def test_time_decides_nothing_whose_decision_may_be_lost(
    broker: BrokerInMemory, decider: Decider
) -> None:
    own = broker.log.log_id.bytes
    if isinstance(decider, ByHome):
        decider = decider._replace(log_id=own)
    token = half(broker, decider=decider)
    lost_records.apply_lost(broker.engine.state, broker.log.end)
    broker.pass_time(30)
    told = shown(broker, token)
    assert (told["state"], told["in_doubt"], told["check_reason"]) == (
        "UNDECIDED",
        True,
        lost_records.WHY,
    )
    broker.ask(
        "tx.decide",
        token=token.hex(),
        outcome="COMMIT",
        operator="ada",
        reason="the rows are there",
    )
    assert shown(broker, token)["state"] == "PUBLISHED"


def fill_disk(broker: BrokerInMemory) -> None:
    """Leave the log without space, with nothing of it unwritten."""
    broker.fs.capacity = 0
    broker.half(99, Message(bytes(50_000)), decider=ByBroker(), wait=False)
    broker.pass_time(0.3)
    assert broker.log.read_only


def free_disk(broker: BrokerInMemory) -> None:
    broker.fs.capacity = None
    assert broker.log.try_space()
    broker.pass_time(0.3)


@pytest.mark.parametrize("answer", list(Decision))
def test_an_answer_that_the_full_disk_refuses_is_asked_for_again(
    broker: BrokerInMemory, oracle: FakeResolver, answer: Decision
) -> None:
    tokens = [half(broker, number) for number in (1, 2)]
    broker.pass_time(7)
    fill_disk(broker)
    for token in tokens:
        oracle.answer(token, answer)
    broker.pass_time(60)
    assert oracle.asked == {}
    free_disk(broker)
    for token in tokens:
        oracle.answer(token, answer)
    broker.pass_time(0)
    expected = {
        Decision.COMMIT: "PUBLISHED",
        Decision.ROLLBACK: "ROLLED_BACK",
        Decision.UNKNOWN: "UNDECIDED",
    }
    assert {shown(broker, token)["state"] for token in tokens} == {expected[answer]}
    assert {shown(broker, token)["tries"] for token in tokens} == {answer is Decision.UNKNOWN}


def test_what_time_ends_is_ended_when_the_full_disk_has_space(broker: BrokerInMemory) -> None:
    home = half(broker, 1, ByHome(broker.log.log_id.bytes, broker.token(1)))
    part = bytes.fromhex(broker.half(2, Message(b"m"), decider=CHECKER, sealed=False))
    fill_disk(broker)
    broker.pass_time(100)
    free_disk(broker)
    assert {shown(broker, token)["state"] for token in (home, part)} == {"ROLLED_BACK"}


def test_a_disk_that_is_full_at_the_first_of_many_checks_loses_none_of_them(
    broker: BrokerInMemory, oracle: FakeResolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer_at_once(token: bytes, row: object, answered: Any) -> None:
        del row
        if not broker.log.read_only:
            fill_disk_now(broker)
        answered(token, Decision.ROLLBACK, "resolver shop", "")

    tokens = [half(broker, number) for number in (1, 2, 3)]
    monkeypatch.setattr(oracle, "resolve", answer_at_once)
    broker.pass_time(7)
    monkeypatch.undo()
    free_disk(broker)
    for token in tokens:
        oracle.answer(token, Decision.COMMIT)
    broker.pass_time(0)
    assert {shown(broker, token)["state"] for token in tokens} == {"PUBLISHED"}


def fill_disk_now(broker: BrokerInMemory) -> None:
    """Let the next write find no space, in this turn of the reactor."""
    broker.fs.capacity = 0
    assert not broker.log.try_space()


def test_a_transaction_is_flagged_in_doubt_though_the_disk_was_full_at_its_time(
    broker: BrokerInMemory, oracle: FakeResolver
) -> None:
    tokens = [half(broker, number) for number in (1, 2)]
    broker.pass_time(7)
    assert set(tokens) == oracle.asked.keys()
    fill_disk(broker)
    broker.pass_time(120)
    free_disk(broker)
    broker.pass_time(2)
    assert all(shown(broker, token)["in_doubt"] for token in tokens)


def test_a_database_that_is_back_is_asked_at_once_about_what_it_was_asked_in_vain(
    broker: BrokerInMemory, oracle: FakeResolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkback_service, "SWEPT_PER_TICK", 2)
    tried = [half(broker, number) for number in range(1, 6)]
    half(broker, 6, CHECKER)
    broker.pass_time(7)
    for token in tried:
        oracle.answer(token, Decision.UNKNOWN, "connection refused")
    young, others = half(broker, 7), ByPostgres(2, 1, 5, None, 1)
    half(broker, 8, others)
    broker.assembly.checks.database_is_back(lambda decider: decider.database == DATABASE.database)
    broker.pass_time(0.5)
    assert oracle.asked.keys() == set(tried)
    for token in tried:
        oracle.answer(token, Decision.COMMIT)
    broker.pass_time(0.1)
    assert {shown(broker, token)["state"] for token in tried} == {"PUBLISHED"}
    assert shown(broker, young)["tries"] == 0


def decide(broker: BrokerInMemory, token: bytes, outcome: Decision, *, force: bool = False) -> Any:
    """Begin an operator's decision; return the list that gets its reply."""
    replies: list[Any] = []
    who = {"operator": "ada", "reason": "a try"}
    broker.assembly.calls.ask(
        "tx.decide",
        {"token": token.hex(), "outcome": outcome.name, "force": force, **who},
        replies.append,
    )
    broker.pass_time(0)
    return replies


def alarms(broker: BrokerInMemory) -> set[str]:
    return {alarm["name"] for alarm in broker.ask("broker.alarms")["alarms"]}


@pytest.mark.parametrize("outcome", [Decision.COMMIT, Decision.ROLLBACK])
def test_an_operator_s_decision_waits_for_the_database_and_agrees_with_it(
    broker: BrokerInMemory, oracle: FakeResolver, outcome: Decision
) -> None:
    token = half(broker)
    replies = decide(broker, token, outcome)
    assert replies == []
    oracle.answer(token, outcome)
    broker.pass_time(0)
    [reply] = replies
    assert reply["state"] == ("PUBLISHED" if outcome is Decision.COMMIT else "ROLLED_BACK")
    assert shown(broker, token)["by"] == "operator ada"


@pytest.mark.parametrize("force", [False, True])
def test_an_operator_never_contradicts_the_database(
    broker: BrokerInMemory,
    oracle: FakeResolver,
    force: bool,  # noqa: FBT001
) -> None:
    token = half(broker)
    broker.pass_time(7)
    [asked] = oracle.asked  # the check that is under way answers both
    replies = decide(broker, token, Decision.ROLLBACK, force=force)
    oracle.answer(asked, Decision.COMMIT)
    broker.pass_time(0)
    [reply] = replies
    assert type(reply) is Conflict
    assert (shown(broker, token)["state"], shown(broker, token)["by"]) == (
        "PUBLISHED",
        "resolver shop",
    )


def test_without_its_database_a_transaction_is_decided_by_force_only_and_compared_later(
    broker: BrokerInMemory, oracle: FakeResolver
) -> None:
    token = half(broker)
    refused = decide(broker, token, Decision.ROLLBACK)
    oracle.answer(token, Decision.UNKNOWN, "connection refused")
    broker.pass_time(0)
    [reply] = refused
    assert type(reply) is Conflict
    assert "connection refused" in reply.message
    assert "--force" in reply.hint
    assert shown(broker, token)["state"] == "UNDECIDED"
    forced = decide(broker, token, Decision.ROLLBACK, force=True)
    oracle.answer(token, Decision.UNKNOWN, "connection refused")
    broker.pass_time(0)
    assert [reply["state"] for reply in forced] == ["ROLLED_BACK"]
    broker.pass_time(6)
    oracle.answer(token, Decision.UNKNOWN, "connection refused")
    broker.pass_time(6)
    oracle.answer(token, Decision.COMMIT)
    broker.pass_time(6)
    assert oracle.asked == {}
    [conflict] = broker.ask("tx.list", state="conflicts")["transactions"]
    assert (conflict["token"], conflict["asked"], conflict["by"]) == (
        token.hex(),
        "COMMIT",
        "resolver shop",
    )
    assert "transaction.conflict" in alarms(broker)


def test_a_database_that_is_lost_for_good_is_asked_no_more_once_an_operator_decides_so_twice(
    broker: BrokerInMemory, oracle: FakeResolver
) -> None:
    token = half(broker)
    decide(broker, token, Decision.ROLLBACK, force=True)
    oracle.answer(token, Decision.UNKNOWN, "timeline 2 left 1 before the transaction")
    broker.pass_time(0)
    assert "transaction.unverified" in alarms(broker)
    refused = decide(broker, token, Decision.COMMIT, force=True)
    oracle.answer(token, Decision.UNKNOWN, "timeline 2 left 1 before the transaction")
    broker.pass_time(0)
    assert [type(reply) for reply in refused] == [Conflict]
    assert "transaction.unverified" in alarms(broker)
    again = decide(broker, token, Decision.ROLLBACK, force=True)
    oracle.answer(token, Decision.UNKNOWN, "timeline 2 left 1 before the transaction")
    broker.pass_time(0)
    assert [reply["state"] for reply in again] == ["ROLLED_BACK"]
    assert "transaction.unverified" not in alarms(broker)
    broker.pass_time(60)
    assert oracle.asked == {}

"""Views of a transaction for operators: messages in pages, neighbours,
contradictions.
"""

from __future__ import annotations

from base64 import b64decode
from typing import Any
from uuid import UUID

import pytest

from tests.broker.support import BrokerInMemory
from txmq import errors
from txmq.batch import encode, verify
from txmq.broker.calls import transactions
from txmq.broker.engine import turn_work
from txmq.broker.search.message_view import PAGE_BYTES
from txmq.core.topics.sends import StoreBatch
from txmq.core.transactions.decisions import DecideTransaction
from txmq.model.decider import ByJob, ByPostgres
from txmq.model.message import Decision, Message
from txmq.model.units import SECOND
from txmq.wire.calls.encoding import encode_call
from txmq.wire.data_requests import Opcode
from txmq.wire.frames import encode_frame
from txmq.wire.json import parse
from txmq.wire.status import to_error


@pytest.fixture
def broker() -> BrokerInMemory:
    return BrokerInMemory()


def show(broker: BrokerInMemory, token: str, **args: object) -> Any:
    return broker.ask("tx.show", token=token, detail=True, **args)


def commit(broker: BrokerInMemory, token: str) -> str:
    reply = broker.ask(
        "tx.decide",
        token=token,
        outcome="COMMIT",
        operator="ada",
        reason="seen in the books",
        force=True,
    )
    return str(reply["state"])


def test_a_transaction_shows_the_messages_that_it_holds(broker: BrokerInMemory) -> None:
    token = broker.half(1, Message(b"one", "k", "made", {"a": "1"}), Message(b"two!"))
    shown = show(broker, token)
    place = {"topic": "t", "partition": 0, "offset": None, "born_at": broker.now()}
    assert shown["rows"] == [
        place
        | {"message_id": f"{token}-0", "key": "k", "tag": "made", "headers": {"a": "1"}, "size": 3},
        place | {"message_id": f"{token}-1", "key": None, "tag": None, "headers": {}, "size": 4},
    ]
    assert shown["next"] is None
    assert [b64decode(row["body"]) for row in show(broker, token, bodies=True)["rows"]] == [
        b"one",
        b"two!",
    ]
    assert "rows" not in broker.ask("tx.show", token=token)
    commit(broker, token)
    assert [row["offset"] for row in show(broker, token)["rows"]] == [0, 1]


def test_the_states_of_many_transactions_are_one_call(broker: BrokerInMemory) -> None:
    one, other = broker.half(1, Message(b"a")), broker.half(2, Message(b"b"))
    commit(broker, other)
    asked = [f"{number:032x}" for number in range(transactions.STATES_PER_STEP)]
    found = broker.ask("tx.states", tokens=[*asked, one, other])["transactions"]
    decider = broker.ask("tx.show", token=one)["decider"]
    assert found == {one: ["UNDECIDED", decider], other: ["PUBLISHED", decider]}
    assert broker.ask("tx.states", tokens=[]) == {"transactions": {}}
    with pytest.raises(errors.RemoteProtocolError, match="at most 5000"):
        broker.ask("tx.states", tokens=["0" * 32] * 5_001)


def test_what_a_database_has_committed_comes_page_by_page(broker: BrokerInMemory) -> None:
    """For the comparison with its rows; other deciders are left out."""
    one, open_, other = (broker.half(number, Message(b"a")) for number in (1, 2, 3))
    elsewhere = broker.half(4, Message(b"a"), decider=ByPostgres(1, 1, 6, 7, 1))
    for token in (one, other, elsewhere):
        commit(broker, token)
    [_, system_id, _timeline, database_oid, *_] = broker.ask("tx.show", token=one)["decider"]
    asked = {"system_id": system_id, "database_oid": database_oid, "limit": 2}
    tokens, after = list[str](), None
    while True:
        page = broker.ask("tx.committed", **asked, after=after)
        tokens += [row["token"] for row in page["transactions"]]
        after = page["next"]
        if after is None:
            break
    assert tokens == [one, other]
    assert open_ not in tokens


def test_messages_come_page_by_page(broker: BrokerInMemory) -> None:
    token = broker.half(1, *(Message(str(number).encode()) for number in range(5)))
    bodies, after = list[list[bytes]](), 0
    while after is not None:
        shown = show(broker, token, after=after, limit=2, bodies=True)
        bodies.append([b64decode(row["body"]) for row in shown["rows"]])
        after = shown["next"]
    assert bodies == [[b"0", b"1"], [b"2", b"3"], [b"4"]]
    assert show(broker, token, after=7)["rows"] == []


def test_a_page_begins_and_ends_within_a_batch(broker: BrokerInMemory) -> None:
    broker.half(1)  # makes the topic
    token = broker.token(2)
    messages = [Message(str(number).encode(), f"k{number}") for number in range(4)]
    data = encode(messages, producer_id=token, epoch=0, sequence=0, born_at=1)
    shown = show(broker, broker.store(token, [data, data]), after=3, limit=2)
    assert ([row["key"] for row in shown["rows"]], shown["next"]) == (["k3", "k0"], 5)
    assert [(batch["messages"], batch["keys"]) for batch in shown["batches"]] == [(4, 4), (4, 4)]


def test_a_page_is_cut_by_its_bytes_but_holds_a_message_at_least(broker: BrokerInMemory) -> None:
    half, whole = bytes(PAGE_BYTES // 4), bytes(PAGE_BYTES * 2)
    token = broker.half(1, *map(Message, (half, half, half, whole, b"last")))
    pages, after = list[list[int]](), 0
    while after is not None:
        shown = show(broker, token, after=after, bodies=True)
        pages.append([row["size"] for row in shown["rows"]])
        after = shown["next"]
    assert pages == [[len(half)] * 2, [len(half)], [len(whole)], [4]]
    assert show(broker, token)["next"] is None


def test_messages_that_are_not_durable_are_on_the_next_page(broker: BrokerInMemory) -> None:
    broker.half(1)
    broker.fs.capacity = 0
    token = broker.token(2)
    data = encode([Message(bytes(50_000))], producer_id=token, epoch=0, sequence=0, born_at=1)
    broker.store(token, [data], wait=False)
    replies: list[Any] = []
    broker.assembly.calls.ask("tx.show", {"token": token.hex(), "detail": True}, replies.append)
    assert replies == []
    broker.fs.capacity = None
    broker.pass_time(1)
    [shown] = replies
    assert (shown["messages"], shown["rows"], shown["next"]) == (1, [], 0)
    assert len(show(broker, token.hex())["rows"]) == 1


def test_a_transaction_tells_whom_it_waits_for_and_whom_it_holds_up(broker: BrokerInMemory) -> None:
    first = broker.half(1, Message(b"1", "a"), Message(b"1", "b"))
    plain = encode([Message(b"x", "a")], producer_id=b"p" * 16, epoch=0, sequence=0, born_at=1)
    broker.do(StoreBatch("t", 0, 0, plain, verify(plain)))
    broker.pass_time(5)
    second = broker.half(2, Message(b"2", "b"), Message(b"2", "a"), Message(b"2", "c"))
    other = broker.half(3, Message(b"3", "d"))
    assert commit(broker, second) == "COMMITTED"
    before = {
        "token": first,
        "state": "UNDECIDED",
        "service": "shop",
        "stored_at": broker.now() - 5 * SECOND,
        "keys": 2,
    }
    queued = {"token": None, "state": "QUEUED", "service": "", "stored_at": 0, "keys": 1}
    shown = show(broker, second)
    assert (shown["waits_for"], shown["holds_up"]) == ([before, queued], [])
    shown = show(broker, first)
    behind = {
        "token": second,
        "state": "COMMITTED",
        "service": "shop",
        "stored_at": broker.now(),
        "keys": 2,
    }
    assert (shown["waits_for"], shown["holds_up"]) == ([], [queued, behind])
    assert show(broker, other)["waits_for"] == show(broker, other)["holds_up"] == []
    commit(broker, first)
    assert show(broker, second)["state"] == "PUBLISHED"
    assert show(broker, second)["waits_for"] == []


def test_a_transaction_that_takes_its_place_at_its_commit_waits_for_all_that_hold_its_keys(
    broker: BrokerInMemory,
) -> None:
    job = broker.half(1, Message(b"1", "a"), decider=ByJob(b"j" * 16))
    later = broker.half(2, Message(b"2", "a"))
    assert [one["token"] for one in show(broker, job)["waits_for"]] == [later]
    assert show(broker, later)["waits_for"] == []


def test_contradictions_are_kept_with_their_reasons(broker: BrokerInMemory) -> None:
    token, other = broker.half(1, Message(b"1")), broker.half(2, Message(b"2"))
    for name in (token, other):
        commit(broker, name)
    refused = broker.ask(
        "tx.decide", token=token, outcome="ROLLBACK", operator="eve", reason="a whim", force=True
    )
    assert type(refused) is errors.Conflict
    broker.pass_time(1)
    broker.do(DecideTransaction(bytes.fromhex(token), Decision.ROLLBACK, "producer shop"))
    whim = {
        "asked": "ROLLBACK",
        "by": "operator eve",
        "reason": "a whim",
        "at": broker.now() - SECOND,
    }
    late = {"asked": "ROLLBACK", "by": "producer shop", "reason": "", "at": broker.now()}
    shown = show(broker, token)
    assert shown["conflicts"] == [late, whim]
    assert (shown["by"], shown["reason"]) == ("operator ada", "seen in the books")
    assert show(broker, other)["conflicts"] == []
    journal = broker.ask("tx.list", state="conflicts")["transactions"]
    assert journal == [{"token": token} | late, {"token": token} | whim]


def test_each_list_holds_what_its_name_says(broker: BrokerInMemory) -> None:
    undecided = broker.half(1, Message(b"1", "a"))
    waiting = broker.half(2, Message(b"2", "a"))
    commit(broker, waiting)
    open_ = broker.half(3, Message(b"3", "a"), sealed=False)
    lists = {"undecided": [undecided, open_], "waiting": [waiting], "open": [open_], "in-doubt": []}
    for state, tokens in lists.items():
        assert [
            row["token"] for row in broker.ask("tx.list", state=state)["transactions"]
        ] == tokens, state


@pytest.mark.parametrize(
    "form", [str, str.upper, lambda text: str(UUID(text)), lambda text: str(UUID(text)).upper()]
)
def test_a_token_may_be_written_as_a_uuid(broker: BrokerInMemory, form: Any) -> None:
    token = broker.half(0xABCDEF, Message(b"1"))
    client = broker.connect()
    shown: Any = client.call("tx.show", token=form(token))
    assert shown["token"] == token


@pytest.mark.parametrize(
    "token", ["", "ab", "g" * 32, "0" * 33, "{" + "0" * 30 + "}", "-" * 32, "0-" * 16 + "0" * 16]
)
def test_anything_but_a_token_is_refused(broker: BrokerInMemory, token: str) -> None:
    reply = broker.connect().ask(Opcode.CALL, encode_call("tx.show", {"token": token}))
    assert isinstance(to_error(reply.status, reply.payload), errors.BadRequest)


def test_a_list_of_transactions_is_made_in_steps_and_fits_in_a_reply(
    broker: BrokerInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reasons are texts of users, of up to 4 KiB: 10,000 of them outgrow a frame."""
    monkeypatch.setattr(turn_work, "TURN_S", 0.0)
    monkeypatch.setattr(turn_work, "STEP_S", 0.0)
    monkeypatch.setattr(transactions, "LIST_BYTES", 4_000)
    tokens = [broker.half(number, Message(b"x", "k")) for number in range(1, 30)]
    client = broker.connect()
    request = encode_frame(Opcode.CALL, 3, encode_call("tx.list", {"limit": 10_000}))
    client.session.dataReceived(request)  # type: ignore[attr-defined]
    assert client.replies() == [], "others have their turns"
    broker.pass_time(1)
    [reply] = client.replies()
    assert (reply.status, len(reply.payload) < 5_000) == (0, True)
    listed: Any = parse(reply.payload)
    assert [row["token"] for row in listed["transactions"]][:5] == tokens[:5]

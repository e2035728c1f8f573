"""Hostile input of users, by the numbers of docs/FAULTS.md, section 4, at a real broker
that has users. In each test the witness has all its requests answered beside it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.admin.test_access_walk import SHOWN, filled
from tests.broker.access.test_needs import FREE, arguments, requests
from tests.system.stranger import AttackedBroker, Stranger, half, hello, refusal
from txmq.client.protocol.transaction.tokens import new_token
from txmq.model.message import ROLLBACK
from txmq.wire import scram
from txmq.wire.calls.registry import CALLS
from txmq.wire.calls.users import VerifierArgs
from txmq.wire.data_requests import Decide, Opcode, pack_decide
from txmq.wire.frames import Frame, encode_frame
from txmq.wire.hello import Challenge, LoginStep
from txmq.wire.json import dump
from txmq.wire.status import to_error

PASSWORD = "a-word-that-nobody-may-see"
CPU_S = 10.0  # of the broker, in one test
UNDECIDED = 200


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedBroker]:
    """A broker with `root`, users without permissions, and two services' producers."""
    attacked = AttackedBroker(tmp_path_factory.mktemp("attacked"))
    attacked.log_in_as("root", PASSWORD)
    call, password = attacked.witness.call, VerifierArgs.of(scram.make_verifier(PASSWORD))
    for name, service in (("eve", ""), ("known", ""), ("shop", "s"), ("thief", "another")):
        call("user.set", name=name, roles=[], new=True, password=password)
        for resource in ("topic:t", f"service:{service}") if service else ():
            call("acl.grant", name=name, what="producer", resource=resource)
    yield attacked
    attacked.close()
    log = attacked.broker.log
    assert PASSWORD not in log
    assert "Traceback" not in log
    assert "\x1b" not in log
    assert not {line["event"] for line in attacked.lines()} & {"broker.fault", "session.failed"}


@pytest.fixture(autouse=True)
def _unharmed(attacked: AttackedBroker) -> Iterator[None]:
    with attacked.unharmed(CPU_S):
        yield


def begin(stranger: Stranger, message: str) -> Frame:
    login = {"mechanism": scram.MECHANISM, "message": message}
    stranger.send(encode_frame(Opcode.HELLO, 1, hello(login=login)))
    return stranger.next()


def end(stranger: Stranger, message: str) -> Frame:
    stranger.send(encode_frame(Opcode.LOGIN, 2, dump({"message": message})))
    return stranger.next()


def error_of(answer: Frame) -> str:
    return refusal(to_error(answer.status, answer.payload))


def logged_in(attacked: AttackedBroker, user: str, service: str = "s") -> Stranger:
    client, stranger = scram.ScramClient(user, PASSWORD), attacked.connect()
    login = {"mechanism": scram.MECHANISM, "message": client.first()}
    sent = hello(login=login).replace(b'"service":"s"', f'"service":"{service}"'.encode())
    stranger.send(encode_frame(Opcode.HELLO, 1, sent))
    challenge = Challenge.parse(stranger.next()).login["message"]
    assert end(stranger, client.final(challenge)).status == 0
    return stranger


def changed(final: str, field: str, value: str) -> str:
    """Return the last message of a login with another value of a field."""
    return ",".join(
        f"{field}={value}" if part.startswith(f"{field}=") else part for part in final.split(",")
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", "a-nonce-of-another-login"),
        ("r", ""),
        ("p", "AAAA"),
        ("p", "not base64"),
        ("p", "A" * 3_000),
        ("c", "cD10bHMtdW5pcXVlLCw="),
        ("c", "\0"),
    ],
)
def test_hostile_24_a_proof_that_is_none(attacked: AttackedBroker, field: str, value: str) -> None:
    client, stranger = scram.ScramClient("known", PASSWORD), attacked.connect()
    challenge = Challenge.parse(begin(stranger, client.first())).login["message"]
    final = client.final(challenge)
    assert error_of(end(stranger, changed(final, field, value))) in ("LoginFailed", "BadRequest")
    assert stranger.rest() == []


def test_hostile_24_a_proof_that_was_overheard(attacked: AttackedBroker) -> None:
    client, stranger = scram.ScramClient("known", PASSWORD), attacked.connect()
    first = client.first()
    final = client.final(Challenge.parse(begin(stranger, first)).login["message"])
    assert end(stranger, final).status == 0
    thief = attacked.connect()
    begin(thief, first)
    assert error_of(end(thief, final)) == "LoginFailed"
    assert thief.rest() == []


@pytest.mark.parametrize("user", ["sh=2Cop", "sh\0op", "\x1b[2Jshop", "u" * 3_000, "", "SHOP"])
def test_hostile_24_25_a_user_that_is_none(attacked: AttackedBroker, user: str) -> None:
    stranger = attacked.connect()
    answer = begin(stranger, f"n,,n={user},r={'n' * 24}")
    if not answer.status:  # a challenge, as to any user
        nonce = Challenge.parse(answer).login["message"].split(",")[0]
        answer = end(stranger, f"c=biws,{nonce},p={'A' * 43}=")
    assert error_of(answer) in ("LoginFailed", "BadRequest")
    assert stranger.rest() == []


def test_hostile_26_a_second_login_and_one_as_another_user(attacked: AttackedBroker) -> None:
    for again in (
        encode_frame(Opcode.LOGIN, 3, LoginStep(message="c=biws,r=x,p=y").encode()),
        encode_frame(Opcode.HELLO, 3, hello(login={"mechanism": scram.MECHANISM,
                     "message": scram.ScramClient("root", PASSWORD).first()})),
    ):  # fmt: skip
        stranger = logged_in(attacked, "eve")
        stranger.send(again)
        assert error_of(stranger.next()) == "BadRequest"
        assert stranger.call("user.me")["user"] == "eve"


def test_hostile_52_a_decision_about_another_s_transaction(attacked: AttackedBroker) -> None:
    owner, thief = logged_in(attacked, "shop"), logged_in(attacked, "thief", "another")
    token = new_token()
    assert isinstance(owner.ask(Opcode.GROUP, half(token.bytes)), bytes)
    payload = pack_decide(Decide(ROLLBACK, token.bytes, 0, "thief"))
    assert refusal(thief.ask(Opcode.DECIDE, payload)) == "AccessDenied"
    for answer in ("COMMIT", "ROLLBACK"):
        assert thief.refused("checks.answer", token=token.hex, answer=answer) == "AccessDenied"
    assert thief.refused("tx.show", token=token.hex) == "AccessDenied"
    assert attacked.witness.call("tx.show", token=token.hex)["state"] == "UNDECIDED"


def test_hostile_84_a_search_tells_nothing_of_bodies(attacked: AttackedBroker) -> None:
    attacked.witness.send("t", b"the secret plan")
    thief = logged_in(attacked, "eve")
    assert thief.refused("message.find", topic="t", body="secret") == "AccessDenied"
    assert thief.refused("message.search", body="secret", limit=1) == "AccessDenied"


def test_hostile_55_half_messages_that_nobody_confirms(attacked: AttackedBroker) -> None:
    attacked.witness.call("user.quota", name="shop", undecided=UNDECIDED)
    owner, answers = logged_in(attacked, "shop"), list[object]()
    for _ in range(2 * UNDECIDED):
        answers.append(owner.ask(Opcode.GROUP, half(new_token().bytes)))
    kept = [one for one in answers if isinstance(one, bytes)]
    assert 0 < len(kept) <= UNDECIDED
    assert {refusal(one) for one in answers if one not in kept} == {"Throttled"}
    attacked.witness.call("user.quota", name="shop", undecided=0)


def test_hostile_77_requests_that_a_user_may_not_make(attacked: AttackedBroker) -> None:
    token = new_token().bytes
    assert isinstance(logged_in(attacked, "shop").ask(Opcode.GROUP, half(token)), bytes)
    eve = logged_in(attacked, "eve")
    for opcode, payload in requests(token).items():
        if opcode in (Opcode.SENDS, Opcode.GROUPS, Opcode.DECISIONS):
            continue  # each request in them has an answer of its own
        assert refusal(eve.ask(opcode, payload)) == "AccessDenied", opcode
    for name in sorted(CALLS.keys() - FREE):
        assert eve.refused(name, **arguments(name)) == "AccessDenied", name
    for path in sorted(SHOWN):
        assert attacked.get_as("eve", PASSWORD, filled(path)).split()[1] == b"403", path
    assert attacked.get_as("eve", "no password", "/topics").split()[1] == b"401"

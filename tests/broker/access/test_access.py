"""Logins and rights of sessions, over a broker in memory."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import pytest

from tests.broker.access.support import PASSWORD, VERIFIER, BrokerWithUsers, login
from tests.broker.support import BrokerInMemory, Client, send_payload
from txmq import errors
from txmq.batch import encode
from txmq.broker.access import guard
from txmq.broker.reactor.protocol import STUCK_SECONDS
from txmq.core.topics.topics import CreateTopic
from txmq.model.decider import ByBroker, ByChecker, ByJob
from txmq.model.message import Decision, Message, is_name
from txmq.model.own_topics import AUDIT
from txmq.wire import scram
from txmq.wire.bundle import BundleDescription, BundlePart, PartBatch, pack_part
from txmq.wire.calls.encoding import encode_call
from txmq.wire.calls.users import VerifierArgs
from txmq.wire.chunks import unpack_chunks
from txmq.wire.data_requests import Decide, Opcode, Read, pack_decide, pack_read
from txmq.wire.frames import Frame, encode_frame
from txmq.wire.hello import Challenge, Hello, LoginStep
from txmq.wire.status import to_error


def refusal_of(reply: Any) -> errors.TxmqError:
    assert reply.status, "it was accepted"
    return to_error(reply.status, reply.payload)


def test_a_wrong_password_and_an_unknown_user_get_the_same_answer() -> None:
    answers = []
    for user, password in (("root", "wrong password"), ("stranger", "wrong password")):
        broker = BrokerWithUsers()
        with pytest.raises(errors.LoginFailed) as caught:
            broker.log_in(user, password)
        answers.append((caught.value.message, caught.value.hint))
    assert len(set(answers)) == 1


def test_the_challenge_to_an_unknown_user_looks_like_any_other_and_stays_the_same() -> None:
    def salt(user: str) -> str:
        client = broker.connect(None)
        hello = Hello(versions=(1, 1), client="test", login=login(user))
        client.send(encode_frame(Opcode.HELLO, 1, hello.encode()))
        [reply] = client.replies()
        return Challenge.parse(reply).login["message"].split(",", 1)[1]

    broker = BrokerWithUsers()
    assert salt("stranger") == salt("stranger") != salt("other")
    assert len(salt("stranger")) - len("i=15000") == len(salt("root")) - len("i=4096")


def test_a_user_with_too_many_failures_has_to_wait_and_others_need_not() -> None:
    broker = BrokerWithUsers()
    for _ in range(guard.MAX_FAILURES):
        with pytest.raises(errors.LoginFailed):
            broker.log_in("root", "wrong password")
    with pytest.raises(errors.Throttled):
        broker.log_in("root")
    assert broker.log_in("shop").call("user.me"), "from the same host"
    broker.assembly.guard.check_login("10.0.0.9", "root")
    broker.pass_time(guard.WINDOW_S)
    assert broker.log_in("root").call("user.me")


def test_a_login_cannot_be_replayed_and_comes_once() -> None:
    broker = BrokerWithUsers()
    mine = scram.ScramClient("root", "correct horse", "n" * 24)
    hello = Hello(versions=(1, 1), client="test", login=login("root", mine))
    frame = encode_frame(Opcode.HELLO, 1, hello.encode())
    one = broker.connect(None)
    one.send(frame)
    [challenge] = one.replies()
    final = mine.final(Challenge.parse(challenge).login["message"])
    proof = encode_frame(Opcode.LOGIN, 2, LoginStep(message=final).encode())
    other = broker.connect(None)
    other.send(frame)
    other.replies()
    other.send(proof)  # as it was overheard
    assert isinstance(other.refusal(), errors.LoginFailed)
    assert other.closed
    one.send(proof)
    [welcome] = one.replies()
    assert not welcome.status
    for again in (frame, proof):  # as another user, or the same
        one.send(again)
        assert isinstance(one.refusal(), errors.BadRequest)


def test_rights_that_are_changed_hold_for_open_connections() -> None:
    broker = BrokerWithUsers()
    root, shop = broker.log_in("root"), broker.log_in("nobody")
    assert isinstance(refusal_of(shop.ask(Opcode.SEND, send_payload())), errors.AccessDenied)
    root.call("acl.grant", name="nobody", what="producer", resource="topic:t")
    root.call("topic.create", name="t", partitions=1)
    assert shop.ask(Opcode.SEND, send_payload()).status == 0
    root.call("acl.revoke", name="nobody", what="producer", resource="topic:t")
    assert isinstance(refusal_of(shop.ask(Opcode.SEND, send_payload(1))), errors.AccessDenied)
    root.call("user.delete", name="nobody")
    broker.pass_time(0.1)
    assert shop.closed
    assert not root.closed


@pytest.mark.parametrize("call", ["acl.revoke", "user.delete"])
def test_requests_that_wait_end_when_their_user_loses_the_right(call: str) -> None:
    broker = BrokerWithUsers()
    root, reader = broker.log_in("root"), broker.log_in("nobody")
    root.call("topic.create", name="t", partitions=1)
    access: dict[str, Any] = {"what": "consumer", "resource": "topic:t"}
    root.call("acl.grant", name="nobody", **access)
    reader.send(encode_frame(Opcode.READ, 7, pack_read(Read(0, 0, 60_000, 1 << 20, "t"))))
    root.call("acl.grant", name="billing", **access)
    assert not reader.replies(), "the rights of others have nothing to do with it"
    root.call(call, name="nobody", **(access if call == "acl.revoke" else {}))
    [reply] = reader.replies()
    assert reply.status == 0
    assert not unpack_chunks(reply.payload)[0], "it may ask again, and is judged"
    assert root.ask(Opcode.SEND, send_payload()).status == 0
    assert not reader.replies()


def test_sessions_of_a_deleted_user_end_though_another_of_the_name_is_there_at_once() -> None:
    broker = BrokerWithUsers()
    root, former = broker.log_in("root"), broker.log_in("nobody")
    new = {"name": "nobody", "roles": ["admin"], "password": VerifierArgs.of(VERIFIER), "new": True}
    deletes = encode_frame(Opcode.CALL, 8, encode_call("user.delete", {"name": "nobody"}))
    root.send(deletes + encode_frame(Opcode.CALL, 9, encode_call("user.set", new)))
    broker.pass_time(0.1)
    assert [reply.status for reply in root.replies()] == [0, 0]
    assert former.closed
    assert broker.log_in("nobody").call("user.me")


def test_a_client_whose_user_is_deleted_and_that_does_not_end_is_cut() -> None:
    broker = BrokerWithUsers()
    root, reader = broker.log_in("root"), broker.log_in("nobody")
    reader.transport.loseConnection = lambda: None  # type: ignore[method-assign]  # as TLS whose peer is silent
    root.call("user.delete", name="nobody")
    broker.pass_time(STUCK_SECONDS)
    assert reader.transport.disconnected


def test_the_first_user_ends_connections_without_a_login() -> None:
    broker = BrokerInMemory()
    broker.start()
    maker, other = broker.connect(), broker.connect()
    key = "AAAAAAAAAAAAAAAAAAAAAA=="
    password = {"salt": key, "iterations": 4_096, "stored_key": key, "server_key": key}
    reply = maker.call("user.set", name="root", roles=["admin"], password=password, new=True)
    assert reply == {"user": "root", "changed": True}
    broker.pass_time(0.1)
    assert maker.closed
    assert other.closed
    fresh = broker.connect(None)
    fresh.send(encode_frame(Opcode.HELLO, 1, Hello(versions=(1, 1), client="test").encode()))
    assert isinstance(fresh.refusal(), errors.LoginFailed)


def test_a_service_decides_its_own_transactions_only() -> None:
    broker = BrokerWithUsers()
    token = bytes.fromhex(broker.half(1, Message(b"x", "k")))  # of the service `shop`
    broker.grant("nobody", "producer", "service:billing")
    thief = broker.log_in("nobody", service="billing")
    decide = pack_decide(Decide(Decision.COMMIT, token, 0, "producer"))
    assert isinstance(refusal_of(thief.ask(Opcode.DECIDE, decide)), errors.AccessDenied)
    calls: tuple[tuple[str, dict[str, object]], ...] = (
        ("checks.answer", {"token": token.hex(), "answer": "COMMIT"}),
        ("checks.wait", {"service": "shop", "wait_ms": 0}),
        ("producer.register", {"service": "shop", "instance": "shop-1"}),
        ("tx.show", {"token": token.hex()}),
    )
    for call, args in calls:
        refused = refusal_of(thief.ask(Opcode.CALL, encode_call(call, args)))
        assert isinstance(refused, errors.AccessDenied), call
    with pytest.raises(errors.AccessDenied):
        broker.log_in("nobody", service="shop", instance="shop-1")
    broker.grant("nobody", "producer", "service:shop")
    assert thief.ask(Opcode.DECIDE, decide).status == 0


def test_without_users_a_check_back_is_answered_by_its_service_only() -> None:
    broker = BrokerInMemory()
    token = broker.half(1, Message(b"x", "k"), decider=ByChecker("c"))  # of the service `shop`
    other = broker.connect()  # of the service `s`
    answer = encode_call("checks.answer", {"token": token, "answer": "COMMIT"})
    refused = refusal_of(other.ask(Opcode.CALL, answer))
    assert isinstance(refused, errors.NotPermitted)
    assert "shop" in refused.message


def test_an_operator_sees_letters_without_bodies_and_acts_under_the_own_name() -> None:
    broker = BrokerWithUsers()
    ops = broker.log_in("ops")
    asked = encode_call("message.find", {"topic": "t", "bodies": True})
    assert isinstance(refusal_of(ops.ask(Opcode.CALL, asked)), errors.AccessDenied)
    ops.call("topic.create", name="t", partitions=1)
    ops.call("topic.alter", name="t", writable=False, operator="ada", reason="frozen")
    found: Any = broker.log_in("checks").call("audit.list", call="topic.alter")
    assert [entry["operator"] for entry in found["entries"]] == ["ops"]


@pytest.mark.parametrize(
    ("call", "args"),
    [
        ("message.find", {"topic": "t", "body": "x"}),
        ("message.search", {"body": "$.a=1"}),
        ("dlq.list", {"group": "g", "select": {"body": "x"}}),
        ("dlq.stats", {"group": "g", "select": {"body": "x"}}),
        ("dlq.replay", {"group": "g", "select": {"body": "x"}, "operator": "o", "reason": "r"}),
        ("dlq.save", {"name": "s", "select": {"body": "x"}}),
    ],
)
def test_bodies_are_searched_only_by_those_who_may_read_them(
    call: str, args: dict[str, Any]
) -> None:
    broker = BrokerWithUsers()
    refused = refusal_of(broker.log_in("ops").ask(Opcode.CALL, encode_call(call, args)))
    assert isinstance(refused, errors.AccessDenied)
    assert "read" in refused.message
    select = args.get("select", args)
    del select["body"]
    select["header"] = ["a", None]  # what lists show anyway
    answer = broker.log_in("ops").ask(Opcode.CALL, encode_call(call, args))
    assert not isinstance(refusal_of(answer) if answer.status else None, errors.AccessDenied)


def test_a_saved_selection_tells_of_bodies_only_those_who_may_read_them() -> None:
    broker = BrokerWithUsers()
    root, ops = broker.log_in("root"), broker.log_in("ops")
    select = {"states": ["open", "abandoned"], "body": "$.card=4111"}
    root.call("dlq.save", name="cards", select=select, operator="root", reason="")
    asked = encode_call("dlq.list", {"group": "g", "saved": "cards"})
    assert isinstance(refusal_of(ops.ask(Opcode.CALL, asked)), errors.AccessDenied)
    root.call("dlq.save", name="cards", select={"key": "k"}, operator="root", reason="")
    assert isinstance(refusal_of(ops.ask(Opcode.CALL, asked)), errors.UnknownGroup)


def test_who_may_read_all_topics_finds_no_act_of_an_operator() -> None:
    broker = BrokerWithUsers()
    broker.grant("billing", "operator", "cluster")
    ops = broker.log_in("ops")
    ops.call("topic.create", name="t", partitions=1)
    ops.call("topic.alter", name="t", writable=False, reason="a secret")
    reader = broker.log_in("billing")
    asked = encode_call("message.find", {"topic": "_txmq.audit"})
    assert isinstance(refusal_of(reader.ask(Opcode.CALL, asked)), errors.AccessDenied)
    for wanted in ({"body": "secret"}, {"key": "topic:t"}):
        found: Any = reader.call("message.search", **wanted)
        assert (found["messages"], found["topics"]) == ([], 1)


def test_denials_are_counted_and_audited_once_a_minute() -> None:
    broker = BrokerWithUsers()
    nobody = broker.log_in("nobody")
    for _ in range(5):
        nobody.ask(Opcode.SEND, send_payload())
    broker.pass_time(0.1)
    assert broker.assembly.guard.denied == {"write": 5}
    found: Any = broker.log_in("checks").call("audit.list", call="access.denied")
    assert [
        (entry["operator"], entry["arguments"]["verb"], entry["arguments"]["resource"])
        for entry in found["entries"]
    ] == [("nobody", "write", "topic:t")]


def test_denials_of_one_user_do_not_hide_those_of_others() -> None:
    broker = BrokerWithUsers()
    nobody, shop = broker.log_in("nobody"), broker.log_in("shop")
    for number in range(guard.MAX_DENIALS + 1):
        nobody.call("topic.delete", name=f"t{number}")
    shop.call("topic.delete", name="orders")
    broker.pass_time(0.1)
    found: Any = broker.log_in("checks").call("audit.list", call="access.denied", limit=1_000)
    entries = [entry["operator"] for entry in found["entries"]]
    assert entries.count("nobody") == guard.MAX_DENIALS_OF_USER
    assert entries.count("shop") == 1


def test_the_audit_topic_is_for_auditors() -> None:
    broker = BrokerWithUsers()
    broker.grant("billing", "read", "topic:*")
    read = pack_read(Read(0, 0, 0, 1 << 16, AUDIT))
    refused = refusal_of(broker.log_in("billing").ask(Opcode.READ, read))
    assert isinstance(refused, errors.AccessDenied)
    assert broker.log_in("checks").ask(Opcode.READ, read).status == 0


def test_a_list_of_users_and_the_log_of_operators_show_no_keys() -> None:
    broker = BrokerWithUsers()
    root = broker.log_in("root")
    shown = json.dumps([root.call("user.list"), root.call("audit.list"), root.call("user.me")])
    for secret in ("stored_key", "salt", "verifier"):
        assert secret not in shown


def test_a_new_password_is_the_one_that_counts() -> None:
    broker = BrokerWithUsers()
    root, shop = broker.log_in("root"), broker.log_in("shop")
    made = scram.make_verifier("another password", iterations=scram.MIN_ITERATIONS)
    root.call("user.set", name="shop", password=VerifierArgs.of(made), new=False)
    assert broker.log_in("shop", "another password")
    with pytest.raises(errors.LoginFailed):
        broker.log_in("shop")
    assert not shop.closed


def test_logins_that_begin_at_a_time_get_no_more_guesses() -> None:
    broker = BrokerWithUsers()
    waiting = []
    for _ in range(3 * guard.MAX_FAILURES):
        client, scram_client = broker.connect(None), scram.ScramClient("root", "wrong password")
        hello = Hello(versions=(1, 1), client="test", login=login("root", scram_client))
        client.send(encode_frame(Opcode.HELLO, 1, hello.encode()))
        [challenge] = client.replies()
        waiting.append((client, scram_client.final(Challenge.parse(challenge).login["message"])))
    told = []
    for client, final in waiting:
        client.send(encode_frame(Opcode.LOGIN, 2, LoginStep(message=final).encode()))
        [reply] = client.replies()
        told.append(type(to_error(reply.status, reply.payload)).__name__)
    assert told == ["LoginFailed"] * 10 + ["Throttled"] * 20


def test_an_ipv6_network_has_the_guesses_of_one_host() -> None:
    office = BrokerWithUsers().assembly.guard
    for number in range(guard.MAX_FAILURES):
        office.check_login(f"2001:db8::{number}", "root")
        office.failed(f"2001:db8::{number}", "root")
    with pytest.raises(errors.Throttled):
        office.check_login("2001:db8::ffff", "root")
    office.check_login("2001:db8:0:1::1", "root")


def test_clients_inside_the_broker_have_a_login_of_their_own() -> None:
    for broker in (BrokerWithUsers(), BrokerInMemory()):
        secret = broker.assembly.guard.own_password
        own = scram.ScramClient(guard.OWN_USER, secret)
        client = broker.connect(None)
        hello = Hello(versions=(1, 1), client="test", login=login(guard.OWN_USER, own))
        client.send(encode_frame(Opcode.HELLO, 1, hello.encode()))
        [challenge] = client.replies()
        final = own.final(Challenge.parse(challenge).login["message"])
        client.send(encode_frame(Opcode.LOGIN, 2, LoginStep(message=final).encode()))
        assert not client.replies()[0].status
        shown: Any = client.call("broker.show")
        assert shown["name"]
    assert not is_name(guard.OWN_USER), "nobody else can have it"


def test_a_node_may_copy_the_log_and_do_nothing_else() -> None:
    broker = BrokerWithUsers()
    with pytest.raises(errors.LoginFailed):
        broker.log_in(guard.NODES, "nonce", service=None)
    broker.assembly.guard.admit_nodes("nonce")
    with pytest.raises(errors.LoginFailed):
        broker.log_in(guard.NODES, "a guess", service=None)
    node = broker.log_in(guard.NODES, "nonce", service=None)

    def refused(name: str, **args: object) -> type[errors.TxmqError]:
        return type(refusal_of(node.ask(Opcode.CALL, encode_call(name, args))))

    held: Any = node.call("log.hold", hold="a" * 32)
    assert held["segments"] == [0]
    read = {"file": "segment", "position": 0, "offset": 0, "size": 64}
    assert refused("log.read", **read) is errors.BadRequest  # the disk is simulated
    assert not node.ask(Opcode.CALL, encode_call("log.release", {"hold": "a" * 32})).status
    for name in ("broker.show", "cluster.describe", "user.list", "log.restores"):
        assert refused(name) is errors.AccessDenied
    assert type(refusal_of(node.ask(Opcode.SEND, send_payload()))) is errors.AccessDenied
    assert not is_name(guard.NODES), "nobody else can have it"


def test_passwords_by_http_cost_a_bounded_number_of_hashes_however_many_peers_there_are() -> None:
    broker = BrokerWithUsers()
    header = "Basic " + b64encode(b"root:wrong password").decode()
    right = "Basic " + b64encode(f"root:{PASSWORD}".encode()).decode()
    log_in = broker.assembly.guard.log_in_by_http
    assert log_in("10.9.9.9", right) is not None
    told: list[str] = []
    for number in range(60):
        with pytest.raises(errors.TxmqError) as caught:
            log_in(f"10.0.0.{number}", header)
        told.append(type(caught.value).__name__)
    assert told.count("Throttled") == 60 - (guard.HASHES_OF_STRANGERS - 1)
    assert log_in("10.9.9.9", right) is not None, "a password that was right is not hashed again"
    broker.pass_time(1)
    with pytest.raises(errors.LoginFailed):
        log_in("10.0.0.1", header)


def test_many_names_neither_push_out_a_lock_nor_take_the_hashes_of_other_hosts() -> None:
    broker = BrokerWithUsers()
    office = broker.assembly.guard
    for _ in range(guard.MAX_FAILURES):
        office.failed("10.0.0.1", "root")
    for number in range(guard.MAX_PEERS + 1):
        office.failed("10.0.0.1", f"name-{number}")
    with pytest.raises(errors.Throttled):
        office.check_login("10.0.0.1", "root")
    told = []
    for number in range(30):
        guess = "Basic " + b64encode(f"other-{number}:wrong".encode()).decode()
        with pytest.raises(errors.TxmqError) as caught:
            office.log_in_by_http("10.0.0.1", guess)
        told.append(type(caught.value).__name__)
    assert told.count("LoginFailed") == guard.HASHES_OF_PEER
    right = "Basic " + b64encode(f"root:{PASSWORD}".encode()).decode()
    assert office.log_in_by_http("10.0.0.2", right) is not None


@pytest.mark.parametrize("by_http", [True, False])
def test_hosts_of_strangers_leave_hashes_to_those_that_users_log_in_from(*, by_http: bool) -> None:
    broker = BrokerWithUsers()
    log_in = broker.assembly.guard.log_in_by_http

    def basic(user: str, password: str) -> str:
        return "Basic " + b64encode(f"{user}:{password}".encode()).decode()

    if by_http:
        host = "10.9.9.9"
        assert log_in(host, basic("root", PASSWORD)) is not None
    else:
        host = broker.log_in("root").session.peer_host  # type: ignore[attr-defined]  # a session's
    broker.pass_time(60.0)
    for number in range(100):
        with pytest.raises(errors.TxmqError):
            log_in(f"10.0.0.{number % 10}", basic(f"user-{number}", "a guess"))
    assert log_in(host, basic("ops", PASSWORD)) is not None
    with pytest.raises(errors.Throttled):
        log_in("10.7.7.7", basic("ops", "a guess"))


def test_a_verifier_of_many_rounds_costs_as_many_hashes() -> None:
    broker = BrokerWithUsers()
    made = scram.make_verifier("x", b"t" * 16, scram.MIN_ITERATIONS)
    made = made._replace(iterations=10 * scram.ITERATIONS)
    broker.log_in("root").call("user.set", name="shop", password=VerifierArgs.of(made), new=False)
    office = broker.assembly.guard
    guess = "Basic " + b64encode(b"shop:wrong").decode()
    with pytest.raises(errors.LoginFailed):
        office.log_in_by_http("10.0.0.1", guess)
    broker.pass_time(1)
    with pytest.raises(errors.Throttled):
        office.log_in_by_http("10.0.0.1", guess)


@pytest.mark.parametrize("name", guard.BUILT_IN)
def test_nobody_else_has_the_rights_of_the_broker_s_own_parts_or_locks_them_out(name: str) -> None:
    office = BrokerWithUsers().assembly.guard
    office.admit_nodes("nonce")
    office.certificate_name = lambda _transport: name
    assert office.certified(object()) is None
    for _ in range(2 * guard.MAX_FAILURES):
        office.failed("127.0.0.1", name)
    office.check_login("127.0.0.1", name)
    header = "Basic " + b64encode(f"{name}:nonce".encode()).decode()
    with pytest.raises(errors.LoginFailed):
        office.log_in_by_http("10.0.0.1", header)


def test_a_login_that_began_before_a_new_password_or_the_user_s_end_does_not_succeed() -> None:
    broker = BrokerWithUsers()
    root, made = broker.log_in("root"), scram.make_verifier("another", b"t" * 16, 4_096)
    begun = []
    for user in ("shop", "billing"):
        client, scram_client = broker.connect(None), scram.ScramClient(user, PASSWORD)
        hello = Hello(versions=(1, 1), client="test", login=login(user, scram_client))
        client.send(encode_frame(Opcode.HELLO, 1, hello.encode()))
        [challenge] = client.replies()
        begun.append((client, scram_client.final(Challenge.parse(challenge).login["message"])))
    root.call("user.set", name="shop", password=VerifierArgs.of(made), new=False)
    root.call("user.delete", name="billing")
    broker.pass_time(0)
    for client, final in begun:
        client.send(encode_frame(Opcode.LOGIN, 2, LoginStep(message=final).encode()))
        [reply] = client.replies()
        assert isinstance(refusal_of(reply), errors.LoginFailed)


def test_a_saved_selection_is_replaced_and_removed_by_its_author_and_by_admins_only() -> None:
    broker = BrokerWithUsers()
    root, ops, other = broker.log_in("root"), broker.log_in("ops"), broker.log_in("nobody")
    broker.grant("nobody", "operator", "group:billing")
    made = scram.make_verifier(PASSWORD, b"t" * 16, scram.MIN_ITERATIONS)

    def save(client: Client, name: str, text: str | None) -> errors.TxmqError | None:
        select = None if text is None else {"text": text}
        args: dict[str, object] = {"name": name, "select": select, "operator": "ops"}
        reply = client.ask(Opcode.CALL, encode_call("dlq.save", args | {"reason": "ops: mine"}))
        return to_error(reply.status, reply.payload) if reply.status else None

    def saved() -> dict[str, str]:
        found: Any = ops.call("dlq.saved")
        return {one["name"]: one["select"]["text"] for one in found["selections"]}

    assert save(ops, "late", "a") is save(ops, "odd", "b") is None
    for text in ("x", None):
        refused = save(other, "late", text)
        assert isinstance(refused, errors.NotPermitted)
        assert "'ops'" in refused.message
    rights, replies = broker.assembly.guard.rights_of("nobody"), list[Any]()
    broker.assembly.calls.ask("dlq.save", {"name": "late"}, replies.append, rights, "console")
    broker.pass_time(0)
    assert [type(reply) for reply in replies] == [errors.NotPermitted]
    assert saved() == {"late": "a", "odd": "b"}
    assert save(ops, "late", "c") is save(root, "odd", "d") is None
    assert saved() == {"late": "c", "odd": "d"}
    assert isinstance(save(ops, "odd", "e"), errors.NotPermitted), "it is the admin's by now"
    root.call("user.delete", name="ops")
    assert save(other, "late", "f") is None, "nobody else could tidy up"
    root.call("user.set", name="ops", roles=["operator"], password=VerifierArgs.of(made), new=True)
    assert isinstance(save(broker.log_in("ops"), "late", None), errors.NotPermitted)
    assert save(root, "late", None) is None


def test_a_watermark_is_moved_by_who_may_write_the_service_of_relays_only() -> None:
    """Behind it, what a relay sends passes for stored."""
    broker = BrokerWithUsers()
    broker.do(CreateTopic("t", 1))
    for user in ("ops", "checks"):
        for resource in ("topic:t", f"service:{'relay' if user == 'ops' else 'shop'}"):
            broker.grant(user, "producer", resource)
    relay, thief = broker.log_in("ops", service=None), broker.log_in("checks", service=None)

    def moved(client: Client, number: int, service: str, before: int, to: int) -> Frame:
        token = broker.token(number)
        batch = encode([Message(b"m")], producer_id=token, epoch=0, sequence=0, born_at=1)
        action = ("mark", "7-1-slot", before, to, 1)
        part = BundlePart(
            token, 0, 0, True, True, b"d" * 32,
            BundleDescription(ByBroker(), service, (action,)), (PartBatch("t", 0, 0, batch),),
        )  # fmt: skip
        return client.ask(Opcode.GROUP, b"".join(pack_part(part)))

    def position() -> Any:  # the reply of a call
        reply: Any = relay.call("mark.show", name="7-1-slot")
        return reply["place"]

    assert moved(relay, 1, "relay", 0, 10).status == 0
    for service in ("shop", "relay"):
        refused = refusal_of(moved(thief, 2, service, 10, 1_000))
        assert isinstance(refused, errors.AccessDenied)
        assert refused.detail["resource"] == "service:relay"
    assert position() == 10
    assert moved(relay, 3, "relay", 10, 20).status == 0
    assert position() == 20


def test_a_job_is_decided_and_joined_by_who_may_write_the_service_of_its_bundles() -> None:
    """Its token can be guessed where it has a name."""
    broker = BrokerWithUsers()
    name = b"j" * 16
    bundle = broker.half(1, Message(b"x"), decider=ByJob(name))  # of the service `shop`
    for resource in ("service:billing", "topic:t"):
        broker.grant("nobody", "producer", resource)
    thief, shop = broker.log_in("nobody", service=None), broker.log_in("shop")
    for call, args in (
        ("job.decide", {"outcome": "ROLLBACK"}),
        ("job.decide", {"outcome": "COMMIT"}),
        ("job.show", {}),
    ):
        asked = encode_call(call, {"token": name.hex(), **args})
        refused = refusal_of(thief.ask(Opcode.CALL, asked))
        assert isinstance(refused, errors.AccessDenied)
        assert refused.detail["resource"] == "service:shop"
    token = broker.token(2)
    batch = encode([Message(b"m")], producer_id=token, epoch=0, sequence=0, born_at=1)
    part = BundlePart(
        token, 0, 0, True, False, b"d" * 32, BundleDescription(ByJob(name), "billing"),
        (PartBatch("t", 0, 0, batch),),
    )  # fmt: skip
    refused = refusal_of(thief.ask(Opcode.GROUP, b"".join(pack_part(part))))
    assert isinstance(refused, errors.AccessDenied)
    done: Any = shop.call("job.decide", token=name.hex(), outcome="COMMIT", winners=[bundle])
    assert done["outcome"] == "COMMIT"

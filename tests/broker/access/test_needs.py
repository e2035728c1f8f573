"""The table of permissions: every request and every call has a row, and is denied to a
user without permissions.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.broker.access.support import BrokerWithUsers, login
from tests.broker.access.test_quotas import half
from tests.broker.calls.test_numbers import sample
from tests.broker.support import send_payload
from txmq import errors
from txmq.broker.access import needs
from txmq.model.access import ROLES, VERBS, Grant, Need, allows, is_grant
from txmq.model.message import Decision, Message
from txmq.model.own_topics import AUDIT
from txmq.wire.batched import pack_requests, unpack_replies
from txmq.wire.calls.encoding import encode_call
from txmq.wire.calls.registry import CALLS
from txmq.wire.data_requests import (
    Ack,
    Decide,
    Fetch,
    Opcode,
    Read,
    ReadLetters,
    pack_ack,
    pack_decide,
    pack_fetch,
    pack_read,
    pack_read_letters,
)
from txmq.wire.frames import encode_frame
from txmq.wire.status import to_error

FREE = {"user.me"}  # of calls; whoever is logged in may ask who that is
SAMPLES: dict[str, dict[str, Any]] = {
    "acl.grant": {"name": "u", "what": "read", "resource": "topic:t"},
    "acl.revoke": {"name": "u", "what": "read", "resource": "topic:t"},
    "user.set": {"name": "u", "roles": []},
    "topic.schema": {"name": "t"},
}


def arguments(name: str) -> dict[str, Any]:
    """Return valid arguments of a call."""
    if name in SAMPLES:
        return SAMPLES[name]
    schema = CALLS[name].model_json_schema()
    args: dict[str, Any] = sample(schema, schema.get("$defs", {}), "")
    for left_out in ("cursor", "saved"):
        args.pop(left_out, None)
    if "letters" in args:
        args.pop("select", None)
    return args


def a_half(broker: BrokerWithUsers) -> bytes:
    """Store an undecided half message of the service `shop`."""
    return bytes.fromhex(broker.half(1, Message(b"x", "k")))


def requests(token: bytes) -> dict[int, bytes]:
    """Return a valid payload of each request that needs a permission."""
    single: dict[int, bytes] = {
        Opcode.SEND: send_payload(),
        Opcode.GROUP: half(token),
        Opcode.DECIDE: pack_decide(Decide(Decision.COMMIT, token, 0, "producer")),
        Opcode.FETCH: pack_fetch(Fetch(1, 0, 1, 1, "g", "m")),
        Opcode.ACK: pack_ack(Ack(1, "g", "m", ())),
        Opcode.READ: pack_read(Read(0, 0, 0, 1, "t")),
        Opcode.LETTERS: pack_read_letters(ReadLetters(0, 0, 1, 1, "p", "t")),
    }
    several: dict[int, bytes] = {
        frame: b"".join(pack_requests([single[one]])) for frame, one in needs.FRAMES_OF.items()
    }
    return single | several


def test_every_request_and_every_call_has_a_row_in_the_table() -> None:
    judged = {*needs.REQUESTS, *needs.FRAMES_OF, *needs.NOT_JUDGED}
    assert judged == set(Opcode)
    assert needs.CALLS.keys() == CALLS.keys()
    shows = {name for name, args in CALLS.items() if "bodies" in args.model_fields}
    assert needs.BODIES.keys() == shows


def test_every_request_is_denied_to_a_user_without_permissions() -> None:
    broker = BrokerWithUsers()
    token = a_half(broker)
    client = broker.log_in("nobody")
    asked = requests(token)
    assert asked.keys() == {*needs.REQUESTS, *needs.FRAMES_OF} - {Opcode.PING}
    for opcode, payload in asked.items():
        reply = client.ask(opcode, payload)
        status = unpack_replies(reply.payload)[0] if opcode in needs.FRAMES_OF else reply
        error = to_error(status.status, status.payload)
        assert isinstance(error, errors.AccessDenied), (opcode, error)
    assert client.ask(Opcode.PING, b"").status == 0


@pytest.mark.parametrize("name", sorted(CALLS.keys() - FREE))
def test_every_call_is_denied_to_a_user_without_permissions(name: str) -> None:
    broker = BrokerWithUsers()
    client = broker.log_in("nobody")
    reply = client.ask(Opcode.CALL, encode_call(name, arguments(name)))
    error = to_error(reply.status, reply.payload)
    assert isinstance(error, errors.AccessDenied), (name, error)
    assert error.detail.keys() == {"user", "verb", "resource"}
    assert "txmq acl grant nobody" in error.hint
    # and the grant of the hint is one that can be given
    assert is_grant(str(error.detail["verb"]), str(error.detail["resource"]))


def test_an_admin_may_make_every_call() -> None:
    broker = BrokerWithUsers()
    client = broker.log_in("root")
    for name in sorted(CALLS.keys() - {"consumer.stored", "user.delete", "checks.wait"}):
        client.send(encode_frame(Opcode.CALL, 9, encode_call(name, arguments(name))))
        for reply in client.replies():
            denied = reply.status and isinstance(
                to_error(reply.status, reply.payload), errors.AccessDenied
            )
            assert not denied, name


def test_roles_give_what_their_names_say() -> None:
    assert ROLES["admin"] == {(verb, kind) for kind, verbs in VERBS.items() for verb in verbs}
    for role in ("operator", "auditor", "producer"):
        assert ("read", "topic") not in ROLES[role], role  # bodies
    for role in ("operator", "auditor", "producer", "consumer"):
        assert ("admin", "cluster") not in ROLES[role]
        assert (("audit", "cluster") in ROLES[role]) is (role == "auditor")
    assert not any(verb not in ("describe", "audit") for verb, _kind in ROLES["auditor"])


def test_a_grant_gives_a_verb_or_a_role_on_one_name_or_on_those_that_begin_alike() -> None:
    def may(grant: tuple[str, str], verb: str, kind: str, name: str = "") -> bool:
        return allows((), [Grant(*grant)], Need(verb, kind, name))

    assert may(("read", "topic:orders"), "read", "topic", "orders")
    assert not may(("read", "topic:orders"), "read", "topic", "orders.eu")
    assert may(("read", "topic:orders*"), "read", "topic", "orders.eu")
    assert not may(("read", "topic:orders*"), "write", "topic", "orders.eu")
    assert not may(("read", "topic:*"), "read", "group", "g")
    assert may(("producer", "topic:orders"), "write", "topic", "orders")
    assert not may(("producer", "topic:orders"), "write", "service", "orders")
    assert may(("operate", "cluster"), "operate", "cluster")
    for bad in ("topic:t", "disk:x", "topic:", "topic:a*b", "topic:..", "topic:a b", "*", ""):
        assert not is_grant("fly" if bad == "topic:t" else "read", bad), bad
    assert not is_grant("consumer", "service:s")
    assert not is_grant("read", "cluster")


def test_the_topic_of_operators_acts_is_for_auditors_alone() -> None:
    assert list(needs.REQUESTS[Opcode.READ](None, pack_read(Read(0, 0, 0, 1, AUDIT)))) == [  # type: ignore[arg-type]  # not looked at
        Need("audit", "cluster")
    ]


def test_a_login_is_needed_before_anything_else() -> None:
    broker = BrokerWithUsers()
    for opcode in Opcode:
        client = broker.connect(None)
        client.send(encode_frame(opcode, 1, b"{}"))
        assert client.closed, opcode
        assert client.refusal()
    assert json.dumps(login("root"))


@pytest.mark.parametrize(
    ("aim", "wanted"),
    [
        ({"to": "t"}, Need("write", "topic", "t")),
        ({"to_group": "h"}, Need("operate", "group", "h")),
    ],
)
def test_a_redrive_needs_a_permission_where_it_brings_bodies_to(
    aim: dict[str, str], wanted: Need
) -> None:
    given = {"group": "g", "letters": [["t", 0, 0]], "operator": "ada", "reason": "r", **aim}
    args = CALLS["dlq.redrive"].model_validate_json(json.dumps(given))
    found = set(needs.CALLS["dlq.redrive"](None, args))  # type: ignore[arg-type]  # it needs no state
    read = {Need(verb, "group", "g") for verb in ("operate", "read")}
    assert found == read | {wanted}

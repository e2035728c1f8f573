"""The hello: strict on both sides, with errors that name the misfit."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txmq.errors import RemoteProtocolError, Throttled, TxmqError
from txmq.model import limits
from txmq.wire.data_requests import Opcode
from txmq.wire.frames import Frame
from txmq.wire.hello import BrokerLimits, Hello, Welcome, negotiate
from txmq.wire.json import dump, parse
from txmq.wire.status import error_reply

HELLO: dict[str, Any] = {
    "versions": [1, 1],
    "client": "txmq-python/0.1.0",
    "service": "orders",
    "instance": None,
    "incarnation": 0,
    "login": None,
    "process": None,
}
WELCOME: dict[str, Any] = {
    "version": 1,
    "broker": "broker-1",
    "log_id": "01890a5d-ac96-774b-bcce-b302099a8057",
    "boot_epoch": 3,
    "limits": {"frame": limits.FRAME, "message": limits.MESSAGE},
    "login": None,
    "incarnation": None,
}


def frame(fields: object, *, opcode: int = Opcode.HELLO, status: int = 0) -> Frame:
    return Frame(opcode, status, 1, dump(fields))


def test_a_hello_is_the_json_of_the_format() -> None:
    hello = Hello(versions=(1, 1), client="txmq-python/0.1.0", service="orders")
    assert parse(hello.encode()) == HELLO
    assert Hello.parse(frame(HELLO)) == hello


def test_a_welcome_is_the_json_of_the_format() -> None:
    welcome = Welcome(
        version=1,
        broker="broker-1",
        log_id=UUID(WELCOME["log_id"]),
        boot_epoch=3,
        limits=BrokerLimits(frame=limits.FRAME, message=limits.MESSAGE),
    )
    assert parse(welcome.encode()) == WELCOME
    assert Welcome.parse(frame(WELCOME)) == welcome


def test_a_client_may_be_of_no_service() -> None:
    assert Hello.parse(frame(HELLO | {"service": None})).service is None


@pytest.mark.parametrize(
    "changed",
    [
        {"versions": [1]},
        {"versions": [0, 1]},
        {"versions": ["1", "1"]},
        {"versions": [1, 1 << 63]},
        {"versions": [True, True]},
        {"versions": None},
        {"client": ""},
        {"client": "c" * 128},
        {"client": "two\nlines"},
        {"client": "\x1b[31m"},
        {"service": ""},
        {"service": "../x"},
        {"service": 7},
        {"login": "secret"},
        {"process": "orders"},
        {"more": 1},
    ],
    ids=str,
)
def test_other_hellos_are_refused_and_the_field_is_named(changed: dict[str, Any]) -> None:
    with pytest.raises(RemoteProtocolError, match=f"Hello: {next(iter(changed))}"):
        Hello.parse(frame(HELLO | changed))


@pytest.mark.parametrize(
    "changed",
    [
        {"log_id": "no uuid"},
        {"log_id": None},
        {"boot_epoch": -1},
        {"limits": {"frame": 0, "message": 1}},
        {"limits": {"frame": 1 << 20}},
        {"broker": "a b"},
        {"more": 1},
    ],
    ids=str,
)
def test_other_welcomes_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(RemoteProtocolError, match=f"Welcome: {next(iter(changed))}"):
        Welcome.parse(frame(WELCOME | changed))


def test_anything_before_the_hello_is_refused() -> None:
    for opcode in (Opcode.PING, Opcode.SEND, Opcode.CALL, 0, 255):
        with pytest.raises(RemoteProtocolError, match="before the hello"):
            Hello.parse(frame(HELLO, opcode=opcode))
    with pytest.raises(RemoteProtocolError):
        Hello.parse(frame(HELLO, status=1))
    with pytest.raises(RemoteProtocolError):
        Welcome.parse(frame(WELCOME, opcode=Opcode.PING))


def test_a_refused_hello_raises_the_brokers_error() -> None:
    status, payload = error_reply(Throttled("too many connections", hint="close some"))
    with pytest.raises(TxmqError, match="too many connections") as caught:
        Welcome.parse(Frame(Opcode.HELLO, status, 1, payload))
    assert type(caught.value) is Throttled


@pytest.mark.parametrize(
    ("client", "broker", "version"),
    [((1, 1), (1, 1), 1), ((1, 3), (1, 2), 2), ((2, 5), (1, 3), 3), ((1, 9), (4, 4), 4)],
)
def test_the_newest_common_version_is_chosen(
    client: tuple[int, int], broker: tuple[int, int], version: int
) -> None:
    assert negotiate(Hello(versions=client, client="c"), broker) == version


@pytest.mark.parametrize(
    ("client", "broker"), [((2, 3), (1, 1)), ((1, 1), (2, 3)), ((3, 1), (1, 3))]
)
def test_without_a_common_version_both_ranges_are_named(
    client: tuple[int, int], broker: tuple[int, int]
) -> None:
    with pytest.raises(
        RemoteProtocolError,
        match=f"{broker[0]} to {broker[1]}, the client {client[0]} to {client[1]}",
    ):
        negotiate(Hello(versions=client, client="c"), broker)


@given(st.binary())
def test_noise_is_no_hello(noise: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        Hello.parse(Frame(Opcode.HELLO, 0, 1, noise))


def test_a_process_names_its_instance_and_incarnation() -> None:
    hello = Hello.parse(frame(HELLO | {"instance": "orders-1", "incarnation": 3}))
    assert (hello.instance, hello.incarnation) == ("orders-1", 3)
    assert parse(hello.encode()) == HELLO | {"instance": "orders-1", "incarnation": 3}


@pytest.mark.parametrize(
    "changed",
    [
        {"instance": "../x"},
        {"instance": ""},
        {"instance": "orders-1", "service": None},
        {"incarnation": 3},  # of which instance?
        {"instance": "orders-1", "incarnation": -1},
        {"instance": "orders-1", "incarnation": 1 << 63},
        {"instance": "orders-1", "incarnation": "3"},
        {"instance": "orders-1", "incarnation": True},
    ],
    ids=str,
)
def test_an_impossible_incarnation_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(RemoteProtocolError):
        Hello.parse(frame(HELLO | changed))

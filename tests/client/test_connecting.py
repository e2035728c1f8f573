"""What clients say of a broker that they cannot connect to, in each of their faces."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any
from uuid import uuid4

import pytest

import txmq
import txmq.aio
import txmq.twisted
from tests.certificates import Authority, locked_key
from tests.client.aio.running import run
from tests.client.real_consumers import closing_broker
from txmq.client.protocol.address import Address, parse_url
from txmq.client.protocol.consumer.settings import consumer_settings
from txmq.client.protocol.settings import ClientSettings
from txmq.client.protocol.transaction.options import (
    NO_CONNECTION,
    checked_options,
    checked_xa_options,
)
from txmq.client.protocol.typed.bodies import TypedBodies
from txmq.client.tls import not_trusted, tls_context
from txmq.errors import BrokerUnavailable, ConfigError, LoginFailed
from txmq.wire.calls.users import VerifierArgs
from txmq.wire.scram import make_verifier

TIMEOUT_S = 3.0  # of calls that find no broker
Send = Callable[[str], None]


def _blocking(url: str) -> None:
    with txmq.connect(url, timeout=TIMEOUT_S) as client:
        client.call("broker.info")


def _asyncio(url: str) -> None:
    async def work() -> None:
        async with txmq.aio.connect(url, timeout=TIMEOUT_S) as client:
            await client.call("broker.info")

    run(work())


def _twisted(reactor: Any, in_reactor: Callable[..., Any], url: str) -> None:
    async def work() -> None:
        client = txmq.twisted.connect(reactor, url, timeout=TIMEOUT_S)
        try:
            await client.call("broker.info")
        finally:
            await client.close()

    in_reactor(work)


@pytest.mark.parametrize(
    ("of", "misspelt", "meant", "take"),
    [
        ("connect", "time_out", "timeout", partial(ClientSettings.of, None)),
        ("consumer", "retries", "retry", partial(consumer_settings, "billing", "orders")),
        ("topic", "fromat", "format", partial(TypedBodies, "orders", dict)),
        (
            "transaction",
            "tiemout",
            "timeout",
            lambda **given: checked_options(ClientSettings(), NO_CONNECTION, None, given),
        ),
        ("xa", "nodes", "node", lambda **given: checked_xa_options(ClientSettings(), given)),
    ],
)
def test_a_misspelt_option_is_told_with_what_may_be_meant(
    of: str, misspelt: str, meant: str, take: Callable[..., object]
) -> None:
    told = f"{of}: there is no option '{misspelt}': did you mean {meant}"
    with pytest.raises(ConfigError, match=told):
        take(**{misspelt: 1})


def test_a_log_may_be_named_by_its_text() -> None:
    log = uuid4()
    for named in (log, str(log)):
        assert ClientSettings.of("orders", log_id=named).log_id == log
    with pytest.raises(ConfigError, match=r"log_id: 'no' .*give a uuid\.UUID, or its text"):
        ClientSettings.of("orders", log_id="no")


@pytest.fixture(params=["blocking", "asyncio", "twisted"])
def send(request: pytest.FixtureRequest) -> Send:
    if request.param == "twisted":
        return partial(
            _twisted,
            request.getfixturevalue("reactor"),
            request.getfixturevalue("in_reactor"),
        )
    return {"blocking": _blocking, "asyncio": _asyncio}[str(request.param)]


def _hang_up(listener: socket.socket) -> None:
    """End each connection at its first bytes, as TLS does with what is none."""
    while True:
        try:
            connection, _peer = listener.accept()
        except OSError:
            return
        with closing(connection):
            connection.recv(1 << 16)


@contextmanager
def hangs_up() -> Iterator[int]:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        thread = Thread(target=_hang_up, args=(listener,), daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_a_port_without_a_listener_is_named_with_the_reason(send: Send) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(BrokerUnavailable, match="refused") as raised:
        send(f"txmq://127.0.0.1:{port}")
    assert "txmq broker --data" in raised.value.hint


def test_a_broker_that_ends_a_connection_without_tls_may_have_it(send: Send) -> None:
    with hangs_up() as port, pytest.raises(BrokerUnavailable) as raised:
        send(f"txmq://127.0.0.1:{port}")
    assert "begins with txmqs://" in raised.value.hint


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a broker with a user."""
    with closing_broker(tmp_path_factory.mktemp("guarded")) as broker:
        password = VerifierArgs.of(make_verifier("secret of ada"))
        with txmq.connect(broker.url, service="tests") as client:
            client.call("user.set", name="ada", roles=["admin"], password=password, new=True)
        yield broker.url.removeprefix("txmq://")


@pytest.mark.parametrize("login", ["", "ada:wrong@", "nobody:secret@"])
def test_a_wrong_login_is_told_as_that_and_not_tried_again(
    guarded: str, send: Send, login: str
) -> None:
    with pytest.raises(LoginFailed) as raised:
        send(f"txmq://{login}{guarded}")
    assert not raised.value.retriable


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("ca={folder}/none.pem", "none.pem cannot be used: No such file"),
        ("ca={key}", "ca={key} cannot be used"),
        ("ca={ca}&cert={folder}/none.pem", "none.pem cannot be used: No such file"),
        ("ca={ca}&cert={cert}", "cert={cert}, or the key, which is looked for in the same file,"),
        ("ca={ca}&cert={ca}&key={key}", "cert={ca}, or key={key} cannot be used"),
        ("ca={ca}&cert={cert}&key={locked}", "the key has a password: store it without one"),
    ],
)
def test_a_file_of_tls_that_cannot_be_used_is_named(
    options: str, named: str, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    files = authority.sign("ada")
    places = {"folder": tmp_path, "ca": authority.ca, "cert": files.cert, "key": files.key}
    places["locked"] = locked_key(files.key)
    settings = parse_url(f"txmqs://127.0.0.1/?{options.format(**places)}").tls
    assert settings is not None
    with pytest.raises(ConfigError) as raised:
        tls_context(settings)
    assert named.format(**places) in raised.value.message


def _shake_hands(*ends: ssl.SSLObject) -> None:
    for end in ends * 3:
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()


@pytest.mark.parametrize(
    ("days", "host", "hint"),
    [
        (-1, "127.0.0.1", "renew it at the broker"),
        (1, "127.0.0.2", "its host as the certificate does"),
    ],
)
def test_an_expired_certificate_is_to_be_renewed(
    tmp_path: Path, days: int, host: str, hint: str
) -> None:
    authority = Authority(tmp_path)
    files = authority.sign("broker", days=days, host=host)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(files.cert, files.key)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context(cafile=str(authority.ca))
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname="127.0.0.1"),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    with pytest.raises(ssl.SSLCertVerificationError) as refused:
        _shake_hands(*ends)
    assert hint in str(not_trusted(Address("127.0.0.1", 7650), refused.value))

"""Certificates that are renewed while a broker runs; what is left of connections."""

from __future__ import annotations

import gc
import os
import pty
import ssl
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from structlog.testing import capture_logs
from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure

from tests.certificates import Authority
from txmq.broker.reactor.tls import HANDSHAKE_BYTES, LOOK_S, Certificates, TlsFactory
from txmq.config.broker import TlsSettings
from txmq.model.units import SECOND


def test_files_that_could_not_be_read_are_tried_again_though_no_time_of_theirs_changes(
    tmp_path: Path,
) -> None:
    files = Authority(tmp_path).sign("broker")
    clock = Clock()
    settings = TlsSettings(cert=files.cert, key=files.key)
    certificates = Certificates(settings, clock)
    renewed = Authority(tmp_path, "other").sign("renewed")
    times = (7_000_000_000, 7_000_000_000)

    def write(cert: bytes, key: bytes) -> None:
        for file, data in ((files.cert, cert), (files.key, key)):
            file.write_bytes(data)
            os.utime(file, ns=times)

    first = certificates.serverConnectionForTLS(None).get_context()
    write(renewed.cert.read_bytes(), b"not for us yet")
    with capture_logs() as logged:
        for _ in range(3):
            clock.advance(LOOK_S)
            assert certificates.serverConnectionForTLS(None).get_context() is first
        write(renewed.cert.read_bytes(), renewed.key.read_bytes())
        clock.advance(LOOK_S)
        assert certificates.serverConnectionForTLS(None).get_context() is not first
    assert [line["event"] for line in logged] == ["tls.not_reloaded", "tls.reloaded"]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("key", b"not a key"),
        ("key", Authority),  # of another certificate
        ("key", X25519PrivateKey),  # signs nothing
        ("cert", b""),
        ("client_ca", b"not a certificate"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_and_the_old_ones_serve_on(
    tmp_path: Path, file: str, content: object
) -> None:
    authority, clock = Authority(tmp_path), Clock()
    files = authority.sign("broker")
    settings = TlsSettings(cert=files.cert, key=files.key, client_ca=authority.ca)
    certificates = Certificates(settings, clock)
    first = certificates.serverConnectionForTLS(None).get_context()
    if content is X25519PrivateKey:
        made = X25519PrivateKey.generate()
        content = made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    elif content is Authority:
        content = authority.sign("another").key.read_bytes()
    assert isinstance(content, bytes)
    place: Path = getattr(settings, file)
    place.write_bytes(content)
    os.utime(place, ns=(7_000_000_000, 7_000_000_000))
    with capture_logs() as logged:
        for _ in range(3):
            clock.advance(LOOK_S)
            assert certificates.serverConnectionForTLS(None).get_context() is first
    assert [line["event"] for line in logged] == ["tls.not_reloaded"]
    assert str(place) in logged[0]["error"]


def test_the_ends_of_certificates_follow_their_files_where_nobody_connects(tmp_path: Path) -> None:
    authority, clock = Authority(tmp_path), Clock()
    files = authority.sign("broker", days=3)
    settings = TlsSettings(cert=files.cert, key=files.key, client_ca=authority.ca)
    certificates = Certificates(settings, clock)

    def days() -> dict[str, int]:
        now = time.time()
        return {one.setting: round((one.at / SECOND - now) / 86_400) for one in certificates.ends()}

    assert days() == {"cert": 3, "client_ca": 30}
    key = files.key.read_bytes()
    authority.sign("broker", days=20)
    renewed = files.key.read_bytes()
    for number, content, expected in ((7, key, 3), (8, renewed, 20)):
        files.key.write_bytes(content)
        for file in files:
            os.utime(file, ns=(number * 10**18, number * 10**18))
        clock.advance(LOOK_S)
        assert days()["cert"] == expected
        troubles = [one.trouble for one in certificates.ends()]
        assert [str(files.key) in one for one in troubles] == [expected == 3] * 2


def test_of_the_chain_that_is_served_the_first_end_counts(tmp_path: Path) -> None:
    files, ends = Authority(tmp_path).sign("broker", days=40), Authority(tmp_path, "between").ca
    with files.cert.open("ab") as chain:
        chain.write(ends.read_bytes())  # in 30 days
    [own] = Certificates(TlsSettings(cert=files.cert, key=files.key), Clock()).ends()
    assert round((own.at / SECOND - time.time()) / 86_400) == 30


def test_of_several_authorities_of_clients_the_last_one_counts(tmp_path: Path) -> None:
    authority, files = Authority(tmp_path), Authority(tmp_path, "next").sign("broker", days=40)
    with authority.ca.open("ab") as bundle:
        bundle.write(files.cert.read_bytes())
    settings = TlsSettings(cert=files.cert, key=files.key, client_ca=authority.ca)
    own, authorities = Certificates(settings, Clock()).ends()
    assert own.at == authorities.at


def test_a_key_with_a_password_is_refused_and_nobody_is_asked(tmp_path: Path) -> None:
    files = Authority(tmp_path).sign("broker")
    key = load_pem_private_key(files.key.read_bytes(), None)
    locked = key.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"a password")
    )
    files.key.write_bytes(locked)
    code = f"""
from pathlib import Path
from twisted.internet.task import Clock
from txmq.broker.reactor.tls import Certificates
from txmq.config.broker import TlsSettings
from txmq.errors import ConfigError
try:
    Certificates(TlsSettings(cert=Path({str(files.cert)!r}), key=Path({str(files.key)!r})), Clock())
except ConfigError as error:
    print("refused", error)
"""
    child, terminal = pty.fork()
    if not child:
        os.execv(sys.executable, [sys.executable, "-c", code])  # this test's own
    shown = b""
    while b"refused" not in shown:
        try:
            shown += os.read(terminal, 4_096)
        except OSError:
            break
        if b"pass phrase" in shown:
            os.write(terminal, b"\n")
            break
    os.close(terminal)
    os.waitpid(child, 0)
    assert b"refused" in shown, shown


class Session(Protocol):
    """The producer of its transport, as the broker's sessions are."""

    def connectionMade(self) -> None:
        transport: Any = self.transport
        transport.registerProducer(self, True)


class Wire:
    """The client's end of a connection in memory."""

    def __init__(self, server: Any) -> None:  # a TlsTransport
        self.server, self.transport = server, StringTransport()
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        self._client = context.wrap_bio(self._incoming, self._outgoing)
        server.makeConnection(self.transport)

    def shake_hands(self, steps: int = 3) -> None:
        """Go on with the handshake, which has three steps."""
        for _ in range(steps):
            with suppress(ssl.SSLWantReadError):
                self._client.do_handshake()
            self._pass_on()

    def close(self) -> None:
        """Close the encryption; the other end answers."""
        with suppress(ssl.SSLWantReadError, ssl.SSLSyscallError):
            self._client.unwrap()
        self._pass_on()

    def _pass_on(self) -> None:
        if sent := self._outgoing.read():
            self.server.dataReceived(sent)
        self._incoming.write(self.transport.value())
        self.transport.clear()


STEPS: dict[str, Callable[[Wire], object]] = {
    "half": lambda wire: wire.shake_hands(1),
    "whole": lambda wire: wire.shake_hands(),
    "text": lambda wire: wire.server.dataReceived(b"GET / HTTP/1.1\r\n\r\n"),
    "garbage": lambda wire: wire.server.dataReceived(b"\x17\x03\x03\0\5hello"),
    "close": lambda wire: wire.close(),
    "cut": lambda wire: wire.server.abortConnection(),
}
ENDS = ("", "text", "half", "whole", "whole garbage", "whole close", "whole cut", "half cut")


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("end", ENDS)
def test_a_lost_connection_leaves_nothing_to_the_collector(tmp_path: Path, end: str) -> None:
    files = Authority(tmp_path).sign("broker")
    certificates = Certificates(TlsSettings(cert=files.cert, key=files.key), Clock())
    factory = TlsFactory(certificates, Factory.forProtocol(Session), Clock())
    wire = Wire(factory.buildProtocol(None))
    left = [weakref.ref(wire.server), weakref.ref(wire.server._tlsConnection)]
    for step in end.split():
        STEPS[step](wire)
    wire.transport.unregisterProducer()  # as a socket's transport does at its end
    wire.server.connectionLost(Failure(ConnectionDone()))
    del wire
    assert [one() for one in left] == [None, None]


def test_a_handshake_that_does_not_end_is_cut(tmp_path: Path) -> None:
    files = Authority(tmp_path).sign("broker")
    certificates = Certificates(TlsSettings(cert=files.cert, key=files.key), Clock())
    wire = Wire(TlsFactory(certificates, Factory.forProtocol(Session), Clock()).buildProtocol(None))
    hello = b"\x01\x01\xff\xf0\x03\x03" + bytes(131_000)  # as long as OpenSSL takes one
    sent = 0
    while not wire.transport.disconnected:
        assert sent <= HANDSHAKE_BYTES
        part = hello[sent : sent + 8_192]
        wire.server.dataReceived(b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part)
        sent += len(part)
    assert sent >= HANDSHAKE_BYTES


def test_a_lost_connection_may_be_closed_and_cut_again(tmp_path: Path) -> None:
    files = Authority(tmp_path).sign("broker")
    certificates = Certificates(TlsSettings(cert=files.cert, key=files.key), Clock())
    wire = Wire(TlsFactory(certificates, Factory.forProtocol(Session), Clock()).buildProtocol(None))
    wire.shake_hands()
    wire.server.abortConnection()
    wire.server.connectionLost(Failure(ConnectionDone()))
    wire.server.abortConnection()
    wire.server.loseConnection()
    assert wire.transport.disconnecting


def test_a_connection_that_is_refused_begins_no_handshake(tmp_path: Path) -> None:
    class Full(Factory):
        def buildProtocol(self, addr: object) -> None:
            del addr

    files = Authority(tmp_path).sign("broker")
    certificates = Certificates(TlsSettings(cert=files.cert, key=files.key), Clock())
    assert TlsFactory(certificates, Full(), Clock()).buildProtocol(None) is None

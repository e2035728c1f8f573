"""Certificates that are renewed while a broker runs."""

from __future__ import annotations

import os
import pty
import sys
from pathlib import Path

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
from twisted.internet.task import Clock

from tests.certificates import Authority
from txmq.broker.reactor.tls import LOOK_S, Certificates
from txmq.config.broker import TlsSettings


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

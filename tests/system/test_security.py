"""Users and TLS at a real broker: every face of the client gets in, and who should not
does not, while a witness client goes on.
"""

from __future__ import annotations

import asyncio
import base64
import ctypes
import ctypes.util
import http.client
import json
import os
import re
import shlex
import shutil
import socket
import ssl
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import txmq
import txmq.aio
import txmq.twisted
from tests.bench.harness import rss_anon
from tests.certificates import CLIENT, Authority
from tests.cli.support import run
from tests.client.reactor_thread import make_in_reactor, running_reactor
from txmq.errors import AccessDenied, ConfigError, LoginFailed, TxmqError
from txmq.testing.processes import ENVIRONMENT, Running
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.wire import scram
from txmq.wire.data_requests import Opcode
from txmq.wire.frames import FrameDecoder, encode_frame
from txmq.wire.hello import Hello, LoginStep
from txmq.wire.status import to_error

ROOT = Path(__file__).parents[2]
PASSWORD = "a-password-of-a-test"


class Secured(NamedTuple):
    """A broker with TLS and users."""

    running: Running
    directory: Path
    authority: Authority
    place: str  # host and port

    def url(self, user: str, password: str = PASSWORD, **options: object) -> str:
        given = {"ca": self.authority.ca, **options}
        query = "&".join(f"{name}={value}" for name, value in given.items())
        return f"txmqs://{user}:{password}@{self.place}/?{query}"

    @property
    def log(self) -> str:
        return (self.directory / "err").read_text("utf-8", "replace")

    def plain(self) -> socket.socket:
        host, _, port = self.place.partition(":")
        return socket.create_connection((host, int(port)), PATIENCE_S)

    def tls(self) -> ssl.SSLSocket:
        context = ssl.create_default_context(cafile=str(self.authority.ca))
        return context.wrap_socket(self.plain(), server_hostname="127.0.0.1")


def cli(*arguments: str, **environment: str) -> Any:
    """Run a command in a process of its own; return its JSON."""
    ran = subprocess.run(
        [sys.executable, "-m", "txmq", *arguments, "--json"],
        env={**os.environ, **ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert PASSWORD not in ran.stdout + ran.stderr
    return json.loads(ran.stdout) if ran.returncode == 0 else json.loads(ran.stderr)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    directory = tmp_path_factory.mktemp("secured")
    authority = Authority(directory)
    files = authority.sign("broker")
    settings = directory / "broker.toml"
    settings.write_text(
        f'[broker]\ndata = "{directory / "data"}"\nlisten = "127.0.0.1:0"\n'
        'http = "127.0.0.1:0"\nhttp_hosts = ["broker.example"]\n'
        f'[tls]\ncert = "{files.cert}"\nkey = "{files.key}"\nclient_ca = "{authority.ca}"\n'
    )
    words = directory / "password"
    words.write_text(PASSWORD + "\n")
    made = cli("user", "init-admin", "root", "--data", str(directory / "data"),
               "--password-file", str(words))  # fmt: skip
    assert made == {"user": "root", "roles": ["admin"]}
    running = Running(directory, "broker", "--create-topics", "--config", str(settings))
    place = running.first_line().removeprefix("ready txmqs://").strip()
    try:
        broker = Secured(running, directory, authority, place)
        with txmq.connect(broker.url("root")) as root:
            root.call("topic.create", name="orders", partitions=1)
            for name, roles in (("shop", ["producer"]), ("billing", ["consumer"]), ("ann", [])):
                root.call("user.set", name=name, roles=roles, new=True, password=keys(PASSWORD))
            root.call("user.set", name="till-1", roles=["producer"], new=True)
        yield broker
    finally:
        running.terminate()
    assert PASSWORD not in broker.log
    assert "Traceback" not in broker.log


def keys(password: str) -> dict[str, object]:
    from txmq.wire.calls.users import VerifierArgs

    return VerifierArgs.of(scram.make_verifier(password, iterations=scram.MIN_ITERATIONS))


def test_every_face_of_the_client_logs_in_over_tls(secured: Secured) -> None:
    url = secured.url("shop")
    with txmq.connect(url, service="shop") as client:
        bodies = [bytes([n]) * 100_000 for n in range(30)]  # more than one read and write
        client.send_many("orders", bodies)
        client.send_async("orders", b"async").result(PATIENCE_S)
        with client.transaction() as tx:
            tx.send("orders", b"in a transaction")

    async def from_asyncio() -> None:
        async with txmq.aio.connect(url, service="shop") as client:
            await client.send("orders", b"asyncio")

    asyncio.run(from_asyncio())

    with running_reactor() as reactor:

        async def from_twisted() -> None:
            client = txmq.twisted.connect(reactor, url, service="shop")
            await client.send("orders", b"twisted")
            await client.close()

        make_in_reactor(reactor)(from_twisted)
    got: list[bytes] = []
    with txmq.connect(secured.url("billing")) as client:
        consumer = client.consumer("billing", topics=["orders"], start="first")
        with closing(consumer):
            while len(got) < 34:
                message = next(iter(consumer))
                got.append(message.body)
                consumer.ack(message)
    assert sorted(got) == sorted([*bodies, b"async", b"in a transaction", b"asyncio", b"twisted"])


def test_commands_take_the_password_from_the_environment(secured: Secured) -> None:
    url = f"txmqs://{secured.place}/?ca={secured.authority.ca}"
    known = {"TXMQ_USER": "shop", "TXMQ_PASSWORD": PASSWORD, "TXMQ_BROKER": url}
    me = cli("user", "me", **known)
    assert (me["user"], me["roles"]) == ("shop", ["producer"])
    assert cli("group", "list", **known)["error"] == "AccessDenied"
    wrong = cli("user", "me", **(known | {"TXMQ_PASSWORD": "another-one-that-is-wrong"}))
    assert wrong["error"] == "LoginFailed"
    assert "another-one" not in json.dumps(wrong)


def test_a_certificate_is_a_login_by_its_common_name(secured: Secured) -> None:
    till = secured.authority.sign("till-1", host=None, use=CLIENT)
    stranger = secured.authority.sign("till-9", host=None, use=CLIENT)
    options = f"ca={secured.authority.ca}&cert={till.cert}&key={till.key}"
    with txmq.connect(f"txmqs://{secured.place}/?{options}") as client:
        assert client.call("user.me")["user"] == "till-1"
    options = f"ca={secured.authority.ca}&cert={stranger.cert}&key={stranger.key}"
    with (
        txmq.connect(f"txmqs://{secured.place}/?{options}") as client,
        pytest.raises(LoginFailed),
    ):
        client.call("user.me")


def test_a_broker_with_another_certificate_is_not_trusted(secured: Secured, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    with (
        txmq.connect(secured.url("shop", ca=other.ca)) as client,
        pytest.raises(ConfigError, match="not trusted"),
    ):
        client.send("orders", b"x")
    forged = other.sign("till-1", host=None, use=CLIENT)
    for certificate in (forged, secured.authority.sign("broker-as-client", host=None)):
        url = secured.url("shop", cert=certificate.cert, key=certificate.key)
        with txmq.connect(url, timeout=0.5) as client, pytest.raises(TxmqError):
            client.send("orders", b"x")


def test_the_wrong_password_reaches_nothing_and_is_not_shown(secured: Secured) -> None:
    with (
        txmq.connect(secured.url("shop", "not-the-password")) as client,
        pytest.raises(LoginFailed) as caught,
    ):
        client.send("orders", b"x")
    assert "not-the-password" not in repr(caught.value) + str(client.__dict__)


def test_who_has_no_grant_is_denied_and_told_how_to_get_it(secured: Secured) -> None:
    with txmq.connect(secured.url("ann")) as ann, pytest.raises(AccessDenied) as caught:
        ann.send("orders", b"x")
    detail = caught.value.detail
    assert (detail["verb"], detail["resource"]) == ("describe", "topic:orders")
    assert "txmq acl grant ann describe topic:orders" in caught.value.hint


def hello(login: dict[str, str] | None = None) -> bytes:
    made = Hello(versions=(1, 1), client="test", login=login)
    return encode_frame(Opcode.HELLO, 1, made.encode())


def started(message: str, mechanism: str = scram.MECHANISM) -> bytes:
    return hello({"mechanism": mechanism, "message": message})


NONCE = "n" * 24
HOSTILE = {
    "no login": hello(),
    "a request before the login": encode_frame(Opcode.CALL, 1, b'{"call":"user.me","args":{}}'),
    "a request in the middle of a login": started(f"n,,n=shop,r={NONCE}")
    + encode_frame(Opcode.PING, 2),
    "an unknown mechanism": started("", "PLAIN"),
    "another user to act for": started(f"n,a=root,n=shop,r={NONCE}"),
    "a user with a comma": started(f"n,,n=sh=2Cop,r={NONCE}")
    + encode_frame(Opcode.LOGIN, 2, LoginStep(message="c=biws,r=x,p=y").encode()),
    "a user with NUL": started(f"n,,n=sh\0op,r={NONCE}"),
    "a user with escapes": started(f"n,,n=\x1b[2J\nforged line,r={NONCE}")
    + encode_frame(Opcode.LOGIN, 2, LoginStep(message="c=biws,r=x,p=y").encode()),
    "a name of a kibibyte": started(f"n,,n={'u' * 1_024},r={NONCE}"),
    "4 KiB before the login": struct.pack("<I", 1 << 20) + bytes(1 << 16),
    "a proof without a beginning": encode_frame(Opcode.LOGIN, 1, b'{"message":""}'),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_a_login_that_is_not_right_ends_the_connection(secured: Secured, what: str) -> None:
    with (
        txmq.connect(secured.url("root"), timeout=PATIENCE_S) as witness,
        closing(secured.tls()) as hostile,
    ):
        witness.call("user.me")
        received = b""
        try:
            hostile.sendall(HOSTILE[what])
            while data := hostile.recv(1 << 16):
                received += data
        except OSError:
            pass  # cut while it was sending
        frames = FrameDecoder(1 << 20).feed(received)
        assert all(frame.status or b"login" in frame.payload for frame in frames)
        if frames:
            assert to_error(frames[-1].status, frames[-1].payload)
        assert witness.call("user.me")["user"] == "root"
    assert "\x1b" not in secured.log
    assert "\nforged line" not in secured.log


def test_plain_text_on_the_tls_port_gets_nothing(secured: Secured) -> None:
    with closing(secured.plain()) as hostile:
        hostile.sendall(hello())
        data = b"".join(iter(lambda: hostile.recv(4_096), b""))
    assert b"broker" not in data  # an alert of TLS at most


def open_ssl() -> Any:  # a library, whose functions have no types
    """Return OpenSSL's library: Python's own module ssl has no key updates."""
    path = ctypes.util.find_library("ssl")
    if path is None:
        pytest.skip("OpenSSL's library is not found")
    library = ctypes.CDLL(path)
    for function in ("TLS_client_method", "SSL_CTX_new", "SSL_new"):
        getattr(library, function).restype = ctypes.c_void_p
    return library


def test_hostile_29_a_flood_of_key_updates_disturbs_nobody(secured: Secured) -> None:
    library, process = open_ssl(), secured.running.process.pid
    context = ctypes.c_void_p(library.SSL_CTX_new(ctypes.c_void_p(library.TLS_client_method())))
    connection = ctypes.c_void_p(library.SSL_new(context))
    with (
        txmq.connect(secured.url("root"), timeout=PATIENCE_S) as witness,
        closing(secured.plain()) as plain,
    ):
        plain.setblocking(True)
        library.SSL_set_fd(connection, plain.fileno())
        assert library.SSL_connect(connection) == 1
        before, answered = rss_anon(process), 0
        for number in range(20_000):
            library.SSL_key_update(connection, 1)  # which asks for one in turn
            if library.SSL_do_handshake(connection) != 1:
                break  # the broker has cut the connection, which is right as well
            if number % 1_000 == 0:
                assert witness.call("user.me")["user"] == "root"
                answered += 1
        assert answered > 0
        assert rss_anon(process) - before <= 64e6
    library.SSL_free(connection)
    library.SSL_CTX_free(context)


def test_an_old_version_of_tls_is_refused(secured: Secured) -> None:
    context = ssl.create_default_context(cafile=str(secured.authority.ca))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with closing(secured.plain()) as plain, pytest.raises(ssl.SSLError):
        context.wrap_socket(plain, server_hostname="127.0.0.1")


def test_a_renewed_certificate_serves_new_connections_and_ends_no_old_one(
    secured: Secured,
) -> None:
    def serial() -> str:
        with closing(secured.tls()) as one:
            return str((one.getpeercert() or {})["serialNumber"])

    before = serial()
    with txmq.connect(secured.url("root")) as old:
        old.call("user.me")
        epoch = old.call("broker.show")["boot_epoch"]
        secured.authority.sign("broker")
        wait_until(lambda: serial() != before)
        assert old.call("broker.show")["boot_epoch"] == epoch
        files = secured.directory / "broker.key"
        good = files.read_bytes()
        files.write_text("not a key")
        wait_until(lambda: "tls.not_reloaded" in secured.log or not serial())
        assert serial()
        files.write_bytes(good)


def ask(secured: Secured, path: str, user: str | None = None, **headers: str) -> tuple[int, Any]:
    """Send a GET by HTTP; return status and body."""
    [place] = re.findall(r'"console": ?"https://([^/"]+)/"', secured.log)
    context = ssl.create_default_context(cafile=str(secured.authority.ca))
    if user is not None:
        word = base64.b64encode(f"{user}:{PASSWORD}".encode()).decode()
        headers["Authorization"] = f"Basic {word}"
    with closing(http.client.HTTPSConnection(place, context=context, timeout=PATIENCE_S)) as one:
        one.request("GET", path, headers=headers)
        reply = one.getresponse()
        body = reply.read()
        if reply.status == 401:
            assert (reply.getheader("WWW-Authenticate") or "").startswith("Basic")
        assert "script-src 'self'" in (reply.getheader("Content-Security-Policy") or "")
        return reply.status, body


def test_http_asks_for_a_login_and_answers_by_the_same_table(secured: Secured) -> None:
    assert ask(secured, "/healthz")[0] == 200
    for path in ("/", "/metrics", "/api/v1/topics"):
        assert ask(secured, path)[0] == 401, path
        assert ask(secured, path, "root")[0] == 200, path
    assert ask(secured, "/", Authorization="Bearer eyJhbGciOiJub25lIn0.e30.")[0] == 401
    assert ask(secured, "/", Authorization="Basic !!")[0] == 401
    url = f"txmqs://{secured.place}/?ca={secured.authority.ca}"
    known = {"TXMQ_USER": "root", "TXMQ_PASSWORD": PASSWORD, "TXMQ_BROKER": url}
    token = cli("user", "token", "add", "root", "ci", **known)["token"]
    assert ask(secured, "/metrics", Authorization=f"Bearer {token}")[0] == 200
    assert cli("user", "token", "revoke", "root", "ci", **known)["changed"]
    assert ask(secured, "/metrics", Authorization=f"Bearer {token}")[0] == 401
    assert token not in secured.log
    status, body = ask(secured, "/api/v1/topics", "shop")
    assert (status, json.loads(body)["error"]) == (403, "AccessDenied")
    assert ask(secured, "/metrics", "shop")[0] == 403
    assert ask(secured, "/api/v1/topics/orders", "shop")[0] == 200
    assert ask(secured, "/healthz", Host="evil.example")[0] == 421
    assert ask(secured, "/healthz", Host="broker.example")[0] == 200
    assert ask(secured, "/healthz", Origin="http://evil.example")[0] == 403
    metrics = ask(secured, "/metrics", "root")[1].decode()
    assert 'txmq_access_denied_total{verb="describe"}' in metrics
    assert "txmq_users 5.0" in metrics


def test_the_commands_of_the_page_lead_from_nothing_to_a_user_over_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs" / "SECURITY.md").read_text("utf-8").partition("From nothing to a user")[2]
    [commands, *_] = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    [settings, *_] = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "broker.toml").write_text(
        settings.replace("[tls]", 'listen = "127.0.0.1:0"\n[tls]')
    )
    monkeypatch.chdir(tmp_path)
    running, place = None, ""
    try:
        for line in commands.strip().splitlines():
            *words, last = shlex.split(line.replace("127.0.0.1:7650", place))
            if words[0] == "openssl" and shutil.which("openssl") is None:
                Authority(tmp_path).sign("broker")
            elif words[0] == "openssl":
                subprocess.run([*words, last], check=True, capture_output=True, timeout=PATIENCE_S)
            elif words[0] == "echo":
                Path(last).write_text(words[1] + "\n")
            elif last == "&":
                running = Running(tmp_path, *words[1:])
                place = running.first_line().removeprefix("ready txmqs://").strip()
            elif words[0] == "export":
                for pair in (*words[1:], last):
                    monkeypatch.setenv(*pair.split("=", 1))
            else:
                while "=" in words[0]:
                    monkeypatch.setenv(*words.pop(0).split("=", 1))
                ran = run(*words[1:], last)
                assert ran.exit_code == 0, (line, ran.stderr)
    finally:
        if running is not None:
            running.terminate()

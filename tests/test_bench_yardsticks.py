"""The yardstick programs: correct, whatever their figures are."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg2
import pytest
from google_crc32c import value as crc32c

from tests.bench import yardsticks
from tests.bench.database import BenchDatabase
from tests.bench.harness import (
    measured,
    python,
    serving,
)
from tests.bench.rows import Run
from tests.bench.yardsticks import Clients, EchoClient, EchoServer
from txmq.testing.wait import PATIENCE_S


@pytest.fixture(scope="module")
def database() -> Iterator[BenchDatabase]:
    with closing(BenchDatabase(os.environ.get("TXMQ_TEST_DSN"))) as database:
        yield database


@pytest.fixture
def run(tmp_path: Path, database: BenchDatabase) -> Run:
    return Run(tmp_path, 1.0, database)


@pytest.mark.parametrize("client", ["echo_client", "echo_twisted_client"])
@pytest.mark.parametrize("server", ["echo", "echo_twisted"])
def test_the_bare_clients_and_servers_talk_to_each_other(
    run: Run, server: EchoServer, client: EchoClient
) -> None:
    took = yardsticks.echo(run, server, client, count=20)
    assert 0 < took["p50_us"] <= took["p99_us"]


@pytest.mark.parametrize("server", ["echo", "echo_twisted"])
def test_the_bare_server_answers_hello_and_send_of_txmq(server: EchoServer) -> None:
    def frame(opcode: int, correlation: int, payload: bytes) -> bytes:
        checked = struct.pack("<BBHI", 1, opcode, 0, correlation) + payload
        return struct.pack("<II", 4 + len(checked), crc32c(checked)) + checked

    stream = frame(1, 7, b'{"versions": [1, 1]}') + frame(16, 8, bytes(1_024))
    with yardsticks.bare_server(server) as program, connected(program.address) as connection:
        for byte in stream[:30]:  # frames may arrive in any pieces
            connection.sendall(bytes([byte]))
        connection.sendall(stream[30:])
        hello, receipt = reply(connection), reply(connection)
    assert hello[:8] == struct.pack("<BBHI", 1, 1, 0, 7)
    assert json.loads(hello[8:])["version"] == 1
    assert receipt[:8] == struct.pack("<BBHI", 1, 16, 0, 8)
    assert struct.unpack("<qqB", receipt[8:]) == (0, 0, 0)


def connected(address: str) -> socket.socket:
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def reply(connection: socket.socket) -> bytes:
    """Return the next frame after length and checksum, both of them checked."""
    length, crc = struct.unpack("<II", exactly(connection, 8))
    body = exactly(connection, length - 4)
    assert crc32c(body) == crc
    return body


def exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        assert piece, "the server closed the connection"
        data += piece
    return data


def sink_frame(correlation: int, body: bytes) -> bytes:
    checked = struct.pack("<4xI", correlation) + body
    return struct.pack("<II", 4 + len(checked), crc32c(checked)) + checked


@pytest.mark.parametrize("sync", ["none", "inline", "thread"])
def test_the_sink_answers_each_request_with_its_place_in_the_file(
    tmp_path: Path, sync: str
) -> None:
    frames = [sink_frame(n, os.urandom(1 + n * 37 % 2_000)) for n in range(300)]
    path = tmp_path / "sink"
    with (
        serving(python("tests.bench.raw.sink", path, 2, sync)) as program,
        connected(program.address) as connection,
    ):
        connection.sendall(b"".join(frames))
        replies = [struct.unpack("<IIq", exactly(connection, 16)) for _ in frames]
    stored = path.read_bytes()
    assert [correlation for _, correlation, _ in replies] == list(range(300))
    assert all(
        stored[at : at + len(frame)] == frame
        for frame, (_, _, at) in zip(frames, replies, strict=True)
    )
    assert stored[sum(map(len, frames)) :].strip(b"\0") == b""


def test_the_sink_refuses_a_request_with_a_wrong_checksum(tmp_path: Path) -> None:
    damaged = bytearray(sink_frame(1, b"body"))
    damaged[-1] ^= 1
    with (
        serving(python("tests.bench.raw.sink", tmp_path / "sink", 1, "inline")) as program,
        connected(program.address) as connection,
    ):
        connection.sendall(damaged)
        with pytest.raises(ConnectionResetError):
            connection.recv(16)


@pytest.mark.parametrize("outstanding", [1, 64, 500])
def test_the_sink_is_driven_to_the_last_request(run: Run, outstanding: int) -> None:
    assert yardsticks.sink_per_s(run, outstanding, count=200) > 0


def test_groups_of_records_are_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "groups"
    assert measured(python("tests.bench.raw.group_file", path, 200, 1_000, 64))["per_s"] > 0
    assert len(path.read_bytes().rstrip(b"\0")) > 64 * 3 * 1_000 - 8


def test_the_disk_is_measured(run: Run) -> None:
    took = yardsticks.disk(run, count=20)
    assert 0 < took["p50_us"] <= took["p99_us"]


@pytest.mark.parametrize("sync_ms", [0, 1])
def test_the_stream_arrives_whole(tmp_path: Path, sync_ms: int) -> None:
    path = tmp_path / "stream"
    assert measured(python("tests.bench.raw.stream", path, 3, sync_ms))["moved"] == 3 << 20
    assert path.stat().st_size == 3 << 20


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_plain_commits_are_counted(run: Run, kind: Clients) -> None:
    result = yardsticks.plain_commit(run, 2, kind, seconds=0.1)
    assert result["per_s"] >= 20
    assert 0 < result["p50_us"] <= result["p99_us"]


def test_two_phase_commits_are_counted_and_leave_nothing_prepared(run: Run) -> None:
    dsns = (run.database.dsn(), run.database.second())
    result = measured(python("tests.bench.raw.two_phase", *dsns, 2, 0.1))
    assert result["per_s"] >= 10
    with closing(psycopg2.connect(dsns[0])) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT gid FROM pg_prepared_xacts WHERE gid LIKE '%bench%'")
        assert cursor.fetchall() == []


def test_no_yardstick_has_more_than_60_lines() -> None:
    programs = list((Path(yardsticks.__file__).parent / "raw").glob("*.py"))
    assert len(programs) > 10
    lengths = {path.name: len(path.read_text().splitlines()) for path in programs}
    assert [name for name, length in lengths.items() if length > 60] == []

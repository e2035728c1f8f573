"""Bodies compressed by the client, stored as they are, and decompressed by readers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

import txmq
import txmq.twisted
from tests.cli.support import run
from tests.client.reactor_thread import InReactor
from tests.client.real import RealBroker
from tests.client.scripted_broker import FakeBroker
from tests.client.scripted_member import fresh
from txmq.batch import Codec, codec_library, read_header
from txmq.client.blocking.client import Client
from txmq.errors import ConfigError
from txmq.model.message import Message
from txmq.testing.wait import PATIENCE_S
from txmq.wire.chunks import unpack_chunks
from txmq.wire.data_requests import Opcode, Read, pack_read

Connect = Callable[..., Client]
CODECS = {"zstd": Codec.ZSTD, "lz4": Codec.LZ4}
BODY = b"the same words again and again " * 300
SMALL = b"x" * 4_096  # no more than is left as it is
TAGS = ("few", "many")


def send_in_every_way(client: Client, topic: str) -> list[bytes]:
    """Returns the bodies in the order in which they were sent."""
    client.send(topic, BODY + b"one", key="k", tag="few", headers={"h": "v"})
    client.send(topic, SMALL, key="k")
    client.send_async(topic, BODY + b"two", key="k", tag="many").result(PATIENCE_S)
    client.send_batch(topic, [Message(BODY + b"three", "k"), Message(b"short", "k", "few")])
    client.send_many(topic, [BODY + b"four", BODY + b"five"], keys=["k", "k"])
    with client.transaction() as tx:
        tx.send(topic, BODY + b"six", key="k")
        tx.send_many(topic, [BODY + b"seven"], keys=["k"])
    with client.transaction() as tx:
        tx.send(topic, BODY + b"eight", key="k", tag="few")
    ends = (b"one", None, b"two", b"three", b"", b"four", b"five", b"six", b"seven", b"eight")
    return [SMALL if end is None else BODY + end if end else b"short" for end in ends]


def stored(broker: RealBroker, topic: str) -> dict[int, int]:
    """The codec of the batch that begins at each offset of partition 0."""
    connection, found, offset = broker.connection(), dict[int, int](), 0
    try:
        while chunks := unpack_chunks(
            connection.request(
                Opcode.READ, pack_read(Read(0, offset, 0, 1 << 20, topic)), timeout=PATIENCE_S
            )
        ).chunks:
            for chunk in chunks:
                found[chunk.base_offset] = read_header(chunk.batch).codec
                offset = chunk.base_offset + chunk.rows
    finally:
        connection.close()
    return found


@pytest.mark.parametrize("name", ["zstd", "lz4"])
def test_all_sends_are_compressed_and_consumers_get_the_bodies(
    name: str, real: RealBroker, connect: Connect
) -> None:
    topic, client = fresh("packed"), connect(real.url, compression=name, timeout=PATIENCE_S)
    client.call("topic.create", name=topic, partitions=1)
    bodies = send_in_every_way(client, topic)
    codecs = stored(real, topic)
    assert codecs.pop(1) == Codec.NONE
    assert set(codecs.values()) == {CODECS[name]}
    plain = connect(real.url)
    with plain.consumer(fresh("all"), [topic], start="first") as consumer:
        got = [message for _ in bodies if (message := consumer.receive(PATIENCE_S)) is not None]
    assert [message.body for message in got] == bodies
    assert (got[0].key, got[0].tag, dict(got[0].headers)) == ("k", "few", {"h": "v"})
    with plain.consumer(
        fresh("some"), [topic], start="first", tags=["few"], selector="h = 'v'"
    ) as consumer:
        assert getattr(consumer.receive(PATIENCE_S), "body", None) == bodies[0]
    assert [found.body for found in plain.find(topic, key="k")] == bodies
    tailed = run("tail", topic, "--no-follow", "--json", "--broker", real.url).stdout
    assert [json.loads(line)["body"].encode() for line in tailed.splitlines()] == bodies


def test_the_twisted_client_compresses_too(
    real: RealBroker, reactor: Any, in_reactor: InReactor
) -> None:
    topic = fresh("packed")
    client = txmq.twisted.connect(
        reactor, real.url, compression="zstd", compress_over=0, timeout=PATIENCE_S
    )

    async def story() -> None:
        await client.call("topic.create", name=topic, partitions=1)
        await client.send(topic, BODY)
        await client.send_many(topic, [BODY, BODY])
        async with client.transaction() as tx:
            tx.send(topic, BODY)
        await client.close()

    in_reactor(story)
    assert set(stored(real, topic).values()) == {Codec.ZSTD}
    assert [found.body for found in real.read(topic)] == [BODY] * 4


def test_bodies_that_do_not_get_smaller_stay_uncompressed(
    fake: FakeBroker, connect: Connect
) -> None:
    connect(fake.url, compression="lz4", compress_over=0).send("orders", bytes(range(256)))
    assert read_header(fake.sends[0].batch).codec == Codec.NONE


@pytest.mark.parametrize(
    "options", [{"compression": "gzip"}, {"compress_over": -1}, {"compress_over": True}]
)
def test_invalid_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        txmq.connect("txmq://127.0.0.1:1", **options)


@pytest.mark.parametrize(("name", "module"), [("zstd", "zstandard"), ("lz4", "lz4.frame")])
def test_a_missing_package_is_reported_at_once(
    name: Any, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    codec_library.cache_clear()
    with pytest.raises(ConfigError, match="not installed") as told:
        txmq.connect("txmq://127.0.0.1:1", compression=name)
    assert told.value.hint.startswith("run `pip install ")

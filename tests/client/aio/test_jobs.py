"""Jobs on asyncio: bundles that were stored apart, and one decision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.client.aio.running import run
from tests.client.aio.test_client import connected
from tests.client.blocking.test_grown_topics import grow, make_topics
from tests.client.real import RealBroker
from tests.client.scripted_member import fresh
from tests.client.test_letters import make_letters
from txmq.errors import ClientClosed
from txmq.testing.wait import PATIENCE_S


def test_a_bundle_may_be_larger_than_a_frame_and_its_topic_may_grow(
    real: RealBroker, connect: Any
) -> None:
    blocking, body = connect(real.url), b"x" * (1 << 20)
    (topic,) = make_topics(blocking, "t")

    async def work() -> None:
        async with connected(real) as client:
            job = client.job()
            group = job.group()
            await group.send(topic, body, key="k0")
            await client._core.topic(topic)  # as it is before it grows
            grow(blocking, topic)
            for number in range(1, 20):
                await group.send(topic, body, key=f"k{number}")
            token = await group.store()
            with pytest.raises(ClientClosed):
                await group.send(topic, b"late")
            await job.decide([token])
            assert await job.wait_published([token], PATIENCE_S)

    run(work())
    found = [one for one in blocking.find(topic) if one.body != b"before"]
    assert len({message.key for message in found}) == len(found) == 20


def test_an_import_of_letters_is_sent_once(real: RealBroker, connect: Any, tmp_path: Path) -> None:
    blocking, group, file = connect(real.url), fresh("g"), tmp_path / "letters"
    make_letters(real, blocking, fresh("t"), group, 2)
    (spare,) = make_topics(blocking, "spare")
    blocking.export_letters(group, file)

    async def work() -> None:
        async with connected(real) as client:
            for repeated, again in ((False, False), (True, False), (False, True)):
                sent = await client.import_letters(file, to=spare, operator="kim", again=again)
                assert sent == (2, 0, repeated)

    run(work())
    assert len(list(blocking.find(spare))) == 1 + 4

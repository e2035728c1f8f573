"""Jobs: bundles that were stored apart, and one decision."""

from __future__ import annotations

import pytest

from tests.client.faces.face import Face
from tests.client.real import RealBroker
from tests.client.scripted_member import fresh
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import UnknownTransaction
from txmq.model.message import COMMIT, ROLLBACK, Message
from txmq.testing.wait import PATIENCE_S


async def test_a_job_publishes_the_bundles_of_its_winners_and_no_others(
    face: Face, real: RealBroker
) -> None:
    client, topic = face.connect(real.url), fresh("job")
    job = client.job()
    first = await job.store(topic, [Message(b"1", key="k"), Message(b"2", key="k")])
    await job.store(topic, [Message(b"a lost attempt", key="k")])
    second = await job.store(topic, [Message(b"3", key="k")])
    assert (await job.outcome(), real.read(topic)) == (None, [])
    with pytest.raises(UnknownTransaction):
        await job.decide([first, new_token()])
    assert not await job.wait_published([first], 0.0)
    assert await job.decide([first, second]) == (COMMIT, False)
    assert await client.job(job.token.hex).decide([second]) == (COMMIT, True)
    assert await client.job(job.token.bytes).abort() == (COMMIT, True)
    assert await job.outcome() is COMMIT
    assert await job.wait_published([first, second], PATIENCE_S)
    await job.store(topic, [Message(b"too late", key="k")])
    assert [message.body for message in real.read(topic)] == [b"1", b"2", b"3"]


async def test_an_aborted_job_sends_nothing(face: Face, real: RealBroker) -> None:
    job, topic = face.connect(real.url).job(), fresh("job")
    await job.store(topic, [Message(b"x")])
    assert await job.abort() == (ROLLBACK, False)
    assert real.read(topic) == []

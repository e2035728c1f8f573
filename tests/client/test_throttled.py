"""Clients on event loops make the pause that a broker asks for, and their decisions go
on. Blocking clients have tests of their own, but for readers, which have one rule.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import txmq
import txmq.aio
import txmq.twisted
from tests.client.aio.running import run
from tests.client.reactor_thread import InReactor
from tests.client.scripted_broker import FakeBroker, Reaction, Silent
from tests.client.scripted_bundles import BundleAnswers
from tests.client.scripted_member import chunk
from txmq.client.protocol.offsets import FileOffsets
from txmq.errors import Throttled
from txmq.testing.wait import PATIENCE_S
from txmq.wire.chunks import pack_chunks
from txmq.wire.data_requests import Opcode
from txmq.wire.frames import Frame

BEHIND = "the disk is behind"
PAUSE_S = 2.0
LONGEST_S = 60.0  # of all pauses that a broker may ask for
TIMEOUT_S = 50.0
Story = Callable[[Any], Coroutine[Any, Any, None]]


class Face(NamedTuple):
    """Runs a story with a client of one face, which is closed at its end."""

    play: Callable[..., None]


@pytest.fixture
def fake() -> Iterator[FakeBroker]:
    with FakeBroker() as broker:
        yield broker


@pytest.fixture(params=["asyncio", "twisted"])
def face(request: pytest.FixtureRequest, fake: FakeBroker, reactor: Any) -> Face:
    if request.param == "asyncio":

        def play(story: Story, delivery_timeout: float = PATIENCE_S) -> None:
            async def work() -> None:
                async with txmq.aio.connect(
                    fake.url, service="s", timeout=TIMEOUT_S, delivery_timeout=delivery_timeout
                ) as client:
                    await story(client)

            run(work())

        return Face(play)
    in_reactor: InReactor = request.getfixturevalue("in_reactor")

    def play_in_reactor(story: Story, delivery_timeout: float = PATIENCE_S) -> None:
        async def work() -> None:
            client = txmq.twisted.connect(
                reactor,
                fake.url,
                service="s",
                timeout=TIMEOUT_S,
                delivery_timeout=delivery_timeout,
            )
            try:
                await story(client)
            finally:
                await client.close()

        in_reactor(work)

    return Face(play_in_reactor)


async def begun(client: Any, body: bytes) -> Any:
    """Send, and return what will have the receipt."""
    if isinstance(client, txmq.aio.Client):
        return await client.send_async("orders", body)
    return client.send("orders", body)


def test_a_throttled_send_goes_again_after_the_pause_and_decisions_go_before_it(
    fake: FakeBroker, face: Face
) -> None:
    answers = BundleAnswers(fake)

    async def story(client: Any) -> None:
        half = await client.half("orders", b"half", checker="c")
        fake.script += [Throttled.after(PAUSE_S, BEHIND)]
        began = time.monotonic()
        sent = await begun(client, b"x")
        while not fake.sends:
            await client.call("topic.describe", names=["orders"])
        assert await half.commit()
        assert len(fake.sends) == 1, "the send waits, the decision does not"
        assert (await sent).offset == 0
        assert time.monotonic() - began >= PAUSE_S

    face.play(story)
    assert [code for code, _ in answers.frames] == [Opcode.GROUP, Opcode.DECIDE]


def test_a_throttled_half_goes_again_after_the_pause_and_a_decision_before_it(
    fake: FakeBroker, face: Face
) -> None:
    answers = BundleAnswers(fake)

    async def story(client: Any) -> None:
        first = await client.half("orders", b"1", checker="c")
        answers.script = [[Throttled.after(PAUSE_S, BEHIND)]]
        began = time.monotonic()
        second = client.half("orders", b"2", checker="c")
        if asyncio.iscoroutine(second):
            second = asyncio.ensure_future(second)
        while len(answers.frames) < 2:
            await client.call("topic.describe", names=["orders"])
        assert await first.commit()
        assert await (await second).commit()
        assert time.monotonic() - began >= PAUSE_S

    face.play(story)
    codes = [code for code, _ in answers.frames]
    assert codes == [Opcode.GROUP, Opcode.GROUP, Opcode.DECIDE, Opcode.GROUP, Opcode.DECIDE]


def test_what_stays_throttled_fails_with_that_error_in_time(fake: FakeBroker, face: Face) -> None:
    BundleAnswers(fake)

    async def story(client: Any) -> None:
        fake.script += [Throttled.after(LONGEST_S, BEHIND)] * 3
        began = time.monotonic()
        with pytest.raises(Throttled, match=BEHIND):
            await client.send("orders", b"x")
        with pytest.raises(Throttled, match=BEHIND):
            await client.send_many("orders", [b"x"])
        assert time.monotonic() - began < TIMEOUT_S, "it does not wait for what would be too late"

    face.play(story, 2.0)


def test_a_throttled_call_is_made_again_after_the_pause(fake: FakeBroker, face: Face) -> None:
    async def story(client: Any) -> None:
        fake.refusals += [Throttled.after(0.2, BEHIND)] * 2
        began = time.monotonic()
        assert (await client.send("orders", b"x")).offset == 0, "though its topic was not known"
        assert time.monotonic() - began >= 0.4
        fake.refusals += [Throttled.after(0.1, BEHIND)]
        assert await client.call("user.me") == {}

    face.play(story)


@pytest.mark.parametrize("pause_s", [0.0, LONGEST_S])
def test_a_call_that_names_no_pause_or_one_too_long_is_refused_at_once(
    fake: FakeBroker, face: Face, pause_s: float
) -> None:
    async def story(client: Any) -> None:
        refusal = Throttled.after(pause_s, BEHIND) if pause_s else Throttled(BEHIND)
        fake.refusals += [refusal]
        with pytest.raises(Throttled, match=BEHIND):
            await client.call("user.me")
        calls = [frame for frame in fake.frames if frame.opcode == Opcode.CALL]
        assert len(calls) == 1

    face.play(story)


class ThrottledReads:
    """A broker that refuses the first read of a message, and answers the next one."""

    pause_s = 0.5

    def __init__(self, fake: FakeBroker) -> None:
        self._fake = fake
        self.reads: list[tuple[float, int]] = []  # when, and connections that were made so far
        fake.answers["topic.show"] = {"firsts": [0], "ends": [1]}
        fake.others = self._answer

    def _answer(self, frame: Frame) -> Reaction:
        if frame.opcode != Opcode.READ:
            return b""
        self.reads.append((time.monotonic(), self._fake.accepted))
        if len(self.reads) == 1:
            return Throttled.after(self.pause_s, BEHIND)
        if len(self.reads) == 2:
            return b"".join(pack_chunks([chunk("read", lease=-1)], next_offset=1))
        return Silent

    def require_pause(self) -> None:
        (refused_at, before), (answered_at, after) = self.reads[:2]
        assert answered_at - refused_at >= self.pause_s
        assert before == after, "to connect again would not help"


def test_a_reader_on_a_loop_waits_as_long_as_the_broker_asks(
    fake: FakeBroker, face: Face, tmp_path: Path
) -> None:
    script = ThrottledReads(fake)

    async def story(client: Any) -> None:
        async with await client.reader("r", ["orders"], FileOffsets(tmp_path)) as reader:
            assert (await reader.receive(PATIENCE_S)).body == b"read"

    face.play(story)
    script.require_pause()


def test_a_blocking_reader_waits_as_long_as_the_broker_asks(
    fake: FakeBroker, tmp_path: Path
) -> None:
    script = ThrottledReads(fake)
    with (
        txmq.connect(fake.url) as client,
        client.reader("r", ["orders"], FileOffsets(tmp_path)) as reader,
    ):
        message = reader.receive(PATIENCE_S)
    assert message is not None
    assert message.body == b"read"
    script.require_pause()


def test_a_reader_that_is_closed_in_its_pause_reads_no_more(
    fake: FakeBroker, face: Face, tmp_path: Path
) -> None:
    script = ThrottledReads(fake)
    script.pause_s = 60.0

    async def story(client: Any) -> None:
        reader = await client.reader("r", ["orders"], FileOffsets(tmp_path))
        assert await reader.receive(0.05) is None
        while not script.reads:
            await client.call("user.me")
        await reader.close()
        assert await reader.receive() is None

    face.play(story)
    assert len(script.reads) == 1

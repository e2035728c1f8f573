"""Who waits alone for an answer receives it on his own thread, and nobody is the worse
for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from threading import get_ident

import pytest

import txmq
from tests.client.fake import FakeBroker, HangUp, Reaction, Silent
from txmq.client.blocking.client import Client
from txmq.client.blocking.connections.stream import Stream
from txmq.client.blocking.sender import sender
from txmq.client.protocol.sender.accumulator import Accumulator
from txmq.client.protocol.sender.in_flight import Flights
from txmq.errors import NotPermitted, RemoteProtocolError
from txmq.testing.wait import wait_until
from txmq.wire.frames import Frame

Connect = Callable[..., Client]
Sent = Future[txmq.Receipt]
UnderWay = Callable[..., tuple[Sent, "Held"]]
DEADLINE_S = 20


@pytest.fixture
def client(fake: FakeBroker, connect: Connect) -> Client:
    """One whose pipeline has its connection."""
    client = connect(fake.url, timeout=20)
    client.send_async("orders", b"first").result(DEADLINE_S)
    return client


class Held:
    """An answer to a message, given when it is told to."""

    def __init__(self, answer: Reaction | None) -> None:
        self._answer, self.release = answer, threading.Event()

    def __call__(self, _frame: object) -> Reaction | None:
        assert self.release.wait(DEADLINE_S)
        return self._answer

    def soon(self) -> None:
        """Gives it a moment later, when the caller waits."""
        threading.Timer(0.02, self.release.set).start()


@pytest.fixture
def under_way(client: Client, fake: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> UnderWay:
    """Sends a message and returns once the pipeline's thread leaves the answer to
    others, until it is woken.
    """
    monkeypatch.setattr(sender, "NAP_S", DEADLINE_S)

    def send(answer: Reaction | None = None) -> tuple[Sent, Held]:
        held = Held(answer)
        fake.script.append(held)
        future = client.send_async("orders", b"second")
        line = client.core.pipeline._line
        wait_until(lambda: client.core.pipeline._flights.awaits_replies and line.stream)
        line._lent = True  # as if somebody had waited just now
        line._wake()
        wait_until(lambda: line.stream and not line.listening)
        return future, held

    return send


@pytest.fixture
def receivers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads that received by themselves."""
    threads, received = list[int](), Flights.received_alone

    def noted(flights: Flights, replies: Iterable[Frame]) -> bool:
        threads.append(get_ident())
        return received(flights, replies)

    monkeypatch.setattr(Flights, "received_alone", noted)
    return threads


def test_a_lone_waiter_receives_by_himself(client: Client, receivers: list[int]) -> None:
    futures = [client.send_async("orders", b"x") for _ in range(2_000)]
    assert [future.result(DEADLINE_S).offset for future in futures] == list(range(1, 2_001))
    while get_ident() not in receivers:  # the thread may have been faster
        client.send_async("orders", b"x").result(DEADLINE_S)


def test_callbacks_run_on_the_pipelines_thread_whoever_receives(
    client: Client, under_way: UnderWay
) -> None:
    called = list[str]()
    future, held = under_way()
    waiter = threading.Thread(target=future.result, args=(DEADLINE_S,))
    waiter.start()
    wait_until(client.core.pipeline._line._waiter.locked)
    behind = client.send_async("orders", b"third")
    behind.add_done_callback(lambda _: called.append(threading.current_thread().name))
    held.release.set()
    wait_until(lambda: called)
    waiter.join(DEADLINE_S)
    assert called == ["txmq-pipeline"]


def test_who_waits_beside_another_gets_his_answer_though_that_one_has_left(
    client: Client, under_way: UnderWay
) -> None:
    line, answers = client.core.pipeline._line, list[txmq.Receipt]()
    future, held = under_way()

    def impatient() -> None:
        with pytest.raises(NotInTime):
            future.result(0.2)

    threads = [
        threading.Thread(target=impatient),
        threading.Thread(target=lambda: answers.append(future.result(DEADLINE_S))),
    ]
    threads[0].start()
    wait_until(line._waiter.locked)
    threads[1].start()
    threads[0].join(DEADLINE_S)
    held.release.set()
    threads[1].join(DEADLINE_S)
    assert [answer.offset for answer in answers] == [1]


def test_a_waiter_waits_as_long_as_he_wants(under_way: UnderWay) -> None:
    future, held = under_way()
    with pytest.raises(NotInTime):
        future.result(0.01)
    held.release.set()
    assert future.result(DEADLINE_S).offset == 1


def test_a_waiter_is_told_of_a_refusal(client: Client, under_way: UnderWay) -> None:
    future, held = under_way(NotPermitted("not you"))
    held.soon()
    with pytest.raises(NotPermitted):
        future.result(DEADLINE_S)
    assert client.send_async("orders", b"next").result(DEADLINE_S).offset == 1


def test_a_waiter_does_not_notice_that_the_connection_is_lost(
    client: Client, under_way: UnderWay
) -> None:
    future, held = under_way(HangUp)
    held.soon()
    assert future.result(DEADLINE_S).offset == 1
    assert client.stats.connections == 2


def test_a_waiter_is_told_of_an_answer_that_is_none(client: Client, under_way: UnderWay) -> None:
    future, held = under_way(b"no receipt")
    held.soon()
    with pytest.raises(RemoteProtocolError) as caught:
        future.result(DEADLINE_S)
    assert caught.value.outcome == "unknown"
    assert client.send_async("orders", b"next").result(DEADLINE_S).message_id


def test_a_waiter_at_a_silent_broker_gives_the_connection_up_in_time(
    fake: FakeBroker, connect: Connect
) -> None:
    client = connect(fake.url, timeout=0.3)
    client.send_async("orders", b"first").result(DEADLINE_S)
    fake.script.append(Silent)
    assert client.send_async("orders", b"second").result(DEADLINE_S).offset == 1
    assert client.stats.connections == 2


@pytest.mark.parametrize(
    ("owner", "name"), [(Stream, "read"), (Flights, "_stored"), (Accumulator, "_settle")]
)
def test_an_interrupt_of_who_receives_loses_and_doubles_nothing(
    client: Client,
    fake: FakeBroker,
    under_way: UnderWay,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
) -> None:
    done, own, interrupts = getattr(owner, name), get_ident(), list[bool]()

    def interrupted(self: object, *args: object) -> object:
        answer = done(self, *args)
        if get_ident() == own and not interrupts:
            interrupts.append(True)
            raise KeyboardInterrupt
        return answer

    future, held = under_way()
    monkeypatch.setattr(owner, name, interrupted)
    held.soon()
    with pytest.raises(KeyboardInterrupt):
        future.result(DEADLINE_S)
    assert future.result(DEADLINE_S).message_id.endswith("-1")
    client.flush(DEADLINE_S)
    assert len(set(fake.origins())) == 2  # if it went out again, then as what it was
    assert (client.core.pipeline._outbox._messages, client.core.pipeline._outbox._bytes) == (0, 0)

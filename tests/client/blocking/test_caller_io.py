"""Callers that wait alone read their own replies, without harm to others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from threading import get_ident

import pytest

import txmq
from tests.client.scripted_broker import FakeBroker, HangUp, Reaction, Silent, receipt
from txmq.client.blocking.client import Client
from txmq.client.blocking.connections.stream import NonBlockingConnection
from txmq.client.blocking.sender import sender
from txmq.client.protocol.sender.accumulator import Accumulator
from txmq.client.protocol.sender.in_flight import InFlightRequests
from txmq.errors import NotPermitted, RemoteProtocolError
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.wire.frames import Frame

Connect = Callable[..., Client]
Sent = Future[txmq.Receipt]
HeldSend = Callable[..., tuple[Sent, "HeldReply"]]


@pytest.fixture
def client(fake: FakeBroker, connect: Connect) -> Client:
    """A client whose sender has its connection."""
    client = connect(fake.url)
    client.send_async("orders", b"first").result(PATIENCE_S)
    return client


class HeldReply:
    """The reply to a message, held back until `release` is set."""

    def __init__(self, answer: Reaction | None) -> None:
        self._answer, self.release = answer, threading.Event()

    def __call__(self, _frame: object) -> Reaction | None:
        assert self.release.wait(PATIENCE_S)
        return self._answer

    def soon(self) -> None:
        """Release the reply a moment later, when the caller waits."""
        threading.Timer(0.2, self.release.set).start()


@pytest.fixture
def held_send(client: Client, fake: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> HeldSend:
    """Send a message, and return once the sender's thread leaves the reply to
    callers.
    """
    monkeypatch.setattr(sender, "SLEEP_S", PATIENCE_S)

    def send(answer: Reaction | None = None) -> tuple[Sent, HeldReply]:
        held = HeldReply(answer)
        fake.script.append(held)
        future = client.send_async("orders", b"second")
        caller_io = client._core.sender._caller_io
        wait_until(lambda: client._core.sender._in_flight.awaits_replies and caller_io.connection)
        caller_io._caller_has_read = True  # as if a caller had waited just now
        caller_io._wake()
        wait_until(lambda: caller_io.connection and not caller_io.thread_reads)
        return future, held

    return send


@pytest.fixture
def receivers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the threads of callers that read replies."""
    threads, received = list[int](), InFlightRequests.receive_for_caller

    def noted(in_flight: InFlightRequests, replies: Iterable[Frame]) -> bool:
        threads.append(get_ident())
        return received(in_flight, replies)

    monkeypatch.setattr(InFlightRequests, "receive_for_caller", noted)
    return threads


def test_a_caller_that_waits_alone_reads_its_own_reply(
    client: Client, receivers: list[int]
) -> None:
    futures = [client.send_async("orders", b"x") for _ in range(2_000)]
    assert [future.result(PATIENCE_S).offset for future in futures] == list(range(1, 2_001))
    while get_ident() not in receivers:  # the thread may have been faster
        client.send_async("orders", b"x").result(PATIENCE_S)


def test_callbacks_run_on_the_senders_thread_whichever_thread_reads(
    client: Client, held_send: HeldSend
) -> None:
    called = list[str]()
    future, held = held_send()
    waiter = threading.Thread(target=future.result, args=(PATIENCE_S,))
    waiter.start()
    wait_until(client._core.sender._caller_io._waiting_caller.locked)
    behind = client.send_async("orders", b"third")
    behind.add_done_callback(lambda _: called.append(threading.current_thread().name))
    held.release.set()
    wait_until(lambda: called)
    waiter.join()
    assert called == ["txmq-pipeline"]


def test_a_second_waiting_caller_gets_its_reply_after_the_first_has_left(
    client: Client, held_send: HeldSend
) -> None:
    caller_io, answers = client._core.sender._caller_io, list[txmq.Receipt]()
    future, held = held_send()

    def impatient() -> None:
        with pytest.raises(NotInTime):
            future.result(0.2)

    threads = [
        threading.Thread(target=impatient),
        threading.Thread(target=lambda: answers.append(future.result(PATIENCE_S))),
    ]
    threads[0].start()
    wait_until(caller_io._waiting_caller.locked)
    threads[1].start()
    threads[0].join(PATIENCE_S)
    held.release.set()
    threads[1].join(PATIENCE_S)
    assert [answer.offset for answer in answers] == [1]


def test_a_waiting_caller_chooses_its_time_out(held_send: HeldSend) -> None:
    future, held = held_send()
    with pytest.raises(NotInTime):
        future.result(0.01)
    held.release.set()
    assert future.result(PATIENCE_S).offset == 1


def test_a_waiting_caller_gets_a_refusal(client: Client, held_send: HeldSend) -> None:
    future, held = held_send(NotPermitted("not you"))
    held.soon()
    with pytest.raises(NotPermitted):
        future.result(PATIENCE_S)
    assert client.send_async("orders", b"next").result(PATIENCE_S).offset == 1


def test_a_waiting_caller_does_not_notice_a_lost_connection(
    client: Client, held_send: HeldSend
) -> None:
    future, held = held_send(HangUp)
    held.soon()
    assert future.result(PATIENCE_S).offset == 1
    assert client.stats.connections == 2


def test_a_waiting_caller_gets_the_error_of_an_invalid_reply(
    client: Client, held_send: HeldSend
) -> None:
    future, held = held_send(b"no receipt")
    held.soon()
    with pytest.raises(RemoteProtocolError) as caught:
        future.result(PATIENCE_S)
    assert caught.value.outcome == "unknown"
    assert client.send_async("orders", b"next").result(PATIENCE_S).message_id


def test_a_waiting_caller_gives_up_a_silent_connection_in_time(
    fake: FakeBroker, connect: Connect
) -> None:
    client = connect(fake.url, timeout=0.3)
    client.send_async("orders", b"first").result(PATIENCE_S)
    connections = client.stats.connections
    fake.script += [Silent] + [receipt(7)] * 20
    assert client.send_async("orders", b"second").result(PATIENCE_S).offset == 7
    assert client.stats.connections > connections


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (NonBlockingConnection, "read"),
        (InFlightRequests, "_count_stored"),
        (Accumulator, "_release"),
    ],
)
def test_an_interrupt_of_a_reading_caller_loses_and_doubles_nothing(
    client: Client,
    fake: FakeBroker,
    held_send: HeldSend,
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

    future, held = held_send()
    monkeypatch.setattr(owner, name, interrupted)
    held.soon()
    with pytest.raises(KeyboardInterrupt):
        future.result(PATIENCE_S)
    assert future.result(PATIENCE_S).message_id.endswith("-1")
    client.flush(PATIENCE_S)
    assert len(set(fake.origins())) == 2  # if it went out again, then as what it was
    assert (
        client._core.sender._accumulator._messages,
        client._core.sender._accumulator._bytes,
    ) == (0, 0)

"""Programs of each face that a supervisor or Ctrl-C ends, while a handler works."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

from tests.client.real import RealBroker
from txmq.client.blocking.client import Client
from txmq.errors import LocalProtocolError
from txmq.testing.wait import PATIENCE_S, wait_until

CAUGHT = (signal.SIGTERM, signal.SIGINT)
BLOCKING = """
import sys, txmq
def work(message):
    print("got", message.body.decode(), flush=True)
    sys.stdin.readline()
with txmq.connect(URL) as client, client.consumer(GROUP, [GROUP]) as consumer:
    consumer.stop_on_signals()
    {run}
    print("ended", flush=True)
"""
RUN = BLOCKING.format(run="consumer.run(work, workers=WORKERS)")
PROGRAMS = {
    "run": RUN.replace("WORKERS", "1"),
    "threads": RUN.replace("WORKERS", "2"),
    "iterator": BLOCKING.format(
        run="for message in consumer:\n        work(message)\n        consumer.ack(message)"
    ),
    "aio": """
import asyncio, sys, txmq.aio
async def work(message):
    print("got", message.body.decode(), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
async def main():
    async with txmq.aio.connect(URL) as client, await client.consumer(GROUP, [GROUP]) as consumer:
        consumer.stop_on_signals()
        await consumer.run(work)
    print("ended", flush=True)
asyncio.run(main())
""",
    "twisted": """
import sys, txmq.twisted
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread
def work(message):
    print("got", message.body.decode(), flush=True)
    return deferToThread(sys.stdin.readline)
async def main():
    client = txmq.twisted.connect(reactor, URL)
    consumer = await client.consumer(GROUP, [GROUP])
    consumer.stop_on_signals()
    await consumer.run(work)
    print("ended", flush=True)
reactor.callWhenRunning(lambda: Deferred.fromCoroutine(main()))
reactor.run()
""",
}
FORKED = """
import os, signal, txmq
with txmq.connect(URL) as client, client.consumer(GROUP, [GROUP]) as consumer:
    consumer.stop_on_signals()
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.write(writes, b"1")  # what comes before, Python forgets in a child
        signal.pause()
        os._exit(0)
    os.read(reads, 1)
    os.kill(child, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), consumer.closed, flush=True)
"""


@contextmanager
def program(source: str, url: str, group: str) -> Iterator[subprocess.Popen[str]]:
    source = f"URL, GROUP = {url!r}, {group!r}\n{source}"
    with subprocess.Popen(
        [sys.executable, "-c", source],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def catches(process: subprocess.Popen[str]) -> bool:
    """Return whether the process still has functions of its own for both signals."""
    status = Path(f"/proc/{process.pid}/status").read_text("utf-8")
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return all(caught >> (number - 1) & 1 for number in CAUGHT)


@pytest.mark.parametrize("number", CAUGHT)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_first_signal_lets_the_handler_finish(
    real: RealBroker, client: Client, name: str, number: signal.Signals
) -> None:
    group = f"signals-{name}-{number.name}"
    client.send(group, b"first")
    with program(PROGRAMS[name], real.url, group) as process:
        assert line(process) == "got first"
        process.send_signal(number)
        if name != "twisted":  # the reactor keeps its handlers
            wait_until(lambda: not catches(process), what="the signal has come")
        out, err = process.communicate("\n", PATIENCE_S)
        assert (process.returncode, out, err) == (0, "ended\n", "")
    client.send(group, b"second")  # the first one is acked
    with client.consumer(group, [group]) as consumer:
        message = consumer.receive(PATIENCE_S)
        assert message is not None
        assert (message.body, message.attempt) == (b"second", 1)
        consumer.ack(message)


@pytest.mark.parametrize("name", ["run", "aio"])
def test_the_second_signal_ends_the_process_at_once(
    real: RealBroker, client: Client, name: str
) -> None:
    group = f"second-signal-{name}"
    client.send(group, b"first")
    with program(PROGRAMS[name], real.url, group) as process:
        assert line(process) == "got first"
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: not catches(process), what="the signal has come")
        process.send_signal(signal.SIGINT)
        assert (process.wait(PATIENCE_S), process.communicate()) == (-signal.SIGINT, ("", ""))


def test_a_signal_that_is_ignored_stays_so(real: RealBroker, client: Client) -> None:
    """A shell ignores SIGINT for its background jobs."""
    client.send("signals-ignored", b"first")
    ignores = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    with program(ignores + PROGRAMS["run"], real.url, "signals-ignored") as process:
        assert line(process) == "got first"
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate("\n", PATIENCE_S)
        assert (process.returncode, out, err) == (0, "ended\n", "")


def test_a_child_of_a_fork_ends_at_its_first_signal(real: RealBroker, client: Client) -> None:
    client.send("signals-forked", b"")
    with program(FORKED, real.url, "signals-forked") as process:
        assert line(process) == f"{-signal.SIGTERM} False"


def test_only_the_main_thread_may_say_what_signals_do(client: Client) -> None:
    client.send("signals-thread", b"")
    refused = list[LocalProtocolError]()

    def ask(stop: Callable[[], None]) -> None:
        with pytest.raises(LocalProtocolError, match="only the main thread") as caught:
            stop()
        refused.append(caught.value)

    with client.consumer("signals-thread", ["signals-thread"]) as consumer:
        thread = Thread(target=ask, args=(consumer.stop_on_signals,))
        thread.start()
        thread.join()
    assert refused

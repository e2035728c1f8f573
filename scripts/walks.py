"""Count the moves between source files in four walks through a client and a broker.

A move is a call, or the return from it, that leads from code in one file of `txmq` or
`spark` to code in another, whatever other packages lie between. The client is in this
process, the broker in another, without its periodic timers (Twisted's LoopingCall).
Each walk is made several times. The first one warms up; the shortest of the others
counts, because other timers only add moves.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING, Final, NamedTuple, Self
from unittest import mock

if TYPE_CHECKING:
    from txmq import Client, Receipt, RetryPolicy

ROOT: Final = Path(__file__).resolve().parents[1]
REACTOR: Final = "twisted.internet.base"  # the module that begins each turn
REPEATS: Final = 6
SETTLE_S: Final = 0.15  # work behind the reply belongs to the walk
TOPIC, FAILING, GROUP, CHECKER = "sent", "failing", "walkers", "walker"
TITLES: Final = {
    "send": "send",
    "half": "half message",
    "decision": "its decision",
    "transaction": "half message and decision",
    "failure": "failure to dead letter",
    "replay": "replay of a letter",
}


class Move(NamedTuple):
    """A step from one file to another: a call of `function`, or a return (no name)."""

    source: str
    target: str
    function: str

    def __str__(self) -> str:
        return f"{self.source} -> {self.target} {self.function}()"


class Trace(NamedTuple):
    """The files that one process entered during a walk, and its moves in order."""

    files: tuple[str, ...]
    moves: tuple[Move, ...]


class Walk(NamedTuple):
    """The traces of both processes."""

    client: Trace
    broker: Trace


class Tracer:
    """Records the moves of this thread, and of threads started later, on demand."""

    def __init__(self, root: Path) -> None:
        self._root = f"{root}{os.sep}"
        self._sources = tuple(f"{root / name}{os.sep}" for name in ("txmq", "spark"))
        self._names: dict[str, str] = {}  # by path; empty for foreign files
        self._on = False
        self._files: list[str] = []
        self._moves: list[Move] = []
        threading.setprofile(self._event)
        sys.setprofile(self._event)

    def start(self) -> None:
        """Begin a trace."""
        self._files, self._moves, self._on = [], [], True

    def stop(self) -> Trace:
        """End the trace and return it."""
        self._on = False
        return Trace(tuple(sorted(set(self._files))), tuple(self._moves))

    def _event(self, frame: FrameType, event: str, _argument: object) -> None:
        if not self._on or event not in ("call", "return") or not (here := self._name(frame)):
            return
        caller = self._caller(frame)
        if called := event == "call":
            self._files.append(here)
        if caller and caller != here:
            move = (caller, here, frame.f_code.co_qualname) if called else (here, caller, "")
            self._moves.append(Move(*move))

    def _caller(self, frame: FrameType) -> str:
        """Return the nearest source file above in the same turn, or nothing."""
        above = frame.f_back
        while above is not None and above.f_globals.get("__name__") != REACTOR:
            if name := self._name(above):
                return name
            above = above.f_back
        return ""

    def _name(self, frame: FrameType) -> str:
        path = frame.f_code.co_filename
        if path not in self._names:
            ours = path.startswith(self._sources)
            self._names[path] = path.removeprefix(self._root) if ours else ""
        return self._names[path]


class Broker:
    """A broker process with a tracer; it ends with this process."""

    def __init__(self, root: Path, directory: Path) -> None:
        self._log = directory / "log"
        self._process = subprocess.Popen(
            (sys.executable, __file__, str(root), "--broker", str(directory / "data")),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("w"),
            text=True,
        )
        self.url = self._line().split()[1]  # of the line `ready URL`

    def start(self) -> None:
        """Begin a trace."""
        self._ask("start")

    def stop(self) -> Trace:
        """End the trace and return it."""
        files, moves = json.loads(self._ask("stop"))
        return Trace(tuple(files), tuple(Move(*move) for move in moves))

    def _ask(self, command: str) -> str:
        assert self._process.stdin is not None
        print(command, file=self._process.stdin, flush=True)
        return self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            sys.exit(f"the broker ended:\n{self._log.read_text()}")
        return line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:
            self._process.terminate()


def serve(root: Path, data: str) -> None:
    """Run `txmq broker` without its periodic timers, and trace it on demand."""

    def obey(tracer: Tracer) -> None:
        for command in sys.stdin:
            trace = tracer.stop()
            if command == "start\n":
                tracer.start()
            print(json.dumps(trace), flush=True)
        os._exit(0)  # the client's process is gone

    threading.Thread(target=obey, args=(Tracer(root),), daemon=True).start()
    sys.argv = ["txmq", "broker", "--create-topics", "--data", data, "--listen", "127.0.0.1:0"]
    with mock.patch("twisted.internet.task.LoopingCall.start"):
        runpy.run_module("txmq", run_name="__main__")


class Walks:
    """Makes the walks and keeps the traces of each repetition."""

    def __init__(self, root: Path, broker: Broker) -> None:
        self._broker = broker
        self._tracer = Tracer(root)
        self.traces: dict[str, list[Walk]] = {}

    def make(self) -> None:
        """Make every walk as often as it is measured."""
        import txmq  # noqa: PLC0415  # of the measured checkout

        never = txmq.RetryPolicy((1.0,), retries=0)
        with txmq.connect(self._broker.url, service="walks") as client:
            for topic in (TOPIC, FAILING):
                client.call("topic.create", name=topic, partitions=1)
            for number in range(REPEATS):
                key = f"key-{number}"
                with self._traced("send"):
                    client.send(TOPIC, b"walk", key=key)
                self._transaction(client, key)
                self._replay(client, self._failure(client, key, never))

    def _transaction(self, client: Client, key: str) -> None:
        with ExitStack() as block:
            with self._traced("half"):
                transaction = block.enter_context(client.transaction(checker=CHECKER))
                transaction.send(TOPIC, b"walk", key=key)
                transaction.prepare()
            with self._traced("decision"):
                block.close()

    def _failure(self, client: Client, key: str, retry: RetryPolicy) -> Receipt:
        """Fail a new message; the one that was replayed last comes before it."""
        sent = client.send(FAILING, b"walk", key=key)
        consumer = client.consumer(GROUP, [FAILING], mode="ordered", start="first", retry=retry)
        with consumer:
            for message in consumer:
                if message.message_id == sent.message_id:
                    break
                consumer.ack(message, wait=True)
            with self._traced("failure"):
                consumer.nack(message, error="walk")
        return sent

    def _replay(self, client: Client, dead: Receipt) -> None:
        place = [dead.topic, dead.partition, dead.offset]
        with self._traced("replay"):
            client.call("dlq.replay", group=GROUP, letters=[place], operator="walker")

    @contextmanager
    def _traced(self, name: str) -> Iterator[None]:
        time.sleep(SETTLE_S)
        self._broker.start()
        self._tracer.start()
        yield
        time.sleep(SETTLE_S)
        walk = Walk(client=self._tracer.stop(), broker=self._broker.stop())
        self.traces.setdefault(name, []).append(walk)


def measure(root: Path) -> dict[str, Walk]:
    """Return the shortest of each walk, and half message and decision together."""
    with TemporaryDirectory(prefix="txmq-walks-") as name:
        directory = Path(name)
        with Broker(root, directory) as broker:
            walks = Walks(root, broker)
            walks.make()
    shortest = {
        name: Walk(*(min(side, key=lambda trace: (len(trace.moves), trace)) for side in sides))
        for name, made in walks.traces.items()
        if (sides := tuple(zip(*made[1:], strict=True)))
    }
    pairs = zip(shortest["half"], shortest["decision"], strict=True)
    both = Walk(*(Trace(tuple(sorted({*a.files, *b.files})), a.moves + b.moves) for a, b in pairs))
    return {name: both if name == "transaction" else shortest[name] for name in TITLES}


def table(found: dict[str, Walk]) -> Iterator[str]:
    yield f"{'walk':28}{'client files':>14}{'moves':>7}{'broker files':>14}{'moves':>7}"
    for name, walk in found.items():
        cells = (f"{len(trace.files):14}{len(trace.moves):7}" for trace in walk)
        yield f"{TITLES[name]:28}{''.join(cells)}"


def hot_spots(found: dict[str, Walk], most: int) -> Iterator[str]:
    """Rank files, pairs of files and called functions by their moves."""
    for name, walk in found.items():
        for side, trace in walk._asdict().items():
            moves = trace.moves
            ends = Counter(file for move in moves for file in (move.source, move.target))
            pairs = Counter(" - ".join(sorted((move.source, move.target))) for move in moves)
            calls = Counter(str(move) for move in moves if move.function)
            yield f"\n{TITLES[name]}, {side}: {len(trace.files)} files, {len(moves)} moves"
            for what, counted in (("in or out of", ends), ("between", pairs), ("calls", calls)):
                yield from (f"{count:6} {what} {text}" for text, count in counted.most_common(most))


def steps(found: dict[str, Walk]) -> Iterator[str]:
    """List the calls of each walk in order; half message and decision stand alone."""
    for name, walk in found.items():
        for side, trace in walk._asdict().items() if name != "transaction" else ():
            yield f"\n{TITLES[name]}, {side}"
            calls = (move for move in trace.moves if move.function)
            yield from (f"{number:5} {move}" for number, move in enumerate(calls, 1))


def main() -> None:
    parser = ArgumentParser(description="Count the moves between source files in four walks.")
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="the checkout to measure")
    parser.add_argument("--hot", type=int, metavar="N", default=0, help="print the N hottest spots")
    parser.add_argument("--steps", action="store_true", help="print every call in order")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    parser.add_argument("--broker", help="for this program's own use")
    options = parser.parse_args()
    root = options.root.resolve()
    sys.path[:0] = [str(root), str(root / "spark")]
    if options.broker:
        serve(root, options.broker)
        return
    found = measure(root)
    if options.json:
        print(json.dumps({name: _counts(walk) for name, walk in found.items()}, indent=2))
        return
    print(*table(found), sep="\n")
    if options.hot:
        print(*hot_spots(found, options.hot), sep="\n")
    if options.steps:
        print(*steps(found), sep="\n")


def _counts(walk: Walk) -> dict[str, dict[str, int]]:
    sides = walk._asdict().items()
    return {side: {"files": len(one.files), "moves": len(one.moves)} for side, one in sides}


if __name__ == "__main__":
    main()

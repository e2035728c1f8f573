"""Pages of the console over very many topics and dead letters, beside a sender."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from typing import Any

import txmq
from tests.bench.brokers import command
from tests.bench.data_directories import current_time, filling, topics
from tests.bench.harness import BenchError, measured, python, rss_anon, sampled, serving
from tests.bench.letters import SPAN, kill
from tests.bench.rows import Row, Run, at_most, benchmark, row
from txmq.testing.ports import free_port

LETTERS, TOPICS = 1_000_000, 1_000
WITNESS_S = 10.0
LEAST_ROUNDS = 10
READY_WITHIN_S = 300.0
MIB = 1 << 20
TOPIC = "bench-0"
PAGES = {
    "overview": "",
    "topics": "topics",
    "topics_found": "topics?filter=bench-77",
    "topic": "topics/orders",
    "messages": "topics/orders/messages",
    "messages_by_key": "topics/orders/messages?key=key-77",
    "groups": "groups",
    "group": "groups/g",
    "transactions": "transactions",
    "letters": "letters",
    "letters_of_group": "letters/g",
    "letters_by_error": "letters/g?filter=error%3AError7",
    "letters_by_text": "letters/g?filter=text%3A%22has+no+77%22",
    "trace": "trace?key=key-77",
    "plans": "plans",
    "audit": "audit",
    "users": "users",
    "settings": "settings",
}


def page_times(port: int, witness: Future[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the milliseconds of each page, in turn until the witness is done."""
    took: dict[str, list[float]] = {name: [] for name in PAGES}
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        while not witness.done() or len(took["overview"]) < LEAST_ROUNDS:
            for name, path in PAGES.items():
                began = time.perf_counter()
                connection.request("GET", f"/{path}")
                reply = connection.getresponse()
                body = reply.read()
                took[name].append((time.perf_counter() - began) * 1e3)
                if reply.status != 200 or b'class="problem"' in body:
                    raise BenchError(f"/{path}: {reply.status}")
    return took


def p99(times: list[float]) -> float:
    return quantiles(times, n=100, method="inclusive")[98]


@benchmark("console", "pages of the console over 1,000,000 dead letters and 1,000 topics")
def console(run: Run) -> Iterator[Row]:
    letters, number = run.count(LETTERS), TOPICS
    of = f"{letters:,} letters, {number:,} topics"
    with TemporaryDirectory(dir=run.directory) as name:
        clock, port = [current_time() - SPAN], free_port()
        with filling(Path(name) / "data", lambda: clock[0]) as filler:
            filler.submit(topics(number, 1))
            kill(filler, clock, letters)
        argv = command(Path(name), f'http = "127.0.0.1:{port}"')
        with (
            serving(argv, READY_WITHIN_S) as program,
            ThreadPoolExecutor(1) as threads,
            sampled(lambda: float(rss_anon(program.process.pid)), 0.2) as memory,
            txmq.connect(program.address) as client,
        ):
            client.send(TOPIC, b"the first one")
            sender = python(
                "tests.bench.clients.witness", program.address, TOPIC, run.seconds(WITNESS_S)
            )
            alone = measured(sender)
            took = page_times(port, threads.submit(measured, sender))
            beside = threads.submit(measured, sender)
            page_times(port, beside)
        for page, times in took.items():
            what = f"/{PAGES[page]}, {of}: p99 of {len(times)}"
            yield row(f"console.page.{page}", what, "ms", p99(times), goal=at_most(500))
        yield row(
            "console.send_p99",
            "p99 of a send beside a reader of all pages, by that of a send alone",
            "ms",
            beside.result()["p99_ms"],
            yardstick=alone["p99_ms"],
            goal=at_most(3),
        )
        yield row("console.rss", f"RssAnon of the broker, most, {of}", "MiB", max(memory) / MIB)

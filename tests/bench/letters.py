"""Pages of dead letters by selections, their statistics, and replays by plans.

`make bench ONLY=letters` has 1,000,000 letters: about a minute to make them, and
1.5 GiB of disk.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import quantiles
from typing import Any, NamedTuple

import txmq
from tests.bench.brokers import FLUSH_10_MS, command, cpu_s
from tests.bench.data_directories import Filler, current_time, filling
from tests.bench.harness import BenchError, sampled, serving
from tests.bench.plans import plan_rows
from tests.bench.rows import Row, Run, at_most, benchmark, row
from txmq.batch import encode, verify
from txmq.core import machine
from txmq.core.consumers.candidates import Candidate, FetchLimits
from txmq.core.consumers.commands import CandidateRead, Deliver, JoinGroup
from txmq.core.consumers.fetch_choice import choose_candidates
from txmq.core.events.consumers import DeadLettered
from txmq.core.events.outcome import Outcome
from txmq.core.state import failed_rows
from txmq.core.state.failed_rows import FailedKind, Move
from txmq.core.state.state import State
from txmq.core.topics.sends import StoreBatch
from txmq.core.topics.topics import CreateTopic
from txmq.errors import RequestRejected
from txmq.model.keys import key_hash, partition_of
from txmq.model.message import Message
from txmq.model.retry import FailureReport
from txmq.model.units import DAY

LETTERS, BATCH, PAGE, PAGES = 1_000_000, 500, 50, 40
KEYS, PRINTS, PARTITIONS = 200_000, 300, 4
SPAN = 6 * DAY  # over which they died; a broker keeps messages for 7
TRACEBACK = "Traceback (most recent call last):\n" + "  File somewhere, line 1\n" * 12
READY_WITHIN_S, WITHIN_S = 300.0, 60.0
MIB = 1 << 20


def kill(filler: Filler, clock: list[int], count: int) -> None:
    """Make letters of a group in two topics; few of them are in the smaller one."""
    engine, random = filler.engine, Random(1)
    step = SPAN // count
    filler.submit([CreateTopic("orders", PARTITIONS), CreateTopic("refunds", 1)])
    keys_of: list[list[str]] = [[] for _ in range(PARTITIONS)]
    for key in (f"key-{number}" for number in range(KEYS)):
        keys_of[partition_of(key, PARTITIONS)].append(key)
    filler.submit([JoinGroup("g", "m", "m", "concurrent", ("orders", "refunds"))])
    for number, start in enumerate(range(0, count, BATCH)):
        size = min(BATCH, count - start)
        rare = number % 1_000 == 0
        topic, partition = ("refunds", 0) if rare else ("orders", number % PARTITIONS)
        keys = random.choices(keys_of[partition], k=size)
        messages = [
            Message(b"x" * 200, key, headers={"tenant": f"t{random.randrange(50)}"}) for key in keys
        ]
        data = encode(messages, producer_id=start.to_bytes(16), epoch=0, sequence=0, born_at=1)
        filler.submit([StoreBatch(topic, 0, partition, data, verify(data))])
        generation = engine.state.groups.by_name["g"].generation
        limits = FetchLimits(size, 1 << 30)
        found = choose_candidates(
            engine.state, "g", "m", generation, engine.store.durable, limits, clock[0]
        )
        reads = tuple(CandidateRead(candidate) for candidate in found.candidates)
        filler.submit([Deliver("g", "m", generation, reads)])
        deaths = []
        for at, key in enumerate(keys):
            cause = random.randrange(PRINTS)
            text = f"{TRACEBACK}Error{cause % 20}: order {key} has no {cause}"
            failure = FailureReport(f"Error{cause % 20}", text, f"print-{cause}")
            deaths.append((at, key_hash(key), clock[0] + at * step, failure))
        clock[0] += size * step
        engine.submit(Die("g", reads[0].candidate, tuple(deaths)), _died)
        filler.commit_tables()


class Die(NamedTuple):
    """Let leased messages of a batch die: (row, key hash, time of death, failure).

    No broker has this command: a consumer reports each failure by itself.
    """

    group: str
    candidate: Candidate
    deaths: tuple[tuple[int, int | None, int, FailureReport], ...]


def decide_deaths(state: State, command: Die, now: int) -> Outcome:
    """Return the events of as many nacks, for one record."""
    del now
    group, source = state.groups.by_name[command.group], command.candidate
    events = []
    for number, (place, key, at, failure) in enumerate(command.deaths, group.next_letter):
        dead = failed_rows.new_row(source.batch, source.first_row + place, key, attempt=1)
        dead = dead._replace(
            kind=FailedKind.LETTER, number=number, dead_at=at, first_failed_at=at, consumer="m",
            error_type=failure.type, error_text=failure.text, fingerprint=failure.fingerprint,
        )  # fmt: skip
        move = Move(source.topic_id, source.partition, source.start + place, dead)
        events.append(DeadLettered(group.group_id, (move,), ()))
    return Outcome(tuple(events), reply=None)


machine.DECIDERS[Die] = decide_deaths


def _died(reply: Any) -> None:
    if isinstance(reply, RequestRejected):
        raise BenchError(f"a message did not die: {reply.message}")


def selections(now: int) -> dict[str, dict[str, Any]]:
    """Return selections by what they are about."""
    middle = now - SPAN // 2
    return {
        "all": {},
        "topic": {"topic": "refunds"},
        "key": {"key": "key-77"},
        "error": {"error_type": "Error7"},
        "fingerprint": {"fingerprint": "print-77"},
        "two that meet": {"error_type": "Error7", "fingerprint": "print-107"},
        "two that never meet": {"error_type": "Error8", "fingerprint": "print-107"},
        "rare topic and error": {"topic": "refunds", "error_type": "Error9"},
        "time": {"died_from": middle, "died_before": middle + DAY // 24},
        "attempts": {"min_attempts": 1},
        "text, common": {"text": "NO 77"},
        "text, in none": {"text": "nowhere"},
        "header": {"header": ["tenant", "t7"]},
        "abandoned": {"states": ["abandoned"]},
    }


def page_times(client: Any, selects: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    """Return the milliseconds of pages of each selection, each from where the one
    before has ended.
    """
    took: dict[str, list[float]] = {name: [] for name in selects}
    cursors: dict[str, str | None] = dict.fromkeys(selects)
    for _ in range(PAGES):
        for name, select in selects.items():
            cursor = cursors[name]
            more = {} if cursor is None else {"cursor": cursor}
            began = time.perf_counter()
            page = client.call("dlq.list", group="g", select=select, limit=PAGE, **more)
            took[name].append((time.perf_counter() - began) * 1e3)
            cursors[name] = page["next"]
    return took


@benchmark("letters", "dead letters: pages by any selection, statistics")
def letters(run: Run) -> Iterator[Row]:
    count = run.count(LETTERS)
    of = f"{count:,} letters"
    with tempfile.TemporaryDirectory(dir=run.directory) as name:
        clock = [current_time() - SPAN]
        began = time.perf_counter()
        with filling(Path(name) / "data", lambda: clock[0]) as filler:
            kill(filler, clock, count)
        made = (time.perf_counter() - began) * 1e6 / count
        yield row("letters.death", f"time of a death, in the core, {of}", "µs", made)
        argv = command(Path(name), FLUSH_10_MS)
        with (
            serving(argv, READY_WITHIN_S) as program,
            sampled(program.rss_anon, 0.2) as samples,
            txmq.connect(program.address, timeout=WITHIN_S) as client,
        ):
            before = cpu_s(program.process.pid)
            took = page_times(client, selections(clock[0]))
            cpu = (cpu_s(program.process.pid) - before) * 1e3 / sum(map(len, took.values()))
            yield row("letters.page_cpu", f"CPU time of the broker for a page, {of}", "ms", cpu)
            slowest = max(took, key=lambda name: max(took[name]))
            every = sorted(one for times in took.values() for one in times)
            yield row(
                "letters.page_p50", f"a page of {PAGE}, {of}: p50", "ms", quantiles(every, n=2)[0]
            )
            yield row(
                "letters.page_p99",
                f"a page of {PAGE}, {len(took)} selections (slowest: {slowest}), {of}: p99",
                "ms",
                quantiles(every, n=100)[98],
                goal=at_most(100),
            )
            for what, times in took.items():
                slug = what.replace(", ", "_").replace(" ", "_")
                yield row(f"letters.page_{slug}", f"by {what}, {of}: most", "ms", max(times))
            for what, select in (("", {}), ("_topic", {"topic": "orders"})):
                seconds, before = [], cpu_s(program.process.pid)
                for _ in range(5):
                    began = time.perf_counter()
                    client.call("dlq.stats", group="g", select=select)
                    seconds.append(time.perf_counter() - began)
                yield row(
                    f"letters.stats{what}",
                    f"statistics by fingerprint{' of a topic' * bool(what)}, {of}: slowest of 5",
                    "s",
                    max(seconds),
                    goal=at_most(1.0),
                )
                cpu = (cpu_s(program.process.pid) - before) / len(seconds)
                yield row(f"letters.stats{what}_cpu", "CPU time of the broker for them", "s", cpu)
            yield from plan_rows(program.address, client, of)
        yield row(
            "letters.rss", f"RssAnon of the broker, most, {of}", "MiB", max(samples) / MIB,
            goal=at_most(250),
        )  # fmt: skip

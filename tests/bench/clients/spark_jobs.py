"""The jobs of Spark over dead letters, in a session on two cores.

    python -m tests.bench.clients.spark_jobs reconcile URL DSN DIRECTORY
    python -m tests.bench.clients.spark_jobs resend URL DIRECTORY
    python -m tests.bench.clients.spark_jobs in_place URL DIRECTORY
    python -m tests.bench.clients.spark_jobs memory URL DSN DIRECTORY
    python -m tests.bench.clients.spark_jobs small URL DSN DIRECTORY

The group is `g`, the table `orders`. Each prints one JSON object.
`reconcile`: {"whole_s", "extract_s", "copy_s", "joins_s", "parquet_s", "rows"}.
`resend`: {"letters", "write_s", "sent_s", "whole_s"}. `in_place`: {"letters", "held_s",
"put_back_s"}. `memory`: {"driver", "workers", "jvm"}, the most anonymous bytes of each
at a time, and {"driver_files"} and so on, what they have mapped of files. `small`:
{"first_s"}, the median of three, warm.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from tests.bench.plans import AT_ONCE
from txmq.tx.postgres.session import connect
from txmq_spark import resend as resending
from txmq_spark.database.mapping import BusinessTable, Mapping
from txmq_spark.database.snapshot import open_snapshot
from txmq_spark.evidence.database_tables import business_rows
from txmq_spark.evidence.letter_evidence import EvidenceTables, join_evidence
from txmq_spark.evidence.missing_messages import keys_apart
from txmq_spark.plan.broker_plans import hand_over, start, wait_for
from txmq_spark.plan.directory import StoredPlan, read_plan
from txmq_spark.plan.rules import PlanRules, classified
from txmq_spark.reconcile import ReconcileOptions, reconciled
from txmq_spark.session.local_session import local_session
from txmq_spark.source.broker_link import BrokerLink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

GROUP, ORDERS = "g", BusinessTable(name="orders", key="id", version="version")
MAPPING = Mapping(tables=(ORDERS,))
WARM_UPS, WARMING = 2, 20  # runs, each with so small a share of the letters
# Resident memory of processes, and what they have mapped of files: the page cache
# holds that, and gives it up.
PARTS = ("driver", "workers", "jvm")
FIGURES = (*PARTS, *(f"{part}_files" for part in PARTS))
ROUNDS, LOOK_S, PAGE = 3, 0.1, os.sysconf("SC_PAGE_SIZE")
# as a cluster's executors have it, instead of the two partitions of small jobs
SETTINGS = {"spark.sql.shuffle.partitions": "16"}


class Discard:
    """A file that keeps nothing."""

    def write(self, data: bytes) -> int:
        return len(data)


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def options(url: str, dsn: str) -> ReconcileOptions:
    return ReconcileOptions(url, (GROUP,), dsn, mapping=MAPPING)


def reconcile(url: str, dsn: str, directory: str) -> dict[str, float]:
    """Reconcile as a whole; then extract, and join, each beside what it is measured
    against.
    """
    with local_session("local[2]", SETTINGS) as spark:
        began = time.perf_counter()
        with reconciled(spark, options(url, dsn)) as found:
            found.write(f"{directory}/plan")
            whole = time.perf_counter() - began
            letters = found.letters.count()
        extract, copy = extraction(spark, dsn)
        ours, parquet = joins(spark, url, dsn, directory)
    return {
        "letters": letters,
        "whole_s": whole,
        "extract_s": extract,
        "copy_s": copy,
        "joins_s": ours,
        "parquet_s": parquet,
    }


def extraction(spark: SparkSession, dsn: str) -> tuple[float, float]:
    """Return the seconds of an extraction into Spark, and of one plain COPY."""
    query = "COPY (SELECT id::text, version::int8, NULL::text FROM orders) TO STDOUT (FORMAT csv)"

    def plain() -> None:
        with closing(connect(dsn, application_name="bench")) as connection:
            connection.cursor().copy_expert(query, Discard())

    def ours() -> None:
        with open_snapshot(dsn) as snapshot:
            business_rows(spark, snapshot, ORDERS).write.format("noop").mode("overwrite").save()

    took = [(seconds(ours), seconds(plain)) for _ in range(ROUNDS)]
    return statistics.median(one for one, _ in took), statistics.median(one for _, one in took)


def joins(spark: SparkSession, url: str, dsn: str, directory: str) -> tuple[float, float]:
    """Return the seconds of the joins over what a job keeps, and over Parquet."""
    from txmq_spark import reconcile as job

    frames: dict[str, Any] = {}

    def noted(letters: DataFrame, log: DataFrame | None, tables: EvidenceTables) -> DataFrame:
        frames.update(letters=letters, log=log, tables=tables)
        return join_evidence(letters, log, tables)

    took = []
    with (
        mock.patch.object(job, "join_evidence", noted),
        reconciled(spark, options(url, dsn)),
    ):
        copies = {
            name: copy_of(spark, frame, f"{directory}/{name}")
            for name, frame in (("letters", frames["letters"]), ("log", frames["log"]))
        }
        tables = EvidenceTables(
            *(
                None if frame is None else copy_of(spark, frame, f"{directory}/{name}")
                for name, frame in frames["tables"]._asdict().items()
            )
        )
        for _ in range(ROUNDS):
            ours = seconds(lambda: judge(frames["letters"], frames["log"], frames["tables"]))
            theirs = seconds(lambda: judge(copies["letters"], copies["log"], tables))
            took.append((ours, theirs))
    return statistics.median(one for one, _ in took), statistics.median(one for _, one in took)


def copy_of(spark: SparkSession, frame: DataFrame, path: str) -> DataFrame:
    frame.write.mode("overwrite").parquet(path)
    return spark.read.parquet(path)


def judge(letters: DataFrame, log: DataFrame, tables: EvidenceTables) -> None:
    """Make the joins of a reconciliation."""
    evidence = join_evidence(letters, log, tables)
    classified(evidence, PlanRules()).write.format("noop").mode("overwrite").save()
    if tables.business is not None:
        keys_apart(tables.business, log).write.format("noop").mode("overwrite").save()


def resend(url: str, directory: str) -> dict[str, float]:
    """Make a plan of all letters, and send them to a topic as new messages."""
    took: list[float] = []
    write = resending.write_letters

    def timed(*args: Any) -> None:
        took.append(seconds(lambda: write(*args)))

    patched = mock.patch.object(resending, "write_letters", timed)
    with patched, local_session("local[2]", SETTINGS) as spark:
        plan = warm_up(plan_of_all(spark, url, directory), url)
        letters = plan.letters.count()
        sent = seconds(lambda: resending.resend(plan, url, "bench-again", wait=False))
        # another run sends nothing, and waits for the end of the first
        whole = sent + seconds(lambda: resending.resend(plan, url, "bench-again"))
    return {
        "letters": letters,
        "write_s": took[-1],  # those before are warm-ups
        "sent_s": sent,
        "whole_s": whole,
    }


def plan_of_all(spark: SparkSession, url: str, directory: str) -> StoredPlan:
    """Make a plan of all letters."""
    with reconciled(spark, ReconcileOptions(url, (GROUP,))) as found:
        found.write(f"{directory}/plan")
    return read_plan(spark, f"{directory}/plan")


def warm_up(plan: StoredPlan, url: str) -> StoredPlan:
    """Send a few letters of the plan to another topic, twice: the first tasks start
    workers, and compile. Return the plan without these.
    """
    [ends] = [max(ends) for topic, ends in plan.manifest.facts.ends.items() if topic == "orders"]
    for number in range(WARM_UPS):
        few = f"offset >= {number * ends // WARMING} AND offset < {(number + 1) * ends // WARMING}"
        letters = plan.letters.where(few)
        resending.resend(plan._replace(letters=letters), url, f"bench-warm-{number}")
    rest = plan.letters.where(f"offset >= {WARM_UPS * ends // WARMING}")
    return plan._replace(letters=rest)


def in_place(url: str, directory: str) -> dict[str, float]:
    """Make a plan of all letters, hand it to the broker, and have it put them back."""
    with local_session("local[2]", SETTINGS) as spark:
        plan = plan_of_all(spark, url, directory)
        began = time.perf_counter()
        [handed] = hand_over(url, plan, None, AT_ONCE | {"start": False})
        held = time.perf_counter() - began
        with BrokerLink(url) as link:
            began = time.perf_counter()
            start(link, handed.name, {})
            shown = wait_for(link, handed.name, lambda now: not now["planned"])
            put_back = time.perf_counter() - began
    return {"letters": shown["delivered"], "held_s": held, "put_back_s": put_back}


def memory(url: str, dsn: str, directory: str) -> dict[str, int]:
    """Reconcile once, and watch the memory of this process and those below it. Spark's
    files are in the directory, too.
    """
    with (
        local_session("local[2]", SETTINGS | {"spark.local.dir": directory}) as spark,
        watched() as most,
        reconciled(spark, options(url, dsn)) as found,
    ):
        found.write(f"{directory}/plan")
    return most


@contextmanager
def watched() -> Iterator[dict[str, int]]:
    """Note the most resident memory of the driver, its workers, and the JVM."""
    most = dict.fromkeys(FIGURES, 0)
    over = threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_S):
            for name, size in sizes().items():
                most[name] = max(most[name], size)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield most
    over.set()
    thread.join()


def sizes() -> dict[str, int]:
    found = dict.fromkeys(FIGURES, 0)
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents[int(path.parent.name)] = int(fields[1])
    for pid in parents:
        if not _is_below(pid, parents):
            continue
        try:
            resident, mapped = map(int, Path(f"/proc/{pid}/statm").read_text().split()[1:3])
            java = b"java" in Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0]
        except OSError:
            continue
        name = "driver" if pid == os.getpid() else "jvm" if java else "workers"
        found[name] += (resident - mapped) * PAGE
        found[f"{name}_files"] += mapped * PAGE
    return found


def _is_below(pid: int, parents: dict[int, int]) -> bool:
    while pid and pid != os.getpid():
        pid = parents.get(pid, 0)
    return bool(pid)


def small(url: str, dsn: str, directory: str) -> dict[str, float]:
    """Reconcile a few letters until the result is there, after one that warms up."""

    def once() -> None:
        with reconciled(spark, options(url, dsn)) as found:
            found.write(f"{directory}/plan")

    with local_session("local[2]") as spark:
        once()
        return {"first_s": statistics.median(seconds(once) for _ in range(ROUNDS))}


JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    "reconcile": reconcile,
    "resend": resend,
    "in_place": in_place,
    "memory": memory,
    "small": small,
}

if __name__ == "__main__":
    print(json.dumps(JOBS[sys.argv[1]](*sys.argv[2:])))

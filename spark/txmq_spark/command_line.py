"""The command `txmq-spark` and its jobs.

The exit status is 0 for success, 1 for an error of txmq, 2 for wrong usage.
"""

from __future__ import annotations

import os
import signal
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from rich.console import Console

from txmq.errors import ConfigError, TxmqError
from txmq.model.units import DAY, SECOND
from txmq_spark.alert_sinks import AlertTable
from txmq_spark.database_tables import BusinessTable
from txmq_spark.landing import DATE_COLUMNS, LandOptions, land
from txmq_spark.plan import SAFE, LetterClass, PlanRules
from txmq_spark.plan_file import read_plan
from txmq_spark.reconcile import ReconcileOptions, reconcile
from txmq_spark.replay import ReplayResult, replay
from txmq_spark.report import html_page, terminal_summary
from txmq_spark.spark_session import job_session
from txmq_spark.watch_rules import WatchRules
from txmq_spark.watching import WatchOptions, watch

URL: Final = "txmq://127.0.0.1:7650"


class Job(NamedTuple):
    """A job of the command: its help, its options, and the function that runs it."""

    help: str
    add_options: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `txmq-spark JOB`."""
    parser = ArgumentParser("txmq-spark", description="Jobs of txmq in Spark.")
    jobs = parser.add_subparsers(metavar="JOB", required=True, dest="job")
    for name, job in JOBS.items():
        below = jobs.add_parser(name, help=job.help, description=job.help)
        _common(below)
        job.add_options(below)
    options = parser.parse_args(arguments)
    with _ended_by_sigterm():
        return _exit_status(lambda: JOBS[options.job].run(options))


def reconcile_main(arguments: Sequence[str] | None = None) -> int:
    """Run `spark-submit spark/reconcile.py`: write the plan and the report."""
    return _main_of("reconcile", arguments)


def replay_main(arguments: Sequence[str] | None = None) -> int:
    """Run `spark-submit spark/replay.py`: carry out a plan."""
    return _main_of("replay", arguments)


def _main_of(job: str, arguments: Sequence[str] | None) -> int:
    return main([job, *(sys.argv[1:] if arguments is None else arguments)])


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block in order, with its queries and the JVM."""
    before = signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(0))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _reconcile(options: Namespace) -> None:
    reconcile_options = _options(options)
    with job_session() as spark:
        found = reconcile(spark, reconcile_options)
    options.plan.write_bytes(found.data)
    if options.report:
        options.report.write_text(html_page(found), encoding="utf-8")
    Console().print(terminal_summary(found))
    print(f"plan: {options.plan}" + (f", report: {options.report}" if options.report else ""))


def _options(options: Namespace) -> ReconcileOptions:
    business = None
    if options.business:
        if not options.business_key:
            raise ConfigError(
                "--business-key",
                "the column with the key is needed",
                hint="--business-key order_id",
            )
        columns = (options.business_key, options.business_version, options.business_token)
        business = BusinessTable(options.business, *columns)
    rules = PlanRules(
        replays=options.max_replays,
        deaths=options.max_deaths,
        error_types=frozenset(options.poison_type),
        fingerprints=frozenset(options.poison_fingerprint),
        include=SAFE | frozenset(map(LetterClass, options.include)),
        chunk=options.chunk,
    )
    return ReconcileOptions(
        url=options.url,
        group=options.group,
        dsn=options.dsn,
        topics=tuple(options.topic),
        business=business,
        applied_query=options.applied_query,
        version=options.version_from,
        rules=rules,
    )


def _replay(options: Namespace) -> None:
    plan = read_plan(options.plan)
    with job_session() as spark:
        done = replay(spark, options.url, plan, canary=options.canary, dry_run=options.dry_run)
    if options.outcomes:
        options.outcomes.write_text("".join(f"{line}\n" for line in done.lines()), encoding="utf-8")
    print(_summary(done))


def _land(options: Namespace) -> None:
    with job_session() as spark:
        progress = land(
            spark,
            LandOptions(
                url=options.url,
                topics=tuple(options.topic),
                pattern=options.topic_pattern,
                path=options.path,
                checkpoint=options.checkpoint or f"{options.path.rstrip('/')}/_checkpoint",
                date_from=options.date_from,
                every_s=options.every,
                max_messages=options.max_messages,
                fail_on_data_loss=not options.skip_lost,
            ),
        )
    print(f"landed: {progress.messages} messages, skipped {progress.skipped}")


def _watch(options: Namespace) -> None:
    rules = WatchRules(
        options.flood,
        options.window * SECOND,
        options.memory_days * DAY,
        options.share,
        options.age * SECOND,
    )
    if options.alerts_table and not options.dsn:
        raise ConfigError(
            "--dsn", "the table of --alerts-table needs a database", hint="postgresql://..."
        )
    watched = WatchOptions(
        url=options.url,
        groups=tuple(options.group),
        topic=options.alerts,
        checkpoint=options.checkpoint,
        every_s=options.every,
        from_now=options.from_now,
        rules=rules,
        table=AlertTable(options.dsn, options.alerts_table) if options.alerts_table else None,
    )
    with job_session() as spark:
        watch(spark, watched)


def _summary(done: ReplayResult) -> str:
    counts = Counter(one.outcome for one in done.outcomes)
    what = (
        ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        or "nothing to replay"
    )
    job = f" (job {done.job})" if done.job else ""
    return f"{what}{job}{': an earlier run replayed this plan' if done.repeated else ''}"


def _exit_status(run: Callable[[], None]) -> int:
    try:
        run()
    except TxmqError as error:
        print(f"txmq: {error}", file=sys.stderr)
        return 1
    return 0


def _reconcile_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--group", required=True, help="the consumer group")
    add(
        "--topic",
        action="append",
        default=[],
        help="read only this topic; repeatable (default: all topics of the group)",
    )
    add(
        "--dsn",
        default=os.environ.get("TXMQ_DSN"),
        help="the business database (default: TXMQ_DSN)",
    )
    add("--plan", type=Path, required=True, help="file for the plan")
    add("--report", type=Path, help="file for a report as an HTML page")
    add(
        "--business",
        metavar="TABLE",
        help="table of the producer with the rows that messages are about",
    )
    add(
        "--business-key", metavar="COLUMN", help="column of that table with the key of the messages"
    )
    add(
        "--business-version",
        metavar="COLUMN",
        help="column of that table with the version of the row",
    )
    add(
        "--business-token",
        metavar="COLUMN",
        help="column of that table with the token of the transaction that wrote the row",
    )
    add(
        "--applied-query",
        metavar="SQL",
        help="query for what the consumer has applied, with the columns message_id;"
        " topic, partition, offset; or key, version",
    )
    add(
        "--version-from",
        metavar="SOURCE",
        help="source of the version in a message: header:NAME or json:PATH",
    )
    add(
        "--include",
        action="append",
        default=[],
        choices=list(LetterClass),
        help="also replay letters of this class; repeatable",
    )
    add(
        "--poison-type",
        action="append",
        default=[],
        metavar="TYPE",
        help="letters with errors of this type are poison; repeatable",
    )
    add(
        "--poison-fingerprint",
        action="append",
        default=[],
        metavar="HEX",
        help="letters with this fingerprint are poison; repeatable",
    )
    add(
        "--max-replays",
        type=_positive,
        default=PlanRules().replays,
        help="letters are poison after so many replays (default: %(default)s)",
    )
    add(
        "--max-deaths",
        type=_positive,
        default=PlanRules().deaths,
        help="letters are poison after so many crashes of the consumer (default: %(default)s)",
    )
    add(
        "--chunk",
        type=_positive,
        default=PlanRules().chunk,
        help="letters that a task replays (default: %(default)s)",
    )


def _replay_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--plan", type=Path, required=True, help="the file that reconcile wrote")
    add("--outcomes", type=Path, help="file for the outcome of each letter, as JSON lines")
    add(
        "--dry-run",
        action="store_true",
        help="change nothing; print the expected outcomes",
    )
    add(
        "--canary",
        type=_positive,
        metavar="N",
        help="replay only the first N letters; run without this option for the rest",
    )


def _land_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--topic", action="append", default=[], help="a topic to land; repeatable")
    add("--topic-pattern", metavar="REGEX", help="land all topics whose names match")
    add("--path", required=True, help="directory for the Parquet files, of any kind Spark knows")
    add("--checkpoint", help="directory for the progress (default: PATH/_checkpoint)")
    add(
        "--date-from",
        choices=DATE_COLUMNS,
        default=DATE_COLUMNS[0],
        help="the time whose date, in UTC, names the directory (default: %(default)s)",
    )
    add(
        "--every",
        type=_positive,
        metavar="SECONDS",
        help="go on until stopped, with a batch so often (default: land what is there, and end)",
    )
    add("--max-messages", type=_positive, metavar="N", help="messages of one batch, about")
    add(
        "--skip-lost",
        action="store_true",
        help="go on where retention has removed messages, and count them",
    )


def _watch_options(parser: ArgumentParser) -> None:
    add, rules = parser.add_argument, WatchRules()
    add("--group", action="append", required=True, help="a consumer group; repeatable")
    add("--alerts", metavar="TOPIC", required=True, help="the topic that alerts are sent to")
    add("--alerts-table", metavar="TABLE", help="also add the alerts to this table")
    add(
        "--dsn",
        default=os.environ.get("TXMQ_DSN"),
        help="the database of that table (default: TXMQ_DSN)",
    )
    add("--checkpoint", required=True, help="directory for progress and memory")
    add(
        "--every",
        type=_positive,
        metavar="SECONDS",
        help="go on until stopped, with a batch so often (default: judge what is there, and end)",
    )
    add("--from-now", action="store_true", help="begin with the next letter, not with the first")
    add(
        "--flood",
        type=_positive,
        default=rules.flood,
        metavar="N",
        help="letters of one window that are a flood (default: %(default)s)",
    )
    add(
        "--window",
        type=_positive,
        default=rules.window // SECOND,
        metavar="SECONDS",
        help="length of a window (default: %(default)s)",
    )
    add(
        "--share",
        type=_percent,
        default=rules.share,
        metavar="PERCENT",
        help="watch the log, too: a flood is also so many percent of the window's messages",
    )
    add(
        "--age",
        type=_positive,
        default=rules.age // SECOND,
        metavar="SECONDS",
        help="tell a letter that is open for so long (default: %(default)s)",
    )
    add(
        "--memory-days",
        type=_positive,
        default=rules.memory // DAY,
        metavar="DAYS",
        help="an error is new again after so long (default: %(default)s)",
    )


def _common(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        default=os.environ.get("TXMQ_BROKER", URL),
        help="the broker (default: TXMQ_BROKER, or %(default)s)",
    )


def _percent(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= 100):
        raise ArgumentTypeError(f"{text!r} is not a percentage from 1 to 100")
    return int(text)


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


JOBS: Final = {
    "reconcile": Job(
        "Classify the dead letters of a consumer group and plan a replay.",
        _reconcile_options,
        _reconcile,
    ),
    "replay": Job("Replay the letters of a plan, once.", _replay_options, _replay),
    "land": Job("Write topics as Parquet files by date, each message once.", _land_options, _land),
    "watch": Job(
        "Send alerts about dead letters to a topic: new errors, floods, old letters.",
        _watch_options,
        _watch,
    ),
}

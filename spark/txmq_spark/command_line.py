"""The command `txmq-spark` and its jobs.

The exit status is 0 for success, 1 for an error of txmq, 2 for wrong usage, and 3 where
a plan waits for somebody: it is paused, cancelled, or not approved.
"""

from __future__ import annotations

import os
import signal
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from txmq.client.protocol.address import PASSWORD_FILE, USER
from txmq.errors import ConfigError, TxmqError
from txmq.model.units import DAY, SECOND
from txmq_spark.alert_sinks import AlertTable
from txmq_spark.broker_urls import job_url
from txmq_spark.charts import printable
from txmq_spark.job_options import (
    add_reconcile_options,
    add_replay_options,
    positive,
    run_reconcile,
    run_replay,
)
from txmq_spark.landing import DATE_COLUMNS, LandOptions, land
from txmq_spark.spark_session import job_session
from txmq_spark.watch_rules import WatchRules
from txmq_spark.watching import WatchOptions, watch

URL: Final = "txmq://127.0.0.1:7650"


class Job(NamedTuple):
    """A job of the command: its help, its options, and the function that runs it."""

    help: str
    add_options: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `txmq-spark JOB`."""
    parser = ArgumentParser("txmq-spark", description="Jobs of txmq in Spark.")
    jobs = parser.add_subparsers(metavar="JOB", required=True, dest="job")
    for name, job in JOBS.items():
        below = jobs.add_parser(name, help=job.help, description=job.help)
        _common(below)
        job.add_options(below)
    options = parser.parse_args(arguments)

    def run() -> int:
        options.url = job_url(options.url, options.user, options.password_file, options.ca)
        return JOBS[options.job].run(options)

    with _ended_by_sigterm():
        return _exit_status(run)


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


def _land(options: Namespace) -> int:
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
    return 0


def _watch(options: Namespace) -> int:
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
    return 0


def _exit_status(run: Callable[[], int]) -> int:
    try:
        return run()
    except TxmqError as error:
        # lines of errors are indented: none of them passes for one of ours
        lines = map(printable, str(error).split("\n"))
        print("txmq: " + "\n    ".join(lines), file=sys.stderr)
        return 1


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
        type=positive,
        metavar="SECONDS",
        help="go on until stopped, with a batch so often (default: land what is there, and end)",
    )
    add("--max-messages", type=positive, metavar="N", help="messages of one batch, about")
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
        type=positive,
        metavar="SECONDS",
        help="go on until stopped, with a batch so often (default: judge what is there, and end)",
    )
    add("--from-now", action="store_true", help="begin with the next letter, not with the first")
    add(
        "--flood",
        type=positive,
        default=rules.flood,
        metavar="N",
        help="letters of one window that are a flood (default: %(default)s)",
    )
    add(
        "--window",
        type=positive,
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
        type=positive,
        default=rules.age // SECOND,
        metavar="SECONDS",
        help="tell a letter that is open for so long (default: %(default)s)",
    )
    add(
        "--memory-days",
        type=positive,
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
    add = parser.add_argument
    add("--user", help=f"the user of the broker (default: {USER}, or that of the URL)")
    add(
        "--password-file",
        metavar="FILE",
        help=f"a file with the password, which executors read, too (default: {PASSWORD_FILE})",
    )
    add("--ca", metavar="FILE", help="the authority of the broker's certificate (default: TXMQ_CA)")


def _percent(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= 100):
        raise ArgumentTypeError(f"{text!r} is not a percentage from 1 to 100")
    return int(text)


JOBS: Final = {
    "reconcile": Job(
        "Classify the dead letters of a consumer group and plan a replay.",
        add_reconcile_options,
        run_reconcile,
    ),
    "replay": Job("Replay the letters of a plan, once.", add_replay_options, run_replay),
    "land": Job("Write topics as Parquet files by date, each message once.", _land_options, _land),
    "watch": Job(
        "Send alerts about dead letters to a topic: new errors, floods, old letters.",
        _watch_options,
        _watch,
    ),
}

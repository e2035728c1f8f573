"""The jobs `land` and `watch` of the command `txmq-spark`: queries over a stream."""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser, Namespace

from txmq.errors import ConfigError
from txmq.model.measures import counted
from txmq.model.units import DAY, SECOND
from txmq_spark.alerts.sinks import AlertTable
from txmq_spark.alerts.watch_rules import WatchRules
from txmq_spark.commands.argument_types import percentage, positive
from txmq_spark.landing import DATE_COLUMNS, LandOptions, land
from txmq_spark.session.spark_session import job_session
from txmq_spark.watching import WatchOptions, watch


def run_land(options: Namespace) -> int:
    """Land topics, and print how many messages."""
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
    text = f"landed: {counted(progress.messages, 'message')}, skipped {progress.skipped}"
    print(json.dumps(progress._asdict()) if options.json else text)
    return 0


def run_watch(options: Namespace) -> int:
    """Send alerts until the query ends. Raises ConfigError."""
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
    text = f"watched {', '.join(watched.groups)}; the alerts: txmq tail {watched.topic} --no-follow"
    told = {"groups": watched.groups, "alerts": watched.topic}
    print(json.dumps(told) if options.json else text)
    return 0


def add_land_options(parser: ArgumentParser) -> None:
    """Add the options of `land`."""
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
    add("--json", action="store_true", help="print the result as JSON")


def add_watch_options(parser: ArgumentParser) -> None:
    """Add the options of `watch`."""
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
        type=percentage,
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
    add("--json", action="store_true", help="print the result as JSON")

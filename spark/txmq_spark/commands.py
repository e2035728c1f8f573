"""The command lines of the jobs. Exit status: 0 done, 1 an error of txmq, 2 wrong
usage.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from txmq.errors import ConfigError, TxmqError
from txmq_spark.manifest import read
from txmq_spark.plan import SAFE, Class, Rules
from txmq_spark.reconcile import Question, reconcile
from txmq_spark.replay import Replay, replay
from txmq_spark.report import page, terminal
from txmq_spark.session import session
from txmq_spark.tables import Business

URL: Final = "txmq://127.0.0.1:7650"


def reconcile_main(arguments: Sequence[str] | None = None) -> int:
    """`spark-submit spark/reconcile.py`: look at everything, write the plan and the
    report.
    """
    options = _reconcile_parser().parse_args(arguments)
    return _reporting(lambda: _reconcile(options))


def replay_main(arguments: Sequence[str] | None = None) -> int:
    """`spark-submit spark/replay.py`: carry a plan out."""
    options = _replay_parser().parse_args(arguments)
    return _reporting(lambda: _replay(options))


def _reconcile(options: Namespace) -> None:
    question = _question(options)
    with session() as spark:
        found = reconcile(spark, question)
    options.plan.write_bytes(found.data)
    if options.report:
        options.report.write_text(page(found), encoding="utf-8")
    Console().print(terminal(found))
    print(f"plan: {options.plan}" + (f", report: {options.report}" if options.report else ""))


def _question(options: Namespace) -> Question:
    business = None
    if options.business:
        if not options.business_key:
            raise ConfigError(
                "--business-key",
                "the column with the key is needed",
                hint="--business-key order_id",
            )
        columns = (options.business_key, options.business_version, options.business_token)
        business = Business(options.business, *columns)
    rules = Rules(
        replays=options.max_replays,
        deaths=options.max_deaths,
        error_types=frozenset(options.poison_type),
        fingerprints=frozenset(options.poison_fingerprint),
        include=SAFE | frozenset(map(Class, options.include)),
        chunk=options.chunk,
    )
    return Question(
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
    plan = read(options.plan)
    with session() as spark:
        done = replay(spark, options.url, plan, canary=options.canary, dry_run=options.dry_run)
    if options.outcomes:
        options.outcomes.write_text("".join(f"{line}\n" for line in done.lines()), encoding="utf-8")
    print(_told(done))


def _told(done: Replay) -> str:
    counts = Counter(one.outcome for one in done.outcomes)
    what = (
        ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        or "nothing to replay"
    )
    job = f" (job {done.job})" if done.job else ""
    return f"{what}{job}{': it had been run before' if done.repeated else ''}"


def _reporting(run: Callable[[], None]) -> int:
    try:
        run()
    except TxmqError as error:
        print(f"txmq: {error}", file=sys.stderr)
        return 1
    return 0


def _reconcile_parser() -> ArgumentParser:
    parser = ArgumentParser(
        "reconcile", description="Class every dead letter of a group and freeze a replay plan."
    )
    _common(parser)
    add = parser.add_argument
    add("--group", required=True, help="the consumer group")
    add(
        "--topic",
        action="append",
        default=[],
        help="only this topic; may be given again (default: all the group reads)",
    )
    add(
        "--dsn",
        default=os.environ.get("TXMQ_DSN"),
        help="the business database (default: TXMQ_DSN)",
    )
    add("--plan", type=Path, required=True, help="the file to write the plan to")
    add("--report", type=Path, help="an HTML page to write")
    add("--business", metavar="TABLE", help="the producer's table that messages speak of")
    add("--business-key", metavar="COLUMN", help="its column with the key of the messages")
    add("--business-version", metavar="COLUMN", help="its column with the version of the row")
    add(
        "--business-token",
        metavar="COLUMN",
        help="its column with the token of the transaction that wrote the row",
    )
    add(
        "--applied-query",
        metavar="SQL",
        help="what the consumer has applied: message_id; topic, partition, offset; or key, version",
    )
    add(
        "--version-from",
        metavar="WHERE",
        help="where a message says its version: header:NAME or json:PATH",
    )
    add(
        "--include",
        action="append",
        default=[],
        choices=list(Class),
        help="replay letters of this class, too",
    )
    add(
        "--poison-type",
        action="append",
        default=[],
        metavar="TYPE",
        help="errors of this type do not heal",
    )
    add(
        "--poison-fingerprint",
        action="append",
        default=[],
        metavar="HEX",
        help="failures like this do not heal",
    )
    add(
        "--max-replays",
        type=_positive,
        default=Rules().replays,
        help="poison after so many replays (default: %(default)s)",
    )
    add(
        "--max-deaths",
        type=_positive,
        default=Rules().deaths,
        help="poison after so many crashes (default: %(default)s)",
    )
    add(
        "--chunk",
        type=_positive,
        default=Rules().chunk,
        help="letters a task replays (default: %(default)s)",
    )
    return parser


def _replay_parser() -> ArgumentParser:
    parser = ArgumentParser("replay", description="Replay the letters of a plan, once.")
    _common(parser)
    add = parser.add_argument
    add("--plan", type=Path, required=True, help="the file that reconcile wrote")
    add("--outcomes", type=Path, help="a file for the outcome of each letter, as JSON lines")
    add(
        "--dry-run",
        action="store_true",
        help="change nothing; say what would become of each letter",
    )
    add(
        "--canary",
        type=_positive,
        metavar="N",
        help="replay only the first N letters; run again without it for the rest",
    )
    return parser


def _common(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        default=os.environ.get("TXMQ_BROKER", URL),
        help="the broker (default: TXMQ_BROKER, or %(default)s)",
    )


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ValueError(text)
    return int(text)

"""The jobs `reconcile` and `replay` of the command `txmq-spark`, which make and use
plans.
"""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from txmq.errors import ConfigError
from txmq.model.printable import escape_unprintable
from txmq_spark.commands.argument_types import positive
from txmq_spark.database.mapping import BusinessTable, Mapping, checked_mapping, read_mapping
from txmq_spark.database.sql_tables import table_name
from txmq_spark.plan.broker_plans import hand_over
from txmq_spark.plan.directory import StoredPlan, plan_place, read_plan
from txmq_spark.plan.report import html_page, terminal_summary
from txmq_spark.plan.rules import SAFE, LetterClass, PlanRules
from txmq_spark.plan.table import write_table
from txmq_spark.reconcile import ReconcileOptions, Reconciliation, reconciled
from txmq_spark.replay import ReplayOptions, ReplayResult, expected, replay
from txmq_spark.resend import resend
from txmq_spark.session.progress import progress_told
from txmq_spark.session.query_errors import job_errors
from txmq_spark.session.spark_session import job_session

RATE: Final = 100.0  # letters per second, as `txmq plan create` has it
RAMP_S: Final = 60.0
UNFINISHED: Final = 3  # exit status: the plan waits for somebody


def run_reconcile(options: Namespace) -> int:
    """Write the plan, and what else is asked for."""
    asked = reconcile_options(options)
    _check_outputs(options)
    with job_session() as spark, progress_told(spark, "reconcile"):
        with job_errors():
            plan_place(spark, options.plan)  # before the work, and again when it is written
        with reconciled(spark, asked) as found:
            stored = found.write(options.plan)
            told = _written(options, asked, found, stored)
    if options.json:
        print(json.dumps(_summary_of(found) | told))
        return 0
    Console().print(terminal_summary(found.manifest, found.summary))
    print(", ".join(f"{what}: {where}" for what, where in told.items()))
    return 0


def _written(
    options: Namespace, asked: ReconcileOptions, found: Reconciliation, stored: StoredPlan
) -> dict[str, Any]:
    told: dict[str, Any] = {"plan": stored.path}
    if options.report:
        page = html_page(found.manifest, found.made, found.summary, stored.path)
        options.report.write_text(page, encoding="utf-8")
        told["report"] = str(options.report)
    if options.table:
        dsn = options.table_dsn or asked.dsn or ""  # `_check_outputs` wants one
        told["table"] = f"{options.table} ({write_table(stored, dsn, options.table)} rows)"
    if options.broker_plan is not None:
        name = options.broker_plan or None
        made = hand_over(options.url, stored, name, {"rate": RATE}, options.operator)
        told["broker"] = ", ".join(one.name for one in made)
    return told


def _check_outputs(options: Namespace) -> None:
    """Raise ConfigError for what could not be written after the work is done."""
    if options.table and not (options.table_dsn or options.dsn):
        raise ConfigError("--table", "a database is needed", hint="--table-dsn, or --dsn")
    if options.table:
        table_name(options.table)
    if options.report and not os.access(options.report.absolute().parent, os.W_OK):
        raise ConfigError(
            "--report",
            f"no file can be made in {options.report.absolute().parent}",
            hint="name a file in a directory that is there, and that you may write to",
        )


def _summary_of(found: Reconciliation) -> dict[str, Any]:
    manifest = found.manifest
    missing = [[*key, count] for key, count in found.summary.missing.items()]
    fields = manifest.model_dump(mode="json", include={"digest", "letters", "replays"})
    return {**fields, "missing": missing}


def reconcile_options(options: Namespace) -> ReconcileOptions:
    """Return the options of a reconciliation. Raises ConfigError."""
    rules = PlanRules(
        replays=options.max_replays,
        deaths=options.max_deaths,
        error_types=frozenset(options.poison_type),
        fingerprints=frozenset(options.poison_fingerprint),
        include=SAFE | frozenset(map(LetterClass, options.include)),
    )
    return ReconcileOptions(
        url=options.url,
        groups=tuple(options.group),
        dsn=options.dsn,
        topics=tuple(options.topic),
        mapping=_mapping(options),
        rules=rules,
        standby=options.standby,
    )


def _mapping(options: Namespace) -> Mapping:
    mapping = read_mapping(options.mapping) if options.mapping else Mapping()
    tables = mapping.tables
    if options.business:
        if not options.business_key:
            raise ConfigError(
                "--business-key",
                "the column with the key is needed",
                hint="--business-key order_id",
            )
        table = BusinessTable(
            name=options.business,
            key=options.business_key,
            version=options.business_version,
            token=options.business_token,
        )
        tables = (*tables, table)
    return checked_mapping(
        str(options.mapping or "options"),
        {
            "table": tuple(table.model_dump() for table in tables),
            "applied": options.applied_query or mapping.applied,
            "version": options.version_from or mapping.version,
        },
    )


def run_replay(options: Namespace) -> int:
    """Replay a plan, or print what a replay would do."""
    if options.to_topic:
        _refuse_options_in_place(options)
    with job_session() as spark, progress_told(spark, "replay"), job_errors():
        plan = read_plan(spark, options.plan)
        if options.dry_run:
            counts = expected(plan, options.url).groupBy("outcome").count().collect()
            return _tell(options, {row["outcome"]: row["count"] for row in counts})
        if options.to_topic:
            sent = resend(plan, options.url, options.to_topic, wait=not options.no_wait)
            told = {f"sent to {sent.topic} and abandoned": sent.abandoned, "left": sent.kept}
            return _tell(options, told)
        settings = {
            "rate": RATE if options.rate is None else options.rate,
            "ramp_s": RAMP_S if options.ramp is None else options.ramp,
            "canary": options.canary or 0,
            "pause": bool(options.pause),
        }
        wanted = ReplayOptions(
            options.url, options.name, settings, options.operator, wait=not options.no_wait
        )
        done = replay(plan, wanted, None if options.json else _tell_progress())
    _tell_result(options, done)
    return 0 if done.is_over or options.no_wait else UNFINISHED


def _refuse_options_in_place(options: Namespace) -> None:
    """Raise ConfigError for an option that only a replay in place has."""
    if options.name:
        raise ConfigError(
            "--name",
            "what is sent to a topic is named by the plan and the topic, so that it is sent once",
            hint="leave it out",
        )
    for name in ("rate", "ramp", "canary", "pause"):
        if getattr(options, name) is not None:
            raise ConfigError(
                f"--{name}",
                "letters are sent to a topic at once, in one transaction",
                hint="leave it out, or replay in place: without --to-topic",
            )


def _tell(options: Namespace, counts: dict[str, int]) -> int:
    text = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    print(json.dumps(counts) if options.json else text or "nothing to replay")
    return 0


def _tell_progress() -> Callable[[dict[str, Any]], None]:
    """Return a function that prints how far a plan is, and what it waits for, where
    that has changed.
    """
    told: dict[str, str] = {}

    def tell(plan: dict[str, Any]) -> None:
        why = f" ({escape_unprintable(plan['why'])})" if plan["why"] else ""
        line = f"{plan['name']}: {plan['state']}, {plan['progress']:.0%}{why}"
        if told.get(plan["name"]) != line:
            told[plan["name"]] = line
            print(line, flush=True)

    return tell


def _tell_result(options: Namespace, done: ReplayResult) -> None:
    if options.json:
        print(json.dumps(done._asdict()))
        return
    _tell(options, done.counts | ({"gone": done.gone} if done.gone else {}))
    for plan in done.plans:
        why = f" ({escape_unprintable(plan['why'])})" if plan["why"] else ""
        print(f"plan {plan['name']}: {plan['state']}{why}; see it: txmq plan show {plan['name']}")


def add_reconcile_options(parser: ArgumentParser) -> None:
    """Add the options of `reconcile`."""
    add = parser.add_argument
    add("--group", action="append", required=True, help="a consumer group; repeatable")
    add(
        "--topic",
        action="append",
        default=[],
        help="read only this topic; repeatable (default: all topics of the groups)",
    )
    add(
        "--dsn",
        default=os.environ.get("TXMQ_DSN"),
        help="the business database (default: TXMQ_DSN)",
    )
    add(
        "--standby",
        action="store_true",
        help="take a snapshot of a standby, which shows commits late and in another order",
    )
    add("--plan", required=True, help="directory for the plan, of any kind Spark knows")
    add("--report", type=Path, help="file for a report as an HTML page")
    add("--table", metavar="TABLE", help="write the plan into this table of PostgreSQL, too")
    add("--table-dsn", help="the database of that table (default: the business database)")
    add(
        "--broker-plan",
        nargs="?",
        const="",
        metavar="NAME",
        help="hand the plan to the broker, which waits to be started: txmq plan start",
    )
    add("--operator", help="who does this, for the broker's audit")
    add("--json", action="store_true", help="print the result as JSON")
    _add_evidence_options(parser)
    _add_rule_options(parser)


def _add_evidence_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--mapping", type=Path, help="file with the tables that messages are about: TOML or JSON")
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


def _add_rule_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
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
        type=positive,
        default=PlanRules().replays,
        help="letters are poison after so many replays (default: %(default)s)",
    )
    add(
        "--max-deaths",
        type=positive,
        default=PlanRules().deaths,
        help="letters are poison after so many crashes of the consumer (default: %(default)s)",
    )


def add_replay_options(parser: ArgumentParser) -> None:
    """Add the options of `replay`."""
    add = parser.add_argument
    add("--plan", required=True, help="the directory that reconcile wrote")
    add("--name", help="name of the broker's plan (default: made of the digest)")
    add("--dry-run", action="store_true", help="change nothing; print the expected outcomes")
    add(
        "--rate",
        type=float,
        help=f"letters a second, 0 = as fast as the broker can (default: {RATE:g})",
    )
    add(
        "--ramp",
        type=float,
        metavar="SECONDS",
        help=f"the rate grows so long (default: {RAMP_S:g})",
    )
    add(
        "--canary",
        type=positive,
        metavar="N",
        help="the first N letters are replayed and watched before the others",
    )
    add(
        "--pause",
        action="store_true",
        default=None,
        help="pause behind the canary, until txmq plan resume",
    )
    add("--no-wait", action="store_true", help="start the plan, and end; the broker goes on")
    add(
        "--to-topic",
        metavar="TOPIC",
        help="send the letters as new messages to a topic, in the order of their keys, and"
        " abandon them, instead of replaying them in place",
    )
    add("--operator", help="who does this, for the broker's audit")
    add("--json", action="store_true", help="print the result as JSON")

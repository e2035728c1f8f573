"""`txmq log backup`, `restore` and `lost`: copies of a log to go on from."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from txmq.cli.command import CommandSession, connect
from txmq.cli.database import open_database
from txmq.cli.options import (
    DEFAULT_BROKER,
    BrokerUrl,
    DataDir,
    Operator,
    SettingsPath,
    data_directory,
    offline_settings,
)
from txmq.cli.output import FAILED, Output, format_time
from txmq.cli.parsers import is_number, parse_bytes, parse_time
from txmq.cli.status_line import StatusLine
from txmq.errors import ConfigError

if TYPE_CHECKING:
    from txmq.cli.running_log import RunningLog
    from txmq.store.backup import BackupReport
    from txmq.store.restore import Until
    from txmq.tx.postgres.inbox_lost import LostEffects

DEFAULT_RATE: Final = "32MiB"  # bytes per second; docs/FIGURES.md has what it costs
REPORT_S: Final = 0.2
MIN_RATE: Final = 1 << 20  # each chunk of a slower one would outlast the broker's hold


def parse_rate(text: str) -> int:
    """Parse a rate in bytes per second; 0 = no limit."""
    rate = parse_bytes(text) if text != "0" else 0
    if 0 < rate < MIN_RATE:
        raise typer.BadParameter(f"invalid rate {text!r}: use 1MiB or more, or 0 for no limit")
    return rate


Backup = Annotated[Path, typer.Argument(metavar="BACKUP", help="Directory of the backup.")]
Rate = Annotated[
    int,
    typer.Option(
        parser=parse_rate, metavar="SIZE", help="Bytes to read in a second; 0 = no limit."
    ),
]
Verify = Annotated[
    bool, typer.Option("--verify", help="Only read the whole backup, and say what is wrong.")
]
UntilText = Annotated[
    str | None,
    typer.Option(
        "--until",
        metavar="POSITION|TIME",
        help="Restore the log up to this position or time, instead of all of the backup.",
    ),
]
Dsns = Annotated[
    list[str] | None,
    typer.Argument(metavar="[DSN]...", help="Databases with inboxes to compare."),
]
Accept = Annotated[
    bool, typer.Option("--accept", help="Record that this was dealt with, and end the alarm.")
]
Most = Annotated[
    int, typer.Option("--limit", min=1, help="Maximum number of transactions of a database.")
]
Why = Annotated[str, typer.Option(help="Reason for --accept, recorded in the log.")]


class Progress:
    """Progress of a read, shown on a terminal, and the limit of its rate.

    `rate` is in bytes per second; 0 = no limit.
    """

    def __init__(self, out: Output, rate: int = 0) -> None:
        self._line = StatusLine(wanted=not out.as_json)
        self._rate, self._total, self._read = rate, 0, 0
        self._began = self._report_at = time.monotonic()

    def begin(self, total: int) -> None:
        self._total, self._began = total, time.monotonic()

    def passed(self, read: int) -> None:
        self._read += read
        now = time.monotonic()
        if self._line.is_shown and now >= self._report_at:
            self._report_at = now + REPORT_S
            percent = min(100, 100 * self._read // max(1, self._total))
            self._line.show(f"{self._read >> 20} MiB, {percent} %")
        if self._rate:
            ahead = self._began + self._read / self._rate - now
            if ahead > 0:
                time.sleep(ahead)

    def close(self) -> None:
        self._line.clear()


def backup(
    out: Output,
    target: Backup,
    *,
    broker: BrokerUrl = DEFAULT_BROKER,
    data: DataDir = None,
    config: SettingsPath = None,
    rate: Rate = DEFAULT_RATE,  # type: ignore[assignment]  # typer parses the default
    verify: Verify = False,
) -> None:
    """Back up the log of a running broker of this machine, or with --data or --config
    of a stopped one; bring a backup up to date. Exit status 1 with --verify: the backup
    is damaged.
    """
    from txmq.store.backup import BackupSource, back_up
    from txmq.store.filesystem import RealFileSystem

    fs = RealFileSystem()
    with closing(Progress(out, rate)) as progress, ExitStack() as opened:
        if verify:
            report = _verified(str(target), progress)
        else:
            source: BackupSource
            running: RunningLog | None = None
            if data is not None or config is not None:
                from txmq.broker.data_directory.backup_source import StoppedLog

                directory = str(data_directory(data, config))
                source = opened.enter_context(closing(StoppedLog(fs, directory)))
            else:
                from txmq.cli.running_log import RunningLog

                client = opened.enter_context(closing(connect(broker)))
                source = running = opened.enter_context(closing(RunningLog(fs, client)))
            fs.makedirs(str(target))
            made = back_up(fs, source, str(target), progress)
            if running is not None:
                running.note_backup(made.manifest.taken_at)
            report = _report_fields(made)
    out.show(report)
    if report.get("damaged"):
        raise typer.Exit(FAILED)


def _report_fields(report: BackupReport) -> dict[str, Any]:
    made = report.manifest
    return {
        "log_id": str(made.log_id),
        "incarnation": None if made.incarnation is None else str(made.incarnation),
        "first": made.first,
        "end": made.end,
        "points_from": made.points_from,
        "taken_at": made.taken_at,
        "segments": len(made.segments),
        "snapshots": [position for position, _file in made.snapshots],
        "copied": report.copied,
        "kept": report.kept,
        "mended": list(report.mended),
    }


def _verified(target: str, progress: Progress) -> dict[str, Any]:
    from txmq.store.backup import BackupReport, find_damage, require_manifest, verify_files
    from txmq.store.filesystem import RealFileSystem

    fs = RealFileSystem()
    manifest = require_manifest(fs, target)
    progress.begin(sum(file.size for file in manifest.files))
    damaged = verify_files(fs, target, manifest.files, progress)
    if not damaged:
        damaged = [
            f"{span.path}: damaged from {span.position} to {span.end}: {span.reason}"
            for span in find_damage(fs, target, manifest)
        ]
    kept = sum(file.size for file in manifest.files)
    return _report_fields(BackupReport(manifest, 0, kept, ())) | {
        "damaged": [{"what": text} for text in damaged]
    }


def restore(
    out: Output,
    source: Backup,
    *,
    data: DataDir = None,
    config: SettingsPath = None,
    until: UntilText = None,
) -> None:
    """Restore a backup into an empty directory. What was stored after its end, or after
    --until, is lost; clients notice by the log's incarnation, which is another one.
    """
    from txmq.broker.data_directory.restore import restore_log
    from txmq.store.filesystem import RealFileSystem

    settings = offline_settings(data, config)
    if settings.cluster is not None:
        raise ConfigError(
            "cluster",
            "a node copies the log of the one that leads, when it is started",
            hint="`txmq cluster create --from BACKUP` begins the log of a cluster",
        )
    with closing(Progress(out)) as progress:
        report = restore_log(
            RealFileSystem(), source, settings.broker, progress, parse_until(until)
        )
    out.show(
        report._asdict()
        | {
            "log_id": str(report.log_id),
            "incarnation": str(report.incarnation),
            "stored_to": format_time(report.stored_to),
        }
    )
    out.print_note("What was stored later is lost. What databases have of it: txmq log lost DSN")


def parse_until(text: str | None) -> Until:
    """Return the point of a restore; None = all of the backup."""
    from txmq.store.restore import Until

    if text is None:
        return Until()
    return Until(position=int(text)) if is_number(text) else Until(time=parse_time(text))


def lost(
    session: CommandSession,
    dsns: Dsns = None,
    *,
    accept: Accept = False,
    reason: Why = "not given",
    limit: Most = 1_000,
    operator: Operator,
) -> None:
    """Show what the log has lost by its last restore: its point, the messages whose
    effects are in the inboxes of these databases, and the transactions that these have
    committed, and whose messages are gone. Exit status 1: that is not accepted.
    """
    from txmq.recover.lost_messages import LostMessages, lost_messages
    from txmq.tx.postgres.inbox_lost import RestoredEnds, lost_effects

    if accept:
        session.client.call("log.accept", operator=operator, reason=reason)
    shown = session.client.call("log.restores")
    names = {topic["topic_id"]: topic["topic"] for topic in shown["topics"]}
    restored = RestoredEnds(
        [one["epoch"] for one in shown["restores"]],
        {
            (topic["topic_id"], epoch): ends
            for topic in shown["topics"]
            for epoch, ends in topic["ends"]
        },
        frozenset(names),
    )
    log_id, restores = shown["log_id"], shown["restores"]
    effects: list[LostEffects] = []
    commits: list[LostMessages] = []
    for dsn in dsns or () if restores else ():
        with open_database(dsn, "log lost") as connection:
            effects += lost_effects(connection, log_id, restored)
            lacking = lost_messages(session.client, connection, log_id, restores[-1])
            commits += islice(lacking, limit)
    session.out.show(
        {
            "log_id": log_id,
            "restores": restores,
            "effects": [_effect(found, names) for found in effects],
            "transactions": [one._asdict() for one in commits],
        }
    )
    if restores and not restores[-1]["accepted"]:
        raise typer.Exit(FAILED)


def _effect(found: LostEffects, names: dict[int, str]) -> dict[str, Any]:
    topic = names.get(found.topic_id)
    return {"topic": topic} | found._asdict() | {"messages": found.end - found.start}

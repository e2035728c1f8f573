"""`txmq log`: verify, print, search and repair a log, while no broker uses it."""

from __future__ import annotations

import json
import time
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from txmq.cli.command import broker_command, local_command
from txmq.cli.commands.log_backup import backup, lost, restore
from txmq.cli.options import (
    DataDir,
    KeyFilter,
    MessageIdFilter,
    PartitionFilter,
    SettingsPath,
    StoredBefore,
    StoredFrom,
    Yes,
    data_directory,
    offline_settings,
)
from txmq.cli.options import Topic as TopicArgument
from txmq.cli.output import FAILED, Output, format_time
from txmq.cli.parsers import parse_token
from txmq.cli.rows import with_decoded_body
from txmq.model.printable import escape_unprintable

if TYPE_CHECKING:
    from txmq.broker.data_directory.offline import IndexReport
    from txmq.broker.data_directory.verify import LogReport

app = typer.Typer(
    name="log",
    no_args_is_help=True,
    help="Verify, print, search, repair, back up and restore the log of a broker, or an archive.",
)
FOUND_COLUMNS = ("message_id", "state", "partition", "offset", "key", "tag", "stored_at", "body")
Deep = Annotated[
    bool,
    typer.Option("--deep", help="Also rebuild the index in memory, and compare all rows."),
]
Start = Annotated[
    int, typer.Option("--from", min=0, metavar="POSITION", help="Start at this position.")
]
End = Annotated[
    int,
    typer.Option("--to", min=0, metavar="POSITION", help="Stop before this position; 0 = none."),
]
Kind = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Only records of this kind; can be repeated."),
]
Topic = Annotated[str, typer.Option(metavar="TOPIC", help="Only records about this topic.")]
Token = Annotated[
    str | None,
    typer.Option(metavar="TOKEN", parser=parse_token, help="Only records of this transaction."),
]
Copy = Annotated[
    bool,
    typer.Option(
        "--copy",
        help="The directory was copied while its broker ran: "
        "index and snapshots may be ahead of the log.",
    ),
]
Limit = Annotated[int | None, typer.Option(min=1, help="Maximum number of results.")]


@local_command(app, "verify", example="txmq log verify --data /var/lib/txmq --deep")
def verify(
    out: Output, *, data: DataDir = None, config: SettingsPath = None, deep: Deep = False
) -> None:
    """Read all records, and compare the index with the log. Exit status 1: there is
    damage. What a repair has given up is listed as lost, and does not count.
    """
    from txmq.broker.data_directory.offline import check_index, durable_position
    from txmq.broker.data_directory.verify import verify_log
    from txmq.store.filesystem import RealFileSystem

    fs, directory = RealFileSystem(), data_directory(data, config)
    found = verify_log(fs, str(directory), durable=durable_position(fs, directory))
    index = check_index(fs, directory, found.log_id, lost=found.lost, deep=deep)
    out.show(_log_fields(found) | _index_fields(index))
    if found.damaged or (index is not None and (index.misplaced or index.different)):
        raise typer.Exit(FAILED)


def _log_fields(found: LogReport) -> dict[str, Any]:
    return {
        "log_id": str(found.log_id),
        "first": found.first,
        "end": found.end,
        "segments": found.segments,
        "records": found.records,
        "torn": found.torn,
        "damaged": [damage._asdict() for damage in found.damaged],
        "given_up": [{"position": start, "end": end} for start, end in found.lost],
    }


def _index_fields(index: IndexReport | None) -> dict[str, Any]:
    if index is None:
        return {"index": None}
    fields: dict[str, Any] = {"index": index.position, "index_rows": index.rows}
    misplaced = [row._asdict() for row in index.misplaced]
    lost = [messages._asdict() for messages in index.lost]
    return fields | {"misplaced": misplaced, "different": list(index.different), "lost": lost}


@local_command(app, "dump", example="txmq log dump --data /var/lib/txmq --topic orders --limit 20")
def dump(  # noqa: PLR0913  # its options
    out: Output,
    *,
    data: DataDir = None,
    config: SettingsPath = None,
    start: Start = 0,
    end: End = 0,
    kind: Kind = None,
    topic: Topic = "",
    token: Token = None,
    limit: Limit = None,
) -> None:
    """Print records, one per line, then the damaged spans. Exit status 1: there are
    such spans.
    """
    from txmq.broker.data_directory import dump as log_dump
    from txmq.broker.data_directory.verify import LogFiles
    from txmq.store.filesystem import RealFileSystem
    from txmq.store.log.segment import read_log_id

    unknown = sorted(set(kind or ()) - {*log_dump.kinds(), "Lost"})
    if unknown:
        raise typer.BadParameter(f"unknown kind {unknown[0]!r}: use {', '.join(log_dump.kinds())}")
    fs, directory = RealFileSystem(), str(data_directory(data, config))
    files, log_id = LogFiles(fs, directory), read_log_id(fs, directory)
    names = {} if log_id is None else log_dump.topic_names(fs, directory, log_id, files)
    files.damaged.clear()
    query = log_dump.RecordFilter(start, end, tuple(kind or ()), topic, bytes.fromhex(token or ""))
    for record in islice(log_dump.dump(files, query, names), limit):
        out.print_line(record, _record_text(record))
    for damage in files.damaged:
        out.print_line(
            {"damaged": damage._asdict()},
            f"{damage.position} DAMAGED to {damage.end}: {damage.reason}",
        )
    if files.damaged:
        raise typer.Exit(FAILED)


@local_command(app, "find", example="txmq log find orders --data /var/lib/txmq/archive --key o-17")
def find(  # noqa: PLR0913  # its options
    out: Output,
    topic: TopicArgument,
    *,
    data: DataDir = None,
    config: SettingsPath = None,
    key: KeyFilter = None,
    message: MessageIdFilter = None,
    start: StoredFrom = None,
    end: StoredBefore = None,
    partition: PartitionFilter = None,
    offset: Annotated[int, typer.Option(min=0, help="First offset.")] = 0,
    limit: Limit = 1_000,
) -> None:
    """Find messages of a topic in a log or an archive, in the order of storage."""
    from txmq.broker.data_directory.verify import LogFiles
    from txmq.broker.search.offline_search import OfflineSearch, SearchScope
    from txmq.broker.search.search import SearchQuery
    from txmq.model.message import parse_message_id
    from txmq.store.filesystem import RealFileSystem

    files = LogFiles(RealFileSystem(), str(data_directory(data, config)))
    query = SearchQuery(
        key, None if message is None else parse_message_id(message), start, end, bodies=True
    )
    rows = OfflineSearch(files, SearchScope(topic, partition, offset), query).rows()
    page = [with_decoded_body(row) for row in rows[:limit]]
    damaged = [damage._asdict() for damage in files.damaged]
    out.show(
        {"messages": page, "more": limit is not None and len(rows) > limit, "damaged": damaged},
        columns=FOUND_COLUMNS,
    )
    if damaged:
        raise typer.Exit(FAILED)


def _record_text(record: dict[str, Any]) -> str:
    event = escape_unprintable(json.dumps(record.get("event", {}), ensure_ascii=False))
    return f"{record['position']} {format_time(record['stored_at'])} {record['kind']} {event}"


@local_command(app, "repair", example="txmq log repair --data /var/lib/txmq")
def repair(
    out: Output, *, data: DataDir = None, config: SettingsPath = None, yes: Yes = False
) -> None:
    """Accept the loss of damaged records, so that the broker can start. A copy of the
    damaged files is kept.
    """
    from txmq.broker.data_directory.offline import durable_position
    from txmq.store.filesystem import RealFileSystem
    from txmq.store.log.repair import repair as repair_log

    directory = data_directory(data, config)
    out.confirm(
        f"Give up the damaged records in {directory}? Restore a backup instead, if there is one.",
        yes=yes,
    )
    fs = RealFileSystem()
    lost = repair_log(fs, str(directory), durable=durable_position(fs, directory))
    out.show({"lost": [damage._asdict() for damage in lost]})


@local_command(app, "rebuild", example="txmq log rebuild --data /var/lib/txmq")
def rebuild(
    out: Output, *, data: DataDir = None, config: SettingsPath = None, copy: Copy = False
) -> None:
    """Rebuild the index from the newest snapshot and the log."""
    from txmq.broker.data_directory.offline import rebuild as rebuild_index
    from txmq.store.filesystem import RealFileSystem

    settings = offline_settings(data, config).broker
    report = rebuild_index(RealFileSystem(), settings, time.time_ns() // 1_000, copy=copy)
    out.show(report._asdict())


local_command(app, "backup", example="txmq log backup /backup --rate 64MiB")(backup)
local_command(
    app, "restore", example="txmq log restore /backup --data /srv/txmq --until 2026-07-01T12:00Z"
)(restore)
broker_command(app, "lost", example="txmq log lost postgresql://db/shop")(lost)

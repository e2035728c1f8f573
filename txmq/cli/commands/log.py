"""`txmq log`: the log of a broker that is stopped, or an archive: verified, printed,
repaired.
"""

from __future__ import annotations

import json
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from txmq.cli.command import local
from txmq.cli.commands.messages import readable
from txmq.cli.options import Topic as Named
from txmq.cli.options import Yes, time_of, token_of
from txmq.cli.output import FAILED, Output, clock, printable

if TYPE_CHECKING:
    from txmq.broker.data_directory.offline import IndexReport
    from txmq.broker.data_directory.verify import Verified

app = typer.Typer(
    no_args_is_help=True, help="The log of a broker that is stopped, or an archive of segments."
)
Stored = Annotated[
    int | None,
    typer.Option(
        "--from", parser=time_of, metavar="TIME", help="Stored then or later, as 2026-07-01."
    ),
]
FOUND = ("message_id", "state", "partition", "offset", "key", "tag", "stored_at", "body")
Data = Annotated[
    Path, typer.Argument(metavar="DIR", help="The data directory, or the folder of an archive.")
]
Deep = Annotated[
    bool,
    typer.Option("--deep", help="Also make the index anew, in memory, and compare row by row."),
]
Start = Annotated[
    int, typer.Option("--from", min=0, metavar="POSITION", help="Begin with the record there.")
]
End = Annotated[
    int, typer.Option("--to", min=0, metavar="POSITION", help="End before this position.")
]
Kind = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Only records of this kind; can be repeated."),
]
Topic = Annotated[str, typer.Option(metavar="TOPIC", help="Only records about this topic.")]
Token = Annotated[
    str | None,
    typer.Option(metavar="TOKEN", parser=token_of, help="Only those of this transaction."),
]
Limit = Annotated[int | None, typer.Option(min=1, help="At most so many.")]


@local(app, "verify")
def verify(out: Output, data: Data, *, deep: Deep = False) -> None:
    """Read every record, and compare the index with the log; the exit status is 1 if
    anything is wrong.
    """
    from txmq.broker.data_directory.offline import check_index
    from txmq.broker.data_directory.verify import verify_log
    from txmq.store.fs import RealFileSystem

    fs = RealFileSystem()
    found = verify_log(fs, str(data))
    index = check_index(fs, data, found.log_id, deep=deep)
    out.show(_log_fields(found) | _index_fields(index))
    if found.damaged or (index is not None and (index.misplaced or index.different)):
        raise typer.Exit(FAILED)


def _log_fields(found: Verified) -> dict[str, Any]:
    return {
        "log_id": str(found.log_id),
        "first": found.first,
        "end": found.end,
        "segments": found.segments,
        "records": found.records,
        "torn": found.torn,
        "damaged": [damage._asdict() for damage in found.damaged],
    }


def _index_fields(index: IndexReport | None) -> dict[str, Any]:
    if index is None:
        return {"index": None}
    told: dict[str, Any] = {"index": index.position, "index_rows": index.rows}
    misplaced = [row._asdict() for row in index.misplaced]
    return told | {"misplaced": misplaced, "different": list(index.different)}


@local(app, "dump")
def dump(
    out: Output,
    data: Data,
    *,
    start: Start = 0,
    end: End = 0,
    kind: Kind = None,
    topic: Topic = "",
    token: Token = None,
    limit: Limit = None,
) -> None:
    """Print records, one a line; damaged spans are told of at the end, and the exit
    status is 1 then.
    """
    from txmq.broker.data_directory import dump as dumping
    from txmq.broker.data_directory.verify import LogFiles
    from txmq.store.fs import RealFileSystem
    from txmq.store.segment import read_log_id

    unknown = sorted(set(kind or ()) - {*dumping.kinds(), "Lost"})
    if unknown:
        raise typer.BadParameter(f"there is no kind {unknown[0]}: {', '.join(dumping.kinds())}")
    fs, directory = RealFileSystem(), str(data)
    files, log_id = LogFiles(fs, directory), read_log_id(fs, directory)
    names = {} if log_id is None else dumping.topic_names(fs, directory, log_id, files)
    files.damaged.clear()
    wanted = dumping.Wanted(start, end, tuple(kind or ()), topic, bytes.fromhex(token or ""))
    for record in islice(dumping.dump(files, wanted, names), limit):
        out.line(record, _line(record))
    for damage in files.damaged:
        out.line(
            {"damaged": damage._asdict()},
            f"{damage.position} DAMAGED to {damage.end}: {damage.reason}",
        )
    if files.damaged:
        raise typer.Exit(FAILED)


@local(app, "find")
def find(  # its options
    out: Output,
    data: Data,
    topic: Named,
    *,
    key: Annotated[str | None, typer.Option(help="Only messages with this key.")] = None,
    message: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="Only the message of this id.")
    ] = None,
    start: Stored = None,
    end: Annotated[
        int | None, typer.Option("--to", parser=time_of, metavar="TIME", help="Stored before.")
    ] = None,
    partition: Annotated[int | None, typer.Option(min=0, help="Only in this partition.")] = None,
    offset: Annotated[int, typer.Option(min=0, help="From this offset on.")] = 0,
    limit: Limit = 1_000,
) -> None:
    """Find messages of a topic in an archive, or in the log of a broker that is
    stopped, in the order of storing.
    """
    from txmq.broker.data_directory.verify import LogFiles
    from txmq.broker.search.offline_search import Digging, Place
    from txmq.broker.search.search import Wanted
    from txmq.model.message import parse_message_id
    from txmq.store.fs import RealFileSystem

    files = LogFiles(RealFileSystem(), str(data))
    wanted = Wanted(
        key, None if message is None else parse_message_id(message), start, end, bodies=True
    )
    rows = Digging(files, Place(topic, partition, offset), wanted).rows()
    told = [readable(row) for row in rows[:limit]]
    damaged = [damage._asdict() for damage in files.damaged]
    out.show(
        {"messages": told, "more": limit is not None and len(rows) > limit, "damaged": damaged},
        columns=FOUND,
    )
    if damaged:
        raise typer.Exit(FAILED)


def _line(record: dict[str, Any]) -> str:
    event = printable(json.dumps(record.get("event", {}), ensure_ascii=False))
    return f"{record['position']} {clock(record['stored_at'])} {record['kind']} {event}"


@local(app, "repair")
def repair(out: Output, data: Data, *, yes: Yes = False) -> None:
    """Accept that damaged records are lost, so that the broker starts again; a copy of
    what was there is kept.
    """
    from txmq.broker.data_directory.offline import known_durable
    from txmq.store.fs import RealFileSystem
    from txmq.store.repair import repair as repair_log

    out.confirm(
        f"Give up what is damaged in {data}? Restore a backup first, if there is one.", yes=yes
    )
    fs = RealFileSystem()
    lost = repair_log(fs, str(data), durable=known_durable(fs, data))
    out.show({"lost": [damage._asdict() for damage in lost]})


@local(app, "rebuild")
def rebuild(out: Output, data: Data) -> None:
    """Throw the index away and make it anew from the newest snapshot and the log."""
    from txmq.broker.data_directory.offline import rebuild as rebuild_index
    from txmq.config.broker import load
    from txmq.store.fs import RealFileSystem

    settings = load(None, {"data": data}).broker
    out.show(rebuild_index(RealFileSystem(), settings, time.time_ns() // 1_000)._asdict())

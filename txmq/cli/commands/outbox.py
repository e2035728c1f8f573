"""`txmq outbox`: rows that wait in a database until their broker is back."""

from __future__ import annotations

import json
import os
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from txmq.cli.command import local_command
from txmq.cli.database import Dsn, open_database
from txmq.cli.options import Bodies, Operator, Reason, Yes
from txmq.cli.output import Output
from txmq.cli.rows import body_fields
from txmq.errors import ConfigError

if TYPE_CHECKING:
    from txmq.tx.outbox_entry import OutboxEntry
    from txmq.tx.postgres.outbox_rows import ListedRow
    from txmq.tx.postgres.session import Connection

app = typer.Typer(
    name="outbox",
    no_args_is_help=True,
    help="Inspect the rows that wait in a database until their broker is back.",
)
Seq = Annotated[
    int,
    typer.Argument(metavar="SEQ", min=1, help="Number of the row; see `txmq outbox list`."),
]
MAX_ROWS = 10_000


@local_command(app, "list", example="txmq outbox list postgresql://db/shop")
def list_(
    out: Output,
    dsn: Dsn,
    *,
    limit: Annotated[int, typer.Option(min=1, max=MAX_ROWS, help="Maximum number of rows.")] = 100,
) -> None:
    """List rows in the order of publication. One that cannot be published holds up
    later ones of its keys.
    """
    from txmq.tx.postgres import outbox_rows

    with open_database(dsn, "outbox") as connection:
        rows = outbox_rows.list_rows(connection, limit)
    out.show({"rows": [_row_fields(row) for row in rows]})


@local_command(app, "show", example="txmq outbox show postgresql://db/shop 3 --bodies")
def show(
    out: Output,
    dsn: Dsn,
    seq: Seq,
    *,
    bodies: Bodies = False,
) -> None:
    """Show the messages of a row."""
    from txmq.tx.outbox_entry import unpack_entries

    with open_database(dsn, "outbox") as connection:
        row, content = _find_row(connection, seq)
    messages = [
        message
        for entry in unpack_entries(content, row.token)
        for message in _message_rows(entry, bodies=bodies)
    ]
    out.show(_row_fields(row) | {"rows": messages})


@local_command(
    app, "drop", example="txmq outbox drop postgresql://db/shop 3 --keep row.json --reason sent"
)
def drop(
    out: Output,
    dsn: Dsn,
    seq: Seq,
    *,
    keep: Annotated[
        Path, typer.Option(metavar="FILE", help="File for the row, with operator and reason.")
    ],
    reason: Reason,
    operator: Operator,
    yes: Yes = False,
) -> None:
    """Write a row to a file, then delete it. Its messages are never sent, although its
    transaction has committed.
    """
    from txmq.tx.postgres import outbox_rows

    out.confirm(f"Drop row {seq}? Its messages will never be sent.", yes=yes)
    with open_database(dsn, "outbox") as connection:
        row, content = _find_row(connection, seq)
        record = _row_fields(row) | {
            "content": b64encode(content).decode(),
            "operator": operator,
            "reason": reason,
        }
        _append(keep, json.dumps(record))
        dropped = outbox_rows.drop(connection, row)
    out.show({"seq": seq, "token": row.token.hex, "dropped": dropped, "kept": str(keep)})


@local_command(app, "renew", example="txmq outbox renew postgresql://db/shop 3")
def renew(out: Output, dsn: Dsn, seq: Seq, *, yes: Yes = False) -> None:
    """Give a row a new token, so that its broker accepts it although it is older than 7
    days.

    Renew only rows that certainly were not published: a second publication would not be
    recognized.
    """
    from txmq.client.protocol.transaction.tokens import new_token
    from txmq.tx.postgres import outbox_rows

    question = f"Renew row {seq}? If its messages were published before, they are published twice."
    out.confirm(question, yes=yes)
    with open_database(dsn, "outbox") as connection:
        row, _content = _find_row(connection, seq)
        token = new_token()
        renewed = outbox_rows.renew(connection, row, token)
    out.show({"seq": seq, "token": token.hex, "replaced": row.token.hex, "renewed": renewed})


def _find_row(connection: Connection, seq: int) -> tuple[ListedRow, bytes]:
    from txmq.tx.postgres import outbox_rows

    row = outbox_rows.find_row(connection, seq)
    content = None if row is None else outbox_rows.content_of(connection, row)
    if row is None or content is None:
        raise ConfigError(
            "seq",
            f"the outbox has no row {seq}",
            hint="it may have been published by now; list the rows with: txmq outbox list DSN",
        )
    return row, content


def _message_rows(entry: OutboxEntry, *, bodies: bool) -> Iterator[dict[str, Any]]:
    from txmq.batch import BatchView

    view = BatchView(entry.batch)
    for key, tag, body in zip(view.keys, view.tags, view.bodies, strict=True):
        fields = {
            "topic": entry.topic,
            "partition": entry.partition,
            "key": key,
            "tag": tag,
            "size": len(body),
        }
        yield fields | body_fields(body) if bodies else fields


def _row_fields(row: ListedRow) -> dict[str, Any]:
    return row._asdict() | {"token": row.token.hex, "log_id": str(row.log_id)}


def _append(path: Path, line: str) -> None:
    """Write `line` to disk, before the row is deleted."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError(
            "keep", f"cannot write {path}: {error.strerror}", hint="choose another file"
        ) from None

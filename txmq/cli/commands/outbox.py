"""`txmq outbox`: what waits in a database for a broker that was away."""

from __future__ import annotations

import json
import os
from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from txmq.cli.command import local
from txmq.cli.commands.schema import Dsn
from txmq.cli.options import Operator, Reason, Yes
from txmq.cli.output import Output, body_fields
from txmq.errors import ConfigError

if TYPE_CHECKING:
    from txmq.tx.outbox_entry import Entry
    from txmq.tx.postgres.outbox_rows import Waiting
    from txmq.tx.postgres.session import Connection

app = typer.Typer(
    no_args_is_help=True, help="Transactions that wait in a database for a broker that was away."
)
Seq = Annotated[
    int,
    typer.Argument(metavar="SEQ", min=1, help="Number of the row, as `txmq outbox list` shows it."),
]
MOST = 10_000


@local(app, "list")
def list_(
    out: Output,
    dsn: Dsn,
    *,
    limit: Annotated[int, typer.Option(min=1, max=MOST, help="How many at most.")] = 100,
) -> None:
    """List what waits, in the order in which it is published: the first row of a broker
    holds up those behind it.
    """
    from txmq.tx.postgres import outbox_rows

    with _connected(dsn) as connection:
        found = outbox_rows.waiting(connection, limit)
    out.show({"rows": [_told(row) for row in found]})


@local(app, "show")
def show(
    out: Output,
    dsn: Dsn,
    seq: Seq,
    *,
    bodies: Annotated[
        bool, typer.Option("--bodies", help="With the bodies of the messages.")
    ] = False,
) -> None:
    """Show the messages of a row."""
    from txmq.tx.outbox_entry import unpack

    with _connected(dsn) as connection:
        row, content = _found(connection, seq)
    messages = [message for entry in unpack(content) for message in _messages(entry, bodies=bodies)]
    out.show(_told(row) | {"rows": messages})


@local(app, "drop")
def drop(
    out: Output,
    dsn: Dsn,
    seq: Seq,
    *,
    keep: Annotated[
        Path, typer.Option(metavar="FILE", help="Where the row, who and why are written first.")
    ],
    reason: Reason,
    operator: Operator,
    yes: Yes = False,
) -> None:
    """Take a row out: its messages are never sent, though its transaction has
    committed. What it held is kept.
    """
    from txmq.tx.postgres import outbox_rows

    out.confirm(f"Drop row {seq}? Its messages are never sent.", yes=yes)
    with _connected(dsn) as connection:
        row, content = _found(connection, seq)
        kept = _told(row) | {
            "content": b64encode(content).decode(),
            "operator": operator,
            "reason": reason,
        }
        _append(keep, json.dumps(kept))
        dropped = outbox_rows.drop(connection, seq)
    out.show({"seq": seq, "token": row.token.hex, "dropped": dropped, "kept": str(keep)})


@local(app, "renew")
def renew(out: Output, dsn: Dsn, seq: Seq, *, yes: Yes = False) -> None:
    """Give a row that is older than the outcomes brokers keep (7 days) a new token, so
    that it can be published.

    Only if it certainly was not: nobody would know the messages again.
    """
    from txmq.client.protocol.transaction.tokens import new_token
    from txmq.tx.postgres import outbox_rows

    question = (
        f"Renew row {seq}? If it was published and only its deletion failed, it is published twice."
    )
    out.confirm(question, yes=yes)
    with _connected(dsn) as connection:
        row, _content = _found(connection, seq)
        token = new_token()
        renewed = outbox_rows.renew(connection, row, token)
    out.show({"seq": seq, "token": token.hex, "replaced": row.token.hex, "renewed": renewed})


@contextmanager
def _connected(dsn: str) -> Iterator[Connection]:
    from txmq.tx.postgres.session import connect

    with closing(connect(dsn, application_name="txmq outbox")) as connection:
        yield connection


def _found(connection: Connection, seq: int) -> tuple[Waiting, bytes]:
    from txmq.tx.postgres import outbox_rows

    row = outbox_rows.one(connection, seq)
    content = outbox_rows.content_of(connection, seq)
    if row is None or content is None:
        raise ConfigError(
            "seq",
            f"the outbox has no row {seq}",
            hint="it may just have been published: txmq outbox list",
        )
    return row, content


def _messages(entry: Entry, *, bodies: bool) -> Iterator[dict[str, Any]]:
    from txmq.batch import BatchView

    view = BatchView(entry.batch)
    for key, tag, body in zip(view.keys, view.tags, view.bodies, strict=True):
        told = {
            "topic": entry.topic,
            "partition": entry.partition,
            "key": key,
            "tag": tag,
            "size": len(body),
        }
        yield told | body_fields(body) if bodies else told


def _told(row: Waiting) -> dict[str, Any]:
    return row._asdict() | {"token": row.token.hex, "log_id": str(row.log_id)}


def _append(path: Path, line: str) -> None:
    """On disk before the row goes."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError(
            "keep", f"{path}: {error.strerror}", hint="name a file that can be written"
        ) from None

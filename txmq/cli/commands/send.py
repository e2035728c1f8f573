"""`txmq send`: one message."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from txmq.cli.command import Session, remote
from txmq.cli.options import Pair, Topic, delay_of, pair_of, time_of

Header = Annotated[
    list[Pair] | None,
    typer.Option(
        "--header", parser=pair_of, metavar="NAME=VALUE", help="A header; may be given again."
    ),
]
Body = Annotated[
    str | None,
    typer.Argument(
        metavar="BODY", help="The body, as text. Without it and --file, standard input is read."
    ),
]
File = Annotated[
    str | None,
    typer.Option("--file", metavar="PATH", help="A file with the body; - is standard input."),
]
DeliverAt = Annotated[
    int | None,
    typer.Option(
        parser=time_of, metavar="TIME", help="Not to be delivered before, as 2026-07-01T12:00:00Z."
    ),
]
Delay = Annotated[
    float | None,
    typer.Option(
        parser=delay_of,
        metavar="SPAN",
        help="Not to be delivered before so long: 90, 90s, 15m, 2h, 3d, level:5.",
    ),
]


def add_to(app: typer.Typer) -> None:
    """Make it a command of `app`."""
    remote(app, "send")(send)


def send(  # its options
    session: Session,
    topic: Topic,
    body: Body = None,
    *,
    key: Annotated[str | None, typer.Option(help="Messages of one key stay in order.")] = None,
    tag: Annotated[str | None, typer.Option(help="Consumers may choose by it.")] = None,
    header: Header = None,
    file: File = None,
    partition: Annotated[int | None, typer.Option(min=0, help="Instead of the key's.")] = None,
    deliver_at: DeliverAt = None,
    delay: Delay = None,
) -> None:
    """Send a message, and print where it is once it is stored."""
    data = _body(body, file)
    headers = dict(header) if header else None
    options: dict[str, Any] = {"key": key, "tag": tag, "headers": headers, "partition": partition}
    receipt = session.client.send(topic, data, deliver_at=deliver_at, delay=delay, **options)
    session.out.show(receipt._asdict())


def _body(text: str | None, file: str | None) -> bytes:
    if text is not None and file is not None:
        raise typer.BadParameter("give BODY or --file, not both")
    if text is not None:
        return text.encode(errors="surrogateescape")  # the bytes that the shell passed
    if file in (None, "-"):
        return sys.stdin.buffer.read()
    try:
        return Path(file or "").read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"{file}: {error.strerror}") from None

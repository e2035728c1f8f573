"""`txmq send`: send one message."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from txmq.cli.bodies import BodyFile, read_body
from txmq.cli.command import CommandSession, broker_command
from txmq.cli.options import Topic
from txmq.cli.parsers import NameValue, parse_delay, parse_header, parse_time

app = typer.Typer()
Header = Annotated[
    list[NameValue] | None,
    typer.Option(
        "--header",
        parser=parse_header,
        metavar="NAME=VALUE",
        help="Header of the message; can be repeated.",
    ),
]
Body = Annotated[
    str | None,
    typer.Argument(
        metavar="BODY", help="Body as text. Default: standard input, unless --file is given."
    ),
]
DeliverAt = Annotated[
    int | None,
    typer.Option(
        parser=parse_time,
        metavar="TIME",
        help="Time of delivery, as 2026-07-01T12:00:00Z.",
    ),
]
Delay = Annotated[
    float | None,
    typer.Option(
        parser=parse_delay,
        metavar="DURATION",
        help="Delay of delivery: 90, 90s, 15m, 2h, 3d, level:5.",
    ),
]


@broker_command(
    app, "send", example="txmq send orders 'amount=12' --key o-17 --header source=shell"
)
def send(  # noqa: PLR0913  # its options
    session: CommandSession,
    topic: Topic,
    body: Body = None,
    *,
    key: Annotated[str | None, typer.Option(help="Key: messages of one key stay in order.")] = None,
    tag: Annotated[str | None, typer.Option(help="Tag, by which consumers can filter.")] = None,
    header: Header = None,
    file: BodyFile = None,
    partition: Annotated[
        int | None, typer.Option(min=0, help="Partition, instead of the one of the key.")
    ] = None,
    deliver_at: DeliverAt = None,
    delay: Delay = None,
) -> None:
    """Send a message, and print its place once the broker has stored it."""
    if body is not None and file is not None:
        raise typer.BadParameter("two bodies are given: use either BODY or --file")
    given = read_body(body, file)
    data = sys.stdin.buffer.read() if given is None else given
    headers = dict(header) if header else None
    options: dict[str, Any] = {"key": key, "tag": tag, "headers": headers, "partition": partition}
    receipt = session.client.send(topic, data, deliver_at=deliver_at, delay=delay, **options)
    session.out.show(receipt._asdict())

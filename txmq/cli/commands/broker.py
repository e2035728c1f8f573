"""`txmq broker`: a broker in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from txmq.cli.command import local
from txmq.cli.output import Output
from txmq.errors import ConfigError

if TYPE_CHECKING:
    from txmq.admin.edge import AdminEdge
    from txmq.config.broker import Settings

Data = Annotated[
    Path | None, typer.Option(metavar="DIR", help="The directory of its data; made if need be.")
]
Config = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Settings, as TOML; options here go before them."),
]
Listen = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Where to listen; port 0: any free one.",
        show_default="127.0.0.1:7650",
    ),
]
Http = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Where to serve the console, metrics and JSON; on this machine only.",
    ),
]


def add_to(app: typer.Typer) -> None:
    """Make it a command of `app`."""
    local(app, "broker")(broker)


def broker(
    out: Output,
    *,
    data: Data = None,
    config: Config = None,
    listen: Listen = None,
    http: Http = None,
) -> None:
    """Run a broker until SIGTERM, which drains it. Prints `ready txmq://HOST:PORT` once
    it serves.
    """
    from txmq.config.broker import load

    settings = load(config, {"data": data, "listen": listen, "http": http})
    serve(
        out,
        settings,
        ready=lambda url, console: out.line({"ready": url, "console": console}, f"ready {url}"),
    )


def serve(out: Output, settings: Settings, *, ready: Callable[[str, str], None]) -> None:
    """Run a broker in this process, with its log on standard error; `ready` gets its
    URL and its console's, if any.
    """
    from twisted.internet.error import CannotListenError

    from txmq.broker.service import run
    from txmq.cli import logs
    from txmq.cli.commands.xa_thread import recovering

    logs.configure(as_json=out.as_json)
    logs.bridge_twisted()
    edges = _edges(settings.broker.http)
    try:
        with recovering(settings) as begin_recovery:

            def serves(url: str) -> None:
                ready(url, "".join(edge.url for edge in edges))
                begin_recovery(url)

            run(settings, ready=serves, edges=edges)
    except CannotListenError as error:
        reason = f"cannot listen on {settings.broker.listen}: {error.socketError.strerror}"
        raise ConfigError(
            "broker.listen", reason, hint="choose another address, or port 0 for any free one"
        ) from None


def _edges(http: str | None) -> tuple[AdminEdge, ...]:
    if http is None:
        return ()  # and a start without a console does not import it
    from txmq.admin.edge import AdminEdge
    from txmq.config.listen import listen_address

    return (AdminEdge(listen_address(http)),)

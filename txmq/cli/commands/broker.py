"""`txmq broker`: run a broker in this process."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from txmq.cli.command import local_command
from txmq.cli.output import Output
from txmq.errors import ConfigError

if TYPE_CHECKING:
    from txmq.admin.edge import AdminEdge
    from txmq.config.broker import SettingsFile

app = typer.Typer()
Data = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Data directory, created if it is missing; needed here or in FILE of --config.",
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Settings as TOML; command-line options override them."),
]
Listen = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Address to listen on; port 0: any free port.",
        show_default="127.0.0.1:7650",
    ),
]
Http = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Address of the console, metrics and JSON API; port 0: any free port.",
        show_default="none",
    ),
]
NodeName = Annotated[
    str | None,
    typer.Option(
        "--name",
        metavar="NAME",
        help="Name of the broker in metrics, alarms and among its nodes.",
        show_default="broker-1",
    ),
]
Advertise = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Where clients and other nodes find this node of a cluster.",
        show_default="where it listens",
    ),
]
Otel = Annotated[
    bool,
    typer.Option("--otel", help="Emit OpenTelemetry spans of what the broker does."),
]


CreateTopics = Annotated[
    bool,
    typer.Option("--create-topics", help="Make topics at their first use, misspelt ones too."),
]


@local_command(app, "broker", example="txmq broker --data /var/lib/txmq --http 127.0.0.1:7651")
def broker(  # noqa: PLR0913  # its options
    out: Output,
    *,
    data: Data = None,
    config: Config = None,
    listen: Listen = None,
    http: Http = None,
    name: NodeName = None,
    advertise: Advertise = None,
    otel: Otel = False,
    create_topics: CreateTopics = False,
) -> None:
    """Run a broker. Print `ready txmq://HOST:PORT` when it serves. SIGTERM drains it
    and stops it.
    """
    from txmq.config.broker import load_broker

    options: dict[str, object] = {
        "data": data,
        "listen": listen,
        "http": http,
        "name": name,
        "otel": otel or None,
        "create_topics": create_topics or None,
    }
    load = partial(load_broker, config, options, advertise=advertise)
    serve(
        out,
        load(),
        ready=lambda url, console: _say_ready(out, url, console),
        load=None if config is None else load,
    )


def _say_ready(out: Output, url: str, console: str) -> None:
    out.print_line({"ready": url, "console": console}, f"ready {url}")
    _notify_supervisor()


def _notify_supervisor() -> None:
    """Tell systemd, by its protocol sd_notify, that the broker serves, or follows one
    that does. Without it a unit of `Type=notify` would never be up.
    """
    if address := os.environ.pop("NOTIFY_SOCKET", ""):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
            notified.connect(address.replace("@", "\0", 1) if address[0] == "@" else address)
            notified.send(b"READY=1")


def serve(
    out: Output,
    settings: SettingsFile,
    *,
    ready: Callable[[str, str], None],
    load: Callable[[], SettingsFile] | None = None,
) -> None:
    """Run a broker in this process, with its log on standard error.

    `ready` receives the URLs of the broker and of its console, which is empty where
    there is none. `load` reads the settings again.
    """
    from twisted.internet.error import CannotListenError

    from txmq.broker.process import run
    from txmq.broker.service import refuse_exposed
    from txmq.cli import logs
    from txmq.cli.running_log import remote_log
    from txmq.cli.xa_thread import xa_recovery

    if not settings.broker.trusted_network:
        refuse_exposed(settings, has_users=True)  # before anything is opened
    if settings.broker.otel:
        _refuse_without_tracer()
    logs.configure(as_json=out.as_json)
    logs.redirect_twisted()
    edges = _edges(settings.broker.http)
    try:
        with xa_recovery(settings) as begin_recovery:

            def serves(url: str) -> None:
                ready(url, "".join(edge.url for edge in edges))

            run(
                settings,
                ready=serves,
                follows=_notify_supervisor,
                edges=edges,
                inside=begin_recovery,
                load=load,
                log_at=remote_log,
            )
    except CannotListenError as error:
        reason = f"cannot listen on {settings.broker.listen}: {error.socketError.strerror}"
        raise ConfigError(
            "broker.listen", reason, hint="choose another address, or port 0 for any free one"
        ) from None


def _refuse_without_tracer() -> None:
    """Raise MissingExtra or ConfigError where spans would reach nobody."""
    from txmq.errors.extras import require

    require("otel", "opentelemetry")
    from txmq.broker.monitoring.spans import find_tracer

    find_tracer()


def _edges(http: str | None) -> tuple[AdminEdge, ...]:
    if http is None:
        return ()  # without a console, its modules are not imported
    from txmq.admin.edge import AdminEdge
    from txmq.config.listen import listen_address

    return (AdminEdge(listen_address(http)),)

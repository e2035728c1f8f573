"""`txmq dev`: a broker, its console and a PostgreSQL server for development."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from txmq.cli.command import local_command
from txmq.cli.commands.broker import Listen, serve
from txmq.cli.commands.schema import install_into
from txmq.cli.output import Output

if TYPE_CHECKING:
    from types import FrameType

    from txmq.config.broker import SettingsFile

app = typer.Typer()
SETTINGS = {"wal_level": "logical"}  # `txmq relay` needs it
Data = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Directory for all data; without it, no data outlives the command."
    ),
]
Http = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Address of the console, metrics and JSON API; port 0: any free port.",
        show_default="the port after the broker's",
    ),
]


@local_command(app, "dev", example="txmq dev --data ./dev")
def dev(out: Output, *, data: Data = None, listen: Listen = None, http: Http = None) -> None:
    """Run a broker, its console and a PostgreSQL server with the tables of txmq. Print
    their addresses.
    """
    from txmq.testing.postgres_server import postgres_url

    signal.signal(signal.SIGTERM, _exit)  # the running broker handles the signal itself
    with _environment(data) as (directory, dsn):
        settings = _settings(directory, listen, http, dsn)
        install_into(dsn)
        serve(
            out,
            settings,
            ready=lambda url, console: out.show(
                {"broker": url, "console": console, "postgres": postgres_url(dsn)}
            ),
        )


def _settings(directory: Path, listen: str | None, http: str | None, dsn: str) -> SettingsFile:
    from txmq.config.broker import ResolverSettings, XaDatabaseSettings, XaSettings, load_broker

    settings = load_broker(None, {"data": directory, "listen": listen})
    settings = load_broker(
        None,
        {
            "data": directory,
            "listen": listen,
            "http": http or _console_address(settings.broker.listen),
        },
    )
    deciding = {
        "resolver": (ResolverSettings(name="dev", dsn=dsn),),
        "xa": XaSettings(database=(XaDatabaseSettings(name="dev", dsn=dsn),)),
    }
    return settings.model_copy(update=deciding)


def _console_address(listen: str) -> str:
    """Return the console's address: the next port after the broker's, or any free
    port.
    """
    from txmq.config.listen import PORTS, listen_address

    port = listen_address(listen).port
    return f"127.0.0.1:{port + 1 if port and port + 1 in PORTS else 0}"


@contextmanager
def _environment(data: Path | None) -> Iterator[tuple[Path, str]]:
    """Start a database server; return the broker's directory and a DSN.

    The server stops with the block.
    """
    from txmq.testing.postgres_server import OwnServer, temporary_server

    if data is None:
        with (
            TemporaryDirectory(prefix="txmq-dev-") as directory,
            temporary_server(fsync=False, settings=SETTINGS) as server,
        ):
            yield Path(directory) / "broker", server.dsn()
    else:
        with OwnServer(data / "postgres", settings=SETTINGS).start() as server:
            yield data / "broker", server.dsn()


def _exit(_number: int, _frame: FrameType | None) -> None:
    sys.exit()  # leaves the blocks that stop the servers

"""`txmq dev`: a broker with its console, and a PostgreSQL server, for a developer's
machine, made for each other.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from txmq.cli.command import local
from txmq.cli.commands.broker import Http, Listen, serve
from txmq.cli.commands.schema import install_into
from txmq.cli.output import Output

if TYPE_CHECKING:
    from types import FrameType

    from txmq.config.broker import Settings

SETTINGS = {"wal_level": "logical"}  # so that `txmq relay` can be tried out, too
Data = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Where to keep everything; without it nothing is kept."),
]


def add_to(app: typer.Typer) -> None:
    """Make it a command of `app`."""
    local(app, "dev")(dev)


def dev(out: Output, *, data: Data = None, listen: Listen = None, http: Http = None) -> None:
    """Run a broker, its console and a PostgreSQL server with txmq's tables; prints
    their addresses.
    """
    signal.signal(signal.SIGTERM, _end)  # until the broker runs, and minds it by itself
    with _places(data) as (directory, dsn):
        settings = _settings(directory, listen, http, dsn)
        install_into(dsn)
        serve(
            out,
            settings,
            ready=lambda url, console: out.show(
                {"broker": url, "console": console, "postgres": dsn}
            ),
        )


def _settings(directory: Path, listen: str | None, http: str | None, dsn: str) -> Settings:
    from txmq.config.broker import Resolver, Xa, XaDatabase, load

    settings = load(None, {"data": directory, "listen": listen})
    settings = load(
        None,
        {"data": directory, "listen": listen, "http": http or _next_to(settings.broker.listen)},
    )
    deciding = {
        "resolver": (Resolver(name="dev", dsn=dsn),),
        "xa": Xa(database=(XaDatabase(name="dev", dsn=dsn),)),
    }
    return settings.model_copy(update=deciding)


def _next_to(listen: str) -> str:
    """The console's address: the port after the broker's, and any free one where that
    is any free one, too.
    """
    from txmq.config.listen import PORTS, listen_address

    port = listen_address(listen).port
    return f"127.0.0.1:{port + 1 if port and port + 1 in PORTS else 0}"


@contextmanager
def _places(data: Path | None) -> Iterator[tuple[Path, str]]:
    """The broker's directory and the DSN of a database of its own, whose server ends
    with the block.
    """
    from txmq.testing.postgres import OwnServer, temporary_server

    if data is None:
        with (
            TemporaryDirectory(prefix="txmq-dev-") as directory,
            temporary_server(fsync=False, settings=SETTINGS) as server,
        ):
            yield Path(directory) / "broker", server.dsn()
    else:
        with OwnServer(data / "postgres", settings=SETTINGS).start() as server:
            yield data / "broker", server.dsn()


def _end(_number: int, _frame: FrameType | None) -> None:
    sys.exit()  # through the blocks that stop what was started

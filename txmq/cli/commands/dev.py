"""`txmq dev`: a broker, its console and PostgreSQL databases for development."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from txmq.cli.command import local_command
from txmq.cli.commands.broker import Listen, serve
from txmq.cli.commands.schema import install_into
from txmq.cli.database import open_database
from txmq.cli.output import Output
from txmq.cli.parsers import parse_name
from txmq.errors import TxmqError

if TYPE_CHECKING:
    from types import FrameType

    from txmq.config.broker import SettingsFile
    from txmq.testing.postgres_server import PostgresServer

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


Server = Annotated[
    str | None,
    typer.Option(
        "--dsn",
        metavar="DSN",
        help="Your own PostgreSQL server, instead of one that the command runs. Without --data "
        "each run is another broker to it, forgotten when the run ends.",
    ),
]
Databases = Annotated[
    list[str] | None,
    typer.Option(
        "--database",
        metavar="NAME",
        parser=parse_name,
        help="Database for txmq's tables, made where it is missing; can be repeated.",
        show_default="that of the DSN",
    ),
]


@local_command(app, "dev", example="txmq dev --data ./dev --database shop --database billing")
def dev(
    out: Output,
    *,
    data: Data = None,
    listen: Listen = None,
    http: Http = None,
    dsn: Server = None,
    database: Databases = None,
) -> None:
    """Run a broker, its console and a PostgreSQL server with the tables of txmq. Print
    their addresses.
    """
    signal.signal(signal.SIGTERM, _exit)  # the running broker handles the signal itself
    with _environment(data, dsn) as (directory, server):
        databases = _databases(server, database or ())
        settings = _settings(directory, listen, http, databases)
        try:
            serve(out, settings, ready=lambda url, console: _show(out, url, console, databases))
        finally:
            if data is None and dsn is not None:
                _forget_broker(directory, databases)


def _databases(server: PostgresServer, names: Sequence[str]) -> dict[str, str]:
    """Return the DSNs of the databases by name, with txmq's tables in each."""
    from txmq.tx.postgres.errors import translated

    for name in names:
        with translated(f"making database {name}"):
            server.require_database(name)
    found = {name: server.dsn(name) for name in names} or {"dev": server.dsn()}
    for dsn in found.values():
        install_into(dsn)
    return found


def _forget_broker(directory: Path, databases: Mapping[str, str]) -> None:
    """Have databases that outlive the broker's log keep nothing for it."""
    from txmq.store.filesystem import RealFileSystem
    from txmq.store.log.segment import read_log_id
    from txmq.tx.postgres.brokers import forget

    log_id = read_log_id(RealFileSystem(), str(directory)) if directory.is_dir() else None
    for dsn in databases.values():
        with suppress(TxmqError), open_database(dsn, "dev") as connection:  # it may be away by now
            if log_id is not None:
                forget(connection, log_id, "its run of txmq dev has ended, without --data")


def _show(out: Output, url: str, console: str, databases: Mapping[str, str]) -> None:
    from txmq.testing.postgres_server import postgres_url

    urls = {name: postgres_url(dsn) for name, dsn in databases.items()}
    shown: dict[str, object] = {"broker": url, "console": console}
    if len(urls) == 1:
        shown |= {"postgres": next(iter(urls.values()))}
    else:
        shown |= {"databases": [{"name": name, "postgres": one} for name, one in urls.items()]}
    out.show(shown)


def _settings(
    directory: Path, listen: str | None, http: str | None, databases: Mapping[str, str]
) -> SettingsFile:
    from txmq.config.broker import ResolverSettings, XaDatabaseSettings, XaSettings, load_broker

    options: dict[str, object] = {"data": directory, "listen": listen, "create_topics": True}
    listens = load_broker(None, options).broker.listen
    settings = load_broker(None, options | {"http": http or _console_address(listens)})
    resolvers = [ResolverSettings(name=name, dsn=dsn) for name, dsn in databases.items()]
    branches = [XaDatabaseSettings(name=name, dsn=dsn) for name, dsn in databases.items()]
    deciding = {"resolver": tuple(resolvers), "xa": XaSettings(database=tuple(branches))}
    return settings.model_copy(update=deciding)


def _console_address(listen: str) -> str:
    """Return the console's address: the next port after the broker's, or any free
    port.
    """
    from txmq.config.listen import PORTS, listen_address

    port = listen_address(listen).port
    return f"127.0.0.1:{port + 1 if port and port + 1 in PORTS else 0}"


@contextmanager
def _environment(data: Path | None, dsn: str | None) -> Iterator[tuple[Path, PostgresServer]]:
    """Return the broker's directory and the database server, which is started where
    there is no DSN, and stops with the block.
    """
    from txmq.testing.postgres_server import OwnServer, PostgresServer, temporary_server

    with ExitStack() as stack:
        if data is None:
            temporary = TemporaryDirectory(prefix="txmq-dev-")
            directory = Path(stack.enter_context(temporary)) / "broker"
        else:
            directory = data / "broker"
        if dsn is not None:
            with open_database(dsn, "dev"):
                server = PostgresServer(dsn)
        elif data is None:
            server = stack.enter_context(temporary_server(fsync=False, settings=SETTINGS))
        else:
            server = stack.enter_context(OwnServer(data / "postgres", settings=SETTINGS).start())
        yield directory, server


def _exit(_number: int, _frame: FrameType | None) -> None:
    sys.exit()  # leaves the blocks that stop the servers

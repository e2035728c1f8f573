"""`txmq recover`: messages on local disks of consumers and producers."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from txmq.cli.broker_stores import (
    export_lines,
    list_stored,
    list_stores,
    report_copy,
    wait_for_adoption,
)
from txmq.cli.command import CommandSession, local_command, open_session
from txmq.cli.local_recovery import (
    describe_disk,
    find_store,
    find_stores,
    is_for_spools,
    list_messages,
    list_spooled,
    open_copy,
    require_directory,
)
from txmq.cli.options import DEFAULT_BROKER, Bodies, BrokerUrl, By, Yes
from txmq.cli.output import FAILED, Output, format_time
from txmq.cli.parsers import parse_duration, parse_store_id
from txmq.errors import Conflict, ForeignStore, StoreError
from txmq.model.tracebacks import last_line

if TYPE_CHECKING:
    from txmq.recover.local import StoreIdentity

app = typer.Typer(
    name="recover",
    no_args_is_help=True,
    help="List, adopt, drain and export messages on local disks of consumers and producers.",
)
STORE_COLUMNS = ("group", "store", "state", "member", "host", "messages", "attempts", "oldest")
DISK_COLUMNS = {
    "stores": (
        "group", "topic", "store", "messages", "settled", "unreported", "oldest", "owner_pid",
        "path", "problem",
    ),
    "spools": (
        "service", "owned", "messages", "bytes", "oldest_at", "refused", "path", "problem",
    ),
}  # fmt: skip
MESSAGE_COLUMNS = (
    "topic", "partition", "offset", "key", "state", "attempts", "due", "error_type",
    "error_text", "order", "body", "body_base64", "message_id", "spool",
)  # fmt: skip

MaybeGroup = Annotated[
    str | None, typer.Argument(metavar="GROUP", help="Name of the consumer group.")
]
MaybeStore = Annotated[
    str | None,
    typer.Argument(metavar="STORE", parser=parse_store_id, help="Id of the store: 32 hex digits."),
]
Dir = Annotated[
    Path | None,
    typer.Option(
        "--data", metavar="DIR", help="Directory on this machine, in use, left behind or copied."
    ),
]
OwnDir = Annotated[
    Path, typer.Option("--data", metavar="DIR", help="Directory of spools on this machine.")
]
Force = Annotated[
    bool, typer.Option("--force", help="Adopt it although its owner is still a member.")
]


@local_command(app, "list", example="txmq recover list --data /var/lib/shop")
def list_(
    out: Output,
    group: MaybeGroup = None,
    *,
    directory: Dir = None,
    broker: BrokerUrl = DEFAULT_BROKER,
) -> None:
    """List stores of consumers that have messages, as the broker knows them. With a
    directory, list the stores and spools below it.
    """
    if directory is not None:
        out.show(describe_disk(directory, group), columns=DISK_COLUMNS)
        return
    with open_session(out, broker) as session:
        out.show({"stores": list(list_stores(session, group))}, columns=STORE_COLUMNS)


@local_command(
    app, "show", example="txmq recover show billing 019a0000000070008000000000000001 --bodies"
)
def show(
    out: Output,
    group: MaybeGroup = None,
    store: MaybeStore = None,
    *,
    directory: Dir = None,
    limit: Annotated[
        int, typer.Option(min=1, max=100_000, help="Maximum number of messages.")
    ] = 100,
    bodies: Bodies = False,
    broker: BrokerUrl = DEFAULT_BROKER,
) -> None:
    """Show the messages of one store. With a directory, those that are on this disk."""
    if directory is not None:
        _require_nothing_named(group, store)
        rows = list_messages(directory, bodies=bodies)
        shown = {"directory": str(directory), "list": list(islice(rows, limit))}
        _show_messages(out, shown)
        return
    of_store = _store_args(group, store)
    with open_session(out, broker) as session:
        shown = dict(session.client.call("recover.show", **of_store, limit=1))
        shown["list"] = list(list_stored(session, of_store, limit=limit, bodies=bodies))
        shown.pop("next", None)
        _show_messages(out, shown)


@local_command(app, "drain", example="txmq recover drain --data /var/lib/shop")
def drain(
    out: Output,
    *,
    directory: OwnDir,
    wait: Annotated[
        float,
        typer.Option(
            parser=parse_duration,
            metavar="DURATION",
            help="Time to wait until spools are drained, as 60s.",
        ),
    ] = "60s",  # type: ignore[assignment]  # parsed
    refused: Annotated[
        bool, typer.Option("--refused", help="Send again what the broker has refused for good.")
    ] = False,
    broker: BrokerUrl = DEFAULT_BROKER,
) -> None:
    """Send what is in the spools of a directory that no process has. Exit status 1:
    some of it is not sent.
    """
    from txmq.recover.spool_drain import drain_spools

    if not is_for_spools(require_directory(directory)):
        raise StoreError(
            f"{directory}: there is no spool", hint="give the directory that producers were given"
        )
    result = drain_spools(broker, str(directory), timeout=wait, refused=refused)
    problems = [problem._asdict() for problem in result.problems]
    if problems or out.as_json:
        out.show(result._asdict() | {"problems": problems})
    else:
        out.show({"sent": result.sent, "left": result.left, "refused": result.refused})
    if result.left or result.refused or problems:
        raise typer.Exit(FAILED)


@local_command(app, "drop", example="txmq recover drop --data /var/lib/shop")
def drop(
    out: Output,
    *,
    directory: OwnDir,
    yes: Yes = False,
) -> None:
    """Drop what the broker has refused of the spools in a directory."""
    from txmq.recover.local.spools import drop_refused

    out.confirm(f"Drop what was refused of the spools in {directory}?", yes=yes)
    out.show({"dropped": drop_refused(str(require_directory(directory)))})


@local_command(app, "adopt", example="txmq recover adopt --data /var/lib/shop/failed")
def adopt(  # noqa: PLR0913  # its options
    out: Output,
    group: MaybeGroup = None,
    store: MaybeStore = None,
    *,
    directory: Dir = None,
    export: Annotated[
        Path | None, typer.Option("--export", metavar="FILE", help="An export of the store.")
    ] = None,
    force: Force = False,
    by: By,
    yes: Yes = False,
    broker: BrokerUrl = DEFAULT_BROKER,
) -> None:
    """Deliver the messages of a store to the other members of its group.

    For a consumer that is gone. With its directory, a copy or an export of it, the
    broker first hears what was processed there, so that no effect comes twice. Exit
    status 1: it still works on some of them.
    """
    signed = {"force": force, **by._asdict()}
    with open_session(out, broker) as session, open_copy(directory, export) as (identity, copy):
        if identity is not None:
            _require_same(session, identity, group, store, directory or export)
            group, store = identity.owner.group, identity.id.hex
        of_store = _store_args(group, store)
        out.confirm(f"Adopt store {store} of group {group}?", yes=yes)
        verdicts = (
            {} if identity is None else report_copy(session, identity, copy, of_store | signed)
        )
        try:
            found = session.client.call("recover.adopt", **of_store, **signed)["messages"]
        except Conflict as error:
            if not verdicts or "knows no store" not in error.message:
                raise
            found = 0  # the broker has all of it already
        left = wait_for_adoption(session, of_store) if found else 0
        out.show({"store": store, "adopted": found - left, "left": left, "verdicts": verdicts})
        if left:
            raise typer.Exit(FAILED)


@local_command(
    app, "export", example="txmq recover export billing 019a0000000070008000000000000001 > s.json"
)
def export_(
    out: Output,
    group: MaybeGroup = None,
    store: MaybeStore = None,
    *,
    directory: Dir = None,
    broker: BrokerUrl = DEFAULT_BROKER,
) -> None:
    """Print the messages of a store, or of the spools in a directory, as lines of JSON
    with exact bodies.
    """
    if directory is None:
        of_store = _store_args(group, store)
        with open_session(out, broker) as session:
            for line in export_lines(session, of_store):
                print(line)
        return
    from txmq.recover.local import export

    below = find_stores(directory)
    if not below and is_for_spools(directory):
        for row in list_spooled(directory):
            print(json.dumps(row))
        return
    for line in export(str(find_store(directory))):
        print(line)


def _show_messages(out: Output, shown: dict[str, Any]) -> None:
    """Show messages. A table has times, and only the last line of a traceback."""
    for row in () if out.as_json else shown["list"]:
        if row.get("due"):
            row["due"] = format_time(row["due"])
        if row.get("error_text"):
            row["error_text"] = last_line(row["error_text"])
    out.show(shown, columns=MESSAGE_COLUMNS)


def _require_nothing_named(*named: object) -> None:
    """Raise BadParameter where --data, which means all of a directory, is not alone."""
    if any(named):
        raise typer.BadParameter(
            "--data means everything in the directory: name no GROUP, STORE or message with it"
        )


def _store_args(group: str | None, store: str | None) -> dict[str, Any]:
    if group is None or store is None:
        raise typer.BadParameter("name GROUP and STORE (txmq recover list), or use --data DIR")
    return {"group": group, "store": store}


def _require_same(
    session: CommandSession,
    identity: StoreIdentity,
    group: str | None,
    store: str | None,
    path: Path | None,
) -> None:
    """Require that a copy is of the group, the store and the log that are meant."""
    owner = identity.owner
    if group not in (None, owner.group) or store not in (None, identity.id.hex):
        raise ForeignStore(
            f"{path}: store {identity.id.hex} of group {owner.group!r}, not what was named",
            hint="leave out GROUP and STORE, or give the directory of that store",
        )
    log_id = session.client.call("broker.show")["log_id"]
    if log_id != str(owner.log_id):
        raise ForeignStore(
            f"{path}: belongs to log {owner.log_id}, the broker at {session.url} has {log_id}",
            hint="give the broker that the consumer was connected to, with --broker",
        )

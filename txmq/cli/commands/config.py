"""`txmq config`: what operators have set at a broker, and the broker's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from txmq.cli.command import CommandSession, broker_command
from txmq.cli.options import By
from txmq.cli.output import FAILED
from txmq.errors import ConfigError, TxmqError

app = typer.Typer(
    name="config",
    no_args_is_help=True,
    help="Export and import topics, groups, replay policies, saved selections and users; show "
    "and reload the settings of the broker.",
)
COLUMNS = ("what", "change", "done", "error")
LEFT_OUT = "left out: positions of groups, and what their members set when they join"


@broker_command(app, "export", example="txmq config export > cluster.json")
def export(session: CommandSession) -> None:
    """Print topics, settings of groups, replay policies, saved selections and users,
    without passwords. The same settings make the same bytes.

    Positions of groups and messages are in a backup (txmq log backup); settings that
    members bring when they join are in their code. Both are left out.
    """
    from txmq.cli import cluster_config

    typer.echo(cluster_config.read(session).text(), nl=False)
    session.out.print_note(LEFT_OUT)


@broker_command(app, "show", example="txmq config show")
def show(session: CommandSession) -> None:
    """Show the settings in force at the broker, without what may hold a secret."""
    sections = session.client.call("broker.settings")["settings"]
    if session.out.as_json:
        session.out.show({"settings": sections})
        return
    rows = [
        {"setting": f"{section}.{name}", "value": str(value)}
        for section, fields in sections.items()
        for name, value in (fields if isinstance(fields, dict) else {"": fields}).items()
    ]
    session.out.show({"settings": rows}, columns=("setting", "value"))


@broker_command(app, "reload", example="txmq config reload")
def reload(session: CommandSession) -> None:
    """Let the broker read its settings file again, as on SIGHUP. `restart` lists the
    settings that differ and wait for a start.
    """
    session.show("broker.reload")


@broker_command(app, "import", example="txmq config import cluster.json --dry-run")
def import_(
    session: CommandSession,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Document that `txmq config export` has printed.")
    ],
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would change, and change nothing.")
    ] = False,
    by: By,
) -> None:
    """Create and change what the file names. Nothing is deleted, and what the file does
    not name stays. Exit status 1: some of it was not possible.
    """
    from txmq.cli import cluster_config

    try:
        wanted = cluster_config.parse(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        hint = "name a file that txmq config export has written"
        raise ConfigError(
            "file", f"cannot read {file}: {getattr(error, 'strerror', None) or error}", hint=hint
        ) from None
    rows: list[dict[str, Any]] = []
    for change in cluster_config.changes(cluster_config.read(session), wanted):
        row = {"what": change.what, "change": change.change, "done": False, "error": ""}
        if change.call and not dry_run:
            try:
                # the creation of a topic takes no operator and no reason
                signed = {} if change.call == "topic.create" else by._asdict()
                session.client.call(change.call, **change.args, **signed)
                row["done"] = True
            except TxmqError as error:
                row["error"] = f"{type(error).__name__}: {error}"
        rows.append(row)
    session.out.show({"changes": rows, "dry_run": dry_run}, columns=COLUMNS)
    if not dry_run and not all(row["done"] for row in rows):
        raise typer.Exit(FAILED)

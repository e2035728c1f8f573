"""Options and arguments that several commands share."""

from __future__ import annotations

import os
import re
from getpass import getuser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from txmq.cli.parsers import parse_message, parse_moment, parse_name, parse_token
from txmq.model import limits
from txmq.model.message import is_name

if TYPE_CHECKING:
    from txmq.config.broker import SettingsFile

DEFAULT_BROKER = "txmq://127.0.0.1:7650"


def operating_system_user() -> str:
    """Return the name of the user that runs the command, as the audit takes names.

    Names of a directory service have other characters, such as ada@corp.example.
    """
    try:
        name = re.sub(r"[^A-Za-z0-9._-]", "_", getuser())[: limits.NAME]
    except (KeyError, OSError):  # a container's user may have no name
        name = ""
    return name if is_name(name) else f"uid-{os.getuid()}"


def offline_settings(data: Path | None, config: Path | None) -> SettingsFile:
    """Return the settings of a broker that `--data` or `--config` names."""
    from txmq.config.broker import load_broker

    return load_broker(config, {"data": data_directory(data, config)})


def data_directory(data: Path | None, config: Path | None) -> Path:
    """Return the data directory that `--data` or `--config` names."""
    from txmq.config.broker import load_broker

    if (data is None) == (config is None):
        raise typer.BadParameter("name the data directory: use either --data DIR or --config FILE")
    return data or load_broker(config, {}).broker.data


BrokerUrl = Annotated[
    str,
    typer.Option(
        "--broker",
        envvar="TXMQ_BROKER",
        metavar="URL",
        help="URL of the broker: txmq://HOST:PORT, txmqs:// for TLS, USER@HOST to log in.",
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="Data directory of a broker, or an archive of one."),
]
SettingsPath = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="Settings of the broker as TOML, with its data directory."
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print results and errors as JSON; never ask.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
Reason = Annotated[str, typer.Option(help="Reason for the change, recorded in the log.")]
Operator = Annotated[
    str,
    typer.Option(
        default_factory=operating_system_user,
        parser=parse_name,
        metavar="NAME",
        show_default="your user name",
        help="Operator who makes the change, recorded in the log.",
    ),
]


class By(NamedTuple):
    """Who makes a change, and why, if that is said."""

    operator: Operator
    reason: Reason = ""


class ByForReason(NamedTuple):
    """Who makes a change, and why, which has to be said."""

    operator: Operator
    reason: Reason


Topic = Annotated[
    str, typer.Argument(metavar="TOPIC", parser=parse_name, help="Name of the topic.")
]
Group = Annotated[str, typer.Argument(metavar="GROUP", help="Name of the consumer group.")]
User = Annotated[str, typer.Argument(metavar="USER", parser=parse_name, help="Name of the user.")]
Token = Annotated[
    str, typer.Argument(metavar="TOKEN", parser=parse_token, help="Token of the transaction.")
]
KeyFilter = Annotated[str | None, typer.Option(help="Only messages with this key.")]
MessageIdFilter = Annotated[
    str | None,
    typer.Option("--id", parser=parse_message, metavar="ID", help="Only the message with this id."),
]
StoredFrom = Annotated[
    int | None,
    typer.Option(
        "--from",
        parser=parse_moment,
        metavar="TIME|AGO",
        help="Stored from this time on, as 2026-07-01T12:00Z, or since so long ago, as 2h.",
    ),
]
StoredBefore = Annotated[
    int | None,
    typer.Option(
        "--to",
        parser=parse_moment,
        metavar="TIME|AGO",
        help="Stored before this time, or more than so long ago.",
    ),
]
Bodies = Annotated[bool, typer.Option("--bodies", help="Include bodies of messages.")]
NextPage = Annotated[
    str | None, typer.Option("--after", metavar="NEXT", help="Start at `next` of the page before.")
]
PartitionFilter = Annotated[int | None, typer.Option(min=0, help="Only in this partition.")]
Limit = Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of results.")]

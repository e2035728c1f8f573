"""`txmq cluster`: nodes that share a log, and logs that have topics in common."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from uuid import uuid4

import typer

from txmq.cli.command import CommandSession, broker_command, local_command
from txmq.cli.commands.log_backup import Progress, UntilText, parse_until
from txmq.cli.options import By
from txmq.cli.output import FAILED, Output
from txmq.cli.parsers import parse_log_id
from txmq.errors import ConfigError

if TYPE_CHECKING:
    from txmq.broker.cluster.kafka_client import KafkaAddress
    from txmq.store.restore import Until
    from txmq.store.shared.records import Genesis

app = typer.Typer(
    name="cluster",
    no_args_is_help=True,
    help="Make the log that several nodes share, see its nodes, and choose who leads. List "
    "several logs that have topics in common.",
)
Config = Annotated[
    Path,
    typer.Option(metavar="FILE", help="Settings of a node as TOML: section cluster is used."),
]
Replicas = Annotated[
    int, typer.Option(min=1, metavar="NUMBER", help="Copies that Kafka keeps of the log.")
]
From = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="BACKUP",
        help="Backup that the log begins with, restored into the node's data directory.",
    ),
]
Force = Annotated[
    bool, typer.Option("--force", help="Step down although no other node is known to follow.")
]
Urls = Annotated[list[str], typer.Argument(metavar="URL...", help="A broker of each log.")]
Together = Annotated[
    bool | None,
    typer.Option(
        "--together/--apart",
        show_default=False,
        help="For a new list: programs name these logs in one list already, in this order, so that "
        "keys of their topics are at all of them; or keys are at the first one.",
    ),
]
Moved = Annotated[
    bool, typer.Option("--moved", help="Logs that are listed are at other addresses now.")
]
LogId = Annotated[
    str,
    typer.Argument(parser=parse_log_id, metavar="LOG", help="Id of the log: txmq cluster logs."),
]


@local_command(app, "create", example="txmq cluster create --config node.toml")
def create(
    out: Output,
    *,
    config: Config,
    replicas: Replicas = 3,
    source: From = None,
    until: UntilText = None,
) -> None:
    """Make the topic of a cluster, with settings by which it loses nothing, and begin
    an empty log in it, or with --from the log of a backup. What is there already stays
    as it is, so it may be repeated.
    """
    from txmq.broker.cluster.kafka_client import KafkaAddress
    from txmq.broker.cluster.kafka_genesis import begin_log
    from txmq.broker.cluster.kafka_topic import check
    from txmq.broker.cluster.kafka_topic import create as create_topic
    from txmq.config.broker import load_cluster
    from txmq.store.log.segment import HEADER_SIZE
    from txmq.store.shared.records import Genesis

    if until is not None and source is None:
        raise typer.BadParameter("--until is a point of a backup: give --from as well")
    settings = load_cluster(config)
    kafka = KafkaAddress(settings.kafka, settings.options)
    is_made = create_topic(kafka, settings.topic, replicas)
    if not is_made:
        check(kafka, settings.topic, settings.accept)
    if source is None:
        genesis = Genesis(uuid4(), 0, HEADER_SIZE, time.time_ns() // 1_000)
    else:
        genesis = _restored(out, config, kafka, source, parse_until(until))
    found = begin_log(kafka, settings.topic, genesis)
    if source is not None and found != genesis:
        raise _has_another_log(settings.topic)
    out.show(
        {
            "topic": settings.topic,
            "log_id": str(found.log_id),
            "topic_made": is_made,
            "log_begun": found == genesis,
        }
    )


def _restored(
    out: Output, config: Path, kafka: KafkaAddress, source: Path, until: Until
) -> Genesis:
    """Restore a backup into the data directory of this node, for an empty topic. Return
    how the topic is to begin.
    """
    from txmq.broker.cluster.kafka_genesis import find_genesis
    from txmq.broker.data_directory.restore import restore_log, shared_genesis
    from txmq.config.broker import load_broker
    from txmq.store.filesystem import RealFileSystem

    fs, settings = RealFileSystem(), load_broker(config, {})
    assert settings.cluster is not None, "its topic is there"
    genesis = shared_genesis(fs, settings.broker.data)
    if genesis is None:  # else an attempt before this one has restored it
        if find_genesis(kafka, settings.cluster.topic) is not None:
            raise _has_another_log(settings.cluster.topic)
        with closing(Progress(out)) as progress:
            restore_log(fs, source, settings.broker, progress, until, is_shared=True)
        genesis = shared_genesis(fs, settings.broker.data)
        assert genesis is not None, "it was restored"
    return genesis


def _has_another_log(topic: str) -> ConfigError:
    """Return the error for a topic that is not for the log of a backup."""
    hint = "name a topic that is not there yet: each log has one of its own"
    return ConfigError("cluster.topic", f"{topic} has a log already", hint=hint)


@broker_command(app, "status", example="txmq cluster status")
def status(session: CommandSession) -> None:
    """Show which node leads, and how far behind the others are at most. Exit status 1:
    no node leads, or none follows.
    """
    view = session.client.call("cluster.describe")
    logs = view.pop("logs")["logs"]
    by_role: dict[str, list[dict[str, Any]]] = {}
    for node in view.pop("nodes"):
        by_role.setdefault(node["role"], []).append(node)
    leader, followers = next(iter(by_role.get("leader", ())), None), by_role.get("follower", [])
    shown = {
        "leader": leader and leader["name"],
        "address": leader and leader["address"],
        "followers": len(followers),
        "silent": len(by_role.get("silent", ())),
        "lag_bytes": max((node["lag_bytes"] for node in followers), default=0),
        "lag_s": max((node["lag_s"] for node in followers), default=0.0),
        "logs": len(logs) or 1,
    }
    session.out.show(view | shown)
    if leader is None or not followers:
        raise typer.Exit(FAILED)


@broker_command(app, "nodes", example="txmq cluster nodes --json")
def nodes(session: CommandSession) -> None:
    """List the nodes that share the log."""
    session.out.show({"nodes": session.client.call("cluster.describe")["nodes"]})


@broker_command(app, "step-down", example="txmq cluster step-down --reason 'its disk is slow'")
def step_down(session: CommandSession, *, force: Force = False, by: By) -> None:
    """Have another node lead: the leader drains, lets one take over at once, and
    follows it.
    """
    session.show("cluster.step_down", **by._asdict(), force=force)


@broker_command(
    app, "add-log", example="txmq cluster add-log txmq://broker-2 --broker txmq://broker-1"
)
def add_log(
    session: CommandSession, urls: Urls, *, together: Together = None, moved: Moved = False, by: By
) -> None:
    """Add logs to those that have topics in common. `--broker` is the first of them,
    which keeps the list. Clients find them while they run: they get messages without a
    key, and keys of new topics. It may be repeated. Exit status 1: a log has no copy of
    the list yet.
    """
    from txmq.cli.listed_logs import LogAdder

    adder = LogAdder(session, urls)
    listed = adder.add(together=together, moved=moved, **by._asdict())
    _show_copied(session, listed, **by._asdict())


@broker_command(app, "drain-log", example="txmq cluster drain-log 708c0839c697452ab4a1e2656f561edf")
def drain_log(session: CommandSession, log_id: LogId, *, by: By) -> None:
    """Give a log no more messages without a key, and no keys of new topics. It keeps
    the keys that it has.
    """
    why = by._asdict()
    listed = session.client.call("cluster.drain_log", log_id=log_id, **why)
    _show_copied(session, listed, **why)


@broker_command(
    app, "remove-log", example="txmq cluster remove-log 708c0839c697452ab4a1e2656f561edf"
)
def remove_log(session: CommandSession, log_id: LogId, *, by: By) -> None:
    """Take a log off the list that is drained, and has no keys of any topic. Programs
    that run go on to consume it.
    """
    why = by._asdict()
    listed = session.client.call("cluster.remove_log", log_id=log_id, **why)
    _show_copied(session, listed, **why)


def _show_copied(session: CommandSession, listed: dict[str, Any], **why: str) -> None:
    """Copy the list to the other logs, and show both."""
    from txmq.cli.listed_logs import copy_list

    copies = copy_list(session, listed, **why)
    session.out.show({**listed, "copies": copies})
    if any(copy["error"] for copy in copies):
        raise typer.Exit(FAILED)


@broker_command(app, "logs", example="txmq cluster logs --json")
def logs(session: CommandSession) -> None:
    """List the logs that have topics in common. Exit status 1: one of them is away, or
    has not the latest list.
    """
    from txmq.cli.listed_logs import log_rows

    rows = log_rows(session)
    session.out.show({"logs": rows})
    if any(row["error"] for row in rows):
        raise typer.Exit(FAILED)

"""`txmq cluster`: the log that several nodes share."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

import typer

from txmq.cli.command import CommandSession, broker_command, local_command
from txmq.cli.options import Operator, Reason
from txmq.cli.output import FAILED, Output

app = typer.Typer(
    name="cluster",
    no_args_is_help=True,
    help="Make the log that several nodes share, see its nodes, and choose who leads.",
)
Config = Annotated[
    Path,
    typer.Option(metavar="FILE", help="Settings of a node as TOML: section cluster is used."),
]
Replicas = Annotated[
    int, typer.Option(min=1, metavar="NUMBER", help="Copies that Kafka keeps of the log.")
]
Force = Annotated[
    bool, typer.Option("--force", help="Step down although no other node is known to follow.")
]


@local_command(app, "create", example="txmq cluster create --config node.toml")
def create(out: Output, *, config: Config, replicas: Replicas = 3) -> None:
    """Make the topic of a cluster, with settings by which it loses nothing, and begin
    an empty log in it. What is there already stays as it is, so it may be repeated.
    """
    from txmq.broker.cluster.kafka_client import KafkaAddress
    from txmq.broker.cluster.kafka_genesis import begin_log
    from txmq.broker.cluster.kafka_topic import check
    from txmq.broker.cluster.kafka_topic import create as create_topic
    from txmq.config.broker import load_cluster
    from txmq.store.log.segment import HEADER_SIZE
    from txmq.store.shared.records import Genesis

    settings = load_cluster(config)
    kafka = KafkaAddress(settings.kafka, settings.options)
    is_made = create_topic(kafka, settings.topic, replicas)
    if not is_made:
        check(kafka, settings.topic, settings.accept)
    genesis = Genesis(uuid4(), 0, HEADER_SIZE, time.time_ns() // 1_000)
    found = begin_log(kafka, settings.topic, genesis)
    out.show(
        {
            "topic": settings.topic,
            "log_id": str(found.log_id),
            "topic_made": is_made,
            "log_begun": found == genesis,
        }
    )


@broker_command(app, "status", example="txmq cluster status")
def status(session: CommandSession) -> None:
    """Show which node leads, and how far behind the others are at most. Exit status 1:
    no node leads, or none follows.
    """
    view = session.client.call("cluster.describe")
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
    }
    session.out.show(view | shown)
    if leader is None or not followers:
        raise typer.Exit(FAILED)


@broker_command(app, "nodes", example="txmq cluster nodes --json")
def nodes(session: CommandSession) -> None:
    """List the nodes that share the log."""
    session.out.show({"nodes": session.client.call("cluster.describe")["nodes"]})


@broker_command(app, "step-down", example="txmq cluster step-down --reason 'its disk is slow'")
def step_down(
    session: CommandSession, *, force: Force = False, reason: Reason = "", operator: Operator
) -> None:
    """Have another node lead: the leader drains, lets one take over at once, and
    follows it.
    """
    session.show("cluster.step_down", operator=operator, reason=reason, force=force)

"""`txmq cluster`: the log that several nodes share."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated
from uuid import uuid4

import typer

from txmq.cli.command import local_command
from txmq.cli.output import Output

app = typer.Typer(
    name="cluster",
    no_args_is_help=True,
    help="Make the log that several nodes share, in a partition of Kafka.",
)
Config = Annotated[
    Path,
    typer.Option(metavar="FILE", help="Settings of a node as TOML: section cluster is used."),
]
Replicas = Annotated[
    int, typer.Option(min=1, metavar="NUMBER", help="Copies that Kafka keeps of the log.")
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

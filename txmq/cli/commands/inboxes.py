"""`txmq inbox`: what an older txmq stored in a database by the names of topics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from txmq.cli.command import CommandSession, broker_command, local_command
from txmq.cli.database import Dsn, open_database
from txmq.cli.options import Yes
from txmq.cli.output import Output
from txmq.cli.parsers import parse_name
from txmq.errors import UnknownTopic

if TYPE_CHECKING:
    from txmq.tx.postgres.inbox_names import NamedPosition

app = typer.Typer(
    name="inbox",
    no_args_is_help=True,
    help="List, adopt and discard inboxes that an older txmq stored by names of topics.",
)
Group = Annotated[str, typer.Argument(metavar="GROUP", help="Consumer group.")]
Topic = Annotated[str, typer.Argument(parser=parse_name, metavar="TOPIC", help="Topic.")]


@local_command(app, "list", example="txmq inbox list postgresql://db/shop")
def list_(out: Output, dsn: Dsn) -> None:
    """List inboxes that were stored by names and that no consumer has taken over."""
    from txmq.tx.postgres import blocking

    with open_database(dsn, "inbox") as connection:
        found = blocking.stored_by_name(connection)
    out.show({"rows": [_fields(row) for row in found]})


@broker_command(app, "adopt", example="txmq inbox adopt postgresql://db/shop billing orders")
def adopt(
    session: CommandSession, dsn: Dsn, group: Group, topic: Topic, *, yes: Yes = False
) -> None:
    """Have the topic of this broker take over what was stored by its name. Its messages
    at these offsets then count as applied.
    """
    from txmq.tx.postgres import blocking
    from txmq.tx.postgres.inbox import Position

    shown = session.client.call("group.show", group=group)
    places = [place for place in shown["positions"] if place["topic"] == topic]
    if not places:
        raise UnknownTopic(
            f"group {group} does not read topic {topic}",
            hint=f"list its partitions with: txmq group show {group}",
        )
    log_id = session.client.call("broker.show")["log_id"]
    session.out.confirm(
        f"Are messages of topic {topic} of this broker those that group {group} has applied?",
        yes=yes,
    )
    adopted = []
    with open_database(dsn, "inbox") as connection:
        for place in places:
            # a broker of an older version tells the present epoch only
            for _offset, epoch in place.get("epochs", [(0, place["epoch"])]):
                position = Position(group, log_id, place["topic_id"], place["partition"], epoch)
                found = blocking.adopt(connection, position, topic)
                adopted.append({"partition": place["partition"], "result": found.value})
    session.out.show({"group": group, "topic": topic, "partitions": adopted})


@local_command(app, "discard", example="txmq inbox discard postgresql://db/shop billing orders")
def discard(out: Output, dsn: Dsn, group: Group, topic: Topic, *, yes: Yes = False) -> None:
    """Delete what was stored by this name: it is that of a topic that is gone."""
    from txmq.tx.postgres import blocking

    out.confirm(f"Forget what group {group} has applied of {topic}?", yes=yes)
    with open_database(dsn, "inbox") as connection:
        discarded = blocking.discard(connection, group, topic)
    out.show({"group": group, "topic": topic, "discarded": discarded})


def _fields(row: NamedPosition) -> dict[str, Any]:
    return row._asdict() | {"stored_until": str(row.stored_until)}

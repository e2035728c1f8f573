"""`txmq topic schema`: the JSON Schema of a topic's bodies, and its changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from txmq.cli.command import CommandSession, broker_command
from txmq.cli.commands.letter_edits import import_model
from txmq.cli.options import By, Topic, Yes
from txmq.cli.output import FAILED
from txmq.errors import ConfigError
from txmq.model.printable import escape_unprintable
from txmq.model.schemas.bodies import read_json, title_of

app = typer.Typer(
    name="schema", no_args_is_help=True, help="Show and change the JSON Schema of a topic's bodies."
)
File = Annotated[Path | None, typer.Option(metavar="FILE", help="File with the JSON Schema.")]
Model = Annotated[
    str | None,
    typer.Option(metavar="MODULE:NAME", help="Pydantic model of the bodies, by its path."),
]
Rule = Annotated[
    Literal["backward", "forward", "none"] | None,
    typer.Option(
        help="Rule of later changes. backward, the default: the new schema reads what was sent "
        "before. forward: the old one reads what is sent from now on."
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Change the schema even against the rule.")]


@broker_command(app, "show", example="txmq topic schema show orders")
def show(session: CommandSession, topic: Topic) -> None:
    """Show the schema of a topic, and the rule of its changes."""
    _print(session, session.client.call("topic.schema", name=topic))


@broker_command(app, "set", example="txmq topic schema set orders --file order.schema.json")
def set_(
    session: CommandSession,
    topic: Topic,
    *,
    file: File = None,
    model: Model = None,
    compatibility: Rule = None,
    force: Force = False,
    by: By,
) -> None:
    """Give a topic a schema, or another rule for its changes.

    The broker refuses a change that breaks the rule, and one that it cannot judge.
    """
    schema = read_schema(file, model)
    if schema is None and compatibility is None:
        raise typer.BadParameter("use --file, --model or --compatibility")
    changes: dict[str, Any] = {"json_schema": schema, "compatibility": compatibility}
    changes |= {"force": force, **by._asdict()}
    _print(session, session.client.call("topic.schema", name=topic, **changes))


@broker_command(app, "check", example="txmq topic schema check orders --file order.schema.json")
def check(
    session: CommandSession,
    topic: Topic,
    *,
    file: File = None,
    model: Model = None,
    compatibility: Rule = None,
) -> None:
    """Show what a new schema would break, and change nothing.

    Exit status 1: it would break something, or cannot be judged.
    """
    schema = read_schema(file, model)
    if schema is None:
        raise typer.BadParameter("use --file or --model")
    asked: dict[str, Any] = {"json_schema": schema, "compatibility": compatibility}
    reply = session.client.call("topic.schema", name=topic, dry_run=True, **asked)
    if session.out.as_json:
        session.out.show(reply)
    else:
        for line in reply["breaks"] or [f"nothing breaks ({reply['compatibility']})"]:
            session.out.print_line({}, escape_unprintable(line))
    if reply["breaks"]:
        raise typer.Exit(FAILED)


@broker_command(app, "remove", example="txmq topic schema remove orders")
def remove(session: CommandSession, topic: Topic, *, by: By, yes: Yes = False) -> None:
    """Remove the schema of a topic, and its rule."""
    session.out.confirm(f"Remove the schema of topic {topic}?", yes=yes)
    session.show("topic.schema", name=topic, json_schema="", **by._asdict())


def read_schema(file: Path | None, model: str | None) -> str | None:
    """Return the schema that the options name, or None. Raises ConfigError."""
    if file is not None and model is not None:
        raise typer.BadParameter("use either --file or --model")
    if model is not None:
        found: Any = import_model(model)
        if not hasattr(found, "model_json_schema"):
            raise ConfigError("--model", f"{model!r} is no pydantic model", hint="use --file")
        return json.dumps(found.model_json_schema())
    if file is None:
        return None
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    try:
        text = file.read_text("utf-8")
        Draft202012Validator.check_schema(read_json(text))
    except OSError as error:
        raise typer.BadParameter(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, SchemaError) as error:
        told = error.message if isinstance(error, SchemaError) else str(error)
        raise ConfigError(
            "--file", f"{file} is no JSON Schema: {told}", hint="use one of draft 2020-12"
        ) from None
    return text


def schema_summary(schema: str) -> str:
    """Return a schema as one entry of a table: its title and size."""
    return f"{title_of(schema) or 'without a title'} ({len(schema)} characters)" if schema else ""


def _print(session: CommandSession, reply: dict[str, Any]) -> None:
    tree = json.loads(reply["schema"]) if reply["schema"] else None
    if session.out.as_json:
        session.out.show(reply | {"schema": tree})
        return
    session.out.show(reply | {"schema": schema_summary(reply["schema"])})
    if tree is not None:
        session.out.print_line({}, json.dumps(tree, indent=2))

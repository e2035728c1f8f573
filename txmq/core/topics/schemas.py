"""Rules of the JSON Schemas of topics: what describes bodies, and how it may change.

The broker stores the schema, and judges changes of it. It does not read the bodies that
are sent; clients with a model do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.events.topics import TopicAltered
from txmq.core.topics.topics import find_changeable
from txmq.errors import IncompatibleSchema, Throttled
from txmq.model.schemas.compatibility import CannotJudge, Compatibility, breaks

if TYPE_CHECKING:
    from txmq.core.state.state import State

MAX_ALL_SCHEMAS = 64 << 20  # characters of all topics: they are in memory
FIRST_RULE: Compatibility = "backward"  # of a schema that comes without one


class ChangeSchema(NamedTuple):
    """Change the schema of a topic ("" = none), or the rule of its changes; None leaves
    either as it is.

    `force`: whatever the change breaks. `dry_run`: judge it only.
    """

    name: str
    schema: str | None = None
    compatibility: Compatibility | None = None
    force: bool = False
    dry_run: bool = False


class ChangedSchema(NamedTuple):
    """The schema of a topic after a change, and what the change breaks."""

    name: str
    schema: str
    compatibility: str
    breaks: list[str]


def decide_change(state: State, command: ChangeSchema, _now: int) -> Outcome:
    topic = find_changeable(state, command.name)
    old = topic.settings
    schema = old.schema if command.schema is None else command.schema
    rule = command.compatibility or cast("Compatibility", old.compatibility or FIRST_RULE)
    changed = bool(schema and old.schema) and schema != old.schema
    try:
        broken = breaks(old.schema, schema, rule) if changed else []
        told = "; ".join(broken)
    except CannotJudge as error:
        broken, told = [f"not judged: {error}"], f"it cannot be judged: {error}"
    if broken and not (command.force or command.dry_run):
        raise IncompatibleSchema(
            f"the new schema of topic {command.name!r} is not {rule} compatible: {told}",
            hint='change it otherwise, send to a new topic, or set it with compatibility "none" '
            "or with --force",
            detail={"compatibility": rule, "breaks": list(broken)},
        )
    more = len(schema) - len(old.schema)
    if more > 0 and state.schema_characters + more > MAX_ALL_SCHEMAS:
        raise Throttled(
            f"the schemas of all topics have {state.schema_characters} characters: {more} more "
            f"would be above {MAX_ALL_SCHEMAS}",
            hint="remove those that nobody uses: txmq topic schema remove",
        )
    settings = old._replace(schema=schema, compatibility=rule if schema else "")
    reply = ChangedSchema(command.name, schema, settings.compatibility, broken)
    if command.dry_run or settings == old:
        return Outcome(reply=reply)
    return Outcome((TopicAltered(topic.topic_id, settings),), reply)


DECIDERS: Deciders = {ChangeSchema: decide_change}
APPLIERS: Appliers = {}

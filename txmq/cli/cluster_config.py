"""Document of what operators have set at a broker: topics, groups, policies, saved
selections and users.

A document says how things are to be, and only of what it names: `changes` compares it
with another one and returns the calls that lead there. None of them deletes anything.
Passwords are not part of it, nor is what members of a group decide when they join.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import Field, StringConstraints, ValidationError

from txmq.cli.command import CommandSession
from txmq.errors import ConfigError
from txmq.errors.validation import first_mistake
from txmq.model.measures import counted
from txmq.model.schemas.compatibility import Compatibility
from txmq.wire.calls.arguments import Args, Name
from txmq.wire.calls.consumers import GroupName, GroupSettingsArgs
from txmq.wire.calls.letters import SelectionArgs
from txmq.wire.calls.plans import PlanSettingsArgs
from txmq.wire.calls.topics import TopicSettingsArgs
from txmq.wire.calls.users import Limit, Role

C = TypeVar("C", bound=Args)
Compare = Callable[[str, C | None, C], Iterator["Change"]]
DEFAULT = "default"
NO_GROUP = "no member has joined it yet: import again when one has"
NO_USERS = "the broker has no users: add an admin first, with txmq user add NAME --role admin"
# settings of a group that have a value for "not set", and so can be taken back
UNLIMITED = {
    "keep_until_exported": False, "messages_per_s": 0, "cold_bytes_per_s": 0,
    "alarm_severity": "default",
}  # fmt: skip
# values of a topic's settings that do not know "default"
STANDARD = {"writable": True, "readable": True, "note": ""}
# settings of a group that `group.show` has in microseconds, documents in milliseconds
TIMES = {"lease_us", "session_us", "consume_timeout_us"}


class TopicConfig(Args):
    """A topic. Settings that are not named are the broker's."""

    partitions: Annotated[int, Field(ge=1, le=4_096)]
    settings: TopicSettingsArgs = TopicSettingsArgs()
    json_schema: dict[str, Any] | bool | None = None
    compatibility: Compatibility | None = None


class GroupConfig(GroupSettingsArgs):
    """Settings of a group that operators have set."""

    keep_until_exported: bool | None = None
    messages_per_s: int | None = None
    cold_bytes_per_s: int | None = None
    alarm_severity: Literal["default", "critical", "warning", "off"] | None = None


class PolicyConfig(Args):
    """The replay policy of a group."""

    after_s: float | None = None
    on_version: bool = False
    max_replays: int = 1
    select: SelectionArgs = SelectionArgs()
    settings: PlanSettingsArgs = PlanSettingsArgs()


QuotaName = Literal["bytes_per_s", "requests_per_s", "topics", "undecided", "connections"]


class UserConfig(Args):
    """A user, without the password."""

    roles: tuple[Role, ...] = ()
    grants: tuple[Annotated[str, StringConstraints(pattern=r"^\S+ \S+$")], ...] = ()
    quota: dict[QuotaName, Limit] = Field(default_factory=dict)


class ClusterConfig(Args):
    """The document. `txmq` is the version of its form."""

    txmq: Literal[1] = 1
    topics: dict[Name, TopicConfig] = Field(default_factory=dict)
    groups: dict[GroupName, GroupConfig] = Field(default_factory=dict)
    policies: dict[GroupName, PolicyConfig] = Field(default_factory=dict)
    selections: dict[Name, SelectionArgs] = Field(default_factory=dict)
    users: dict[Name, UserConfig] = Field(default_factory=dict)

    def text(self) -> str:
        """Return the document as JSON; the same settings make the same bytes.

        Unprintable characters are escaped, because terminals show it.
        """
        fields = _set_fields(self)
        if "groups" in fields:  # without those of which nothing is set
            fields["groups"] = {name: one for name, one in fields["groups"].items() if one}
        text = json.dumps({"txmq": 1} | fields, indent=2, sort_keys=True, ensure_ascii=False)
        return "".join(map(_escape_char, text)) + "\n"


def _escape_char(char: str) -> str:
    return char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1]


class Change(NamedTuple):
    """Change of one thing, and the call that makes it.

    Without a call `change` says why nothing can be done.
    """

    what: str
    change: str
    call: str = ""
    args: Mapping[str, Any] = MappingProxyType({})


def parse(text: str) -> ClusterConfig:
    """Return the document that a text has. Raises ConfigError."""
    try:
        return ClusterConfig.model_validate_json(text)
    except ValidationError as error:
        where, reason = first_mistake(error, unit="field")
        if where == ("txmq",):
            reason = "the document is of another version; this txmq knows version 1"
        raise ConfigError(
            ".".join(where) or "document", reason, hint="txmq config export shows the form"
        ) from None


def read(session: CommandSession) -> ClusterConfig:
    """Return the document of a broker, as it is set now."""
    call = session.client.call
    return parse(
        json.dumps(
            {
                "topics": {
                    name: _topic(call("topic.show", name=name))
                    for name in _names(session, "topic.list", "topics", "name")
                },
                "groups": {
                    name: _group(call("group.show", group=name)["settings"])
                    for name in _names(session, "group.list", "groups", "group")
                },
                "policies": {
                    row["group"]: {name: row[name] for name in PolicyConfig.model_fields}
                    for row in session.read_pages("policy.list", "policies")["policies"]
                },
                "selections": {
                    row["name"]: row["select"]
                    for row in session.read_pages("dlq.saved", "selections")["selections"]
                },
                "users": {
                    row["user"]: {name: row[name] for name in UserConfig.model_fields}
                    for row in session.read_pages("user.list", "users")["users"]
                },
            }
        )
    )


def _names(session: CommandSession, call: str, field: str, name: str) -> Iterator[str]:
    for row in session.read_pages(call, field)[field]:
        yield row[name]


def _topic(shown: Mapping[str, Any]) -> dict[str, Any]:
    settings = {name: value for name, value in shown["settings"].items() if value != DEFAULT}
    settings = {n: v for n, v in settings.items() if n not in ("writable", "readable") or not v}
    made = {"partitions": shown["partitions"], "compatibility": settings.pop("compatibility", None)}
    schema = json.loads(shown["schema"]) if shown.get("schema") else None
    return made | {"settings": settings, "json_schema": schema}


def _group(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group that operators have set."""
    found: dict[str, Any] = {}
    for name in settings["altered"]:
        if name in TIMES:
            found[f"{name.removesuffix('_us')}_ms"] = settings[name] // 1_000
        else:
            found[name] = settings[name]
    return found | {name: settings[name] for name in UNLIMITED if settings[name]}


def changes(now: ClusterConfig, wanted: ClusterConfig) -> list[Change]:
    """Return the changes that lead from `now` to `wanted`, in their order."""
    waiting = {*wanted.groups, *wanted.policies} - set(now.groups)
    users = _changes_of_each(now.users, wanted.users, _user_changes)
    if wanted.users and not now.users:  # a first admin without a password locks all out
        users = iter([Change("users", NO_USERS)])
    return [
        *_changes_of_each(now.topics, wanted.topics, _topic_changes),
        *(Change(f"group {name}", NO_GROUP) for name in sorted(waiting)),
        *_changes_of_each(now.groups, _without(wanted.groups, waiting), _group_changes),
        *_changes_of_each(now.selections, wanted.selections, _selection_changes),
        *_changes_of_each(now.policies, _without(wanted.policies, waiting), _policy_changes),
        *users,
    ]


def _without(things: Mapping[str, C], names: AbstractSet[str]) -> dict[str, C]:
    return {name: one for name, one in things.items() if name not in names}


def _changes_of_each(
    now: Mapping[str, C], wanted: Mapping[str, C], compare: Compare[C]
) -> Iterator[Change]:
    for name, one in sorted(wanted.items(), key=lambda item: item[0]):
        yield from compare(name, now.get(name), one)


def _topic_changes(name: str, now: TopicConfig | None, wanted: TopicConfig) -> Iterator[Change]:
    what = f"topic {name}"
    settings = _set_fields(wanted.settings)
    if now is None:
        made = {"name": name, "partitions": wanted.partitions} | settings
        yield Change(
            what, f"create with {counted(wanted.partitions, 'partition')}", "topic.create", made
        )
        now = TopicConfig(partitions=wanted.partitions, settings=wanted.settings)
    if wanted.partitions > now.partitions:
        grown = {"name": name, "partitions": wanted.partitions}
        yield Change(
            what,
            f"grow from {now.partitions} to {counted(wanted.partitions, 'partition')}",
            "topic.grow",
            grown,
        )
    elif wanted.partitions < now.partitions:
        yield Change(
            what, f"has {counted(now.partitions, 'partition')}: their number can only grow"
        )
    standard = dict.fromkeys(TopicSettingsArgs.model_fields, DEFAULT) | STANDARD
    before, after = standard | _set_fields(now.settings), standard | settings
    altered = {field: after[field] for field in after if after[field] != before[field]}
    if altered:
        yield Change(what, _describe(before, altered), "topic.alter", {"name": name} | altered)
    yield from _schema_changes(name, now, wanted)


def _schema_changes(name: str, now: TopicConfig, wanted: TopicConfig) -> Iterator[Change]:
    given: dict[str, Any] = {}
    if now.json_schema != wanted.json_schema:
        none = wanted.json_schema is None
        given["json_schema"] = "" if none else json.dumps(wanted.json_schema)
    if wanted.compatibility not in (None, now.compatibility):
        given["compatibility"] = wanted.compatibility
    if given:
        yield Change(
            f"topic {name}",
            "set " + " and ".join(sorted(given)),
            "topic.schema",
            {"name": name} | given,
        )


def _group_changes(name: str, now: GroupConfig | None, wanted: GroupConfig) -> Iterator[Change]:
    before, after = UNLIMITED | _set_fields(now or GroupConfig()), UNLIMITED | _set_fields(wanted)
    altered = {field: after[field] for field in after if after[field] != before.get(field)}
    if altered:
        yield Change(
            f"group {name}", _describe(before, altered), "group.alter", {"group": name} | altered
        )


def _selection_changes(
    name: str, now: SelectionArgs | None, wanted: SelectionArgs
) -> Iterator[Change]:
    if now != wanted:
        args = {"name": name, "select": _set_fields(wanted)}
        yield Change(f"selection {name}", "save", "dlq.save", args)


def _policy_changes(name: str, now: PolicyConfig | None, wanted: PolicyConfig) -> Iterator[Change]:
    if now != wanted:
        args = {"group": name, "select": {}} | _set_fields(wanted)
        yield Change(f"policy {name}", "set", "policy.set", args)


def _user_changes(name: str, now: UserConfig | None, wanted: UserConfig) -> Iterator[Change]:
    what = f"user {name}"
    if now is None or set(now.roles) != set(wanted.roles):
        said = "add, without a password" if now is None else "set roles"
        args = {"name": name, "roles": list(wanted.roles), "new": now is None}
        yield Change(what, said, "user.set", args)
    before = {} if now is None else now.quota
    if before != wanted.quota:
        limits = {name: wanted.quota.get(name, 0) for name in {*before, *wanted.quota}}
        yield Change(what, "set quota", "user.quota", {"name": name} | limits)
    had = set(() if now is None else now.grants)
    for grant in sorted(had.symmetric_difference(wanted.grants)):
        verb, resource = grant.split(" ", 1)
        act = "revoke" if grant in had else "grant"
        yield Change(
            what, f"{act} {grant}", f"acl.{act}", {"name": name, "what": verb, "resource": resource}
        )


def _set_fields(args: Args) -> dict[str, Any]:
    """Return the fields that are set, as JSON has them."""
    return args.model_dump(mode="json", exclude_none=True, exclude_defaults=True)


def _describe(before: Mapping[str, Any], altered: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name}: {json.dumps(before.get(name, DEFAULT))} to {json.dumps(value)}"
        for name, value in altered.items()
    )

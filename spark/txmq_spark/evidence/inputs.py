"""Inputs of a reconciliation: groups, and their topics up to the published ends."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from txmq.errors import AccessDenied, BadRequest, ConfigError, LogChanged, UnknownTopic
from txmq_spark.database.mapping import Mapping
from txmq_spark.database.snapshot import DatabaseSnapshot
from txmq_spark.evidence.database_tables import GroupIdentity, GroupPartition
from txmq_spark.source.broker_link import BrokerLink
from txmq_spark.source.logs import Logs, Surveyed, survey_all
from txmq_spark.source.message_reading import message_look
from txmq_spark.source.options import ReadOptions


class Inputs(NamedTuple):
    """The snapshot and the published ends, and the connections that read them."""

    link: BrokerLink
    snapshot: DatabaseSnapshot | None
    groups: tuple[GroupIdentity, ...]
    firsts: dict[str, tuple[int, ...]]
    ends: dict[str, tuple[int, ...]]
    has_schemas: bool  # some topic has a JSON Schema
    topic_ids: dict[str, int]
    others: tuple[Surveyed, ...] = ()  # the other logs that are listed, and their ends

    @property
    def urls(self) -> list[str]:
        """The URLs of all logs."""
        return [self.link.url, *(place.link.url for place, _survey in self.others)]

    @property
    def may_lack_messages(self) -> bool:
        """True if retention has removed messages of the topics."""
        bounds = [one for _place, survey in self.others for one in survey.topics.values()]
        firsts = [*self.firsts.values(), *(one.firsts for one in bounds)]
        return any(first > 0 for of_topic in firsts for first in of_topic)


def fix_inputs(
    link: BrokerLink,
    snapshot: DatabaseSnapshot | None,
    names: Iterable[str],
    topics: Sequence[str] = (),
) -> Inputs:
    """Return the ends to classify up to, of these topics, else of those that the groups
    read. Raises ConfigError, RequestRejected.
    """
    groups: list[GroupIdentity] = []
    found = {topic: link.call("topic.show", name=topic) for topic in topics}
    for name in sorted(set(names)):
        shown = link.call("group.show", group=name)
        if not topics:
            found |= _there(link, set(shown["topics"]) - found.keys())
        read = found.keys() & shown["topics"]
        if not (topics or read):
            raise ConfigError(
                "group", f"group {name} reads no topic", hint="check the name of the group"
            )
        places = tuple(
            place
            for position in shown["positions"]
            if position["topic"] in found
            for place in GroupPartition.of(position)
        )
        groups.append(GroupIdentity(name, link.log_id, places))
    firsts, ends = (
        {topic: tuple(map(int, shown[bound])) for topic, shown in sorted(found.items())}
        for bound in ("firsts", "ends")
    )
    schemas = any(shown.get("schema") for shown in found.values())
    ids = {topic: int(shown["topic_id"]) for topic, shown in found.items()}
    others = tuple(_others(link, tuple(found))) if snapshot is not None else ()
    return Inputs(link, snapshot, tuple(groups), firsts, ends, schemas, ids, others)


def _others(link: BrokerLink, topics: tuple[str, ...]) -> list[Surveyed]:
    """Return what the logs have that are listed with that of the link."""
    if not link.log_list.logs:
        return []
    with Logs(ReadOptions(link.url, topics)) as logs:
        found = survey_all(logs.places(), message_look(logs.options))
    return [one for one in found if one.survey.log.log_id != link.log_id]


def _there(link: BrokerLink, topics: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the topics that exist, by name. Not all topics are listed for that: a user
    may know these only.
    """
    found = {}
    for topic in topics:
        with suppress(UnknownTopic):
            found[topic] = link.call("topic.show", name=topic)
    return found


def mapping_of_read(link: BrokerLink, mapping: Mapping, read: Collection[str]) -> Mapping:
    """Return the mapping without the tables none of whose topics is read: no row of
    them has a message there.

    Raises ConfigError for a topic that the broker does not have.
    """
    named = {topic for table in mapping.tables for topic in table.topics}
    for topic in sorted(named.difference(read)):
        try:
            link.call("topic.show", name=topic)
        except AccessDenied:  # of another group's topic, which this user may not know
            continue
        except (UnknownTopic, BadRequest):  # BadRequest: no topic may have that name
            raise ConfigError(
                "mapping",
                f"the broker has no topic {topic}",
                hint="name topics that there are: txmq topic list",
            ) from None
    return mapping.of_topics(read)


def require_same_topics(inputs: Inputs) -> None:
    """Raise LogChanged where a topic was made again meanwhile, or the log replaced: the
    evidence is then of other messages than the letters.
    """
    for topic, topic_id in inputs.topic_ids.items():
        if inputs.link.call("topic.show", name=topic)["topic_id"] != topic_id:
            raise LogChanged(
                f"topic {topic} was deleted and made again meanwhile", hint="run the job again"
            )

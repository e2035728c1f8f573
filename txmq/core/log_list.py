"""Rules of the list of logs that have topics in common.

The first log of the list keeps it, and numbers its versions. The others take copies: of
two, the later version. A topic keeps the logs that have its keys: the list says of each
log from which topic on it has some, by the ids that count up at the first log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID

from txmq.core.events.cluster import LogsListed
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.state.state import FIRST_OWN_ID
from txmq.errors import BadRequest
from txmq.model.cluster import ListedLog, LogList

if TYPE_CHECKING:
    from txmq.core.events.base import RecordContext
    from txmq.core.state.state import State

MOST_LOGS = 16
# Each welcome has the list, and a client takes little from a broker that it does not
# know yet.
MOST_CHARACTERS = 1_500
SHOW = "see the list: txmq cluster logs"


class ListLogs(NamedTuple):
    """Add logs by their addresses to the list that the log `own` keeps.

    Keys of topics that are there already stay where they are. With `together`, which
    only a new list can have, they are spread over all of its logs: clients had them so
    before there was a list. With `moved`, a log that is listed may have other addresses
    than before.
    """

    own: UUID
    logs: tuple[tuple[UUID, str], ...]
    together: bool = False
    moved: bool = False


class DrainLog(NamedTuple):
    """Give a log no keys of new topics, and no messages without a key."""

    own: UUID
    log_id: UUID


class RemoveLog(NamedTuple):
    """Take a log off the list, which is drained and has no keys of any topic."""

    own: UUID
    log_id: UUID


class CopyList(NamedTuple):
    """Take the list that the first of its logs keeps, unless this one is as late."""

    own: UUID
    copy: LogList


def decide_list(state: State, command: ListLogs, now: int) -> Outcome:
    known = {log.log_id: log for log in state.logs.logs}
    _refuse_elsewhere(state, command.own)
    if not known and (command.logs[0][0] != command.own or len(command.logs) == 1):
        raise BadRequest("a new list begins with this log, and has others", hint=SHOW)
    for log_id, addresses in command.logs:
        before = known.get(log_id)
        if before is None:
            if state.logs.logs and command.together:
                raise BadRequest(
                    "keys are not spread anew: the list has been begun",
                    hint="leave --together out: topics keep their logs, and new ones use all",
                )
            since = 0 if command.together or log_id == command.own else state.next_topic_id
            known[log_id] = ListedLog(log_id, addresses, since)
        elif before.addresses != addresses:
            if not command.moved:
                message = f"log {log_id} is listed already, at {before.addresses}"
                hint = (
                    f"is {addresses} a node of it, or a copy? if the log has moved there: --moved"
                )
                raise BadRequest(message, hint=hint)
            known[log_id] = before._replace(addresses=addresses)
    return _listed(state, tuple(known.values()), now)


def decide_drain(state: State, command: DrainLog, now: int) -> Outcome:
    found = _find(state, command.own, command.log_id)
    if found.is_drained:
        return Outcome(reply=state.logs)
    logs = tuple(
        log._replace(keys_to=state.next_topic_id) if log is found else log
        for log in state.logs.logs
    )
    if all(log.is_drained for log in logs):
        raise BadRequest(
            "all other logs are drained", hint="add a log before: txmq cluster add-log"
        )
    return _listed(state, logs, now)


def decide_remove(state: State, command: RemoveLog, now: int) -> Outcome:
    found = _find(state, command.own, command.log_id)
    if found is state.logs.logs[0]:
        raise BadRequest(
            f"log {found.log_id} is the first one", hint="it keeps the list, and stays"
        )
    if not found.is_drained:
        raise BadRequest(
            f"log {found.log_id} is not drained",
            hint=f"drain it before: txmq cluster drain-log {found.log_id}",
        )
    topics = _topics_with_keys(state, found)
    if topics:
        raise BadRequest(
            f"log {found.log_id} has keys of {len(topics)} topics, such as {topics[0]!r}",
            hint="it stays listed while there are topics from before it was drained",
        )
    return _listed(state, tuple(log for log in state.logs.logs if log is not found), now)


def decide_copy(state: State, command: CopyList, _now: int) -> Outcome:
    known, ids = state.logs, [log.log_id for log in command.copy.logs]
    if known.logs and known.logs[0].log_id != ids[0]:
        raise BadRequest(
            f"this log is listed by another one, at {known.logs[0].addresses}",
            hint="a log is in one list",
        )
    if command.own not in ids[1:]:
        raise BadRequest("this log has no copy of that list", hint=SHOW)
    if command.copy.version <= known.version:
        return Outcome(reply=known)
    return _recorded(command.copy)


def _refuse_elsewhere(state: State, own: UUID) -> None:
    """Refuse a change of a list that another log keeps."""
    logs = state.logs.logs
    if not logs or logs[0].log_id == own:
        return
    raise BadRequest(
        f"the list is kept by its first log, at {logs[0].addresses}",
        hint=f"use it there: --broker txmq://{logs[0].addresses}",
    )


def _find(state: State, own: UUID, log_id: UUID) -> ListedLog:
    _refuse_elsewhere(state, own)
    found = next((log for log in state.logs.logs if log.log_id == log_id), None)
    if found is None:
        raise BadRequest(f"there is no log {log_id} in the list", hint=SHOW)
    return found


def _topics_with_keys(state: State, log: ListedLog) -> list[str]:
    return [
        topic.name
        for topic in state.topics.values()
        if topic.topic_id < FIRST_OWN_ID and log.has_keys_of(topic.topic_id)
    ]


def _listed(state: State, logs: tuple[ListedLog, ...], now: int) -> Outcome:
    if logs == state.logs.logs:
        return Outcome(reply=state.logs)
    characters = sum(len(log.addresses) for log in logs)
    if len(logs) > MOST_LOGS or characters > MOST_CHARACTERS:
        raise BadRequest(
            f"{len(logs)} logs with addresses of {characters} characters are too many",
            hint=f"a list has up to {MOST_LOGS}, with {MOST_CHARACTERS} characters of addresses",
        )
    # Copies may have a later version than a first log that was restored from a backup.
    version = max(state.logs.version + 1, now)
    return _recorded(LogList(version, logs))


def _recorded(listed: LogList) -> Outcome:
    return Outcome((LogsListed(listed.version, listed.rows),), reply=listed)


def apply_listed(state: State, event: LogsListed, _context: RecordContext) -> None:
    state.logs = LogList.of(*event)


DECIDERS: Deciders = {
    ListLogs: decide_list,
    DrainLog: decide_drain,
    RemoveLog: decide_remove,
    CopyList: decide_copy,
}
APPLIERS: Appliers = {LogsListed: apply_listed}

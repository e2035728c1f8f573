"""Logs that are added to others: topics first, then the list, then its copies.

Each step does nothing where it was done before. So a command that was cut short is
repeated, and operators who add logs at the same time do not undo one another's work.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from txmq.cli import command
from txmq.cli.command import CommandSession
from txmq.client.protocol.address import parse_url, place_of, url_at
from txmq.errors import ConfigError, TxmqError

if TYPE_CHECKING:
    from txmq.cli.command import CommandClient

LOCAL = re.compile(r"127\.|localhost:|\[::1\]")


@contextmanager
def broker_at(session: CommandSession, url: str) -> Iterator[CommandSession]:
    """Connect to another broker."""
    client = command.connect(url)
    try:
        yield CommandSession(session.out, client, url)
    finally:
        client.close()


def addresses_in(url: str) -> str:
    """Return the addresses of a URL, as they are listed."""
    return ",".join(map(str, parse_url(url)))


class LogAdder:
    """Adds the logs at some URLs to the list that the session's log keeps."""

    def __init__(self, session: CommandSession, urls: Sequence[str]) -> None:
        """Look at all of them. Raises ConfigError for those that cannot be added."""
        self._session, self._urls = session, urls
        described = session.client.call("cluster.describe")
        self._own, self._listed = described["log_id"], described["logs"]["logs"]
        if self._listed and self._listed[0]["log_id"] != self._own:
            first = self._listed[0]["addresses"]
            raise ConfigError(
                "--broker",
                "this log is listed by another one, which keeps the list",
                hint=f"use --broker {url_at(place_of(session.url), [first])}",
            )
        known = [log["addresses"] for log in self._listed] or [addresses_in(session.url)]
        _require_reachable([*known, *map(addresses_in, urls)])
        self._found = [self._look_at(url) for url in urls]

    def _look_at(self, url: str) -> str:
        """Return the id of the log at a URL."""
        with broker_at(self._session, url) as other:
            described = other.client.call("cluster.describe")
        log_id, listed = str(described["log_id"]), described["logs"]["logs"]
        if log_id == self._own:
            raise ConfigError(
                place_of(url), "a node of the same log, or a copy of it", hint="name another log"
            )
        if listed and listed[0]["log_id"] != self._own:
            raise ConfigError(
                place_of(url),
                f"its log is listed by another one, at {listed[0]['addresses']}",
                hint="a log is in one list",
            )
        return log_id

    def add(self, *, together: bool | None, moved: bool, **why: str) -> dict[str, Any]:
        """Add the logs, and return the list."""
        mine = set(_topics_of(self._session))
        common = set[str]()
        for url in self._urls:
            with broker_at(self._session, url) as other:
                theirs = set(_topics_of(other))
                common |= mine & theirs
                if not together:
                    for name in sorted(mine - theirs):
                        _make_topic(self._session.client, other.client, name)
        logs = [
            {"log_id": log_id, "addresses": addresses_in(url)}
            for log_id, url in zip(self._found, self._urls, strict=True)
        ]
        if not self._listed:
            if common and together is None:
                raise ConfigError(
                    "--together",
                    f"topics are at several of these logs: {', '.join(sorted(common)[:5])}",
                    hint="--together: programs name these logs in one list, in this order, and "
                    "keys are spread over them; --apart: keys are at the first log",
                )
            own = {"log_id": self._own, "addresses": addresses_in(self._session.url)}
            logs.insert(0, own)
        call = self._session.client.call
        return call("cluster.add_logs", logs=logs, together=bool(together), moved=moved, **why)


def _require_reachable(listed: Sequence[str]) -> None:
    """Refuse addresses of this machine beside those of others: programs elsewhere would
    find nobody there, or another log.
    """
    local = [text for text in listed if LOCAL.match(text)]
    if local and len(local) < len(listed):
        raise ConfigError(
            "--broker",
            f"programs on other machines cannot reach {local[0]}",
            hint="name each broker by an address that programs use, this one by --broker as well",
        )


def _topics_of(session: CommandSession) -> list[str]:
    return [topic["name"] for topic in session.read_pages("topic.list", "topics")["topics"]]


def _make_topic(model: CommandClient, client: CommandClient, name: str) -> None:
    """Make a topic as the model has it, before messages come."""
    shown = model.call("topic.show", name=name)
    settings, schema = shown["settings"], shown["schema"]
    rule = settings.pop("compatibility", None)
    client.call("topic.create", name=name, partitions=shown["partitions"], **settings)
    if schema:
        client.call("topic.schema", name=name, json_schema=schema, compatibility=rule)


def copy_list(session: CommandSession, listed: dict[str, Any], **why: str) -> list[dict[str, Any]]:
    """Give each log a copy of the list; return what became of that."""
    copies = list[dict[str, Any]]()
    for log in listed["logs"][1:]:
        error = ""
        try:
            with broker_at(session, url_at(session.url, [log["addresses"]])) as other:
                other.client.call("cluster.copy_logs", **listed, **why)
        except TxmqError as refusal:
            error = str(refusal)
        copies.append({"log_id": log["log_id"], "addresses": log["addresses"], "error": error})
    return copies


def log_rows(session: CommandSession) -> list[dict[str, Any]]:
    """Return the listed logs, which version of the list each of them has, and what is
    wrong with it.
    """
    rows = list[dict[str, Any]]()
    for log in session.client.call("cluster.describe")["logs"]["logs"]:
        version, error = None, ""
        try:
            with broker_at(session, url_at(session.url, [log["addresses"]])) as other:
                described = other.client.call("cluster.describe")
        except TxmqError as refusal:
            error = str(refusal)
        else:
            version = described["logs"]["version"]
            if described["log_id"] != log["log_id"]:
                error = f"log {described['log_id']} is there"
        rows.append({**log, "drained": log["keys_to"] > 0, "version": version, "error": error})
    latest = max((row["version"] or 0 for row in rows), default=0)
    for row in rows:
        if not row["error"] and row["version"] < latest:
            row["error"] = "an older list: repeat txmq cluster add-log URL"
    return rows

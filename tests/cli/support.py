"""Commands run in this process, and a client with scripted replies."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Self
from unittest.mock import patch
from uuid import UUID

import pytest
import typer
from typer.testing import CliRunner, Result

from txmq.cli.app import command_line
from txmq.client.blocking.messages import BlockingMessageCalls
from txmq.client.protocol.awaited.messages import AwaitedMessageCalls
from txmq.client.protocol.transaction.job_decision import JobOutcome
from txmq.model.durations import Duration
from txmq.model.message import COMMIT, Message, Receipt

NOBODY = "txmq://127.0.0.1:1"
TOKEN = "019a0000000070008000000000000001"
BY_ADA = {"operator": "ada", "reason": ""}
WHY = ("--reason", "lost on 3 May")


@dataclass
class ScriptedJob:
    """A job with one bundle, whose messages are sent by its decision."""

    token: UUID
    client: ScriptedClient
    sent: list[tuple[str, Message, int | None]] = field(default_factory=list)

    def group(self) -> Self:
        return self

    async def send(self, topic: str, body: bytes, **fields: Any) -> None:
        self.sent.append((topic, Message(body, **fields), None))

    async def store(self) -> UUID:
        return self.token

    async def decide(self, winners: list[UUID]) -> JobOutcome:
        assert winners == [self.token]
        self.client.sent += self.sent
        self.client.committed.add(self.token.hex)
        return JobOutcome(COMMIT, repeated=False)

    async def wait_published(self, winners: list[UUID]) -> bool:
        return winners == [self.token]


class AwaitedClient(AwaitedMessageCalls):
    """The calls of a scripted client, as all faces have them."""

    _core: Any

    def __init__(self, client: ScriptedClient) -> None:
        self._client, self._core = client, self

    async def call(self, name: str, args: dict[str, Any]) -> dict[str, Any]:
        return self._client.call(name, **args)

    def job(self, token: Any = None, *, expire_after: Duration = 0.0) -> Any:
        assert expire_after
        return ScriptedJob(token, self._client)


@dataclass
class ScriptedClient(BlockingMessageCalls):
    """A client that replies in turn, or raises the errors among its replies; it records
    the calls.
    """

    replies: list[dict[str, Any] | Exception] = field(default_factory=list)
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    sent: list[tuple[str, Message, int | None]] = field(default_factory=list)
    committed: set[object] = field(default_factory=set)  # jobs
    url: str = ""
    closed: bool = False

    def __post_init__(self) -> None:
        self._awaited = AwaitedClient(self)

    def call(self, name: str, /, **args: object) -> dict[str, Any]:
        if name == "job.show":
            return {"outcome": "COMMIT" if args["token"] in self.committed else None}
        self.calls.append((name, args))
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def send(
        self,
        topic: str,
        body: bytes,
        *,
        key: str | None = None,
        tag: str | None = None,
        headers: Mapping[str, str] | None = None,
        partition: int | None = None,
        deliver_at: int | datetime | None = None,
        delay: float | timedelta | None = None,
    ) -> Receipt:
        self.sent.append(
            (topic, Message(body, key, tag, headers, deliver_at, delay=delay), partition)
        )
        return Receipt("ab" * 16 + "-7", topic, partition or 0, 42, duplicate=False)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedClient]:
    """The client of all commands, at any address."""
    scripted = ScriptedClient()

    def connect(url: str) -> ScriptedClient:
        scripted.url = url
        return scripted

    monkeypatch.setattr("txmq.cli.command.connect", connect)
    monkeypatch.setattr("txmq.cli.options.getuser", lambda: "ada")
    monkeypatch.delenv("TXMQ_BROKER", raising=False)
    yield scripted
    assert scripted.closed or not scripted.url, "a command left its client open"


def reply(*arguments: str, broker: str, stdin: bytes = b"") -> Any:
    """Return the JSON that a command prints: an object, or a list of the objects on
    several lines. The command must succeed.
    """
    result = run(*arguments, "--json", "--broker", broker, stdin=stdin)
    assert result.exit_code == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    return lines[0] if len(lines) == 1 else lines


def run(*arguments: str, stdin: str | bytes | None = None) -> Result:
    """Run `txmq ARGUMENTS`. Errors that a command should have caught are raised."""
    # typer would build all commands anew, which takes longer than to run most of them
    with patch("typer.testing._get_command", lambda _app: command_line()):
        result = CliRunner().invoke(typer.Typer(), list(arguments), input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


# the reply of a log that has no delivery of a message
NO_DELIVERIES: dict[str, Any] = {
    "deliveries": [], "whole": True, "damaged": False, "from_at": None, "until_at": None,
    "next": None, "known": [],
}  # fmt: skip

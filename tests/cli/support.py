"""Commands run in this process, and a client with scripted replies."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from txmq.cli.app import app
from txmq.model.message import Message, Receipt

NOBODY = "txmq://127.0.0.1:1"
TOKEN = "019a0000000070008000000000000001"
BY_ADA = {"operator": "ada", "reason": ""}
WHY = ("--reason", "lost on 3 May")


@dataclass
class ScriptedTransaction:
    """The sends of one transaction."""

    sent: list[tuple[str, Message, int | None]] = field(default_factory=list)

    def send(
        self,
        topic: str,
        body: bytes,
        *,
        key: str | None = None,
        tag: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.sent.append((topic, Message(body, key, tag, headers), None))


@dataclass
class ScriptedClient:
    """A client that replies in turn, or raises the errors among its replies; it records
    the calls.
    """

    replies: list[dict[str, Any] | Exception] = field(default_factory=list)
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    sent: list[tuple[str, Message, int | None]] = field(default_factory=list)
    url: str = ""
    closed: bool = False

    def call(self, name: str, /, **args: object) -> dict[str, Any]:
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

    @contextmanager
    def transaction(self) -> Iterator[ScriptedTransaction]:
        """Record the sends of the block, if it ends."""
        tx = ScriptedTransaction()
        yield tx
        self.sent += tx.sent

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
    result = CliRunner().invoke(app, list(arguments), input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result

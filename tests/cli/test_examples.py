"""Examples of the help texts, tried in turn against a broker that runs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.cli.peer import peer
from tests.cli.support import reply, run
from tests.cli.test_every_command import EACH
from txmq.model.decider import ByChecker
from txmq.testing.processes import Running, running

TOKEN = "019a0000000070008000000000000001"  # in the examples
MESSAGES = 18  # in partition 0 of orders; the examples name the last one
ERROR = {"type": "KeyError", "text": "no such order", "fingerprint": "f-1"}
TOPIC = (
    "topic create", "topic set", "topic alter", "topic list", "topic show", "topic schema set",
    "topic schema check", "topic schema show", "topic schema remove",
)  # fmt: skip
MESSAGE = (
    "send", "tail", "message find", "message delayed", "message show", "message recall", "trace",
)  # fmt: skip
GROUP = (
    "group list", "group show", "group pause", "group resume", "group alter", "group clone",
    "group reset", "group skip",
)  # fmt: skip
LETTERS = (
    "dlq list", "dlq show", "dlq stats", "dlq note", "dlq select save", "dlq select list",
    "dlq select delete", "dlq edit", "dlq export", "dlq import", "dlq redrive", "dlq replay",
    "plan create", "plan list", "plan show", "plan letters", "plan export", "plan leave",
    "plan start", "plan pause", "plan resume", "plan cancel", "plan delete", "policy set",
    "policy list", "policy delete", "dlq abandon",
)  # fmt: skip
BROKER = (
    "config export", "config import", "config show", "config reload", "stats", "limits", "clock",
    "audit", "user list", "user me", "user token list", "acl list", "tx list", "tx check",
    "tx show", "tx commit", "xa list", "log backup",
)  # fmt: skip
LAST = ("group delete", "topic delete")
STOPPED = ("log verify", "log dump", "log find", "log repair", "log rebuild", "log restore")


@dataclass
class Shop:
    """A broker with dead letters of the group billing, and what examples stand for."""

    process: Running
    url: str
    values: dict[str, str] = field(default_factory=dict)

    def try_example(self, name: str) -> str:
        """Run the example of a command, which must succeed; return its output."""
        line, _, file = EACH[name].epilog.removeprefix("Example: txmq ").partition(" > ")
        for word, value in self.values.items():
            line = line.replace(word, value)
        result = run(*shlex.split(line), stdin=b"y\n" * 2)
        assert result.exit_code == 0, f"{line}: {result.output}"
        if file:
            Path(file).write_text(result.stdout)
        return result.stdout


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EDITOR", """sh -c 'echo more >> "$0"'""")
    data, settings = tmp_path / "data", tmp_path / "broker.toml"
    settings.write_text(f'[broker]\ndata = "{data}"\nlisten = "127.0.0.1:0"\n')
    (tmp_path / "order.schema.json").write_text('{"type": "object"}')
    with running(tmp_path, "broker", "--create-topics", "--config", str(settings)) as process:
        url = process.first_line().removeprefix("ready ")
        monkeypatch.setenv("TXMQ_BROKER", url)
        values = {"/var/lib/txmq/archive": str(data), "/var/lib/txmq": str(data)}
        values |= {"/backup": str(tmp_path / "backup"), "/srv/txmq": str(tmp_path / "restored")}
        yield Shop(process, url, values)


def test_examples_do_what_they_show(shop: Shop, tmp_path: Path) -> None:
    for name in TOPIC:
        shop.try_example(name)
    for number in range(MESSAGES):
        sent = reply("send", "orders", str(number), "--partition", "0", broker=shop.url)
    later = reply("send", "orders", "later", "--delay", "1h", broker=shop.url)
    shop.values[f"show {TOKEN}-0"] = f"show {sent['message_id']}"
    shop.values[f"recall {TOKEN}-0"] = f"recall {later['message_id']}"
    for name in MESSAGE:
        shop.try_example(name)
    assert "o-17" in (tmp_path / "o-17.html").read_text()
    with peer(shop.url) as billing:
        billing.dead_letters("billing", "orders", MESSAGES + 1, [ERROR])
        shop.values[TOKEN] = billing.half("orders", b"x", ByChecker("shop"))
    reply("topic", "create", "repair", broker=shop.url)
    for name in (*GROUP, *LETTERS, *BROKER, *LAST):
        shop.try_example(name)
    shop.values["2026-07-01T12:00Z"] = datetime.now(UTC).isoformat()
    assert shop.process.terminate() == 0
    for name in STOPPED:
        shop.try_example(name)
    restored = run("log", "verify", "--data", str(tmp_path / "restored"), "--json")
    assert (restored.exit_code, json.loads(restored.stdout)["damaged"]) == (0, [])

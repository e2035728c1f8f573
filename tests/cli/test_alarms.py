"""`txmq alarms`, against a broker that runs."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.broker.monitoring.listening import webhook
from tests.cli.peer import peer
from tests.cli.support import reply, run
from txmq.broker.monitoring.alarm_rules import ALARM_RULES
from txmq.cli.app import command_line
from txmq.model.decider import ByChecker
from txmq.testing.own_broker import OwnBroker
from txmq.testing.wait import PATIENCE_S, wait_until


def is_command(words: list[str]) -> bool:
    """Return whether a text that goes on with these words names a command."""
    command: Any = command_line()
    for word in words:
        if not hasattr(command, "commands") or word not in command.commands:
            break
        command = command.commands[word]
    return not hasattr(command, "commands") or bool(command.invoke_without_command)


def test_each_command_that_an_alarm_names_is_one() -> None:
    rules = (Path(__file__).parents[2] / "packaging/prometheus/txmq.rules.yml").read_text()
    texts = [rule.action for rule in ALARM_RULES] + re.findall("action: (.*)", rules)
    named = [found for text in texts for found in re.findall(r"\btxmq ((?:[a-z]+ ?)+)", text)]
    assert len(named) > 30
    assert [words for words in named if not is_command(words.split())] == []


@pytest.mark.parametrize("words", ["brokers", "group see", "retry"])
def test_a_name_of_no_command_is_found(words: str) -> None:
    assert not is_command(words.split())


def test_alarms_are_shown_and_make_the_status_1(tmp_path: Path) -> None:
    with OwnBroker(tmp_path, "[alarms]\nundecided_s = 0.2\n") as broker:
        assert reply("alarms", broker=broker.url) == {"alarms": []}
        assert run("alarms", "--broker", broker.url).stdout == "no alarms\n"
        reply("topic", "create", "halves", "--partitions", "1", broker=broker.url)
        with peer(broker.url) as shop:
            token = shop.half("halves", b"lost", ByChecker("shop"))
        wait_until(lambda: run("alarms", "--broker", broker.url).exit_code == 1, what="an alarm")
        [alarm] = json.loads(run("alarms", "--json", "--broker", broker.url).stdout)["alarms"]
        assert (alarm["name"], alarm["severity"]) == ("transaction.oldest_undecided", "warning")
        assert token in alarm["text"]
        assert "txmq tx show" in alarm["action"]
        reply("tx", "rollback", token, "--reason", "lost", broker=broker.url)
        assert reply("alarms", broker=broker.url) == {"alarms": []}
        assert broker.stop() == 0
    assert broker.log.count("alarm.raised") == broker.log.count("alarm.cleared") == 1


def test_alarms_go_out_by_themselves_and_their_receivers_can_be_tested(tmp_path: Path) -> None:
    with webhook() as server:
        settings = f"""
[alarms]
undecided_s = 0.2
[[alarms.webhook]]
name = "chat"
url = "{server.url}"
form = "slack"
"""
        with OwnBroker(tmp_path, settings) as broker:
            shown = reply("alarms", "test", broker=broker.url)
            assert shown == {"receivers": [{"receiver": "chat", "error": ""}]}
            tested = [server.posts.get(timeout=PATIENCE_S).body["text"] for _ in range(2)]
            assert ["raised" in text for text in tested] == [True, False]
            reply("topic", "create", "halves", "--partitions", "1", broker=broker.url)
            with peer(broker.url) as shop:
                token = shop.half("halves", b"lost", ByChecker("shop"))
            assert token in server.posts.get(timeout=PATIENCE_S).body["text"]
            reply("tx", "rollback", token, "--reason", "lost", broker=broker.url)
            text = server.posts.get(timeout=PATIENCE_S).body["text"]
            assert "resolved transaction.oldest_undecided" in text
            settings = reply("config", "show", broker=broker.url)
            assert server.url not in json.dumps(settings)
            assert broker.stop() == 0


def test_a_receiver_that_hangs_keeps_nobody_waiting(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(PATIENCE_S)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        settings = f'[[alarms.webhook]]\nname = "hangs"\nurl = "{url}"\n'
        with OwnBroker(tmp_path, settings) as broker:
            reply("topic", "create", "orders", "--partitions", "1", broker=broker.url)
            reply("send", "orders", "{}", broker=broker.url)
            with peer(broker.url) as shop:
                shop.dead_letters("billing", "orders", 1)
            told, _address = listening.accept()
            with told:
                assert told.recv(4) == b"POST"
                [alarm] = json.loads(run("alarms", "--json", "--broker", broker.url).stdout)[
                    "alarms"
                ]
                assert (alarm["name"], alarm["about"]) == ("group.letters", "group:billing")
                [group] = reply("group", "list", broker=broker.url)["groups"]
                assert list(group)[:2] == ["group", "unprocessed"]
                assert (group["unprocessed"], group["letters"]) == (1, 1)
            assert broker.stop() == 0

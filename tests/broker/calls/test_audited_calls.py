"""Each call of an operator submits what leaves a message in the audit topic."""

from __future__ import annotations

from typing import Any

import pytest

from tests.broker.calls.test_letter_calls import Office
from tests.broker.support import BrokerInMemory, FakeNode
from txmq.core import audit
from txmq.core.audit import AUDIT_TOPIC_ID, Audited
from txmq.core.topics.topics import CreateTopic
from txmq.model.own_topics import AUDIT
from txmq.wire.calls.registry import CALLS

TOKEN = "01" * 16
LOG = {"log_id": TOKEN, "addresses": "a:1"}
GROUP = {"group": "g"}
STORE = GROUP | {"store": "02" * 16}
PLACE = {"topic": "t", "partition": 0, "offset": 1}
GRANT = {"name": "root", "what": "read", "resource": "topic:t"}
LETTERS = GROUP | {"letters": [["t", 0, 1]]}
# with what they need at least, so that something is submitted
ARGUMENTS: dict[str, dict[str, Any]] = {
    "topic.alter": {"name": "t", "writable": True},
    "topic.grow": {"name": "t", "partitions": 2},
    "topic.schema": {"name": "t", "json_schema": "{}"},
    "topic.delete": {"name": "t"},
    "group.alter": GROUP,
    "group.delete": GROUP,
    "group.reset": GROUP | {"topic": "t"},
    "group.clone": GROUP | {"to": "other"},
    "group.pause": GROUP,
    "group.resume": GROUP,
    "tx.decide": {"token": TOKEN, "outcome": "ROLLBACK"},
    "xa.heuristic": {"token": TOKEN, "branch": "b", "decided": "COMMIT", "found": "rolled back"},
    "xa.forget": {"token": TOKEN},
    "dlq.replay": LETTERS,
    "dlq.abandon": LETTERS,
    "dlq.edit": GROUP | PLACE | {"edits": 0, "body": "eA=="},
    "dlq.redrive": LETTERS | {"to": "t"},
    "dlq.try": GROUP | PLACE | {"member": "a"},
    "dlq.exported": GROUP | {"letters": [["t", 0, 1, 2, 0]]},
    "dlq.note": GROUP | {"fingerprint": "f1", "text": "seen"},
    "dlq.save": {"name": "mine", "select": {}},
    "plan.create": GROUP | {"name": "p", "select": {}},
    **{
        f"plan.{order}": {"name": "p"}
        for order in (
            "freeze",
            "approve",
            "start",
            "pause",
            "resume",
            "cancel",
            "abandon",
            "delete",
        )
    },
    "plan.leave": {"name": "p", "letters": [["t", 0, 1]]},
    "policy.set": GROUP | {"after_s": 60, "select": {}},
    "retry.now": LETTERS,
    "retry.bury": LETTERS,
    "retry.skip": LETTERS,
    "recover.adopt": STORE,
    "recover.tell": STORE | {"entries": []},
    "log.accept": {},
    "cluster.step_down": {},
    "cluster.add_logs": {"logs": [LOG]},
    "cluster.drain_log": {"log_id": TOKEN},
    "cluster.remove_log": {"log_id": TOKEN},
    "cluster.copy_logs": {"version": 1, "logs": [LOG | {"keys_from": 0}]},
    "clock.confirm": {},
    "user.set": {"name": "root", "roles": ["admin"]},
    "user.delete": {"name": "root"},
    "user.quota": {"name": "root", "topics": 5},
    "token.add": {"name": "root", "token": "t", "digest": "ab" * 32, "expire_s": 3_600},
    "token.revoke": {"name": "root", "token": "t"},
    "acl.grant": GRANT,
    "acl.revoke": GRANT,
}
READS = {"audit.list"}  # `operator` is what to look for


def test_no_call_of_an_operator_is_left_out() -> None:
    calls = {name for name, args in CALLS.items() if "operator" in args.model_fields}
    assert calls - READS == ARGUMENTS.keys()


@pytest.mark.parametrize("name", ARGUMENTS)
def test_each_call_of_an_operator_is_audited(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    office = Office(2, FakeNode())
    submitted: list[Any] = []
    submit = office.broker.engine.submit

    def note(command: object, *args: Any, **options: Any) -> None:
        submitted.append(command)
        submit(command, *args, **options)

    monkeypatch.setattr(office.broker.engine, "submit", note)
    office.client.call(name, operator="kim", reason="why not", **ARGUMENTS[name])
    office.broker.pass_time(0)
    entries = [command.entry for command in submitted if isinstance(command, Audited)]
    assert [(entry.call, entry.operator, entry.reason) for entry in entries] == [
        (name, "kim", "why not")
    ]
    assert all(key not in entries[0].arguments for key in ("body", "entries", "operator"))


def test_the_topic_is_there_from_the_first_start_and_is_not_listed() -> None:
    broker = BrokerInMemory()
    topic = broker.engine.state.topics[AUDIT]
    assert (topic.topic_id, topic.settings.writable) == (AUDIT_TOPIC_ID, False)
    assert broker.ask("topic.list")["topics"] == []
    assert [one["name"] for one in broker.ask("topic.list", own=True)["topics"]] == [AUDIT]
    assert broker.ask("topic.show", name=AUDIT)["settings"]["retention_ms"] == 365 * 86_400_000


def test_a_broker_that_is_upgraded_makes_the_topic_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as older:
        older.setattr(audit, "topic_events", lambda _state: ())
        broker = BrokerInMemory()
        broker.do(CreateTopic("t", 1))
    assert AUDIT not in broker.engine.state.topics
    for _start in range(2):
        broker.engine.boot("newer")
    assert sorted(broker.engine.state.topics_by_id) == [1, AUDIT_TOPIC_ID]
    assert broker.do(CreateTopic("u", 1)).topic_id == 2

"""A broker whose alarms are observed, and a member of a group that causes some."""

from __future__ import annotations

from itertools import count
from typing import Any

from tests.broker.support import BrokerInMemory, FakeNode, FakeResolver
from txmq.broker.checkback.resolvers import ResolverStatus
from txmq.config.broker import SettingsFile
from txmq.core.transactions.decisions import DecideTransaction
from txmq.model.message import Decision, Message
from txmq.model.units import SECOND
from txmq.wire.data_requests import Ack, AckedRange, Fetch, Opcode, pack_ack, pack_fetch

SETTINGS = SettingsFile.model_validate(
    {
        "broker": {"data": "/data"},
        "checks": {"first_s": 6.0, "then_s": 10.0, "longest_s": 10.0, "in_doubt_after": 2},
        "alarms": {
            "undecided_s": 60.0,
            "open_s": 40.0,
            "conflict_s": 100.0,
            "resolver_s": 5.0,
            "cleanup_s": 200.0,
            "fence_s": 300.0,
            "store_s": 200.0,
            "store_owner_s": 60.0,
            "no_member_s": 120.0,
        },
    }
)
STORE = "5" * 32
KNOWN = {"name", "severity", "since", "text", "action", "about"}


class AlarmBroker:
    """A broker whose alarms are observed."""

    def __init__(self) -> None:
        self.oracle, self.numbers = FakeResolver(), count(1)
        self.node = FakeNode()
        self.broker = BrokerInMemory(self.oracle, SETTINGS, self.node)
        self.broker.start()

    def names(self) -> list[str]:
        return [alarm["name"] for alarm in self.alarms()]

    def alarms(self) -> list[dict[str, Any]]:
        alarms: list[dict[str, Any]] = self.broker.ask("broker.alarms")["alarms"]
        assert all(alarm.keys() == KNOWN for alarm in alarms)
        assert all(alarm[name] for alarm in alarms for name in KNOWN - {"about"})
        return alarms

    def half(self, number: int = 1, **options: Any) -> bytes:
        return bytes.fromhex(self.broker.half(number, Message(b"m", "k"), **options))

    def decide(self, token: bytes, outcome: Decision) -> None:
        self.broker.do(DecideTransaction(token, outcome, "producer shop"))

    def resolver(self, *, failing_s: float = 0.0, kept_s: float = 0.0) -> None:
        now = self.broker.now()
        since = [round(now - seconds * SECOND) if seconds else 0 for seconds in (failing_s, kept_s)]
        told = ("connection refused" if failing_s else "", "log 7 is silent" if kept_s else "")
        self.oracle.is_like = (ResolverStatus("shop", now, since[0], told[0], since[1], told[1]),)


class Handler:
    """A member of an ordered group that has one message."""

    def __init__(self, desk: AlarmBroker, *, group: str = "billing", **settings: Any) -> None:
        self._desk, self._client, self._group = desk, desk.broker.connect(), group
        self.publish()
        options = {"mode": "ordered", "topics": ["t"], "instance": "i", "member": "m"} | settings
        joined: Any = self._client.call("consumer.join", group=group, **options)
        self._known = {"group": group, "member": "m", "generation": joined["generation"]}
        self.fetch()

    def fail(self, **how: Any) -> None:
        place = {"topic": "t", "partition": 0, "offset": 0} | how
        self._client.call("consumer.nack", **self._known, **place)

    def ack(self, offset: int) -> None:
        acked = (AckedRange("t", 0, offset, offset + 1),)
        ack = Ack(self._known["generation"], self._group, "m", acked)
        assert self._client.ask(Opcode.ACK, pack_ack(ack)).status == 0

    def set_severity(self, severity: str) -> None:
        args = {"group": self._group, "alarm_severity": severity, "operator": "ada"}
        self._client.call("group.alter", **args)

    def store(self, state: str = "stored") -> None:
        """Keep the message in a local store, or tell what became of it there."""
        topic_id = self._desk.broker.engine.state.topics["t"].topic_id
        entry = ["t", topic_id, 0, 0, state, 1, 0, ["KeyError", "text", ""], 0, 0]
        self._client.call("consumer.stored", **self._known, store=STORE, host="h", entries=[entry])

    def leave(self) -> None:
        self._client.call("consumer.leave", group=self._group, member="m", instance="i")

    def publish(self) -> None:
        self._desk.decide(self._desk.half(next(self._desk.numbers)), Decision.COMMIT)

    def fetch(self) -> None:
        wanted = Fetch(self._known["generation"], 0, 1 << 20, 100, self._group, "m")
        self._client.ask(Opcode.FETCH, pack_fetch(wanted))

    def extend(self) -> None:
        self._client.call("consumer.extend", **self._known)

    def abandon(self) -> None:
        args: dict[str, Any] = {
            "group": "billing",
            "letters": [["t", 0, 0]],
            "operator": "ada",
            "reason": "no use",
        }
        self._client.call("dlq.abandon", **args)

    def plan(self, what: str, **args: Any) -> None:
        self._client.call(f"plan.{what}", **{"name": "p", "operator": "ada"} | args)

    def resume(self) -> None:
        self._client.call("group.resume", group="billing", operator="ada")

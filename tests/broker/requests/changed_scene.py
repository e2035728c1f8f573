"""A broker with something of everything that long reads look at, and the reads, which
are made one step at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import CodeType, GeneratorType
from typing import Any, NamedTuple
from unittest.mock import patch

from tests.broker.support import DATABASE, BrokerInMemory, parts_of
from txmq.admin import site as site_module
from txmq.admin.http_values import HttpReply
from txmq.admin.site import AdminSite
from txmq.batch import encode, verify
from txmq.config.broker import load_broker
from txmq.core.topics.sends import StoreBatch
from txmq.core.topics.topics import CreateTopic
from txmq.core.transactions.decisions import DecideTransaction
from txmq.errors import RequestRejected
from txmq.model.message import Decision, Message
from txmq.wire.data_requests import (
    Ack,
    AckedRange,
    Fetch,
    Opcode,
    ReadLetters,
    pack_ack,
    pack_fetch,
    pack_read_letters,
)
from txmq.wire.frames import encode_frame

WHO: dict[str, Any] = {"operator": "ada", "reason": "as it comes"}
MESSAGES = 16
STORE = "5" * 32
TOPICS = {"m": 2, "n": 3, "c": 1, "t": 1}  # `n` is in no group, `t` has transactions
LETTERS = [["m", 0, offset] for offset in range(8)]


class Read(NamedTuple):
    """A read in steps, and who is answered."""

    name: str
    steps: GeneratorType[None, None, Any]
    answer: Callable[[Any], None]


class ChangedScene:
    """Reads begin with `begin_reads`. `failures` has what is neither an answer nor a
    refusal; `seen` the functions that made steps.
    """

    def __init__(self) -> None:
        self.broker = BrokerInMemory()
        self.broker.start()
        self.client, self.reader = self.broker.connect(), self.broker.connect()
        self.reads: list[Read] = []
        self.seen: set[CodeType] = set()
        self.failures: list[str] = []
        self.answers: dict[str, list[Any]] = {}
        self.answered: list[str] = []  # the names of those that are to be there
        self._sequence = 0
        for name, partitions in TOPICS.items():
            self.broker.do(CreateTopic(name, partitions))
        self.generations = {group: self._join(group) for group in ("g", "h", "o")}
        self._send_all()
        self._fail_some()
        self.tokens = self._transact()
        self.broker.pass_time(2)
        self._make_plans()

    def ask(self, name: str, /, **args: Any) -> Any:
        return self.broker.ask(name, **args)

    def _join(self, group: str) -> int:
        mode = "ordered" if group == "o" else "concurrent"
        member = {"member": "a", "instance": "a", "mode": mode, "topics": ["m"]}
        joined: Any = self.client.call("consumer.join", group=group, **member)
        return int(joined["generation"])

    def send(self, topic: str, partition: int, message: Message) -> None:
        data = encode([message], producer_id=b"p" * 16, epoch=0, sequence=self._sequence, born_at=1)
        self._sequence += 1
        self.broker.do(StoreBatch(topic, 0, partition, data, verify(data)))

    def _send_all(self) -> None:
        for number in range(MESSAGES):
            headers = {"tenant": "red"} if number % 2 else None
            self.send("m", 0, Message(b"body", f"k{number % 4}", headers=headers))
        for partition in range(3):
            self.send("n", partition, Message(b"body", "k1"))
        self.send("m", 1, Message(b"later", "k1", delay=3_600))

    def fetch(self, group: str) -> None:
        wanted = Fetch(self.generations[group], 0, 1 << 22, 10_000, group, "a")
        assert self.client.ask(Opcode.FETCH, pack_fetch(wanted)).status == 0

    def _fail_some(self) -> None:
        """Of the groups g and o, most are letters, and some retries; group h is through
        with all.
        """
        for group in self.generations:
            self.fetch(group)
        acked = Ack(self.generations["h"], "h", "a", (AckedRange("m", 0, 0, MESSAGES),))
        assert self.client.ask(Opcode.ACK, pack_ack(acked)).status == 0
        for group in ("g", "o"):
            for offset in range(10):
                error = {"type": "E", "text": f"no {offset}", "bases": [], "fingerprint": "f"}
                self.client.call(
                    "consumer.nack", group=group, member="a",
                    generation=self.generations[group], topic="m", partition=0, offset=offset,
                    error=error, dead=offset < 8,
                )  # fmt: skip
        self.ask("consumer.stored", **self.report(10, 11))
        for paused in ("pause", "resume", "pause", "resume"):
            self.ask(f"group.{paused}", group="g", **WHO)
        self.ask("dlq.save", name="s", select={"topic": "m"}, **WHO)

    def report(self, *offsets: int) -> dict[str, Any]:
        failure = ["KeyError", "text", "print"]
        topic_id = self.broker.engine.state.topics["m"].topic_id
        entries = [["m", topic_id, 0, offset, "stored", 1, 5, failure, 0, 0] for offset in offsets]
        member = {"member": "a", "generation": self.generations["g"], "host": "host"}
        return {"group": "g", "store": STORE, "entries": entries, **member}

    def _make_plans(self) -> None:
        """Plan p holds letters, plan f is to be frozen, plan s is to find its letters.
        So is a policy, those that have been dead for a second.
        """
        self.ask("plan.create", name="p", group="g")
        self.ask("plan.add", name="p", letters=LETTERS[:4])
        self.ask("plan.create", name="f", group="g")
        self.ask("plan.add", name="f", letters=LETTERS[4:6])
        self.ask("plan.freeze", name="f", **WHO)
        self.ask("plan.create", name="s", group="o", select={})
        self.ask("policy.set", group="g", select={}, after_s=1.0, **WHO)

    def _transact(self) -> list[str]:
        """Two transactions are undecided, two committed."""
        tokens = [self.broker.half(number, Message(b"x", f"k{number}")) for number in range(4)]
        for token in tokens[2:]:
            self.broker.do(DecideTransaction(bytes.fromhex(token), Decision.COMMIT, "test"))
        return tokens

    def begin_reads(self) -> None:
        """Begin all reads, without a step."""
        turns = self.broker.assembly.turns
        for name, begin in self._all_reads():
            turns.run = partial(self._note, name)  # type: ignore[method-assign]
            before = len(self.reads)
            begin()
            assert len(self.reads) > before, f"{name} makes no steps"
        del turns.run

    def _note(self, name: str, reader: object, steps: Any, answer: Callable[[Any], None]) -> None:
        del reader
        self.reads.append(Read(name, steps, answer))

    def _all_reads(self) -> list[tuple[str, Callable[[], object]]]:
        assembly = self.broker.assembly
        with patch.object(site_module, "Console") as console:  # it takes long to make
            console.return_value.handle.return_value = False
            site = AdminSite(parts_of(self.broker, load_broker(None, {"data": "/data"})))
        letters = ReadLetters(0, 0, MESSAGES, 1 << 20, "p", "m")
        asked = encode_frame(Opcode.LETTERS, 9, pack_read_letters(letters))
        reads: list[tuple[str, Callable[[], object]]] = [
            ("LETTERS", partial(self.reader.session.dataReceived, asked)),  # type: ignore[attr-defined]
            ("plans", assembly._plans.tick),
            ("policies", assembly._policies.tick),
        ]
        for page in ("/metrics", "/metrics/partitions"):
            respond = partial(self._answered, page)
            reads.append((page, partial(site.handle, page, {}, respond, None)))
            self.answered.append(page)
        for name, args in self._calls():
            title = f"{name} {args}"
            ask = partial(assembly.calls.ask, name, args, partial(self._answered, title))
            reads.append((title, ask))
            self.answered.append(title)
        return reads

    def _calls(self) -> list[tuple[str, dict[str, Any]]]:
        named, some = {"group": "g"}, {"letters": LETTERS}
        database = {"system_id": DATABASE.system_id, "database_oid": DATABASE.database_oid}
        selections: list[dict[str, Any]] = [
            {"select": {}},
            {"select": {"topic": "m", "text": "no"}},
            {"select": {"header": ["tenant", "red"]}},
            {"select": {"body": "x"}},
            {"saved": "s"},
        ]
        found: list[tuple[str, dict[str, Any]]] = [
            (call, {**named, **selection})
            for call in ("dlq.list", "dlq.stats")
            for selection in selections
        ]
        found += [
            ("topic.list", {}),
            ("topic.show", {"name": "m"}),
            ("topic.show", {"name": "n"}),
            ("message.find", {"topic": "m", "bodies": True}),
            ("message.find", {"topic": "n", "key": "k1"}),
            ("message.search", {"key": "k1"}),
            ("message.search", {"key": "k1", "after": [2, 0, 0]}),
            ("message.search", {"body": "x"}),
            ("message.search", {"header": ["tenant", None], "correlations": ["c"]}),
            ("message.find", {"topic": "m", "body": "$.a=1"}),
            ("message.search", {"id": f"{(b'q' * 16).hex()}-1"}),
            ("message.life", {"topic": "m", "partition": 0, "offset": 1}),
            ("message.life", {"topic": "m", "partition": 0, "offset": 99}),
            ("message.deliveries", {"messages": [["m", 0, 1], ["m", 0, 10]]}),
            ("group.list", {}),
            ("group.show", {"group": "g"}),
            ("group.show", {"group": "o"}),
            ("dlq.show", {**named, "topic": "m", "partition": 0, "offset": 1}),
            ("plan.check", {"name": "p"}),
            ("recover.list", {}),
            ("recover.list", named),
            ("consumer.stored", self.report(10, 12, 11, 12, 13)),
            ("audit.list", {}),
            ("audit.list", {"newest": True, "about": "group:g"}),
            *(("tx.list", {"state": state}) for state in ("undecided", "waiting", "conflicts")),
            ("tx.states", {"tokens": self.tokens}),
            ("tx.show", {"token": self.tokens[0], "detail": True}),
            ("tx.committed", database),
            ("dlq.redrive", {**named, **some, "to": "c", **WHO}),
            ("dlq.redrive", {**named, "select": {}, "to": "c", **WHO}),
            ("dlq.redrive", {**named, **some, "to_group": "h", **WHO}),
            ("dlq.redrive", {**named, "select": {}, "to_group": "h", **WHO}),
            ("dlq.replay", {"group": "o", "select": {"text": "no"}}),
            ("dlq.abandon", {"group": "o", "select": {"text": "no 1"}, "reason": "of no use"}),
        ]
        return found

    def _answered(self, name: str, reply: Any) -> None:
        self.answers.setdefault(name, []).append(reply)

    def make_steps(self, number: int) -> bool:
        """Make so many steps of each read. False = all reads ended before."""
        self.reads = [read for read in self.reads if self._makes(read, number)]
        return bool(self.reads)

    def _makes(self, read: Read, number: int) -> bool:
        """Make steps of a read, and answer at its end; False = it has ended."""
        for _ in range(number):
            try:
                next(read.steps)
            except StopIteration as end:
                self.broker.engine.answer_when_durable(read.answer, end.value)
                self.broker.pass_time(0)
                return False
            except RequestRejected as refused:
                read.answer(refused)
                return False
            except Exception as error:  # noqa: BLE001  # any is a failure
                self.failures.append(f"{read.name}: {error!r}")
                return False
            self._look_at(read.steps)
        return True

    def _look_at(self, steps: Any) -> None:
        while isinstance(steps, GeneratorType):
            self.seen.add(steps.gi_code)
            steps = steps.gi_yieldfrom

    def end(self) -> None:
        """Make all steps that are left, and look at the answers."""
        self.make_steps(1 << 20)
        self.broker.pass_time(0)
        for name in self.answered:
            replies = self.answers.get(name, [])
            if len(replies) != 1 or not isinstance(replies[0], dict | RequestRejected | HttpReply):
                self.failures.append(f"{name}: {replies}")
        if len(self.reader.replies()) != 1:
            self.failures.append("LETTERS: no reply")
        self.failures += map(repr, self.broker.engine.faults.counts)

"""Random work of all kinds, also that of consumers, operators and transaction
managers.
"""

from __future__ import annotations

from typing import Any

from tests.broker.data_directory.random_work import HOUR, KEYS, POSTGRES, Work
from tests.broker.data_directory.retention_world import RetentionWorld
from tests.broker.support import HELLO, Client
from txmq.batch import encode, verify
from txmq.core.consumers.commands import ExpireLeases
from txmq.core.retention.outcome_expiry import ExpireOutcomes
from txmq.core.topics import delayed
from txmq.core.topics.delay_rules import Recall
from txmq.core.topics.topics import AlterTopic, GrowTopic
from txmq.core.transactions.batched import DecideBundles, StoreBundles
from txmq.core.transactions.decisions import DecideTransaction
from txmq.core.transactions.half_storage import BundleBatch, StorePart
from txmq.model.decider import ByBroker, ByForeign, ByJob, Decider
from txmq.model.message import Decision, Message
from txmq.wire.calls.encoding import encode_call
from txmq.wire.chunks import Chunk, unpack_chunks
from txmq.wire.data_requests import Ack, AckedRange, Fetch, Opcode, pack_ack, pack_fetch
from txmq.wire.frames import encode_frame
from txmq.wire.json import parse

WHO = {"operator": "ada", "reason": "as it comes"}
MODES = {"c": "concurrent", "o": "ordered"}
Actions = tuple[tuple[object, ...], ...]


class Everything(Work):
    """Random work of `Work`, and of consumers with failures, topics that grow and are
    deleted, group resets, branches, jobs and watermarks.
    """

    def __init__(self, world: RetentionWorld, seed: int) -> None:
        super().__init__(world, seed)
        self._mark = 0
        self._decided: list[bytes] = []
        self._jobs: list[tuple[bytes, list[bytes]]] = []
        self.go_on_with(world)

    def go_on_with(self, world: RetentionWorld) -> None:
        """Continue with a broker that was started again."""
        self.world = world
        self._client = Client(world)  # type: ignore[arg-type]  # it has all that a client asks for
        self._client.send(HELLO)
        self._client.replies()

    def some(self, steps: int) -> None:
        often = [self.send, self.half, self.decide, self.consume, self.consume, self.consume]
        seldom = [
            self.pass_time,
            self.retain,
            self.change_topics,
            self.operate,
            self.treat_letters,
            self.plan_replays,
            self.branch,
            self.job,
            self.move_mark,
            self.acks_in_a_transaction,
            self.together,
            self.contradict,
            self.recall,
            self.age,
            self.send_together,
        ]
        for _ in range(steps):
            self._rng.choice(often * 2 + seldom)()
            self.world.storage.tick()
            self.world.turn()

    def pass_time(self) -> None:
        super().pass_time()
        self.world.do(ExpireLeases(self.world.now()))
        self.world.assembly._group_work.tick()
        self.world.turn()

    def consume(self) -> None:
        """Fetch as a member, and ack, nack, return or forget the messages."""
        group = self._rng.choice([*MODES])
        known = self._join(group)
        for chunk in self._fetch(known):
            base = chunk.base_offset + chunk.first_row
            place = (chunk.topic, chunk.partition, base, base + chunk.rows)
            match self._rng.randrange(9):
                case 8:
                    self._report_stored(known, chunk, base)
                case 0 | 1:
                    dead, delay = (
                        self._rng.random() < 0.3,
                        self._rng.choice([None, 5_000, 3_600_000]),
                    )
                    self._call(
                        "consumer.nack",
                        **known,
                        topic=chunk.topic,
                        partition=chunk.partition,
                        offset=base,
                        dead=dead,
                        delay_ms=delay,
                    )
                case 2:
                    self._call("consumer.return", **known, ranges=[place])
                case 3:
                    """Its lease will run out."""
                case _:
                    ack = Ack(known["generation"], group, known["member"], (AckedRange(*place),))
                    self._ask(Opcode.ACK, pack_ack(ack))

    def _report_stored(self, known: dict[str, Any], chunk: Chunk, base: int) -> None:
        """Keep messages in a local store, and perhaps settle, order or adopt it."""
        store = self._rng.choice(["0" * 32, "1" * 32])
        topic_id = self.world.state.topics[chunk.topic].topic_id
        states = self._rng.choices(["stored", "acked", "dead", "returned"], [9, 1, 1, 1], k=3)
        entries = [
            [chunk.topic, topic_id, chunk.partition, offset, state, 1, 0, ["E", "text", ""], 0, 0]
            for offset, state in zip(range(base, base + chunk.rows), states, strict=False)
        ]
        self._call("consumer.stored", **known, store=store, host="h", entries=entries)
        of_store = {"group": known["group"], "store": store}
        places = [[entry[0], *entry[2:4]] for entry in entries]
        match self._rng.randrange(4):
            case 0:
                self._call("recover.adopt", **of_store, force=True)
            case 1:
                self._call("retry.now", group=known["group"], letters=places)
            case 2:
                change = self._rng.choice(("retry.bury", "retry.skip"))
                self._call(change, group=known["group"], letters=places[:1], reason="no use")

    def _join(self, group: str) -> dict[str, Any]:
        member = self._rng.choice("ab")
        joined = self._call(
            "consumer.join",
            group=group,
            topics=[*self.world.state.topics][:2],
            instance=member,
            member=member,
            mode=MODES[group],
            start="first",
            on_exhausted="park" if group == "o" else None,
        )
        return {"group": group, "member": member, "generation": joined["generation"]}

    def _fetch(self, known: dict[str, Any]) -> tuple[Chunk, ...]:
        fetch = Fetch(known["generation"], 0, 1 << 20, 12, known["group"], known["member"])
        reply = self._ask(Opcode.FETCH, pack_fetch(fetch))
        return tuple(unpack_chunks(reply.payload).chunks) if reply.status == 0 else ()

    def change_topics(self) -> None:
        """Create, grow or delete a topic."""
        match self._rng.randrange(5):
            case 0:
                self._call("topic.create", name="v", partitions=2)
            case 1:
                self.world.do(
                    AlterTopic(self._rng.choice("tu"), {"letters_us": self._rng.choice([-1, HOUR])})
                )
            case 2 | 3:
                name = self._rng.choice("tuv")
                there = self.world.state.topics.get(name)
                if there is not None and len(there.end_offsets) < 8:
                    # the call would wait for its moment
                    self.world.do(GrowTopic(name, len(there.end_offsets) + 1))
            case _:
                self._call("topic.delete", name="v")

    def operate(self) -> None:
        group, topic = self._rng.choice([*MODES]), self._rng.choice("tuv")
        match self._rng.randrange(8):
            case 0:
                self._call(
                    "group.reset",
                    group=group,
                    topic=topic,
                    to=self._rng.choice(["first", "last"]),
                    **WHO,
                )
            case 1:
                self._call(
                    self._rng.choice(["group.pause", "group.resume"]),
                    group=group,
                    topic=topic,
                    **WHO,
                )
            case 2:
                self._call(
                    "group.alter", group=group, lease_ms=self._rng.choice([5_000, 60_000]), **WHO
                )
            case 3:
                self._call("group.clone", group=group, to="clone", **WHO)
            case 4:
                self._call("group.delete", group="clone", **WHO)
            case 5:
                member = self._rng.choice("ab")
                self._call("consumer.leave", group=group, member=member, instance=member)
            case 6:
                self._call("consumer.extend", **self._join(group))
            case _:
                self._call("producer.register", service="shop", instance=self._rng.choice("xy"))

    def treat_letters(self) -> None:
        group = self._rng.choice([*MODES])
        listed = self._call("dlq.list", group=group, limit=5)
        letters = [
            [one["topic"], one["partition"], one["offset"]] for one in listed.get("letters", ())
        ]
        if letters:
            how = self._rng.choice(["dlq.replay", "dlq.replay", "dlq.abandon"])
            self._call(how, group=group, letters=letters[: self._rng.randrange(1, 5)], **WHO)
            print_ = listed["letters"][0]["fingerprint"]
            self._call("dlq.note", group=group, fingerprint=print_, text=how, **WHO)
            self._call("dlq.save", name=how, select={"fingerprint": print_}, **WHO)

    def plan_replays(self) -> None:
        """Begin a plan or a policy, or order something about plans that are there."""
        group, name = self._rng.choice([*MODES]), f"p{self._rng.randrange(4)}"
        settings = {
            "rate": 0, "ramp_s": 0, "canary": self._rng.randrange(2), "start": True,
            "in_flight": self._rng.randrange(3),
        }  # fmt: skip
        self._call(
            "plan.create", name=name, group=group, select={}, settings=settings, operator="ada"
        )
        order = self._rng.choice(["pause", "resume", "resume", "cancel", "delete"])
        self._call(f"plan.{order}", name=f"p{self._rng.randrange(4)}", **WHO)
        after_s = self._rng.choice([None, 1, 600])
        self._call(
            "policy.set", group=group, after_s=after_s, settings=settings, max_replays=5, **WHO
        )
        for _ in range(3):
            self.world.assembly._plans.tick()
            self.world.assembly._policies.tick()
            self.world.turn()

    def branch(self) -> None:
        """Store a branch of a foreign manager: decided by the manager, by hand, or not
        at all.
        """
        token = self.store(ByForeign(7, self._rng.randbytes(8), b"b"))
        match self._rng.randrange(3):
            case 0:
                self.world.do(
                    DecideTransaction(
                        token, self._rng.choice([Decision.COMMIT, Decision.ROLLBACK]), "manager"
                    )
                )
            case 1:
                self._call("tx.decide", token=token.hex(), outcome="COMMIT", **WHO)

    def job(self) -> None:
        """Store the bundles of a job one by one, and decide it after two of them."""
        if not self._jobs or len(self._jobs[-1][1]) > 2:
            self._jobs.append((self.token(), []))
        token, groups = self._jobs[-1]
        groups.append(self.store(ByJob(token)))
        if len(groups) > 2:
            self._call(
                "job.decide",
                token=token.hex(),
                outcome="COMMIT",
                winners=[one.hex() for one in groups[1:]],
            )

    def together(self) -> None:
        """Store several bundles in one request, and decide them in another."""
        groups = tuple(self._part(self.token(), POSTGRES) for _ in range(3))
        self.world.do(StoreBundles(groups))
        outcomes = [self._rng.choice([Decision.COMMIT, Decision.ROLLBACK]) for _ in groups]
        self.world.do(
            DecideBundles(
                tuple(
                    DecideTransaction(g.token, o, "m")
                    for g, o in zip(groups, outcomes, strict=True)
                )
            )
        )
        self._decided += [group.token for group in groups]

    def contradict(self) -> None:
        """Repeat a decision, contradict one, or decide an unknown transaction."""
        if self._decided:
            outcome = self._rng.choice([Decision.COMMIT, Decision.ROLLBACK])
            self.world.do(DecideTransaction(self._rng.choice(self._decided), outcome, "m"))
        log_id = self.world.log.log_id
        self._call("xa.outcome", token=self.token().hex(), log_id=str(log_id), decide=True, by="r")

    def recall(self) -> None:
        waiting = [row.message for row in delayed.scan(self.world.state)][:9]
        if waiting:
            one = self._rng.choice(waiting)
            self.world.do(Recall(((one.producer, one.sequence),)))

    def age(self) -> None:
        """Expire old outcomes now and then."""
        self.world.turn(self._rng.choice([10, 10, HOUR, 8 * 24 * HOUR]))
        self.world.assembly._delays.forget_recalls()
        sweep: Any = ExpireOutcomes()
        while isinstance(sweep, ExpireOutcomes):
            sweep = self.world.do(sweep)

    def move_mark(self) -> None:
        self.store(ByBroker(), (("mark", "source", self._mark, self._mark + 1, self.world.now()),))
        self._mark += 1

    def acks_in_a_transaction(self) -> None:
        known = self._join("c")
        who = ("ack", "c", known["member"], known["generation"])
        acks = tuple(
            (*who, chunk.topic, chunk.partition, base, base + 1)
            for chunk in self._fetch(known)[:2]
            for base in (chunk.base_offset + chunk.first_row,)
        )
        if acks:
            self._open.append(self.store(POSTGRES, acks))

    def store(self, decider: Decider, actions: Actions = ()) -> bytes:
        """Store a bundle of one message. Return its token."""
        part = self._part(self.token(), decider, actions)
        self.world.do(part)
        return part.token

    def _part(self, token: bytes, decider: Decider, actions: Actions = ()) -> StorePart:
        data = encode(
            [Message(b"of it", self._rng.choice(KEYS))],
            producer_id=token,
            epoch=0,
            sequence=0,
            born_at=1,
        )
        batch = BundleBatch("t", 0, self._rng.randrange(3), data, verify(data))
        return StorePart(
            token,
            0,
            (batch,),
            True,
            decider == ByBroker(),
            b"d" * 32,
            0,
            decider,
            "shop",
            actions,
            0,
        )

    def _call(self, name: str, /, **args: object) -> Any:
        """Return the reply, or nothing for a refusal, of which there are many here."""
        reply = self._client_reply(encode_frame(Opcode.CALL, 7, encode_call(name, args)))
        return parse(reply.payload) if reply.status == 0 else {}

    def _ask(self, opcode: int, payload: bytes) -> Any:
        return self._client_reply(encode_frame(opcode, 7, payload))

    def _client_reply(self, frame: bytes) -> Any:
        self._client.send(frame)
        self.world.turn()
        [reply] = self._client.replies()
        return reply

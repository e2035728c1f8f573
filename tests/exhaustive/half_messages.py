"""The world of half messages: two producers, a database, a resolver, a broker.

The broker is the real core, as a function of the commands that it logged. The database
has what docs/PROTOCOL.md 2 says of PostgreSQL: row locks, and one unique row or fence
for each token, where a row that is not committed yet makes a fence wait.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator
from functools import cache
from typing import NamedTuple, Self

from tests.core.driver import Driver, token
from txmq.core.events.base import Booted
from txmq.core.topics.topics import CreateTopic
from txmq.core.transactions import model
from txmq.core.transactions.decisions import DecideTransaction
from txmq.errors import RequestRejected
from txmq.model.bundle import BundleState
from txmq.model.decider import ByPostgres
from txmq.model.message import Decision

DECIDER = ByPostgres(1, 1, 5, 7, 1)
TOPIC = "t"
KEYS = (("k",), ("k", "l"))  # of each producer; a partition for each key
PARTITIONS = ("k", "l")


class Bounds(NamedTuple):
    """How often each thing may happen still."""

    copies: int = 0  # of bundles
    deaths: int = 0
    restarts: int = 0
    refusals: int = 0  # blocks that fail before their COMMIT


class Store(NamedTuple):
    """The command that stores the bundle of a producer."""

    producer: int


class Decide(NamedTuple):
    """The command that decides the bundle of a producer."""

    producer: int
    outcome: Decision


class Boot(NamedTuple):
    """The start of a broker."""


Command = Store | Decide | Boot
Log = tuple[Command, ...]


class Seen(NamedTuple):
    """What a log amounts to: states of the bundles, bodies by partition."""

    states: tuple[BundleState | None, ...]
    bodies: tuple[tuple[str, ...], ...]


@cache
def core_after(log: Log) -> tuple[Driver, object]:
    """Return the core after these commands, and its reply to the last one."""
    core = Driver()
    core.do(CreateTopic(TOPIC, len(PARTITIONS)))
    reply: object = None
    for command in log:
        reply = _do(core, command)
        core.work_off()
    return core, reply


def _do(core: Driver, command: Command) -> object:
    match command:
        case Store(producer):
            sends = [(TOPIC, PARTITIONS.index(key), key, str(producer)) for key in KEYS[producer]]
            return core.store(token(core, producer), sends, DECIDER)
        case Decide(producer, outcome):
            return core.do(DecideTransaction(token(core, producer), outcome, "p"))
        case Boot():
            core.record(Booted(core.state.boot_epoch + 1, "b"))
            return None


@cache
def seen(log: Log) -> Seen:
    core = core_after(log)[0]
    rows = [model.get(core.state, token(core, number)) for number in range(2)]
    return Seen(
        tuple(row and row.state for row in rows),
        tuple(tuple(core.bodies(TOPIC, partition)) for partition in range(len(PARTITIONS))),
    )


class Producer(NamedTuple):
    """A producer, its transaction, its token row, and what is on the way of it."""

    number: int
    alive: bool = True
    # none, open, inserted, committing (COMMIT on the wire), committed, aborted
    tx: str = "none"
    row: str = ""  # C committed, R fenced
    bundle: bool = False  # on the wire
    told: Decision | None = None  # decision on the wire
    learned: bool = False  # how its COMMIT ended
    looked: bool = False  # the resolver found no row, and has not fenced yet
    verdict: Decision | None = None  # of the resolver, on the way to the broker

    @property
    def holds_locks(self) -> bool:
        return self.tx in ("open", "inserted", "committing")


class HalfWorld:
    """A state of the whole: producers, the broker's log, what of it is durable."""

    def __init__(self, bounds: Bounds) -> None:
        self.left = bounds
        self.producers = (Producer(0), Producer(1))
        self.log: Log = ()
        self.durable = 0
        self.commits: tuple[int, ...] = ()  # in their order
        self.seen: frozenset[str] = frozenset()  # what has just happened

    def key(self) -> Hashable:
        return self.producers, self.log, self.durable, self.commits, self.left

    def steps(self) -> Iterator[tuple[str, Self]]:
        for name, (guard, step) in STEPS.items():
            for number in range(2):
                if guard(self, self.producers[number]):
                    after = self._fork()
                    step(after, self.producers[number])
                    yield f"{name} {number}", after
        for name, (of_broker, work) in BROKER_STEPS.items():
            if of_broker(self):
                after = self._fork()
                work(after)
                yield name, after

    def _fork(self) -> Self:
        twin = copy.copy(self)
        twin.seen = frozenset()
        return twin

    def spend(self, name: str) -> None:
        self.left = self.left._replace(**{name: getattr(self.left, name) - 1})

    def note(self, what: str) -> None:
        self.seen |= {what}

    def put(self, producer: Producer) -> None:
        producers = list(self.producers)
        producers[producer.number] = producer
        self.producers = (producers[0], producers[1])

    def submit(self, command: Command) -> object:
        """Have the broker decide; a command that records nothing leaves the log."""
        before, (after, reply) = core_after(self.log)[0], core_after((*self.log, command))
        if len(after.log) > len(before.log):
            self.log = (*self.log, command)
        return reply

    def state(self, producer: Producer) -> BundleState | None:
        return seen(self.log).states[producer.number]

    def durable_state(self, producer: Producer) -> BundleState | None:
        return seen(self.log[: self.durable]).states[producer.number]

    # invariants

    def check(self) -> None:
        durable = seen(self.log[: self.durable])
        for producer in self.producers:
            self._check_outcome(producer, durable)
        for partition, bodies in enumerate(durable.bodies):
            order = [
                str(number) for number in self.commits if PARTITIONS[partition] in KEYS[number]
            ]
            assert list(bodies) == order[: len(bodies)], "not in the order of the commits"

    def _check_outcome(self, producer: Producer, durable: Seen) -> None:
        name, state = str(producer.number), durable.states[producer.number]
        places = [partition for partition, bodies in enumerate(durable.bodies) if name in bodies]
        committed = producer.tx == "committed"
        assert committed or not places, f"{name} is a phantom"
        assert state is not BundleState.ROLLED_BACK or not committed, f"{name} is lost"
        assert len(places) in (0, len(KEYS[producer.number])), f"{name} is seen in part"
        assert (producer.row == "C") == committed, f"{name} has a row of another outcome"

    def check_end(self) -> None:
        """Check a state that no step leaves: all is decided and published."""
        for producer in self.producers:
            state = self.durable_state(producer)
            if producer.tx == "committed":
                assert state is BundleState.PUBLISHED, f"{producer.number} is not delivered"
            else:
                assert state in (None, BundleState.ROLLED_BACK), f"{producer.number} stays"


# Steps: when each is possible, and what it does. docs/specification/half_messages.qnt
# has the same ones.


def may_begin(world: HalfWorld, me: Producer) -> bool:
    other = world.producers[1 - me.number]
    return me.alive and me.tx == "none" and not other.holds_locks


def begin(world: HalfWorld, me: Producer) -> None:
    """Begin a transaction, and lock the rows of its keys."""
    world.put(me._replace(tx="open"))


def may_send(world: HalfWorld, me: Producer) -> bool:
    return me.alive and me.tx in ("open", "inserted") and not me.bundle and world.state(me) is None


def send(world: HalfWorld, me: Producer) -> None:
    world.put(me._replace(bundle=True))


def may_store(_world: HalfWorld, me: Producer) -> bool:
    return me.bundle


def store(world: HalfWorld, me: Producer) -> None:
    """The bundle comes to the broker."""
    _store(world, me)
    world.put(me._replace(bundle=False))


def may_store_a_copy(world: HalfWorld, me: Producer) -> bool:
    return me.bundle and world.left.copies > 0


def store_a_copy(world: HalfWorld, me: Producer) -> None:
    """The bundle comes, and stays on the wire to come again."""
    world.spend("copies")
    _store(world, me)


def _store(world: HalfWorld, me: Producer) -> None:
    if world.state(me) is not None:
        world.note("a bundle came twice")
    if me.tx in ("aborted", "committed"):
        world.note("a bundle came after its transaction")
    world.submit(Store(me.number))


def may_insert(_world: HalfWorld, me: Producer) -> bool:
    return me.alive and me.tx == "open"


def insert(world: HalfWorld, me: Producer) -> None:
    """Insert the token row; a fence in its place ends the transaction."""
    if me.row == "R":
        world.note("a fence stopped a transaction")
        world.put(me._replace(tx="aborted", told=Decision.ROLLBACK))
    else:
        world.put(me._replace(tx="inserted"))


def may_commit(world: HalfWorld, me: Producer) -> bool:
    return me.alive and me.tx == "inserted" and world.durable_state(me) is not None


def commit(world: HalfWorld, me: Producer) -> None:
    """Send COMMIT, once the broker has confirmed the bundle."""
    world.put(me._replace(tx="committing"))


def may_refuse(world: HalfWorld, me: Producer) -> bool:
    return me.alive and me.tx in ("open", "inserted") and world.left.refusals > 0


def refuse(world: HalfWorld, me: Producer) -> None:
    """The block fails before its COMMIT, which proves the rollback."""
    world.spend("refusals")
    world.put(me._replace(tx="aborted", told=Decision.ROLLBACK))


def is_committing(_world: HalfWorld, me: Producer) -> bool:
    return me.tx == "committing"


def take_effect(world: HalfWorld, me: Producer) -> None:
    """The database carries out a COMMIT, however late."""
    if not me.alive:
        world.note("a COMMIT came after its producer's death")
    world.commits += (me.number,)
    world.put(me._replace(tx="committed", row="C"))


def may_be_lost(_world: HalfWorld, me: Producer) -> bool:
    return not me.alive and me.tx == "committing"


def lose_commit(world: HalfWorld, me: Producer) -> None:
    """A COMMIT never comes to the database, and its backend ends."""
    world.put(me._replace(tx="aborted"))


def may_learn(_world: HalfWorld, me: Producer) -> bool:
    return me.alive and me.tx == "committed" and not me.learned


def learn(world: HalfWorld, me: Producer) -> None:
    """The producer gets the answer to its COMMIT, and tells the broker."""
    world.put(me._replace(learned=True, told=Decision.COMMIT))


def is_told(_world: HalfWorld, me: Producer) -> bool:
    return me.told is not None


def decide(world: HalfWorld, me: Producer) -> None:
    """The producer's decision comes to the broker."""
    assert me.told is not None
    _decide(world, me, me.told)
    world.put(me._replace(told=None))


def may_die(world: HalfWorld, me: Producer) -> bool:
    return me.alive and me.tx != "none" and world.left.deaths > 0


def die(world: HalfWorld, me: Producer) -> None:
    """The producer dies; what it has on the wire may come or not."""
    world.spend("deaths")
    world.put(me._replace(alive=False))


def may_end(_world: HalfWorld, me: Producer) -> bool:
    return not me.alive and me.tx in ("open", "inserted")


def end_backend(world: HalfWorld, me: Producer) -> None:
    """The database notices the death, and rolls back."""
    world.put(me._replace(tx="aborted"))


def may_look(world: HalfWorld, me: Producer) -> bool:
    return (
        world.durable_state(me) is BundleState.UNDECIDED
        and world.state(me) is BundleState.UNDECIDED
        and not me.looked
        and me.verdict is None
    )


def look(world: HalfWorld, me: Producer) -> None:
    """The resolver looks for a committed row, as proof."""
    if me.row == "C":
        world.put(me._replace(verdict=Decision.COMMIT))
    else:
        world.put(me._replace(looked=True))


def may_fence(_world: HalfWorld, me: Producer) -> bool:
    return me.looked and me.tx not in ("inserted", "committing")


def fence(world: HalfWorld, me: Producer) -> None:
    """The resolver inserts a fence; a row in its place makes it look again."""
    if me.row == "C":
        world.note("a row came between proof and fence")
        world.put(me._replace(looked=False))
    else:
        world.put(me._replace(looked=False, row="R", verdict=Decision.ROLLBACK))


def has_verdict(_world: HalfWorld, me: Producer) -> bool:
    return me.verdict is not None


def answer(world: HalfWorld, me: Producer) -> None:
    """The resolver's verdict comes to the broker."""
    assert me.verdict is not None
    if world.state(me) is None:
        world.note("an answer about a lost bundle")
    _decide(world, me, me.verdict)
    world.put(me._replace(verdict=None))


def _decide(world: HalfWorld, me: Producer, outcome: Decision) -> None:
    before = world.state(me)
    reply = world.submit(Decide(me.number, outcome))
    if world.state(me) is BundleState.COMMITTED:
        world.note("a bundle waits for an earlier ticket")
    if before in (BundleState.PUBLISHED, BundleState.ROLLED_BACK):
        world.note("a decision came twice")
        assert not isinstance(reply, RequestRejected), "decisions that contradict one another"


def may_flush(world: HalfWorld) -> bool:
    return world.durable < len(world.log)


def flush(world: HalfWorld) -> None:
    world.durable = len(world.log)


def may_restart(world: HalfWorld) -> bool:
    return world.left.restarts > 0 and world.log != ()


def restart(world: HalfWorld) -> None:
    """The broker starts again, with what of its log was durable."""
    world.spend("restarts")
    if world.durable < len(world.log):
        world.note(f"a restart lost {type(world.log[-1]).__name__}")
    world.log = (*world.log[: world.durable], Boot())


Guard = Callable[[HalfWorld, Producer], bool]
Step = Callable[[HalfWorld, Producer], None]
STEPS: dict[str, tuple[Guard, Step]] = {
    "begin": (may_begin, begin),
    "send": (may_send, send),
    "store": (may_store, store),
    "store_a_copy": (may_store_a_copy, store_a_copy),
    "insert": (may_insert, insert),
    "commit": (may_commit, commit),
    "refuse": (may_refuse, refuse),
    "take_effect": (is_committing, take_effect),
    "lose_commit": (may_be_lost, lose_commit),
    "learn": (may_learn, learn),
    "decide": (is_told, decide),
    "die": (may_die, die),
    "end_backend": (may_end, end_backend),
    "look": (may_look, look),
    "fence": (may_fence, fence),
    "answer": (has_verdict, answer),
}
BROKER_STEPS: dict[str, tuple[Callable[[HalfWorld], bool], Callable[[HalfWorld], None]]] = {
    "flush": (may_flush, flush),
    "restart": (may_restart, restart),
}

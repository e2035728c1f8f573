"""One seed: picks who does what when, what breaks, and when it ends."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING
from unittest.mock import patch

from twisted.internet.defer import Deferred

from tests.simulation import actors, branches, convoys, crowds, delays, moves
from tests.simulation.clock import Clock
from tests.simulation.database import Database
from tests.simulation.history import Broken, History
from tests.simulation.node import EPOCH_US, Node
from tests.simulation.verdict import check_everything, check_group, check_time
from txmq.core.consumers import background_work, resets
from txmq.core.topics import key_order
from txmq.core.transactions import half_storage, large_bundles
from txmq.errors import StoreError
from txmq.testing.simfs import PowerCut, SimFS
from txmq.wire.calls import encode_call
from txmq.wire.headers import Opcode

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

    from twisted.python.failure import Failure

    from tests.simulation.planted import Bug

TROUBLE_S = 0.7  # after that nothing breaks any more,
LIVELINESS_S = 60.0  # and then everything must come to its end
STEPS = 200_000
JUMPS_SHARE = 0.25  # of the seeds have a broker's machine whose clock is put back
HOUR_US = 3_600_000_000
XA_SHARE = 0.4  # of the seeds have XA and instances as well


class World:
    """Everything that a seed decides about."""

    def __init__(self, seed: int, bug: Bug | None = None) -> None:
        self._seed, self.rng, self.clock = seed, Random(seed), Clock()
        self.history, self.database = History(), Database(self.clock, self.rng)
        self.failures: dict[tuple[str, str], int] = {}
        self.branches: dict[
            bytes, str
        ] = {}  # of home transactions, elsewhere: token → how it stands
        self.disk = SimFS()
        self.node: Node | None = None
        self.over = False
        self.trouble = 1.0
        self._bug = bug
        self._failure: Failure | None = None
        self._busy = 0

    def now(self) -> int:
        return EPOCH_US + int(self.clock.seconds() * 1_000_000)

    def run(self) -> History:
        """Raises Broken, or what an actor met, if anything is wrong. Three keys already
        make a large group.
        """
        with (
            patch.object(large_bundles, "KEYS", 2),
            patch.object(key_order, "CASCADE", 6),
            patch.object(half_storage, "OPEN_FOR", 300_000),
            patch.object(resets, "SLICE", 2),
            patch.object(background_work, "SLICE", 2),
        ):
            return self._run()

    def _run(self) -> History:
        self._start_broker()
        self._setup()
        rng = self.rng
        self.clock.callLater(rng.uniform(0.02, 0.4), self._power_cut)
        self.clock.callLater(rng.uniform(0.0, 0.1), self._break_a_connection)
        self.clock.callLater(TROUBLE_S, self._calm)
        if rng.random() < JUMPS_SHARE:
            self.clock.callLater(rng.uniform(0.0, TROUBLE_S), self._put_clock_back)
        self._go_on()
        return self.history

    def _setup(self) -> None:
        starter = actors.Operator(self, "op")

        async def begin() -> None:
            await starter.insist(
                Opcode.CALL,
                encode_call(
                    "topic.create", {"name": actors.TOPIC, "partitions": actors.PARTITIONS}
                ),
            )
            for number in range(2):
                self._do(actors.Producer(self, f"p{number}").run(3))
                self._do(actors.Service(self, f"s{number}").run(3))
            self._do(actors.Local(self, "l").run(2))
            if self.rng.random() < XA_SHARE:
                self._xa()
            if self.rng.random() < crowds.SHARE:
                self._do(crowds.Crowd(self, "w").run(2))
            if (
                Random(~self._seed).random() < convoys.SHARE
            ):  # apart: the other seeds stay as they were
                self._do(convoys.Convoys(self, "v").run(3))
            if self.rng.random() < delays.SHARE:
                self._do(delays.Scheduler(self, "d").run(4))
            for work in moves.of_seed(self, self._seed):
                self._do(work)
            self._always(actors.Consumer(self, "m0").run())
            for name in ("m0", "m1"):
                self._always(actors.Ordered(self, name).run())
            self._always(starter.run())

        self._do(begin())

    def _xa(self) -> None:
        for actor in (
            branches.Manager(self, "x"),
            branches.Coordinator(self, "h"),
            branches.Instance(self, "i"),
        ):
            self._do(actor.run(3))
        self._always(branches.Recoverer(self, "r").run())

    def _do(self, work: Coroutine[Deferred[Any], Any, None]) -> None:
        """Work that must come to its end."""
        self._busy += 1

        def done(_result: object) -> None:
            self._busy -= 1

        Deferred.fromCoroutine(work).addCallbacks(done, self._failed)

    def _always(self, work: Coroutine[Deferred[Any], Any, None]) -> None:
        """Work that goes on until all is over."""
        Deferred.fromCoroutine(work).addErrback(self._failed)

    def _failed(self, failure: Failure) -> None:
        self._failure = self._failure or failure

    def _go_on(self) -> None:
        for _ in range(STEPS):
            if self.over:
                return
            try:
                self.clock.next()
                if self._failure is not None or (
                    self.node is not None and self.node.failure is not None
                ):
                    self._raise_failures()
            except (PowerCut, StoreError):
                if not self.disk.dark:
                    raise
                self._restart_later()
        raise Broken("the simulation does not come to its end")

    def _raise_failures(self) -> None:
        failure = self._failure or (self.node.failure if self.node is not None else None)
        if failure is not None:
            failure.raiseException()

    def _start_broker(self) -> None:
        self.node = Node(self.disk, self.clock, self.rng, self.database, self._bug)

    def _power_cut(self) -> None:
        """The broker's machine loses power: at once, or in the middle of one of the
        next changes of its disk.
        """
        if not self.trouble:
            return
        if self.node is None:
            self.clock.callLater(0.05, self._power_cut)
            return
        self.history.counts["power cuts"] += 1
        if self.rng.random() < 0.5:
            self._restart_later()
        else:
            self.disk.crash_at = self.disk.changes + self.rng.randint(1, 20)

    def _restart_later(self) -> None:
        if self.node is not None:
            self.node.crash()
        self.disk = self.disk.crash(self.rng)
        self.node = None
        self.clock.callLater(self.rng.uniform(0.01, 0.3), self._start_broker)
        self.clock.callLater(self.rng.uniform(0.1, 0.6), self._power_cut)

    def _break_a_connection(self) -> None:
        if self.trouble:
            if self.node is not None:
                self.history.counts["connections cut"] += 1
                self.node.cut_a_connection()
            self.clock.callLater(self.rng.uniform(0.01, 0.1), self._break_a_connection)

    def _put_clock_back(self) -> None:
        """And perhaps right again."""
        self.history.counts["clocks put back"] += 1
        self.clock.put_back = 0 if self.clock.put_back else self.rng.randrange(HOUR_US)
        if self.trouble and self.rng.random() < 0.5:
            self.clock.callLater(self.rng.uniform(0.0, 0.3), self._put_clock_back)

    def _calm(self) -> None:
        self.trouble = 0.0
        self.disk.crash_at = 0
        self.clock.callLater(0.05, self._look)

    def _look(self) -> None:
        """End it once everything is done, decided, delivered and replayed."""
        if self.node is not None and not self._busy and self._drained():
            check_everything(self)
            moves.check(self)
            self.over = True
        elif self.clock.seconds() > TROUBLE_S + LIVELINESS_S:
            raise Broken(f"after {LIVELINESS_S} s of calm: {self._what_is_left()}")
        else:
            self.clock.callLater(0.05, self._look)

    def _drained(self) -> bool:
        return not any(self._what_is_left().values())

    def _what_is_left(self) -> dict[str, int]:
        assert self.node is not None
        engine = self.node.engine
        state = engine.state
        left = {
            "busy": self._busy,
            "undecided": state.undecided,
            "unflushed": engine.store.end - engine.store.durable,
        }
        left["backlog"] = state.backlog + sum(not gate.lifted for gate in state.gates.values())
        left["delayed"] = state.delayed
        left["holds"] = sum(state.holds.values())
        left["branches prepared"] = sum(
            state == branches.PREPARED for state in self.branches.values()
        )
        left["groups missing"] = 2 - len(state.consumers.groups)
        for group in state.consumers.groups.values():
            left[f"{group.name} behind"] = sum(
                state.topics_by_id[spot[0]].ends[spot[1]] - position.floor
                for spot, position in group.positions.items()
            ) + 10 * (len(state.topics[actors.TOPIC].ends) - len(group.positions))
            left[f"{group.name} moved"] = (
                sum(group.retrying.values()) + group.letters + sum(map(len, group.fences.values()))
            )
            left[f"{group.name} in hand"] = len(group.held_rows) + len(group.leases)
        return left

    def delivered(self, partition: int, offset: int, body: str) -> None:
        """A consumer was handed a message."""
        self.history.seen(partition, offset, body)
        check_group(self, body)
        check_time(self, body)

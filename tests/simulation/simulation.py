"""The simulation of one seed: actors at work, injected faults, and checks at the
end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any
from unittest.mock import patch

from twisted.internet.defer import Deferred

from tests.simulation import (
    actors,
    batched_services,
    client_consumers,
    consumers,
    delayed_producer,
    filtering_consumers,
    inbox_consumers,
    letter_mender,
    machine_clock,
    multi_send,
    operators,
    plan_operator,
    remade_topic,
    services,
    store_consumers,
    xa,
)
from tests.simulation.history import InvariantBroken, SimulationHistory
from tests.simulation.invariants import check_everything
from tests.simulation.simulated_broker import SimulatedBroker
from tests.simulation.world import PREPARED, SimulatedWorld
from tests.store.simfs import PowerCut
from txmq.broker import assembly
from txmq.broker.engine.engine import Engine
from txmq.core.consumers import background_work, resets
from txmq.core.topics import key_order
from txmq.core.transactions import half_storage, large_bundles
from txmq.errors import StoreError
from txmq.model.units import HOUR
from txmq.wire.calls.encoding import encode_call
from txmq.wire.data_requests import Opcode

FAULTS_S = 0.7  # no fault is injected after this time,
SETTLE_S = 20.0  # and within this time everything must come to its end
STEPS = 200_000
CLOCK_SHARE = 0.25  # of the seeds put the clock of the broker's machine back
XA_SHARE = 0.4  # of the seeds have XA transactions and producer instances


class Simulation:
    """The run of one seed. `plant` puts a bug into each broker that it starts."""

    def __init__(self, seed: int, plant: Callable[[Engine], None] | None = None) -> None:
        self._seed, self._plant = seed, plant
        self.world = SimulatedWorld(seed)
        self._busy = 0
        self._machine_clock = machine_clock.MachineClock(self.world, seed)
        self._inbox: inbox_consumers.SimulatedInbox | None = None
        self._filtering: filtering_consumers.FilteringConsumer | None = None

    def run(self) -> SimulationHistory:
        """Run the seed to its end, and return its history.

        Raises InvariantBroken, or the error of an actor or of the broker. Limits are
        small, so that three keys make a bundle large and few rows fill a step.
        """
        with (
            patch.object(large_bundles, "KEYS_PER_PIECE", 2),
            patch.object(key_order, "MAX_KEYS_PER_RELEASE", 6),
            patch.object(half_storage, "OPEN_TIMEOUT", 300_000),
            patch.object(resets, "STEP_ROWS", 2),
            patch.object(background_work, "STEP_ROWS", 2),
            patch.object(assembly, "EXPIRY_S", 0.2),
        ):
            return self._run()

    def _run(self) -> SimulationHistory:
        self._start_broker()
        self._start_actors()
        rng, clock = self.world.rng, self.world.clock
        clock.callLater(rng.uniform(0.02, 0.4), self._cut_power)
        clock.callLater(rng.uniform(0.0, 0.1), self._cut_a_connection)
        clock.callLater(FAULTS_S, self._end_faults)
        if rng.random() < CLOCK_SHARE:
            clock.callLater(rng.uniform(0.0, FAULTS_S), self._put_clock_back)
        self._machine_clock.start()
        self._step_until_over()
        return self.world.history

    def _start_actors(self) -> None:
        world, rng = self.world, self.world.rng
        replayer = operators.LetterReplayer(world, "op")
        if letter_mender.is_at_work(self._seed):
            replayer = letter_mender.LetterMender(world, "op", self._seed)
        elif plan_operator.is_at_work(self._seed):
            replayer = plan_operator.PlanOperator(world, "op", self._seed)

        async def begin() -> None:
            topic = {"name": actors.TOPIC, "partitions": actors.PARTITIONS}
            await replayer.request(Opcode.CALL, encode_call("topic.create", topic))
            for number in range(2):
                self._run_to_end(actors.Producer(world, f"p{number}").run(3))
                self._run_to_end(services.Service(world, f"s{number}").run(3))
            self._run_to_end(services.LocalTransactions(world, "l").run(2))
            if rng.random() < XA_SHARE:
                self._start_xa()
            if rng.random() < batched_services.SHARE:
                self._run_to_end(batched_services.BatchedServices(world, "w").run(2))
            # from a generator of its own: seeds without it draw the same numbers
            if Random(~self._seed).random() < multi_send.SHARE:
                self._run_to_end(multi_send.MultiSendProducer(world, "v").run(3))
            # delayed messages of one key come in no known order by a clock that jumps
            if rng.random() < delayed_producer.SHARE and not self._machine_clock.is_set:
                self._run_to_end(delayed_producer.DelayedProducer(world, "d").run(4))
            for work in operators.work_of_seed(world, self._seed):
                self._run_to_end(work)
            self._start_consumers()
            self._run_throughout(replayer.run())

        self._run_to_end(begin())

    def _start_consumers(self) -> None:
        self._run_throughout(consumers.ConcurrentConsumer(self.world, "m0").run())
        for name in ("m0", "m1"):
            self._run_throughout(consumers.OrderedConsumer(self.world, name).run())
        if Random(self._seed + 0.5).random() < client_consumers.SHARE:
            for name in client_consumers.MEMBERS:
                self._run_throughout(client_consumers.ClientConsumer(self.world, name).run())
        if Random(self._seed + 0.4375).random() < filtering_consumers.SHARE:
            self._filtering = filtering_consumers.FilteringConsumer(self.world, "f0")
            self._run_throughout(self._filtering.run())
        if Random(self._seed + 0.125).random() < remade_topic.SHARE:
            self._run_to_end(remade_topic.TopicRemaker(self.world, "rt").run())
            self._run_throughout(remade_topic.RemadeTopicConsumer(self.world, "w0").run())
        if Random(self._seed + 0.25).random() < inbox_consumers.SHARE:
            self._inbox = inbox_consumers.SimulatedInbox()
            for name in inbox_consumers.MEMBERS:
                member = inbox_consumers.InboxConsumer(self.world, name, self._inbox)
                self._run_throughout(member.run())
            operator = inbox_consumers.InboxOperator(self.world, "io", self._inbox)
            self._run_to_end(operator.run())

        if Random(self._seed + 0.375).random() < store_consumers.SHARE:
            effects = store_consumers.EffectsOfStores()
            for name in store_consumers.MEMBERS:
                self._run_throughout(store_consumers.StoreConsumer(self.world, name, effects).run())
            self._run_throughout(store_consumers.StoreOperator(self.world, "so", effects).run())

    def _start_xa(self) -> None:
        for actor in (
            xa.ForeignManager(self.world, "x"),
            xa.HomeCoordinator(self.world, "h"),
            xa.ReplacedInstance(self.world, "i"),
        ):
            self._run_to_end(actor.run(3))
        self._run_throughout(xa.BranchRecoverer(self.world, "r").run())

    def _run_to_end(self, work: Coroutine[Deferred[Any], Any, None]) -> None:
        """Start work that must end before the simulation does."""
        self._busy += 1

        def done(_result: object) -> None:
            self._busy -= 1

        Deferred.fromCoroutine(work).addCallbacks(done, self.world.failed)

    def _run_throughout(self, work: Coroutine[Deferred[Any], Any, None]) -> None:
        """Start work that goes on until the simulation ends."""
        Deferred.fromCoroutine(work).addErrback(self.world.failed)

    def _step_until_over(self) -> None:
        world = self.world
        for _ in range(STEPS):
            if world.over:
                return
            try:
                world.clock.next()
                self._raise_failure()
            except (PowerCut, StoreError):
                if not world.disk.power_is_cut:
                    raise
                self._restart_later()
        raise InvariantBroken(f"the simulation has not ended after {STEPS} steps")

    def _raise_failure(self) -> None:
        broker = self.world.broker
        failure = self.world.failure or (broker.failure if broker is not None else None)
        if failure is not None:
            failure.raiseException()

    def _start_broker(self) -> None:
        world = self.world
        world.broker = SimulatedBroker(
            world.disk, world.clock, world.rng, world.database, self._plant
        )

    def _cut_power(self) -> None:
        """Cut the power of the broker's machine, at once or at one of the next changes
        of its disk.
        """
        world = self.world
        if not world.trouble:
            return
        if world.broker is None:
            world.clock.callLater(0.05, self._cut_power)
            return
        world.history.counts["power cuts"] += 1
        if world.rng.random() < 0.5:
            self._restart_later()
        else:
            world.disk.crash_at = world.disk.changes + world.rng.randint(1, 20)

    def _restart_later(self) -> None:
        world = self.world
        if world.broker is not None:
            world.broker.crash()
        world.disk = world.disk.crash(world.rng)
        world.broker = None
        world.clock.callLater(world.rng.uniform(0.01, 0.3), self._start_broker)
        world.clock.callLater(world.rng.uniform(0.1, 0.6), self._cut_power)

    def _cut_a_connection(self) -> None:
        world = self.world
        if world.trouble:
            if world.broker is not None:
                world.history.counts["connections cut"] += 1
                world.broker.cut_a_connection()
            world.clock.callLater(world.rng.uniform(0.01, 0.1), self._cut_a_connection)

    def _put_clock_back(self) -> None:
        """Put the wall clock back; the next call sets it right again."""
        world = self.world
        world.history.counts["clocks put back"] += 1
        world.clock.put_back = 0 if world.clock.put_back else world.rng.randrange(HOUR)
        if world.trouble and world.rng.random() < 0.5:
            world.clock.callLater(world.rng.uniform(0.0, 0.3), self._put_clock_back)

    def _end_faults(self) -> None:
        self.world.trouble = 0.0
        self.world.disk.crash_at = 0
        self._machine_clock.end()
        self.world.clock.callLater(0.05, self._check_end)

    def _check_end(self) -> None:
        """End the simulation once all is done, decided, delivered and replayed."""
        world = self.world
        if world.broker is not None and not any(self._unfinished(world.broker).values()):
            check_everything(world)
            operators.check(world)
            letter_mender.check(world)
            plan_operator.check(world)
            if self._filtering is not None:
                self._filtering.check()
            if self._inbox is not None:
                self._inbox.check(world.broker.engine.state)
            world.over = True
        elif world.clock.seconds() > FAULTS_S + SETTLE_S:
            left = self._unfinished(world.broker) if world.broker is not None else "no broker"
            raise InvariantBroken(f"{SETTLE_S} s after the last fault: {left}")
        else:
            world.clock.callLater(0.05, self._check_end)

    def _unfinished(self, broker: SimulatedBroker) -> dict[str, int]:
        world, engine = self.world, broker.engine
        state = engine.state
        left = {
            "clock to confirm": self._machine_clock.confirms,
            "busy": self._busy,
            "undecided": state.undecided,
            "unflushed": engine.store.end - engine.store.durable,
        }
        left["backlog"] = state.backlog + sum(
            not barrier.lifted_at for barrier in state.barriers.values()
        )
        left["delayed"] = state.delayed_count
        left["held keys"] = sum(state.held_keys.values())
        left["branches prepared"] = Counter(world.branches.values())[PREPARED]
        left["groups missing"] = sum(
            name not in state.groups.by_name for name in world.consumer_groups
        )
        if self._inbox is not None:
            left["inbox not compared"] = self._inbox.unopened(state)
        handled = world.history.handled
        left["remade unseen"] = sum(
            not handled[f"{remade_topic.GROUP}:{body}"] for body in world.remade
        )
        left["ghosts"] = remade_topic.ghosts(state)
        for group in state.groups.by_name.values():
            left[f"{group.name} behind"] = sum(
                state.topics_by_id[topic_id].end_offsets[partition] - position.floor
                for (topic_id, partition), position in group.positions.items()
            )
            if group.name != remade_topic.GROUP:  # it has positions of deleted topics
                missing = len(state.topics[actors.TOPIC].end_offsets) - len(group.positions)
                left[f"{group.name} behind"] += 10 * missing
            left[f"{group.name} moved"] = (
                sum(group.retrying.values()) + group.letters + sum(map(len, group.fences.values()))
            )
            left[f"{group.name} at consumers"] = sum(
                store.messages for store in group.stores.values()
            )
            left[f"{group.name} leased"] = len(group.leased_rows) + len(group.leases)
        return left

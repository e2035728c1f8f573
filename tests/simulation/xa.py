"""Simulated XA: foreign transaction managers, coordinators, recovery, and producer
instances that replace each other.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from uuid import UUID

from tests.simulation.actors import PLAIN_KEYS, ROW_KEYS, TOPIC, partition_for
from tests.simulation.history import InvariantBroken
from tests.simulation.network import RequestLost
from tests.simulation.services import Service
from tests.simulation.world import COMMITTED, PREPARED, ROLLED_BACK, SimulatedWorld
from txmq.errors import Conflict, HeuristicOutcome, ProducerFenced
from txmq.model.bundle import BundleState
from txmq.model.decider import ByForeign, ByHome, Decider
from txmq.model.message import COMMIT, ROLLBACK, Decision
from txmq.wire import data_requests as h
from txmq.wire.data_requests import Opcode

COMMITS = (BundleState.COMMITTED.name, BundleState.PUBLISHED.name)


class XaActor(Service):
    """A client that repeats its calls until they are answered."""

    async def store(self, token: bytes, decider: Decider, *, commit: bool = False) -> BundleState:
        """Store a bundle, and return its state."""
        keys = (self.rng.choice(PLAIN_KEYS + ROW_KEYS), PLAIN_KEYS[1])
        return await self.send_parts_until_answered(
            self.make_bundle(token, [(key, 0) for key in keys], decider, commit=commit)
        )

    async def decide(self, token: bytes, outcome: Decision) -> None:
        """Decide a bundle. Raises Conflict if it was decided in the other way."""
        await self.request(Opcode.DECIDE, h.pack_decide(h.Decide(outcome, token, 0, self.name)))
        history = self.world.history
        (history.committed if outcome is COMMIT else history.rolled_back).add(token)

    async def call(self, name: str, /, **args: object) -> Any:
        """Return the result of a call that may be repeated."""
        while True:
            try:
                return await self.connection.call(name, **args)
            except RequestLost:
                await self.connection.connect()


class ForeignManager(XaActor):
    """A foreign transaction manager: its prepared bundles stay undecided until it
    decides.
    """

    async def run(self, transactions: int) -> None:
        await self.connection.connect()
        for number in range(transactions):
            token, xid = self.new_token(), ByForeign(7, self.name.encode(), bytes([number]))
            if self.rng.random() < 0.2:
                if await self.store(token, xid, commit=True) not in (
                    BundleState.COMMITTED,
                    BundleState.PUBLISHED,
                ):
                    raise InvariantBroken("a one-phase commit did not commit")
                self.world.history.committed.add(token)
            elif await self.store(token, xid) is not BundleState.UNDECIDED:
                raise InvariantBroken("a branch was decided as it was prepared")
            else:
                await self._finish(token)

    async def _finish(self, token: bytes) -> None:
        outcome = self.rng.choices((COMMIT, ROLLBACK), (70, 30))[0]
        await self.connection.pause(self.rng.choice((0.01, 0.01, 0.5)))
        if self.rng.random() < 0.3:  # its process died: the next one asks what is prepared
            self.connection.drop()
            listed = (await self.call("xa.list", kind="foreign", owner="sim"))["transactions"]
            if token.hex() not in {row["token"] for row in listed}:
                raise InvariantBroken(f"the prepared branch {token.hex()} is not listed")
        if self.rng.random() < 0.2:
            await self._decide_as_operator(token, outcome)
            return
        try:
            await self.decide(token, outcome)
        except Conflict as error:
            raise InvariantBroken(
                f"a prepared branch was decided without its manager: {error}"
            ) from error
        self.world.history.counts["foreign"] += 1

    async def _decide_as_operator(self, token: bytes, outcome: Decision) -> None:
        """Let an operator decide first.

        If the manager decides otherwise, the heuristic decision is listed until it is
        forgotten.
        """
        hand = self.rng.choice((COMMIT, ROLLBACK))
        await self.call(
            "tx.decide", token=token.hex(), outcome=hand.name, operator="op", reason="gone"
        )
        history = self.world.history
        (history.committed if hand is COMMIT else history.rolled_back).add(token)
        with suppress(HeuristicOutcome):
            await self.request(Opcode.DECIDE, h.pack_decide(h.Decide(outcome, token, 0, self.name)))
            if outcome is not hand:
                raise InvariantBroken("a decision by hand was overruled")
        for listed in (True, False):
            rows = (await self.call("xa.list", heuristic=True))["transactions"]
            if (token.hex() in {row["token"] for row in rows}) is not listed:
                raise InvariantBroken(
                    f"the decision by hand of {token.hex()} is {'not ' * listed}listed"
                )
            await self.call("xa.forget", token=token.hex(), operator="op", reason="seen")
        history.counts["by hand"] += 1


class HomeCoordinator(XaActor):
    """Prepare a branch elsewhere and a bundle here, which the home broker decides.

    The coordinator dies now and then between these steps.
    """

    async def run(self, transactions: int) -> None:
        await self.connection.connect()
        for _ in range(transactions):
            token, branches = self.new_token(), self.world.branches
            prepare_first = self.rng.random() < 0.5
            if prepare_first:
                branches[token] = PREPARED
                await self.connection.pause(self.rng.choice((0.01, 0.3)))
            if self.rng.random() < 0.15:  # dies, and leaves the branch to the recoverer
                continue
            state = await self.store(
                token, ByHome(UUID(self.connection.welcome["log_id"]).bytes, token)
            )
            if not prepare_first:
                branches[token] = PREPARED
            if self.rng.random() < 0.15:
                self.connection.drop()
                await self.connection.connect()
                continue
            await self._decide(token, state)

    async def _decide(self, token: bytes, state: BundleState) -> None:
        try:
            await self.decide(token, COMMIT if state is BundleState.UNDECIDED else ROLLBACK)
        except Conflict:
            end(self.world, token, ROLLED_BACK)
        else:
            end(self.world, token, COMMITTED if state is BundleState.UNDECIDED else ROLLED_BACK)
        self.world.history.counts["home"] += 1


class BranchRecoverer(XaActor):
    """End branches that are prepared for too long, by the outcome at the home
    broker.
    """

    async def run(self, transactions: int = 0) -> None:
        await self.connection.connect()
        while not self.world.over:
            await self.connection.pause(0.1)
            for token in [
                token for token, state in self.world.branches.items() if state == PREPARED
            ]:
                if self.rng.random() < 0.5:
                    continue
                log_id = self.connection.welcome["log_id"]
                reply = await self.call(
                    "xa.outcome", token=token.hex(), log_id=log_id, decide=True, by=self.name
                )
                end(self.world, token, COMMITTED if reply["state"] in COMMITS else ROLLED_BACK)
                self.world.history.counts["recovered"] += 1


def end(world: SimulatedWorld, token: bytes, state: str) -> None:
    """End a branch. Raises InvariantBroken if it has ended in the other way."""
    before, world.branches[token] = world.branches[token], state
    if before not in (PREPARED, state):
        raise InvariantBroken(f"branch {token.hex()} was {before} and is to be {state}")


class ReplacedInstance(XaActor):
    """Processes of one producer instance, each fenced by the next one without its
    knowledge.
    """

    async def run(self, transactions: int) -> None:
        self.connection.identity = {"instance": self.name, "incarnation": 0}
        await self._register()
        for _ in range(transactions):
            token = self.new_token()
            await self.store(token, ByForeign(8, self.name.encode(), token))
            newer = ReplacedInstance(self.world, self.name)
            newer.connection.identity = {"instance": self.name, "incarnation": 0}
            await newer._register()
            await self._act_when_fenced(token)
            self.connection, newer.connection = newer.connection, self.connection
            newer.connection.drop()

    async def _register(self) -> None:
        await self.connection.connect()
        reply = await self.call("producer.register", service="sim", instance=self.name)
        self.connection.identity = {"instance": self.name, "incarnation": reply["epoch"]}

    async def _act_when_fenced(self, token: bytes) -> None:
        """Check that a fenced process cannot send, but may decide what it has
        stored.
        """
        data = self.batch(self.new_id(), 0, (PLAIN_KEYS[0], "late"))
        with suppress(ProducerFenced):
            await self.request(
                Opcode.SEND, h.send_header(TOPIC, partition_for(PLAIN_KEYS[0]), 0) + data
            )
            raise InvariantBroken("an incarnation sent after the next one was registered")
        await self.decide(token, COMMIT)
        self.world.history.counts["fenced"] += 1

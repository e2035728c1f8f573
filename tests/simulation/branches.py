"""Actors of XA: managers that have the broker as a branch, coordinators that it decides
for, and processes of one producer instance that take each other's place.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any
from uuid import UUID

from tests.simulation.actors import PLAIN_KEYS, ROW_KEYS, TOPIC, Service, place_of
from tests.simulation.history import Broken
from tests.simulation.network import Lost
from txmq.errors import Conflict, HeuristicOutcome, ProducerFenced
from txmq.model.bundle import GroupState
from txmq.model.message import COMMIT, ROLLBACK, Decision
from txmq.wire import headers as h
from txmq.wire.headers import Opcode

if TYPE_CHECKING:
    from tests.simulation.world import World

PREPARED, COMMITTED, ROLLED_BACK = "prepared", "committed", "rolled back"
COMMITS = (GroupState.COMMITTED.name, GroupState.PUBLISHED.name)


class Xa(Service):
    """What managers share."""

    async def stored(
        self, token: bytes, decider: tuple[object, ...], *, commit: bool = False
    ) -> GroupState:
        """Where the group stands once it is stored, however often that must be
        tried.
        """
        keys = (self.rng.choice(PLAIN_KEYS + ROW_KEYS), PLAIN_KEYS[1])
        return await self.stored_parts(
            self.group(token, [(key, 0) for key in keys], decider, commit=commit)
        )

    async def decided(self, token: bytes, outcome: Decision) -> None:
        """Raises Conflict where somebody decided otherwise."""
        await self.insist(Opcode.DECIDE, h.pack_decide(h.Decide(outcome, token, 0, self.name)))
        history = self.world.history
        (history.decided if outcome is COMMIT else history.dead_tokens).add(token)

    async def asked(self, name: str, **args: object) -> Any:
        """What a call returns that may be made again."""
        while True:
            try:
                return await self.peer.call(name, **args)
            except Lost:
                await self.peer.connect()


class Manager(Xa):
    """A foreign manager: what is prepared for it stays so until it decides, whatever
    happens meanwhile.
    """

    async def run(self, transactions: int) -> None:
        await self.peer.connect()
        for number in range(transactions):
            token, xid = self.new_token(), ("foreign", 7, self.name.encode(), bytes([number]))
            if self.rng.random() < 0.2:
                if await self.stored(token, xid, commit=True) not in (
                    GroupState.COMMITTED,
                    GroupState.PUBLISHED,
                ):
                    raise Broken("a one-phase commit did not commit")
                self.world.history.decided.add(token)
            elif await self.stored(token, xid) is not GroupState.UNDECIDED:
                raise Broken("a branch was decided as it was prepared")
            else:
                await self._finish(token)

    async def _finish(self, token: bytes) -> None:
        outcome = self.rng.choices((COMMIT, ROLLBACK), (70, 30))[0]
        await self.peer.pause(self.rng.choice((0.01, 0.01, 0.5)))
        if self.rng.random() < 0.3:  # its process died: the next one asks what is prepared
            self.peer.drop()
            listed = (await self.asked("xa.list", kind="foreign", owner="sim"))["transactions"]
            if token.hex() not in {row["token"] for row in listed}:
                raise Broken(f"the prepared branch {token.hex()} is not listed")
        if self.rng.random() < 0.2:
            await self._by_hand(token, outcome)
            return
        try:
            await self.decided(token, outcome)
        except Conflict as error:
            raise Broken(f"a prepared branch was decided without its manager: {error}") from error
        self.world.history.counts["foreign"] += 1

    async def _by_hand(self, token: bytes, outcome: Decision) -> None:
        """An operator is faster; if it was another decision, that stays listed until it
        is dealt with.
        """
        hand = self.rng.choice((COMMIT, ROLLBACK))
        await self.asked(
            "tx.decide", token=token.hex(), outcome=hand.name, operator="op", reason="gone"
        )
        history = self.world.history
        (history.decided if hand is COMMIT else history.dead_tokens).add(token)
        with suppress(HeuristicOutcome):
            await self.insist(Opcode.DECIDE, h.pack_decide(h.Decide(outcome, token, 0, self.name)))
            if outcome is not hand:
                raise Broken("a decision by hand was overruled")
        for listed in (True, False):
            rows = (await self.asked("xa.list", heuristic=True))["transactions"]
            if (token.hex() in {row["token"] for row in rows}) is not listed:
                raise Broken(f"the decision by hand of {token.hex()} is {'not ' * listed}listed")
            await self.asked("xa.forget", token=token.hex(), operator="op", reason="seen")
        history.counts["by hand"] += 1


class Coordinator(Xa):
    """Commits a branch elsewhere and messages here by the broker's decision; dies now
    and then between its steps.
    """

    async def run(self, transactions: int) -> None:
        await self.peer.connect()
        for _ in range(transactions):
            token, branches = self.new_token(), self.world.branches
            prepare_first = self.rng.random() < 0.5
            if prepare_first:
                branches[token] = PREPARED
                await self.peer.pause(self.rng.choice((0.01, 0.3)))
            if self.rng.random() < 0.15:  # dies, and leaves the branch to the recoverer
                continue
            state = await self.stored(
                token, ("home", UUID(self.peer.welcome["log_id"]).bytes, token)
            )
            if not prepare_first:
                branches[token] = PREPARED
            if self.rng.random() < 0.15:
                self.peer.drop()
                await self.peer.connect()
                continue
            await self._decide(token, state)

    async def _decide(self, token: bytes, state: GroupState) -> None:
        try:
            await self.decided(token, COMMIT if state is GroupState.UNDECIDED else ROLLBACK)
        except Conflict:
            end(self.world, token, ROLLED_BACK)
        else:
            end(self.world, token, COMMITTED if state is GroupState.UNDECIDED else ROLLED_BACK)
        self.world.history.counts["home"] += 1


class Recoverer(Xa):
    """Ends the branches that are prepared for too long, as the home broker decides."""

    async def run(self, transactions: int = 0) -> None:
        await self.peer.connect()
        while not self.world.over:
            await self.peer.pause(0.1)
            for token in [
                token for token, state in self.world.branches.items() if state == PREPARED
            ]:
                if self.rng.random() < 0.5:
                    continue
                log_id = self.peer.welcome["log_id"]
                told = await self.asked(
                    "xa.outcome", token=token.hex(), log_id=log_id, decide=True, by=self.name
                )
                end(self.world, token, COMMITTED if told["state"] in COMMITS else ROLLED_BACK)
                self.world.history.counts["recovered"] += 1


def end(world: World, token: bytes, state: str) -> None:
    """The branch is ended, or was: never in another way."""
    before, world.branches[token] = world.branches[token], state
    if before not in (PREPARED, state):
        raise Broken(f"branch {token.hex()} was {before} and is to be {state}")


class Instance(Xa):
    """Processes of one instance: each takes the place of the one before, which does not
    know that it is over.
    """

    async def run(self, transactions: int) -> None:
        self.peer.identity = {"instance": self.name, "incarnation": 0}
        await self._register()
        for _ in range(transactions):
            token = self.new_token()
            await self.stored(token, ("foreign", 8, self.name.encode(), token))
            newer = Instance(self.world, self.name)
            newer.peer.identity = {"instance": self.name, "incarnation": 0}
            await newer._register()
            await self._late(token)
            self.peer, newer.peer = newer.peer, self.peer
            newer.peer.drop()

    async def _register(self) -> None:
        await self.peer.connect()
        told = await self.asked("producer.register", service="sim", instance=self.name)
        self.peer.identity = {"instance": self.name, "incarnation": told["epoch"]}

    async def _late(self, token: bytes) -> None:
        """The older process goes on: it sends nothing, but what it stored it may
        decide.
        """
        data = self.batch(self.new_id(), 0, (PLAIN_KEYS[0], "late"))
        with suppress(ProducerFenced):
            await self.insist(Opcode.SEND, h.send_header(TOPIC, place_of(PLAIN_KEYS[0]), 0) + data)
            raise Broken("an incarnation sent after the next one was registered")
        await self.decided(token, COMMIT)
        self.world.history.counts["fenced"] += 1

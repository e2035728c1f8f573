"""Simulated services: transactions with a database, broker-local transactions, jobs."""

from __future__ import annotations

from contextlib import suppress

from tests.simulation.actors import PLAIN_KEYS, ROW_KEYS, TOPIC, Actor, partition_for
from tests.simulation.database import Fenced
from tests.simulation.history import InvariantBroken
from tests.simulation.network import RequestLost
from txmq.errors import Conflict, RequestRejected
from txmq.model.bundle import BundleState
from txmq.model.decider import ByBroker, ByJob, ByPostgres, Decider
from txmq.model.message import Decision
from txmq.wire import data_requests as h
from txmq.wire.bundle import (
    BundleDescription,
    BundlePart,
    PartBatch,
    bundle_digest,
    pack_part,
    unpack_bundle_receipt,
)
from txmq.wire.data_requests import Opcode

POSTGRES = ByPostgres(1, 1, 5, None, 1)


class Service(Actor):
    """A service that changes a row and sends messages in one transaction.

    Its process dies now and then, at the worst moments.
    """

    async def run(self, transactions: int) -> None:
        await self.connection.connect()
        for _ in range(transactions):
            await self._transaction()
            await self.connection.pause(0.02)

    async def _transaction(self) -> None:
        database, history, rng = self.world.database, self.world.history, self.rng
        token, key = self.new_token(), rng.choice(ROW_KEYS)
        version = await database.lock(key)
        parts = self.make_bundle(
            token, [(key, version), *((name, 0) for name in self.extra_keys())], POSTGRES
        )
        outcome = "roll back"
        with suppress(RequestLost, Fenced):
            if len(parts) > 1 and rng.random() < 0.15:
                await self._store(parts[:-1])
                outcome = rng.choice(("roll back", "die before"))
            elif await self._store(parts):
                history.stored_at[token] = self.world.clock.seconds()
                database.insert_token(token)
                outcome = rng.choices(
                    ("commit", "roll back", "die before", "die after"), (70, 10, 10, 10)
                )[0]
        if outcome == "die before":
            self.connection.drop()
            # until the database notices that the backend's client is gone
            await self.connection.pause(0.1)
        if outcome in ("commit", "die after") and token not in database.fences:
            database.commit(token, key, version)
            history.counts["committed"] += 1
        else:
            database.roll_back(token, key)
            history.rolled_back.add(token)
        if outcome == "die after":
            self.connection.drop()
        elif outcome in ("commit", "roll back"):
            await self._report_decision(token, committed=token in database.committed)
        if self.connection.transport is None:
            await self.connection.connect()

    def extra_keys(self) -> list[str]:
        """Return the keys of messages that go with a transaction: none, one, or enough
        for a large bundle.
        """
        return self.rng.choices(PLAIN_KEYS, k=self.rng.choice((0, 0, 0, 1, 1, 3, 6)))

    def make_bundle(
        self,
        token: bytes,
        rows: list[tuple[str, int]],
        decider: Decider,
        *,
        commit: bool = False,
    ) -> list[BundlePart]:
        """Return the parts of a bundle: one, or perhaps several for more than two
        messages.
        """
        bodies = [f"{key}|{version}|{token.hex()}-{n}" for n, (key, version) in enumerate(rows)]
        self.world.history.attempted.update(bodies)
        self.world.history.bundles[token] = bodies
        batches = [
            PartBatch(TOPIC, partition_for(key), 0, self.batch(token, n, (key, body)))
            for n, ((key, _version), body) in enumerate(zip(rows, bodies, strict=True))
        ]
        each = self.rng.choice((1, 2, 4)) if len(batches) > 2 else len(batches)
        self.world.history.counts["large"] += len(batches) > 2
        check = 0 if decider.kind in ("local", "job") else 300_000
        parts = [
            BundlePart(
                token,
                number,
                0,
                False,
                False,
                bytes(32),
                None,
                tuple(batches[start : start + each]),
            )
            for number, start in enumerate(range(0, len(batches), each))
        ]
        parts[0] = parts[0]._replace(description=BundleDescription(decider, "sim", (), check))
        return [
            *parts[:-1],
            parts[-1]._replace(sealed=True, commit=commit, digest=bundle_digest(parts)),
        ]

    async def send_parts(self, parts: list[BundlePart]) -> BundleState:
        """Send these parts, and return the state of the bundle. Raises RequestLost."""
        state = BundleState.OPEN
        for part in parts:
            state = BundleState(
                unpack_bundle_receipt(
                    await self.connection.request(Opcode.GROUP, pack_part(part))
                ).state
            )
        return state

    async def send_parts_until_answered(self, parts: list[BundlePart]) -> BundleState:
        """Send these parts until all of them have been answered, and return the state
        of the bundle.
        """
        while True:
            try:
                return await self.send_parts(parts)
            except RequestLost:
                await self.connection.connect()

    async def _store(self, parts: list[BundlePart]) -> bool:
        """Return whether the bundle is stored. Give up after three attempts, as a
        transaction that has held its lock for too long does.
        """
        for _ in range(3):
            try:
                state = await self.send_parts(parts)
            except RequestLost:
                await self.connection.connect()
            else:
                return state in (
                    BundleState.UNDECIDED,
                    BundleState.PUBLISHED,
                    BundleState.COMMITTED,
                )
        return False

    async def _report_decision(self, token: bytes, *, committed: bool) -> None:
        decision = Decision.COMMIT if committed else Decision.ROLLBACK
        try:
            await self.connection.request(
                Opcode.DECIDE, h.pack_decide(h.Decide(decision, token, 0, "producer"))
            )
        except Conflict as error:
            raise InvariantBroken(f"the database said {decision.name}: {error}") from error
        except (RequestLost, RequestRejected):
            self.world.history.counts["decisions lost"] += 1  # the resolver finds out


class LocalTransactions(Service):
    """A service with broker-local transactions, and with jobs that decide several
    bundles at once.
    """

    async def run(self, transactions: int) -> None:
        await self.connection.connect()
        for _ in range(transactions):
            await (self._job() if self.rng.random() < 0.4 else self._local())
            await self.connection.pause(0.03)

    async def _local(self) -> None:
        token, history = self.new_token(), self.world.history
        keys = (self.rng.choice(PLAIN_KEYS + ROW_KEYS), PLAIN_KEYS[1], *self.extra_keys())
        parts = self.make_bundle(token, [(key, 0) for key in keys], ByBroker(), commit=True)
        if len(parts) > 1 and self.rng.random() < 0.1:
            parts.pop()
        done = await self.send_parts_until_answered(parts) in (
            BundleState.COMMITTED,
            BundleState.PUBLISHED,
        )
        (history.committed if done else history.rolled_back).add(token)

    async def _job(self) -> None:
        job, tokens, history = self.new_token(), [], self.world.history
        for _ in range(3):
            token = self.new_token()
            parts = self.make_bundle(
                token, [(key, 0) for key in (PLAIN_KEYS[2], *self.extra_keys())], ByJob(job)
            )
            if await self.send_parts_until_answered(parts) is BundleState.UNDECIDED:
                tokens.append(token)
            else:
                history.rolled_back.add(token)
        winners = [token for token in tokens if self.rng.random() < 0.7]
        history.rolled_back.update(set(tokens) - set(winners))
        decision = {
            "token": job.hex(),
            "outcome": "COMMIT",
            "winners": [token.hex() for token in winners],
        }
        for _ in range(1 + (self.rng.random() < 0.5)):  # a driver may say it twice
            while True:
                try:
                    await self.connection.call("job.decide", **decision)
                except RequestLost:
                    await self.connection.connect()
                else:
                    break
        history.committed.update(winners)
        late = self.new_token()
        if (
            await self.send_parts_until_answered(
                self.make_bundle(late, [(PLAIN_KEYS[2], 0)] * 3, ByJob(job))
            )
            != BundleState.ROLLED_BACK
        ):
            raise InvariantBroken("a group was stored for a job that is decided")
        history.rolled_back.add(late)

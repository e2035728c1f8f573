"""Services of one process whose transactions share frames.

The broker stores and decides each transaction of a frame by itself.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.simulation.actors import ROW_KEYS
from tests.simulation.database import Fenced
from tests.simulation.history import InvariantBroken
from tests.simulation.network import RequestLost
from tests.simulation.services import POSTGRES, Service
from txmq.errors import Conflict, DigestMismatch, RequestRejected, UnknownTopic, UnknownTransaction
from txmq.model.bundle import BundleState
from txmq.model.message import Decision
from txmq.wire import data_requests as h
from txmq.wire.batched import pack_requests, unpack_replies
from txmq.wire.bundle import BundlePart, bundle_digest, pack_part, unpack_bundle_receipt
from txmq.wire.data_requests import Opcode
from txmq.wire.status import to_error

SHARE = 0.3  # of the seeds have this process
WAVES = 2  # of transactions, stored before any of them is decided


class PendingTransaction(NamedTuple):
    """A transaction that locks its row, or did so before it ended."""

    token: bytes
    key: str
    version: int
    parts: list[BundlePart]


class BatchedServices(Service):
    """Store the bundles of several services in one frame, and decide them in another.

    Both frames also hold requests that the broker must refuse.
    """

    async def run(self, transactions: int) -> None:
        await self.connection.connect()
        for _ in range(transactions):
            self._undecided: list[PendingTransaction] = []
            for _wave in range(WAVES):
                await self._wave()
            await self._decide()
            await self.connection.pause(0.02)

    async def _wave(self) -> None:
        """Begin, store and end some transactions.

        All processes lock keys in sorted order, so that they cannot deadlock.
        """
        rng, database = self.rng, self.world.database
        pending = []
        for key in sorted(rng.sample(ROW_KEYS, rng.choice((2, 3)))):
            version, token = await database.lock(key), self.new_token()
            rows = [(key, version), *((name, 0) for name in self.extra_keys()[:1])]
            pending.append(
                PendingTransaction(token, key, version, self.make_bundle(token, rows, POSTGRES))
            )
        stored = await self._store_all(pending)
        for transaction in pending:
            self._commit(transaction, stored=transaction.token in stored)

    def _commit(self, transaction: PendingTransaction, *, stored: bool) -> None:
        token, database, history = transaction.token, self.world.database, self.world.history
        try:
            if stored and self.rng.random() < 0.85:
                history.stored_at[token] = self.world.clock.seconds()
                database.insert_token(token)
                database.commit(token, transaction.key, transaction.version)
                history.counts["committed together"] += 1
                self._undecided.append(transaction)
                return
        except Fenced:
            pass
        database.roll_back(token, transaction.key)
        history.rolled_back.add(token)
        self._undecided.append(transaction)

    async def _store_all(self, pending: list[PendingTransaction]) -> set[bytes]:
        """Return the tokens of the bundles that are stored, and were not rolled back
        meanwhile.
        """
        requests = [part for transaction in pending for part in transaction.parts]
        rejected = self._rejected_parts(pending)
        for part, _error in rejected:
            requests.insert(
                self.rng.randrange(requests.index(pending[0].parts[0]) + 1, len(requests) + 1), part
            )
        for _ in range(3):
            try:
                payload = pack_requests([b"".join(pack_part(part)) for part in requests])
                answers = unpack_replies(
                    await self.connection.request(Opcode.GROUPS, b"".join(payload))
                )
            except RequestLost:
                await self.connection.connect()
            else:
                break
        else:
            return set()
        states = {}
        for part, answer in zip(requests, answers, strict=True):
            wrong = next((error for other, error in rejected if other is part), None)
            if (type(to_error(*answer)) if answer.status else None) is not wrong:
                raise InvariantBroken(
                    f"{part.token.hex()} of a frame of bundles was answered with {answer}"
                )
            if wrong is None:
                states[part.token] = BundleState(unpack_bundle_receipt(answer.payload).state)
        return {token for token, state in states.items() if state is not BundleState.ROLLED_BACK}

    def _rejected_parts(
        self, pending: list[PendingTransaction]
    ) -> list[tuple[BundlePart, type[RequestRejected]]]:
        """Return parts that must be refused, with the error of each.

        One is for an unknown topic, the other uses a token again with other contents.
        """
        first = pending[0].parts[0]
        [batch, *_rest] = first.batches
        lost = BundlePart(
            self.new_token(),
            0,
            0,
            True,
            False,
            b"l" * 32,
            first.description,
            (batch._replace(topic="none"),),
        )
        again = first._replace(sealed=True, digest=b"o" * 32, batches=(batch,))
        assert bundle_digest([again]) != again.digest, "so that it is another's"
        wanted = [(lost, UnknownTopic), (again, DigestMismatch)][: self.rng.randrange(3)]
        # a part of an open bundle has no digest to differ from
        if len(pending[0].parts) > 1:
            return wanted[:1]
        return [(part, error) for part, error in wanted]

    async def _decide(self) -> None:
        """Decide in any order as the database did, some twice, with an unknown token
        among them.
        """
        rng, history = self.rng, self.world.history
        verdicts = [
            (
                transaction.token,
                Decision.COMMIT
                if transaction.token in self.world.database.committed
                else Decision.ROLLBACK,
            )
            for transaction in self._undecided
        ]
        verdicts += [*rng.sample(verdicts, rng.randrange(2)), (self.new_token(), Decision.COMMIT)]
        rng.shuffle(verdicts)
        payloads = [
            h.pack_decide(h.Decide(outcome, token, 0, "producer")) for token, outcome in verdicts
        ]
        try:
            reply = await self.connection.request(
                Opcode.DECISIONS, b"".join(pack_requests(payloads))
            )
        except RequestLost:
            history.counts["decisions lost"] += len(verdicts)
            await self.connection.connect()
            return
        known = {transaction.token for transaction in self._undecided}
        for (token, outcome), answer in zip(verdicts, unpack_replies(reply), strict=True):
            error = to_error(*answer) if answer.status else None
            if error is not None:
                unheard = token not in known or outcome is Decision.ROLLBACK
                if isinstance(error, Conflict) or not (
                    unheard and isinstance(error, UnknownTransaction)
                ):
                    raise InvariantBroken(
                        f"the database said {outcome.name} of {token.hex()}: {error}"
                    )
                continue
            state = BundleState(h.unpack_decide_receipt(answer.payload).state)
            if token not in known or (state is BundleState.ROLLED_BACK) != (
                outcome is Decision.ROLLBACK
            ):
                raise InvariantBroken(
                    f"{token.hex()} was decided {outcome.name}, and is {state.name}"
                )
        history.counts["decided together"] += len(self._undecided)

"""Services of one process, whose transactions share frames: stored together, decided
together, each for itself.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.simulation.actors import POSTGRES, ROW_KEYS, Service
from tests.simulation.database import Fenced
from tests.simulation.history import Broken
from tests.simulation.network import Lost
from txmq.errors import Conflict, DigestMismatch, RequestRejected, UnknownTopic, UnknownTransaction
from txmq.model.bundle import GroupState
from txmq.model.message import Decision
from txmq.wire import headers as h
from txmq.wire.group import Part, group_digest, pack_part, unpack_group_receipt
from txmq.wire.headers import Opcode
from txmq.wire.status import to_error
from txmq.wire.together import pack_requests, unpack_answers

SHARE = 0.3  # of the seeds have such a process
WAVES = 2  # of transactions that are stored before any of them is decided


class Half(NamedTuple):
    """A transaction whose row is locked, or was."""

    token: bytes
    key: str
    version: int
    parts: list[Part]


class Crowd(Service):
    """Stores the groups of some services in one frame, and later decides them in one,
    both with bad neighbours.
    """

    async def run(self, transactions: int) -> None:
        await self.peer.connect()
        for _ in range(transactions):
            self._undone: list[Half] = []
            for _wave in range(WAVES):
                await self._wave()
            await self._decide()
            await self.peer.pause(0.02)

    async def _wave(self) -> None:
        """Locks are taken in the order of their keys, so that two crowds do not wait
        for one another.
        """
        rng, database = self.rng, self.world.database
        halves = []
        for key in sorted(rng.sample(ROW_KEYS, rng.choice((2, 3)))):
            version, token = await database.lock(key), self.new_token()
            rows = [(key, version), *((name, 0) for name in self.some_keys()[:1])]
            halves.append(Half(token, key, version, self.group(token, rows, POSTGRES)))
        stored = await self._store_all(halves)
        for half in halves:
            self._commit(half, stored=half.token in stored)

    def _commit(self, half: Half, *, stored: bool) -> None:
        token, database, history = half.token, self.world.database, self.world.history
        try:
            if stored and self.rng.random() < 0.85:
                history.stored[token] = self.world.clock.seconds()
                database.insert_token(token)
                database.commit(token, half.key, half.version)
                history.counts["committed together"] += 1
                self._undone.append(half)
                return
        except Fenced:
            pass
        database.roll_back(token, half.key)
        history.dead_tokens.add(token)
        self._undone.append(half)

    async def _store_all(self, halves: list[Half]) -> set[bytes]:
        """The tokens of those that are stored, and not rolled back meanwhile."""
        requests = [part for half in halves for part in half.parts]
        bad = self._bad_neighbours(halves)
        for part, _error in bad:
            requests.insert(
                self.rng.randrange(requests.index(halves[0].parts[0]) + 1, len(requests) + 1), part
            )
        for _ in range(3):
            try:
                payload = pack_requests([b"".join(pack_part(part)) for part in requests])
                answers = unpack_answers(await self.peer.request(Opcode.GROUPS, b"".join(payload)))
            except Lost:
                await self.peer.connect()
            else:
                break
        else:
            return set()
        states = {}
        for part, answer in zip(requests, answers, strict=True):
            wrong = next((error for neighbour, error in bad if neighbour is part), None)
            if (type(to_error(*answer)) if answer.status else None) is not wrong:
                raise Broken(f"{part.token.hex()} of a frame of groups was answered with {answer}")
            if wrong is None:
                states[part.token] = GroupState(unpack_group_receipt(answer.payload).state)
        return {token for token, state in states.items() if state is not GroupState.ROLLED_BACK}

    def _bad_neighbours(self, halves: list[Half]) -> list[tuple[Part, type[RequestRejected]]]:
        """Groups that must be refused, and how: of no topic, and a token used again for
        other contents.
        """
        first = halves[0].parts[0]
        [batch, *_rest] = first.batches
        lost = Part(
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
        assert group_digest([again]) != again.digest, "so that it is another's"
        wanted = [(lost, UnknownTopic), (again, DigestMismatch)][: self.rng.randrange(3)]
        if (
            len(halves[0].parts) > 1
        ):  # of several parts: what it has no digest of yet is stored, or not, by its number
            return wanted[:1]
        return [(part, error) for part, error in wanted]

    async def _decide(self) -> None:
        """What the database says, in any order, some of it twice, beside what nobody
        has heard of.
        """
        rng, history = self.rng, self.world.history
        verdicts = [
            (
                half.token,
                Decision.COMMIT
                if half.token in self.world.database.committed
                else Decision.ROLLBACK,
            )
            for half in self._undone
        ]
        verdicts += [*rng.sample(verdicts, rng.randrange(2)), (self.new_token(), Decision.COMMIT)]
        rng.shuffle(verdicts)
        payloads = [
            h.pack_decide(h.Decide(outcome, token, 0, "producer")) for token, outcome in verdicts
        ]
        try:
            reply = await self.peer.request(Opcode.DECISIONS, b"".join(pack_requests(payloads)))
        except Lost:
            history.counts["decisions lost"] += len(verdicts)
            await self.peer.connect()
            return
        known = {half.token for half in self._undone}
        for (token, outcome), answer in zip(verdicts, unpack_answers(reply), strict=True):
            error = to_error(*answer) if answer.status else None
            if error is not None:
                unheard = token not in known or outcome is Decision.ROLLBACK
                if isinstance(error, Conflict) or not (
                    unheard and isinstance(error, UnknownTransaction)
                ):
                    raise Broken(f"the database said {outcome.name} of {token.hex()}: {error}")
                continue
            state = GroupState(h.unpack_decide_receipt(answer.payload).state)
            if token not in known or (state is GroupState.ROLLED_BACK) != (
                outcome is Decision.ROLLBACK
            ):
                raise Broken(f"{token.hex()} was decided {outcome.name}, and is {state.name}")
        history.counts["decided together"] += len(self._undone)

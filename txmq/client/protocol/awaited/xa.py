"""Two-phase commit over several PostgreSQL databases and brokers, in all faces
(docs/PROTOCOL.md 3).

The log of the home broker, which is the client's, has the decision. At the end of the
block the bundles go out, and every branch that wrote is prepared while the brokers
sync. If all votes are yes, the home broker is asked for COMMIT, else for ROLLBACK. Its
durable answer is the decision, and all branches follow it. If this process dies,
recovery finds the prepared branches by their gids and ends them as the home broker has
decided.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from txmq.client.log import get_logger
from txmq.client.protocol.awaited.block import B, K
from txmq.client.protocol.awaited.caller_transaction import CallerSteps
from txmq.client.protocol.awaited.database_branch import DatabaseBranch
from txmq.client.protocol.awaited.home_broker import record_mixed, request_decision
from txmq.client.protocol.sender.routing import Routing
from txmq.client.protocol.transaction.home_decision import (
    HomeDecision,
    mixed_error,
    uncommitted_error,
)
from txmq.client.protocol.transaction.outbox_entries import order_keys
from txmq.client.protocol.transaction.prepared_slots import SlotDemand
from txmq.client.protocol.transaction.unrouted import UnroutedSends
from txmq.crashpoints import crashpoint
from txmq.errors import LocalProtocolError, TxmqError
from txmq.model.decider import BrokerBranch, ByHome, Participant
from txmq.model.message import COMMIT
from txmq.tx.coordinator import HOME, BundleStatus, Coordinator, Vote, needs_two_phases
from txmq.tx.postgres.driver import Driver
from txmq.tx.xid import branches

T = TypeVar("T")
Step = Callable[[], Coroutine[Any, Any, T]]
log = get_logger()


def require_connections(connections: Sequence[object]) -> None:
    """Raise LocalProtocolError unless there are connections, each of them once."""
    if not connections or len(set(map(id, connections))) < len(connections):
        raise LocalProtocolError(
            f"An XA transaction got {len(connections)} connections, none or one twice",
            hint="give different connections: client.xa(connection_a, connection_b)",
        )


class XaSteps(CallerSteps[B, K]):
    """Rows on several connections and messages sent in the block, all or none."""

    unfinished: tuple[str, ...] = ()  # gids of branches that recovery has to end

    def _use(self, drivers: Sequence[Driver], node: str) -> None:
        """Use the connections of those drivers. Called once, as the object is made."""
        self._drivers, self._node = drivers, node
        self._branches: list[DatabaseBranch] = []

    def _spread(self, cores: Sequence[K], routing: Routing) -> UnroutedSends[B]:
        unrouted = super()._spread(cores, routing)
        self._bundles.append(self._home)  # it takes part even without messages
        return unrouted

    @abstractmethod
    async def _at_once(self, steps: Sequence[Step[T]]) -> list[T]:
        """Return the results of steps that may wait, in order, when all are over.

        Raises the error of one of them.
        """

    @abstractmethod
    async def _reserve_slots(
        self, demand: dict[int, SlotDemand], deadline: float, stack: ExitStack
    ) -> None:
        """Reserve a slot for each branch to prepare, until `stack` ends.

        Raises TwoPhaseFull at the deadline.
        """

    async def _begin(self) -> None:
        log_id = await self._home.broker.log_id()
        names = branches(self._node, log_id, self.token, len(self._drivers))
        try:
            for driver, name in zip(self._drivers, names, strict=True):
                branch = DatabaseBranch(driver, name, self._sends)
                self._branches.append(branch)
                await branch.begin()
        except BaseException:
            await self._give_back()
            raise

    async def _commit(self) -> None:
        try:
            for branch in self._branches:
                branch.end_block()
            for branch in self._branches:
                await branch.inspect()
            await self._require_turn()
        except BaseException:
            await self._abort()
            raise
        writing = sum(branch.wrote for branch in self._branches)
        if needs_two_phases(writing, speaking=bool(self._nonempty_bundles())):
            await self._commit_in_two_phases()
        else:
            await self._commit_in_one_phase()

    async def _abort(self) -> None:
        """Roll back the branches that are open; prepared ones stay."""
        ended = [branch for branch in self._branches if not await branch.roll_back()]
        if ended:
            raise ended[0].ended()

    async def _give_back(self) -> None:
        for branch in self._branches:
            await branch.give_back()

    @asynccontextmanager
    async def _database_savepoint(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for branch in self._branches:
                await stack.enter_async_context(branch.savepoint())
            yield

    async def _require_turn(self) -> None:
        """Require that nothing waits in an outbox that these messages would overtake.

        They cannot queue there themselves: their home broker decides.
        """
        for bundle in self._nonempty_bundles():
            keys = order_keys(bundle.buffer.items)
            for branch in self._branches if keys else ():
                await branch.require_turn(await bundle.log_id(), keys)

    async def _commit_in_one_phase(self) -> None:
        """Commit the branch that wrote, which decides, and then the others."""
        first, *others = sorted(self._branches, key=lambda branch: not branch.wrote)
        try:
            self._deciding = True
            await first.commit()
            await self._at_once([branch.follow for branch in others])
        finally:
            await self._abort()

    async def _commit_in_two_phases(self) -> None:
        others = [bundle for bundle in self._nonempty_bundles() if bundle is not self._home]
        with ExitStack() as slots:
            try:
                deadline = self._core.seconds() + self._timeout
                await self._reserve_slots(await self._slot_demand(), deadline, slots)
            except BaseException:
                await self._abort()
                raise
            await self._coordinate([self._home, *others])

    async def _slot_demand(self) -> dict[int, SlotDemand]:
        """Return the number of branches to prepare at each server."""
        limits = [await branch.prepared_limit() for branch in self._branches if branch.wrote]
        return {
            server: SlotDemand(sum(other == server for other, _ in limits), limit)
            for server, limit in limits
        }

    async def _coordinate(self, bundles: list[B]) -> None:
        coordinator = Coordinator(tuple(range(len(self._branches))), len(bundles))
        answer: HomeDecision | None = None
        try:
            failure = await self._collect_votes(coordinator, bundles)
            answer = await self._request_decision(coordinator)
            await self._finish_participants(coordinator, bundles)
        finally:
            self.unfinished = self._gids(coordinator.result.unfinished)
            await self._abort()
        await self._raise_unless_committed(coordinator, failure, answer)

    async def _collect_votes(self, coordinator: Coordinator, bundles: list[B]) -> TxmqError | None:
        """Store the bundles, prepare the branches; return the first failure."""
        try:
            await self._send_bundles(coordinator, bundles)
            crashpoint("xa.before_prepare")
            failure = await self._prepare(coordinator)
            crashpoint("xa.after_prepares")
            if failure is None:
                await self._await_bundles(coordinator, bundles)
        except TxmqError as error:
            failure = error
        except BaseException:
            coordinator.veto()
            await self._request_decision(coordinator)
            await self._finish_participants(coordinator, bundles)
            raise
        finally:
            for bundle in bundles:
                bundle.abandon()
        return failure

    async def _send_bundles(self, coordinator: Coordinator, bundles: list[B]) -> None:
        deadline = self._core.seconds() + self._timeout
        decider = ByHome((await self._home.log_id()).bytes, self.token.bytes)
        for n, bundle in enumerate(bundles):
            participants = await self._participants(bundles) if n == HOME else ()
            await bundle.build(self._description(bundle, decider, participants), deadline)
        crashpoint("xa.before_group")
        for n, bundle in enumerate(bundles):
            await bundle.send()
            coordinator.note_bundle(n, BundleStatus.UNCLEAR)

    async def _participants(self, bundles: list[B]) -> tuple[Participant, ...]:
        databases = [branch.participant() for branch in self._branches if branch.wrote]
        logs = [await bundle.log_id() for bundle in bundles[1:]]
        return (*databases, *(BrokerBranch(log_id.bytes) for log_id in logs))

    async def _prepare(self, coordinator: Coordinator) -> TxmqError | None:
        for n, branch in enumerate(self._branches):
            if branch.wrote:
                coordinator.note_vote(n, Vote.UNCLEAR)
        votes = await self._at_once([branch.vote for branch in self._branches])
        for n, vote in enumerate(votes):
            coordinator.note_vote(n, vote.vote)
        return next((vote.error for vote in votes if vote.error is not None), None)

    async def _await_bundles(self, coordinator: Coordinator, bundles: list[B]) -> None:
        # A time-out of their own: the branches may have used up the first one.
        deadline = self._core.seconds() + self._timeout
        for n, bundle in enumerate(bundles):
            bundle.extend_deadline(deadline)
            await bundle.await_receipt()
            coordinator.note_bundle(n, BundleStatus.YES)
        crashpoint("xa.after_group")

    async def _request_decision(self, coordinator: Coordinator) -> HomeDecision | None:
        """Ask the home broker for the decision, if one is needed.

        Unprepared branches are rolled back before, which releases their locks.
        """
        proposal = coordinator.proposal
        if proposal is not COMMIT:
            await self._abort()
        if proposal is None:
            return None
        self._deciding = self._deciding or proposal is COMMIT
        crashpoint("xa.before_decision")
        deadline = self._core.seconds() + self._core.settings.timeout
        answer = await request_decision(self._home, proposal, deadline)
        coordinator.note_decision(answer.decision)
        self._home.published = answer.published
        crashpoint("xa.after_decision")
        return answer

    async def _finish_participants(self, coordinator: Coordinator, bundles: list[B]) -> None:
        for n in coordinator.brokers_to_notify:
            bundles[n].send_decision(coordinator.decision)
        numbers = coordinator.branches_to_end
        ends: list[Step[bool | None]] = [
            partial(self._branches[n].finish, coordinator.decision) for n in numbers
        ]
        if coordinator.decision is COMMIT:
            ends += [branch.follow for branch in self._branches if not branch.wrote]
        for n, agrees in zip(numbers, await self._at_once(ends), strict=False):
            coordinator.note_end(n, agrees)
        crashpoint("xa.after_commits")

    async def _raise_unless_committed(
        self, coordinator: Coordinator, failure: TxmqError | None, answer: HomeDecision | None
    ) -> None:
        """Return only if every participant has committed or will by recovery."""
        decision, unfinished, mixed = coordinator.result
        if unfinished:
            log.warning(
                "transaction.unfinished",
                token=str(self.token),
                decision=decision.name,
                branches=self.unfinished,
            )
        if mixed:
            gids = self._gids(mixed)
            for gid in gids:
                await record_mixed(self._home, gid, decision)
            raise mixed_error(self.token, decision, gids) from failure
        why = answer.why if answer is not None else ""
        error = uncommitted_error(self.token, decision, failure, why)
        if error is not None:
            raise error from failure

    def _gids(self, numbers: Sequence[int]) -> tuple[str, ...]:
        return tuple(self._branches[n].branch.gid for n in numbers)

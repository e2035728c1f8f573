"""Two-phase commit over several PostgreSQL databases and brokers, on asyncio
(docs/PROTOCOL.md 3).

The steps are those of txmq/client/blocking/transaction/xa.py: the branches are prepared
and ended at the same time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager
from typing import Self

from txmq.client.aio.core import AioCore
from txmq.client.aio.transaction.bundle import FIRST_PAUSE_S, LONGEST_PAUSE_S, AioBundle
from txmq.client.aio.transaction.caller_transaction import CallerTransaction, not_begun
from txmq.client.blocking.transaction.prepared_slots import SlotDemand, prepared_slots
from txmq.client.log import get_logger
from txmq.client.protocol.awaited.database_branch import DatabaseBranch
from txmq.client.protocol.sender.routing import Routing
from txmq.client.protocol.transaction.home_decision import (
    HomeDecision,
    decision_of,
    mixed_entry,
    mixed_error,
    rollback_args,
    uncommitted_error,
)
from txmq.client.protocol.transaction.lifecycle import Stage
from txmq.client.protocol.transaction.outbox_entries import order_keys
from txmq.client.protocol.transaction.unrouted import UnroutedSends
from txmq.crashpoints import crashpoint
from txmq.errors import Conflict, LocalProtocolError, TwoPhaseFull, TxmqError
from txmq.model.bundle import BundleState
from txmq.model.decider import BrokerBranch, ByHome, Participant
from txmq.model.message import COMMIT, UNKNOWN, Decision
from txmq.tx.coordinator import HOME, BundleStatus, Coordinator, Vote, needs_two_phases
from txmq.tx.postgres.drivers import async_driver
from txmq.tx.xid import branches

SLOT_PAUSE_S = 0.02  # between two looks for a slot that other transactions of the process have
log = get_logger()


class XaTransaction(CallerTransaction):
    """Rows on several connections and messages sent in the block, all or none.

    The block returns once the transaction is committed. `unfinished` has the gids of
    branches whose database could not be reached: recovery commits them, and their rows
    stay locked until then. The block raises InDoubt if the home broker did not answer,
    HeuristicMixed if an operator had ended a branch otherwise, and else the reason of
    the rollback. The rest is as for the blocking `client.xa`.
    """

    def __init__(
        self,
        core: AioCore,
        connections: Sequence[object],
        *,
        node: str,
        timeout: float,
        check_after: float,
    ) -> None:
        super().__init__(core, timeout=timeout, check_after=check_after)
        if not connections or len(set(map(id, connections))) < len(connections):
            raise LocalProtocolError(
                f"An XA transaction got {len(connections)} connections, none or one twice",
                hint="give different connections: client.xa(connection_a, connection_b)",
            )
        self._node = node
        self._connections = connections
        self._branches: list[DatabaseBranch] = []
        self.unfinished: tuple[str, ...] = ()

    def _spread(self, cores: Sequence[AioCore], routing: Routing) -> UnroutedSends[AioBundle]:
        unrouted = super()._spread(cores, routing)
        self._bundles.append(self._home)  # it takes part even without messages
        return unrouted

    async def __aenter__(self) -> Self:
        self._require(Stage.NEW)
        log_id = await self._core.log_id()
        names = branches(self._node, log_id, self.token, len(self._connections))
        try:
            for connection, name in zip(self._connections, names, strict=True):
                branch = DatabaseBranch(async_driver(connection), name, self._sends)
                self._branches.append(branch)
                await branch.begin()
        except BaseException as error:
            await self._give_back()
            not_begun(error)
            raise
        return await super().__aenter__()

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

    async def _require_turn(self) -> None:
        """Require that nothing waits in an outbox that these messages would overtake.

        They cannot queue there themselves: their home broker decides.
        """
        for bundle in self._nonempty_bundles():
            keys = order_keys(bundle.buffer.items)
            for branch in self._branches if keys else ():
                await branch.require_turn(await bundle.log_id(), keys)

    async def _abort(self) -> None:
        ended = [branch for branch in self._branches if not await branch.roll_back()]
        if ended:
            raise ended[0].ended()

    async def _give_back(self) -> None:
        for branch in self._branches:
            await branch.give_back()

    def _database_savepoint(self) -> AbstractAsyncContextManager[None]:
        return self._savepoints()

    @asynccontextmanager
    async def _savepoints(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for branch in self._branches:
                await stack.enter_async_context(branch.savepoint())
            yield

    async def _commit_in_one_phase(self) -> None:
        """Commit the branch that wrote, which decides, and then the others."""
        first, *others = sorted(self._branches, key=lambda branch: not branch.wrote)
        try:
            self._deciding = True
            await first.commit()
            await asyncio.gather(*(branch.follow() for branch in others))
        finally:
            await self._abort()

    async def _commit_in_two_phases(self) -> None:
        others = [bundle for bundle in self._nonempty_bundles() if bundle is not self._home]
        bundles = [self._home, *others]
        with ExitStack() as stack:
            try:
                await self._reserve_slots(stack)
            except BaseException:
                await self._abort()
                raise
            await self._coordinate(bundles)

    async def _reserve_slots(self, stack: ExitStack) -> None:
        """Reserve a slot for each branch to prepare. Raises TwoPhaseFull."""
        demand = await self._slot_demand()
        deadline = self._core.seconds() + self._timeout
        while True:
            try:
                stack.enter_context(prepared_slots().reserve(demand, 0.0))  # without waiting
            except TwoPhaseFull:
                too_many = any(needed > limit for needed, limit in demand.values())
                if too_many or self._core.seconds() >= deadline:
                    raise
                await asyncio.sleep(SLOT_PAUSE_S)
            else:
                return

    async def _slot_demand(self) -> dict[int, SlotDemand]:
        """Return the number of branches to prepare at each server."""
        limits = [await branch.prepared_limit() for branch in self._branches if branch.wrote]
        return {
            server: SlotDemand(sum(other == server for other, _ in limits), limit)
            for server, limit in limits
        }

    async def _coordinate(self, bundles: list[AioBundle]) -> None:
        coordinator = Coordinator(tuple(range(len(self._branches))), len(bundles))
        answer: HomeDecision | None = None
        try:
            failure = await self._collect_votes(coordinator, bundles)
            answer = await self._request_decision(coordinator, bundles)
            await self._finish_participants(coordinator, bundles)
        finally:
            self.unfinished = self._gids(coordinator.result.unfinished)
            await self._abort()  # branches that are open still
        await self._raise_unless_committed(coordinator, failure, answer)

    async def _collect_votes(
        self, coordinator: Coordinator, bundles: list[AioBundle]
    ) -> TxmqError | None:
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
            await self._request_decision(coordinator, bundles)
            await self._finish_participants(coordinator, bundles)
            raise
        finally:
            for bundle in bundles:
                bundle.abandon()
        return failure

    async def _send_bundles(self, coordinator: Coordinator, bundles: list[AioBundle]) -> None:
        deadline = self._core.seconds() + self._timeout
        decider = ByHome((await self._core.log_id()).bytes, self.token.bytes)
        for n, bundle in enumerate(bundles):
            participants = await self._participants(bundles) if n == HOME else ()
            await bundle.build(self._description(bundle, decider, participants), deadline)
        crashpoint("xa.before_group")
        for n, bundle in enumerate(bundles):
            await bundle.send()
            coordinator.note_bundle(n, BundleStatus.UNCLEAR)

    async def _prepare(self, coordinator: Coordinator) -> TxmqError | None:
        for n, branch in enumerate(self._branches):
            if branch.wrote:
                coordinator.note_vote(n, Vote.UNCLEAR)
        votes = await asyncio.gather(*(branch.vote() for branch in self._branches))
        for n, vote in enumerate(votes):
            coordinator.note_vote(n, vote.vote)
        return next((vote.error for vote in votes if vote.error is not None), None)

    async def _await_bundles(self, coordinator: Coordinator, bundles: list[AioBundle]) -> None:
        # A time-out of their own: the branches may have used up the first one.
        deadline = self._core.seconds() + self._timeout
        for n, bundle in enumerate(bundles):
            bundle.extend_deadline(deadline)
            await bundle.await_receipt()
            coordinator.note_bundle(n, BundleStatus.YES)
        crashpoint("xa.after_group")

    async def _participants(self, bundles: list[AioBundle]) -> tuple[Participant, ...]:
        positioned = await self._core.takes_positions()
        databases = [
            branch.participant(positioned=positioned) for branch in self._branches if branch.wrote
        ]
        logs = [await bundle.log_id() for bundle in bundles[1:]]
        return (*databases, *(BrokerBranch(log_id.bytes) for log_id in logs))

    async def _request_decision(
        self, coordinator: Coordinator, bundles: list[AioBundle]
    ) -> HomeDecision | None:
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
        answer = await self._decision(proposal, deadline)
        coordinator.note_decision(answer.decision)
        bundles[HOME].published = answer.published
        crashpoint("xa.after_decision")
        return answer

    async def _decision(self, wanted: Decision, deadline: float) -> HomeDecision:
        """Ask for COMMIT or ROLLBACK, and retry while the broker is away.

        The answer may be the other decision.
        """
        once = self._commit_at_home if wanted is COMMIT else self._roll_back_at_home
        pause = FIRST_PAUSE_S
        while True:
            try:
                return await once(max(deadline - self._core.seconds(), FIRST_PAUSE_S))
            except TxmqError as error:
                final = not error.retriable and error.outcome != "unknown"
                if final or self._core.seconds() + pause >= deadline:
                    return HomeDecision(UNKNOWN, why=error.message)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _commit_at_home(self, seconds: float) -> HomeDecision:
        try:
            return decision_of((await self._home.decide(COMMIT, seconds)).state)
        except Conflict as conflict:
            return decision_of(conflict.detail.get("state"), conflict.message)

    async def _roll_back_at_home(self, seconds: float) -> HomeDecision:
        core = self._core
        args = rollback_args(self.token, await core.log_id(), core.settings.service)
        reply = await core.call("xa.outcome", args, within=seconds, repeat=True)
        return decision_of(BundleState[reply["state"]])

    async def _finish_participants(
        self, coordinator: Coordinator, bundles: list[AioBundle]
    ) -> None:
        for n in coordinator.brokers_to_notify:
            bundles[n].send_decision(coordinator.decision)
        numbers = coordinator.branches_to_end
        finishes = [self._branches[n].finish(coordinator.decision) for n in numbers]
        readers = [branch for branch in self._branches if not branch.wrote]
        follows = [branch.follow() for branch in readers if coordinator.decision is COMMIT]
        ends = await asyncio.gather(*finishes)
        await asyncio.gather(*follows)
        for n, agrees in zip(numbers, ends, strict=True):
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
                await self._record_mixed(gid, decision)
            raise mixed_error(self.token, decision, gids) from failure
        why = answer.why if answer is not None else ""
        error = uncommitted_error(self.token, decision, failure, why)
        if error is not None:
            raise error from failure

    async def _record_mixed(self, gid: str, decision: Decision) -> None:
        entry = mixed_entry(self.token, gid, decision, self._core.settings.service)
        try:
            await self._core.call("xa.heuristic", entry, repeat=True)
        except TxmqError as error:
            log.warning(
                "transaction.not_journalled",
                token=str(self.token),
                branch=gid,
                error=error.message,
            )

    def _gids(self, numbers: Sequence[int]) -> tuple[str, ...]:
        return tuple(self._branches[n].branch.gid for n in numbers)

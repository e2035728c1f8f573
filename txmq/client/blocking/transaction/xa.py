"""Two-phase commit over several PostgreSQL databases and brokers (docs/PROTOCOL.md 3).

The log of the home broker, which is the client's, has the decision. At the end of the
block the bundles go out, and every branch that wrote is prepared while the brokers
sync. If all votes are yes, the home broker is asked for COMMIT, else for ROLLBACK. Its
durable answer is the decision, and all branches follow it. If this process dies,
recovery finds the prepared branches by their gids and ends them as the home broker has
decided.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Self, TypeVar

from txmq.client.blocking.concurrently import run_concurrently
from txmq.client.blocking.core import BlockingCore
from txmq.client.blocking.transaction.broker_bundle import BrokerBundle
from txmq.client.blocking.transaction.caller_transaction import CallerTransaction
from txmq.client.blocking.transaction.home_broker import record_mixed, request_decision
from txmq.client.blocking.transaction.prepared_slots import SlotDemand, prepared_slots
from txmq.client.log import get_logger
from txmq.client.protocol.awaited.database_branch import DatabaseBranch
from txmq.client.protocol.sender.routing import Routing
from txmq.client.protocol.transaction.home_decision import (
    HomeDecision,
    mixed_error,
    uncommitted_error,
)
from txmq.client.protocol.transaction.lifecycle import Stage
from txmq.client.protocol.transaction.outbox_entries import order_keys
from txmq.client.protocol.transaction.unrouted import UnroutedSends
from txmq.crashpoints import crashpoint
from txmq.errors import (
    LocalProtocolError,
    TwoPhaseFull,
    TxmqError,
)
from txmq.model.decider import BrokerBranch, ByHome, Participant
from txmq.model.message import COMMIT, Decision
from txmq.tx.coordinator import HOME, BundleStatus, Coordinator, Vote, needs_two_phases
from txmq.tx.postgres.caller import blocking_block
from txmq.tx.postgres.driver import BlockingConnection, run
from txmq.tx.postgres.drivers import blocking_driver
from txmq.tx.xid import branches

T = TypeVar("T")
log = get_logger()


class XaTransaction(CallerTransaction):
    """Rows on several connections and messages sent in the block, all or none.

    The block returns once the transaction is committed. `unfinished` has the gids of
    branches whose database could not be reached: recovery commits them, and their rows
    stay locked until then. The block raises InDoubt if the home broker did not answer,
    HeuristicMixed if an operator had ended a branch otherwise, and else the reason of
    the rollback.

    For one database prefer `client.transaction(connection)`: half the cost, and nothing
    is left prepared. A single branch that wrote, without any message, is committed in
    one phase. Branches that only read end after the decision, so that no NOTIFY goes
    out of a transaction that was rolled back.
    """

    def __init__(
        self,
        core: BlockingCore,
        connections: Sequence[BlockingConnection],
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

    def _spread(
        self, cores: Sequence[BlockingCore], routing: Routing
    ) -> UnroutedSends[BrokerBundle]:
        unrouted = super()._spread(cores, routing)
        self._bundles.append(self._home)  # it takes part even without messages
        return unrouted

    def __enter__(self) -> Self:
        self._require(Stage.NEW)
        names = branches(self._node, self._core.log_id, self.token, len(self._connections))
        try:
            for connection, name in zip(self._connections, names, strict=True):
                branch = DatabaseBranch(blocking_driver(connection), name, self._sends)
                run(branch.begin())
                self._branches.append(branch)
        except BaseException:
            self._abort()
            raise
        return super().__enter__()

    def _commit(self) -> None:
        try:
            for branch in self._branches:
                branch.end_block()
            for branch in self._branches:
                run(branch.inspect())
            self._require_turn()
        except BaseException:
            self._abort()
            raise
        writing = sum(branch.wrote for branch in self._branches)
        if needs_two_phases(writing, speaking=bool(self._nonempty_bundles())):
            self._commit_in_two_phases()
        else:
            self._commit_in_one_phase()

    def _require_turn(self) -> None:
        """Require that nothing waits in an outbox that these messages would overtake.

        They cannot queue there themselves: their home broker decides.
        """
        for bundle in self._nonempty_bundles():
            keys = order_keys(bundle.buffer.items)
            for branch in self._branches if keys else ():
                run(branch.require_turn(bundle.core.log_id, keys))

    def _abort(self) -> None:
        ended = [branch for branch in self._branches if not run(branch.roll_back())]
        if ended:
            raise ended[0].ended()

    def _give_back(self) -> None:
        for branch in self._branches:
            run(branch.give_back())

    @contextmanager
    def _database_savepoint(self) -> Iterator[None]:
        with ExitStack() as stack:
            for branch in self._branches:
                stack.enter_context(blocking_block(branch.savepoint()))
            yield

    def _commit_in_one_phase(self) -> None:
        """Commit the branch that wrote, which decides, and then the others."""
        first, *others = sorted(self._branches, key=lambda branch: not branch.wrote)
        try:
            run(first.commit())
            run_concurrently([_runs(branch.follow) for branch in others])
        finally:
            self._abort()

    def _commit_in_two_phases(self) -> None:
        others = [bundle for bundle in self._nonempty_bundles() if bundle is not self._home]
        bundles = [self._home, *others]
        with ExitStack() as stack:
            try:
                stack.enter_context(
                    prepared_slots().reserve(self._slot_demand(), time.monotonic() + self._timeout)
                )
            except TwoPhaseFull:
                self._abort()
                raise
            self._coordinate(bundles)

    def _slot_demand(self) -> dict[int, SlotDemand]:
        """Return the number of branches to prepare at each server."""
        limits = [run(branch.prepared_limit()) for branch in self._branches if branch.wrote]
        return {
            server: SlotDemand(sum(other == server for other, _ in limits), limit)
            for server, limit in limits
        }

    def _coordinate(self, bundles: list[BrokerBundle]) -> None:
        coordinator = Coordinator(tuple(range(len(self._branches))), len(bundles))
        answer: HomeDecision | None = None
        try:
            failure = self._collect_votes(coordinator, bundles)
            answer = self._request_decision(coordinator, bundles)
            self._finish_participants(coordinator, bundles)
        finally:
            self.unfinished = self._gids(coordinator.result.unfinished)
            self._abort()  # branches that are open still
        self._raise_unless_committed(coordinator, failure, answer)

    def _collect_votes(
        self, coordinator: Coordinator, bundles: list[BrokerBundle]
    ) -> TxmqError | None:
        """Store the bundles, prepare the branches; return the first failure."""
        try:
            self._send_bundles(coordinator, bundles)
            crashpoint("xa.before_prepare")
            failure = self._prepare(coordinator)
            crashpoint("xa.after_prepares")
            if failure is None:
                self._await_bundles(coordinator, bundles)
        except TxmqError as error:
            failure = error
        except BaseException:
            coordinator.veto()
            self._request_decision(coordinator, bundles)
            self._finish_participants(coordinator, bundles)
            raise
        finally:
            for bundle in bundles:
                bundle.abandon()
        return failure

    def _send_bundles(self, coordinator: Coordinator, bundles: list[BrokerBundle]) -> None:
        deadline = time.monotonic() + self._timeout
        decider = ByHome(self._core.log_id.bytes, self.token.bytes)
        for n, bundle in enumerate(bundles):
            participants = self._participants(bundles) if n == HOME else ()
            run(bundle.build(self._description(bundle, decider, participants), deadline))
        crashpoint("xa.before_group")
        for n, bundle in enumerate(bundles):
            run(bundle.send())
            coordinator.note_bundle(n, BundleStatus.UNCLEAR)

    def _prepare(self, coordinator: Coordinator) -> TxmqError | None:
        for n, branch in enumerate(self._branches):
            if branch.wrote:
                coordinator.note_vote(n, Vote.UNCLEAR)
        votes = run_concurrently([_runs(branch.vote) for branch in self._branches])
        for n, vote in enumerate(votes):
            coordinator.note_vote(n, vote.vote)
        return next((vote.error for vote in votes if vote.error is not None), None)

    def _await_bundles(self, coordinator: Coordinator, bundles: list[BrokerBundle]) -> None:
        # A time-out of their own: the branches may have used up the first one.
        deadline = time.monotonic() + self._timeout
        for n, bundle in enumerate(bundles):
            bundle.extend_deadline(deadline)
            run(bundle.await_receipt())
            coordinator.note_bundle(n, BundleStatus.YES)
        crashpoint("xa.after_group")

    def _participants(self, bundles: list[BrokerBundle]) -> tuple[Participant, ...]:
        positioned = self._core.takes_positions
        databases = [
            branch.participant(positioned=positioned) for branch in self._branches if branch.wrote
        ]
        return (*databases, *(BrokerBranch(bundle.core.log_id.bytes) for bundle in bundles[1:]))

    def _request_decision(
        self, coordinator: Coordinator, bundles: list[BrokerBundle]
    ) -> HomeDecision | None:
        """Ask the home broker for the decision, if one is needed.

        Unprepared branches are rolled back before, which releases their locks.
        """
        proposal = coordinator.proposal
        if proposal is not COMMIT:
            self._abort()
        if proposal is None:
            return None
        crashpoint("xa.before_decision")
        deadline = time.monotonic() + self._core.settings.timeout
        answer = request_decision(self._core, self.token, proposal, deadline)
        coordinator.note_decision(answer.decision)
        bundles[HOME].published = answer.published
        crashpoint("xa.after_decision")
        return answer

    def _finish_participants(self, coordinator: Coordinator, bundles: list[BrokerBundle]) -> None:
        for n in coordinator.brokers_to_notify:
            bundles[n].send_decision(coordinator.decision)
        numbers = coordinator.branches_to_end
        ends: list[Callable[[], bool | None]] = [
            _runs(partial(self._branches[n].finish, coordinator.decision)) for n in numbers
        ]
        readers = [branch for branch in self._branches if not branch.wrote]
        if coordinator.decision is COMMIT:
            ends += [_runs(branch.follow) for branch in readers]
        for n, agrees in zip(numbers, run_concurrently(ends), strict=False):
            coordinator.note_end(n, agrees)
        crashpoint("xa.after_commits")

    def _raise_unless_committed(
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
            self._raise_mixed(decision, self._gids(mixed), failure)
        why = answer.why if answer is not None else ""
        error = uncommitted_error(self.token, decision, failure, why)
        if error is not None:
            raise error from failure

    def _raise_mixed(
        self, decision: Decision, gids: tuple[str, ...], failure: TxmqError | None
    ) -> None:
        for gid in gids:
            record_mixed(self._core, self.token, gid, decision)
        raise mixed_error(self.token, decision, gids) from failure

    def _gids(self, numbers: Sequence[int]) -> tuple[str, ...]:
        return tuple(self._branches[n].branch.gid for n in numbers)


def _runs(step: Callable[[], Coroutine[Any, Any, T]]) -> Callable[[], T]:
    """Return the call that carries out a step of a branch, for any thread."""
    return lambda: run(step())

"""Two-phase commit over several Postgres databases and the brokers, decided in the home
broker's log (PROTOCOLS 3).

The home broker is that of the client. At the end of the block the groups are sent, and
while the brokers bring them to disk, every branch that wrote is prepared. All yes: the
home broker is asked to decide COMMIT, and its durable answer is the commit; else it is
asked for ROLLBACK. The branches follow, all at once. Whatever happens to this process,
recovery finds the prepared branches by their gids, asks the home broker and ends them
the same way.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Self

from txmq.client.blocking.concurrently import together
from txmq.client.blocking.core import Core
from txmq.client.blocking.transaction.branch import LentBranch
from txmq.client.blocking.transaction.broker_part import Share
from txmq.client.blocking.transaction.home import Verdict, ask, note_mixed
from txmq.client.blocking.transaction.permits import Wanted, permits
from txmq.client.blocking.transaction.transaction import Stage, Transaction
from txmq.client.log import get_logger
from txmq.crashpoints import crashpoint
from txmq.errors import (
    BrokerUnavailable,
    ConnectionLost,
    HeuristicMixed,
    InDoubt,
    LocalProtocolError,
    RequestTimeout,
    TransactionAborted,
    TwoPhaseFull,
    TxmqError,
)
from txmq.model.message import COMMIT, ROLLBACK, UNKNOWN, Decision
from txmq.tx.coordinator import HOME, Coordinator, Stored, Vote, needs_two_phases
from txmq.tx.postgres.session import Connection
from txmq.tx.xid import branches

RECOVERED = "recovery ends the branches as the home broker decides: txmq xa recover"
log = get_logger()


class XaTransaction(Transaction):
    """The rows written on the connections in the block and the messages sent in it
    exist together, or not at all.

    The block returns once everything is committed; `unfinished` names branches, by
    their gids, whose database was out of reach for that: they are committed by
    recovery, their rows stay locked until then. It raises InDoubt where the home broker
    did not answer, HeuristicMixed where somebody had ended a branch otherwise by hand,
    and else what it was rolled back for.

    For one database prefer `client.transaction(connection)`: half the cost, and nothing
    that could be left prepared. A single branch that wrote, without any message, is
    simply committed, and branches that only read end with the votes.
    """

    def __init__(
        self,
        core: Core,
        connections: Sequence[Connection],
        *,
        node: str,
        timeout: float,
        check_after: float,
    ) -> None:
        super().__init__(core, timeout=timeout, check_after=check_after)
        if not connections or len(set(map(id, connections))) < len(connections):
            hint = "client.xa(connection_a, connection_b)"
            raise LocalProtocolError(
                "an XA transaction has connections, each of them once", hint=hint
            )
        self._node = node
        self._connections = connections
        self._branches: list[LentBranch] = []
        self.unfinished: tuple[str, ...] = ()

    def __enter__(self) -> Self:
        self._require(Stage.NEW)
        names = branches(self._node, self._core.log_id, self.token, len(self._connections))
        try:
            for connection, name in zip(self._connections, names, strict=True):
                branch = LentBranch(connection, name)
                branch.begin()
                self._branches.append(branch)
        except BaseException:
            self._abort()
            raise
        return super().__enter__()

    def _commit(self) -> None:
        try:
            for branch in self._branches:
                branch.look()
        except BaseException:
            self._abort()
            raise
        writing = sum(branch.wrote for branch in self._branches)
        if needs_two_phases(writing, speaking=bool(self._taking_part())):
            self._commit_in_two_phases()
        else:
            self._commit_in_one_phase()

    def _abort(self) -> None:
        for branch in self._branches:
            branch.roll_back()

    @contextmanager
    def _nested(self) -> Iterator[None]:
        with ExitStack() as stack:
            for branch in self._branches:
                stack.enter_context(branch.savepoint())
            yield

    def _commit_in_one_phase(self) -> None:
        """Nothing is lost with a branch that only read, so the one that wrote is the
        last.
        """
        try:
            for branch in sorted(self._branches, key=lambda branch: branch.wrote):
                branch.commit()
        except BaseException:
            self._abort()
            raise

    def _commit_in_two_phases(self) -> None:
        others = [share for share in self._taking_part() if share is not self._share]
        shares = [self._share, *others]
        with ExitStack() as stack:
            try:
                stack.enter_context(
                    permits().held(self._places(), time.monotonic() + self._timeout)
                )
            except TwoPhaseFull:
                self._abort()
                raise
            self._coordinate(shares)

    def _places(self) -> dict[int, Wanted]:
        """How many branches are prepared at each server."""
        rooms = [branch.room for branch in self._branches if branch.wrote]
        return {
            server: Wanted(sum(other == server for other, _ in rooms), room)
            for server, room in rooms
        }

    def _coordinate(self, shares: list[Share]) -> None:
        coordinator = Coordinator(tuple(range(len(self._branches))), len(shares))
        verdict: Verdict | None = None
        try:
            failure = self._collect(coordinator, shares)
            verdict = self._ask(coordinator, shares)
            self._carry_out(coordinator, shares)
        finally:
            self.unfinished = self._gids(coordinator.result.unfinished)
        self._conclude(coordinator, failure, verdict)

    def _collect(self, coordinator: Coordinator, shares: list[Share]) -> TxmqError | None:
        """Gets all votes and groups, or why there is one that will not do."""
        try:
            self._send_groups(coordinator, shares)
            crashpoint("xa.before_prepare")
            failure = self._prepare(coordinator)
            crashpoint("xa.after_prepares")
            if failure is None:
                self._await_groups(coordinator, shares)
        except TxmqError as error:
            failure = error
        except BaseException:
            coordinator.veto()
            self._ask(coordinator, shares)
            self._carry_out(coordinator, shares)
            raise
        finally:
            for share in shares:
                share.give_up()
        return failure

    def _send_groups(self, coordinator: Coordinator, shares: list[Share]) -> None:
        deadline = time.monotonic() + self._timeout
        decider = ("home", self._core.log_id.bytes, self.token.bytes)
        for n, share in enumerate(shares):
            participants = self._participants(shares) if n == HOME else ()
            share.prepare(self._description(share, decider, participants), deadline)
        crashpoint("xa.before_group")
        for n, share in enumerate(shares):
            share.send()
            coordinator.grouped(n, Stored.UNCLEAR)

    def _prepare(self, coordinator: Coordinator) -> TxmqError | None:
        for n, branch in enumerate(self._branches):
            if branch.wrote:
                coordinator.voted(n, Vote.UNCLEAR)
        ballots = together([branch.vote for branch in self._branches])
        for n, ballot in enumerate(ballots):
            coordinator.voted(n, ballot.vote)
        return next((ballot.error for ballot in ballots if ballot.error is not None), None)

    def _await_groups(self, coordinator: Coordinator, shares: list[Share]) -> None:
        deadline = (
            time.monotonic() + self._timeout
        )  # once more: the branches may have taken all of the first
        for n, share in enumerate(shares):
            share.extend(deadline)
            share.receipt()
            coordinator.grouped(n, Stored.YES)
        crashpoint("xa.after_group")

    def _participants(self, shares: list[Share]) -> tuple[tuple[object, ...], ...]:
        databases = [branch.participant for branch in self._branches if branch.wrote]
        return (*databases, *(("broker", share.core.log_id.bytes) for share in shares[1:]))

    def _ask(self, coordinator: Coordinator, shares: list[Share]) -> Verdict | None:
        """Lets the home broker decide, where that is needed. What is not prepared lets
        go of its locks meanwhile.
        """
        question = coordinator.question
        if question is not COMMIT:
            self._abort()
        if question is None:
            return None
        crashpoint("xa.before_decision")
        deadline = time.monotonic() + self._core.settings.timeout
        verdict = ask(self._core, self.token, question, deadline)
        coordinator.decided(verdict.decision)
        shares[HOME].published = verdict.published
        crashpoint("xa.after_decision")
        return verdict

    def _carry_out(self, coordinator: Coordinator, shares: list[Share]) -> None:
        for n in coordinator.to_tell:
            shares[n].tell(coordinator.decision)
        numbers = coordinator.to_end
        ends = [partial(self._branches[n].end, coordinator.decision) for n in numbers]
        for n, agrees in zip(numbers, together(ends), strict=True):
            coordinator.ended(n, agrees)
        crashpoint("xa.after_commits")

    def _conclude(
        self, coordinator: Coordinator, failure: TxmqError | None, verdict: Verdict | None
    ) -> None:
        """Returns only if it is committed, everywhere."""
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
        why = verdict.why if verdict is not None else ""
        if decision is UNKNOWN:
            text = f"the home broker did not answer: {why}"
            raise InDoubt(text, token=str(self.token), hint=RECOVERED) from failure
        if decision is ROLLBACK:
            raise self._refusal(failure, why) from failure

    def _refusal(self, failure: TxmqError | None, why: str) -> TxmqError:
        if failure is None:
            hint = "its time ran out, or recovery or an operator was faster: txmq tx show"
            return TransactionAborted(f"the home broker had rolled it back: {why}", hint=hint)
        text = f"{failure.message}; the transaction was rolled back"
        if isinstance(failure, ConnectionLost | RequestTimeout):
            return BrokerUnavailable(
                f"a broker did not confirm the messages: {text}", hint="run the transaction again"
            )
        return failure if failure.outcome == "not done" else TransactionAborted(text)

    def _raise_mixed(
        self, decision: Decision, gids: tuple[str, ...], failure: TxmqError | None
    ) -> None:
        for gid in gids:
            note_mixed(self._core, self.token, gid, decision)
        text = f"{len(gids)} branches of transaction {self.token} ended otherwise than decided, which was {decision.name}"
        hint = "compare the databases, put it right, then: txmq xa forget"
        raise HeuristicMixed(
            text, token=str(self.token), decision=decision.name, branches=gids, hint=hint
        ) from failure

    def _gids(self, numbers: Sequence[int]) -> tuple[str, ...]:
        return tuple(self._branches[n].branch.gid for n in numbers)

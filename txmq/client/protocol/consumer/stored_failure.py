"""The outcome of a failed attempt by the retry policy, where the consumer stores it."""

from __future__ import annotations

from random import random
from typing import NamedTuple

from txmq.client.protocol.consumer.settlement import PendingNack
from txmq.model.retry import DEFAULT_DELAYS, FailureAction, RetryPolicy
from txmq.model.units import MILLISECOND
from txmq.recover.local import State

# For groups with the default policy: a retry here costs nobody a request.
LOCAL_POLICY = RetryPolicy((5, *DEFAULT_DELAYS[:-1]))


class FailureOutcome(NamedTuple):
    """The state of a message after a failed attempt, and its next due time in µs."""

    state: State
    attempt: int
    due: int


def local_policy(policy: RetryPolicy | None) -> RetryPolicy:
    """Return the policy for the local store of a group with this one."""
    return LOCAL_POLICY if policy is None or policy == RetryPolicy() else policy


def after_failure(policy: RetryPolicy, attempt: int, nack: PendingNack, now: int) -> FailureOutcome:
    """Return the outcome of a failed attempt."""
    failure = nack.failure
    asked = None if nack.delay_ms is None else nack.delay_ms * MILLISECOND
    action = policy.action((failure.type, *failure.bases))
    if nack.dead or (action is FailureAction.DEAD and not nack.postpone):
        return FailureOutcome(State.DEAD, attempt, 0)
    if nack.postpone or action is FailureAction.POSTPONE:
        pause = policy.delays_us[0] if asked is None else asked
        return FailureOutcome(State.STORED, attempt - 1, now + pause)
    delay = policy.delay(attempt, random())  # noqa: S311  # no secret
    if delay is None:
        return FailureOutcome(State.DEAD, attempt, 0)
    return FailureOutcome(State.STORED, attempt, now + (delay if asked is None else asked))

"""Attempts in place: a message that has failed is handled again by the thread that has
it, before it is nacked.

They help against errors that pass within seconds, without a delivery for each. The
attempts of one delivery count as one for the broker, whose retry policy comes after.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import random

from txmq.client.protocol.consumer.failure import error_classes
from txmq.client.protocol.consumer.fetched import DeliveredMessage
from txmq.client.protocol.consumer.stored_delivery import stored_delivery
from txmq.model.retry import FailureAction, RetryPolicy

# A pause of 0.1 s doubles with each attempt: five attempts take about 1.5 s.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0


class InPlaceAttempts:
    """The attempts at one message, or at one list of messages."""

    def __init__(self, most: int, policy: RetryPolicy) -> None:
        self._most, self._policy = most, policy
        self._made = 0

    def pause_after(
        self, error: BaseException, messages: Sequence[DeliveredMessage]
    ) -> float | None:
        """Return the seconds until the next attempt; None where there is none.

        There is none after an error that the policy does not retry, and where a message
        is settled: by its handler, or because its consume timeout is over.
        """
        self._made += 1
        if any(map(stored_delivery, messages)):  # each of their attempts is counted
            return None
        if (
            self._made < self._most
            and self._policy.action(error_classes(error)) is FailureAction.RETRY
            and all(message.in_hand for message in messages)
        ):
            pause = min(FIRST_PAUSE_S * float(1 << (self._made - 1)), LONGEST_PAUSE_S)
            # The random part keeps handlers that failed together from meeting again.
            return pause * (0.5 + random())  # noqa: S311  # no secret
        self._note_attempts(error)
        return None

    def _note_attempts(self, error: BaseException) -> None:
        """Have the number of attempts stored with the error."""
        note = f"(attempt {self._made} of {self._most} in place)"
        # A handler may raise the same object for many messages.
        if self._most > 1 and note not in getattr(error, "__notes__", ()):
            error.add_note(note)

"""Attempts in place: how many, after what pauses, and what ends them."""

from __future__ import annotations

import pytest

from tests.client.scripted_member import ScriptedMember, chunk
from txmq.client.protocol.consumer.failure import describe_failure
from txmq.client.protocol.consumer.in_place import LONGEST_PAUSE_S, InPlaceAttempts
from txmq.errors import LocalProtocolError
from txmq.model.retry import RetryPolicy

POLICY = RetryPolicy((1,), dead=["ValueError"], postpone=["OSError"])


def member(count: int = 2) -> ScriptedMember:
    scripted = ScriptedMember().joined()
    return scripted.fetched(chunk(*(f"m{number}" for number in range(count))))


def test_the_pauses_double_and_end_with_the_number_of_attempts() -> None:
    attempts, messages = InPlaceAttempts(8, POLICY), member().receive()
    pauses = [attempts.pause_after(KeyError(), messages) for _ in range(8)]
    assert pauses.pop() is None
    for number, pause in enumerate(pauses):
        middle = min(0.1 * 2**number, LONGEST_PAUSE_S)
        assert pause is not None
        assert middle / 2 <= pause <= middle * 1.5


def test_one_attempt_leaves_the_error_as_it_is() -> None:
    error = KeyError("k")
    assert InPlaceAttempts(1, POLICY).pause_after(error, member().receive()) is None
    assert not hasattr(error, "__notes__")


@pytest.mark.parametrize("error", [UnicodeError("a base of it is dead"), ConnectionError()])
def test_the_policy_ends_them(error: Exception) -> None:
    assert InPlaceAttempts(5, POLICY).pause_after(error, member().receive()) is None


def test_a_message_that_is_settled_ends_them() -> None:
    scripted = member()
    messages = scripted.receive(2)
    scripted.operations.nack(messages[0], None, "by the handler")
    assert InPlaceAttempts(5, POLICY).pause_after(KeyError(), messages) is None


def test_their_number_is_stored_with_the_error_and_does_not_tell_failures_apart() -> None:
    once, error = describe_failure(KeyError("k")), KeyError("k")
    attempts, messages = InPlaceAttempts(2, POLICY), member().receive()
    attempts.pause_after(KeyError("k"), messages)
    attempts.pause_after(error, messages)
    report = describe_failure(error)
    assert report.text.endswith("(attempt 2 of 2 in place)\n")
    assert report.fingerprint == once.fingerprint


@pytest.mark.parametrize("number", [0, -1, 2.5, True])
def test_their_number_is_at_least_one(number: object) -> None:
    with pytest.raises(LocalProtocolError, match="attempts_in_place"):
        ScriptedMember(attempts_in_place=number)

"""Check-backs without I/O: the questions of a broker, and the answers of checkers.

An answer is COMMIT, ROLLBACK or UNKNOWN. Exceptions and other values of a checker
become UNKNOWN with a reason, which operators can see, and the broker asks again later.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from txmq.batch import BatchView
from txmq.client.log import get_logger
from txmq.client.protocol.transaction.half_message import no_service
from txmq.errors import LocalProtocolError, RemoteProtocolError
from txmq.model.message import UNKNOWN, Decision, check_name
from txmq.model.tracebacks import text_of

WAIT_MS = 20_000  # of a long poll
MAX_QUESTIONS = 16  # of one poll; they are answered one after the other
ANSWER_S = 5.0
REASON_LIMIT = 400  # characters
SLOW_S = 0.5  # of a checker's work, before its client waits for questions again
# After an error. The broker does not wait long for a process with an open block.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
log = get_logger()


class CheckedMessage(NamedTuple):
    """A message of an undecided transaction, as a checker sees it."""

    topic: str
    message_id: str
    key: str | None
    tag: str | None
    headers: Mapping[str, str]
    body: bytes


class CheckAnswer(NamedTuple):
    """An answer to the broker; an UNKNOWN has a `reason`."""

    decision: Decision
    reason: str = ""
    open: bool = False  # the block of the local work is open in this process
    passed: bool = False  # it is over here, and other processes have the checker


class Half(NamedTuple):
    """The question to a checker, if the local work of a transaction has been done.

    `token` is that of `client.transaction(checker=...)`, `service` the one that stored
    it. `tries` counts the earlier questions. `stored_at` is in microseconds since the
    epoch, by the broker's clock.
    """

    token: UUID
    checker: str
    service: str
    tries: int
    stored_at: int
    messages: tuple[CheckedMessage, ...]


def checked_name(service: str | None, name: str, function: object) -> str:
    """Return the name of a checker.

    Raises ConfigError if the client has no service, or LocalProtocolError.
    """
    if not service:
        raise no_service()
    if not callable(function):
        raise LocalProtocolError(
            f"Checker {name!r} is of type {type(function).__name__}",
            hint="give a function that takes a Half and returns a Decision",
        )
    return check_name(name, "checker")


def wait_args(service: str | None, checkers: Sequence[str], wait_ms: int) -> dict[str, Any]:
    """Return the arguments of a call that waits for questions about these checkers, and
    about the process's own transactions.
    """
    return {
        "service": service,
        "checkers": checkers,
        "max": MAX_QUESTIONS,
        "wait_ms": wait_ms,
        "own": True,
    }


def answer_args(half: Half, answer: CheckAnswer) -> dict[str, Any]:
    """Return the arguments of the call that answers a question."""
    return {
        "token": half.token.hex,
        "answer": answer.decision.name,
        "reason": answer.reason,
        "open": answer.open,
        "passed": answer.passed,
    }


def answer_of(half: Half, decision: object) -> CheckAnswer:
    """Return the answer for what a checker has returned."""
    checker = half.checker
    if not isinstance(decision, Decision):
        given = type(decision).__name__
        log.warning("checkers.no_answer", checker=checker, token=str(half.token), answer=given)
        return _unknown(f"checker {checker} returned a value of type {given}, not a Decision")
    if decision is UNKNOWN:
        return _unknown(f"checker {checker} returned UNKNOWN")
    return CheckAnswer(decision)


def answer_of_failed(half: Half, error: BaseException) -> CheckAnswer:
    """Return the answer for what a checker has raised."""
    kind = type(error).__name__
    log.warning("checkers.failed", checker=half.checker, token=str(half.token), error=kind)
    return _unknown(f"checker {half.checker} raised {kind}: {text_of(error)}")


def _unknown(reason: str) -> CheckAnswer:
    return CheckAnswer(UNKNOWN, reason.encode(errors="replace").decode()[:REASON_LIMIT])


def halves_in(reply: Mapping[str, Any]) -> Iterator[Half]:
    """Yield the questions in a reply. Raises RemoteProtocolError."""
    try:
        for check in reply["checks"]:
            messages = tuple(message for batch in check["batches"] for message in _messages(batch))
            token, numbers = UUID(check["token"]), (int(check["tries"]), int(check["stored_at"]))
            yield Half(token, str(check["checker"]), str(check["service"]), *numbers, messages)
    except (KeyError, TypeError, ValueError) as error:
        raise RemoteProtocolError(f"The broker sent an invalid question: {error!r:.200}") from error


def _messages(batch: dict[str, Any]) -> Iterator[CheckedMessage]:
    view = BatchView(b64decode(batch["batch"]))
    columns = (view.message_ids, view.keys, view.tags, view.headers, view.bodies)
    for fields in zip(*columns, strict=True):
        yield CheckedMessage(str(batch["topic"]), *fields)

"""Statuses of replies: a number on the wire for each refusal in txmq.errors.

A reply whose status is not 0 carries JSON: `{"error": NAME, "message": ..., "hint":
..., "detail": {...}}`.
"""

from __future__ import annotations

from pydantic import Field, JsonValue

from txmq import errors
from txmq.errors import ProtocolError, RemoteProtocolError, RequestRejected, TxmqError
from txmq.model import limits
from txmq.wire.json import WireModel, dump, parse_as

OK = 0


def _table(*rows: tuple[int, type[RequestRejected]]) -> dict[int, type[RequestRejected]]:
    table = dict(rows)
    if len(table) != len(rows) or len(set(table.values())) != len(rows) or OK in table:
        raise ValueError("a status or an error occurs twice")
    return table


# Numbers are never reused.
ERRORS_BY_STATUS = _table(
    (1, errors.BadRequest),
    (2, errors.BrokerFailed),
    (3, errors.NotPermitted),
    (4, errors.Throttled),
    (5, errors.ReadOnly),
    (6, errors.MessageTooLarge),
    (7, errors.LoginFailed),
    (8, errors.AccessDenied),
    (9, errors.UnknownUser),
    (10, errors.NotLeader),
    (16, errors.UnknownTopic),
    (17, errors.UnknownPartition),
    (18, errors.StaleTopic),
    (19, errors.TopicExists),
    (20, errors.OffsetOutOfRange),
    (21, errors.SequenceGap),
    (22, errors.UnknownProducer),
    (23, errors.ProducerFenced),
    (24, errors.RecallTooLate),
    (25, errors.IncompatibleSchema),
    (30, errors.TopicClosed),
    (31, errors.MessagesDamaged),
    (32, errors.UnknownGroup),
    (33, errors.UnknownMember),
    (34, errors.StaleGeneration),
    (35, errors.GroupMismatch),
    (36, errors.NotLeased),
    (37, errors.UnknownLetter),
    (38, errors.TopicReplaced),
    (39, errors.UnknownPlan),
    (48, errors.UnknownTransaction),
    (49, errors.Conflict),
    (50, errors.DigestMismatch),
    (51, errors.NoResolver),
    (52, errors.DuplicateXid),
    (53, errors.HeuristicOutcome),
    (54, errors.OtherLog),
)
STATUS_BY_ERROR = {error: status for status, error in ERRORS_BY_STATUS.items()}


class Refusal(WireModel):
    """The payload of a reply that refuses its request."""

    error: str
    message: str
    hint: str = ""
    detail: dict[str, JsonValue] = Field(default_factory=dict)


def error_reply(error: TxmqError) -> tuple[int, bytes]:
    """Return status and payload of the reply for `error`.

    An error that is no refusal is reported without its private details.
    """
    rejected = _rejected(error)
    message, hint = rejected.message[: limits.ERROR_TEXT], rejected.hint[: limits.ERROR_TEXT]
    fields = {
        "error": type(rejected).__name__,
        "message": message,
        "hint": hint,
        "detail": rejected.detail,
    }
    return STATUS_BY_ERROR[type(rejected)], dump(fields)


def _rejected(error: TxmqError) -> RequestRejected:
    if isinstance(error, RequestRejected) and type(error) in STATUS_BY_ERROR:
        return error
    if isinstance(error, ProtocolError):
        return errors.BadRequest(error.message, hint=error.hint)
    text = f"the broker could not process the request: {type(error).__name__}"
    return errors.BrokerFailed(text, hint="see the broker's log for the reason")


def to_error(status: int, payload: bytes) -> RequestRejected | RemoteProtocolError:
    """Return the error for a reply with this status.

    An unknown status becomes a RequestRejected that names it.
    """
    try:
        refusal = parse_as(Refusal, payload)
    except RemoteProtocolError as error:
        return error
    rejected = ERRORS_BY_STATUS.get(status)
    if rejected is None:
        message = f"{refusal.error} (status {status}): {refusal.message}"
        return RequestRejected(message, hint=refusal.hint, detail=dict(refusal.detail))
    return rejected(refusal.message, hint=refusal.hint, detail=dict(refusal.detail))

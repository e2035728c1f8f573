"""Refusals on the wire: each error has its own status, and survives a round trip."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from txmq import errors
from txmq.errors import RequestRejected, TxmqError
from txmq.model import limits
from txmq.wire import status
from txmq.wire.frames import MIN_LENGTH
from txmq.wire.json import dump, parse

TEXT = {"error": "BadRequest", "message": "no", "hint": "", "detail": {}}


def subclasses(cls: type[RequestRejected]) -> Iterator[type[RequestRejected]]:
    for sub in cls.__subclasses__():
        yield sub
        yield from subclasses(sub)


def test_every_refusal_has_a_status() -> None:
    assert set(subclasses(RequestRejected)) == set(status.ERRORS_BY_STATUS.values())


def test_a_status_or_an_error_twice_fails_at_import() -> None:
    for rows in (
        [(1, errors.BadRequest), (1, errors.Conflict)],
        [(1, errors.BadRequest), (2, errors.BadRequest)],
    ):
        with pytest.raises(ValueError, match="twice"):
            status._table(*rows)
    with pytest.raises(ValueError, match="twice"):
        status._table((0, errors.BadRequest))


@pytest.mark.parametrize("error", status.ERRORS_BY_STATUS.values())
def test_a_refusal_comes_out_as_it_went_in(error: type[RequestRejected]) -> None:
    code, payload = status.error_reply(
        error("it cannot be", hint="wait", detail={"size": 7, "why": ["a", None]})
    )
    found = status.to_error(code, payload)
    assert type(found) is error
    assert isinstance(found, RequestRejected)
    assert (found.message, found.hint, str(found)) == (
        "it cannot be",
        "wait",
        "it cannot be (wait)",
    )
    assert found.detail == {"size": 7, "why": ["a", None]}
    assert (found.retriable, found.outcome) == (error.retriable, error.outcome)


def test_the_reply_is_the_json_of_the_format() -> None:
    code, payload = status.error_reply(errors.UnknownTopic("there is no topic x", hint="create it"))
    assert code == 16
    assert parse(payload) == {
        "error": "UnknownTopic",
        "message": "there is no topic x",
        "hint": "create it",
        "detail": {},
    }


@pytest.mark.parametrize(
    "error", [errors.RemoteProtocolError("a bad frame"), errors.LocalProtocolError("a bad name")]
)
def test_a_broken_rule_of_the_protocol_is_a_bad_request(error: TxmqError) -> None:
    found = status.to_error(*status.error_reply(error))
    assert type(found) is errors.BadRequest
    assert found.message == error.message


def test_an_internal_error_reveals_nothing_private() -> None:
    found = status.to_error(*status.error_reply(errors.CorruptRecord("/var/secret", 5, "zeros")))
    assert type(found) is errors.BrokerFailed
    assert found.outcome == "unknown"
    assert "secret" not in str(found)
    assert "CorruptRecord" in str(found)


def test_a_status_of_a_newer_broker_is_still_a_refusal() -> None:
    found = status.to_error(9_999, dump(TEXT | {"error": "TooTired", "message": "later"}))
    assert type(found) is RequestRejected
    assert "TooTired (status 9999): later" in str(found)


@pytest.mark.parametrize(
    "payload", [b"", b"{}", b"[]", b"no json", dump(TEXT | {"message": 7}), dump(TEXT | {"x": 1})]
)
def test_a_damaged_refusal_is_an_error_of_the_protocol(payload: bytes) -> None:
    assert isinstance(status.to_error(1, payload), errors.RemoteProtocolError)


def test_a_long_error_still_fits_in_a_frame_before_the_hello() -> None:
    _, payload = status.error_reply(errors.RemoteProtocolError("日" * 5_000, hint="本" * 5_000))
    assert MIN_LENGTH + len(payload) <= limits.FRAME_BEFORE_HELLO

"""Reports of failures to the broker."""

from __future__ import annotations

from txmq.client.protocol.consumer.failure import MAX_TEXT, describe_failure


def raised(number: int, detail: str) -> Exception:
    try:
        _fail(number, detail)
    except (KeyError, ValueError) as error:
        return error
    raise AssertionError("it fails")


def _fail(number: int, detail: str) -> None:
    if number < 0:
        raise KeyError(detail)
    raise ValueError(f"order {number} of {detail!r} has no stock")


def test_a_report_has_type_and_traceback() -> None:
    failure = describe_failure(raised(1, "ada"))
    assert failure.type == "ValueError"
    assert failure.text.startswith("Traceback")
    assert failure.text.endswith("ValueError: order 1 of 'ada' has no stock\n")


def test_the_same_failure_of_other_messages_has_the_same_fingerprint() -> None:
    first, second = describe_failure(raised(1, "ada")), describe_failure(raised(22, "bob"))
    assert first.fingerprint == second.fingerprint
    assert (
        describe_failure("time-out after 3 s").fingerprint
        == describe_failure("time-out after  14 s").fingerprint
    )


def test_other_failures_have_other_fingerprints() -> None:
    errors = (
        raised(1, "ada"),
        raised(-1, "ada"),
        ValueError("order 1 of 'ada' has no stock"),
        None,
    )
    assert len({describe_failure(error).fingerprint for error in errors}) == 4


def test_a_long_text_keeps_its_end_and_any_text_can_be_sent() -> None:
    failure = describe_failure("ö" * MAX_TEXT + "\udc80 the end")
    assert len(failure.text.encode()) <= MAX_TEXT
    assert failure.text.endswith("? the end")

"""How failures are described to the broker."""

from __future__ import annotations

from txmq.client.protocol.consumer.failure import TEXT, failure_of


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


def test_a_failure_tells_type_and_traceback() -> None:
    failure = failure_of(raised(1, "ada"))
    assert failure.type == "ValueError"
    assert failure.text.startswith("Traceback")
    assert failure.text.endswith("ValueError: order 1 of 'ada' has no stock\n")


def test_the_same_failure_of_other_messages_has_the_same_fingerprint() -> None:
    assert failure_of(raised(1, "ada")).fingerprint == failure_of(raised(22, "bob")).fingerprint
    assert (
        failure_of("time-out after 3 s").fingerprint
        == failure_of("time-out after  14 s").fingerprint
    )


def test_other_failures_have_others() -> None:
    prints = {failure_of(raised(1, "ada")).fingerprint, failure_of(raised(-1, "ada")).fingerprint}
    prints |= {
        failure_of(ValueError("order 1 of 'ada' has no stock")).fingerprint,
        failure_of(None).fingerprint,
    }
    assert len(prints) == 4


def test_a_long_text_keeps_its_end_and_any_text_can_be_sent() -> None:
    failure = failure_of("ö" * TEXT + "\udc80 the end")
    assert len(failure.text.encode()) <= TEXT
    assert failure.text.endswith("? the end")

"""What messages are searched for in bodies and headers."""

from __future__ import annotations

import json

import pytest

from txmq.errors import InvalidPath, LocalProtocolError
from txmq.model.content import MAX_JSON, body_criterion, content_of, parse_header, parse_path

ORDER = {
    "customer": {"id": 17, "name": "a b", "vip": True},
    "lines": [{"sku": "x"}, {"sku": "ü", "none": None}],
    "order-id": "o-17",
    "a.b": "dotted",
    "sum": 17.5,
    "text": "17",
    "price": "$9.50",
    "escaped": r"\$x",
}


@pytest.mark.parametrize(
    ("criterion", "found"),
    [
        ("$.customer.id=17", True),
        ("$.customer.id=17.0", True),
        ("$.customer.id=1", False),
        ("$.text=17", True),
        ("$.customer.name=a b", True),
        ("$.customer.vip=true", True),
        ("$.customer.vip=1", False),
        ("$.lines[1].sku=ü", True),
        ("$.lines[-1].none=null", True),
        ("$.lines[0].none=null", False),
        ("$.lines[2].sku=x", False),
        ("$.lines.sku=x", False),
        ("$.order-id=o-17", True),
        ("$['a.b']=dotted", True),
        ('$["customer"]["id"]=17', True),
        ("$.sum=17.5", True),
        ("$.customer={}", False),
        ("$.customer[0]=17", False),
        ("o-17", True),
        ("o-18", False),
        ("ü", False),
        (r"\u00fc", True),
        (r"\$.text=17", False),
        (r"\$9.50", True),
        (r"\\$9.50", False),
        (r"\\$x", True),
    ],
)
def test_a_body_is_judged_by_a_text_or_by_a_value_at_a_path(
    criterion: str,
    found: bool,  # noqa: FBT001  # of a table
) -> None:
    assert body_criterion(criterion)(json.dumps(ORDER).encode()) is found


@pytest.mark.parametrize(
    ("criterion", "position"),
    [
        ("$", 1),
        ("$.a", 3),
        ("$.=1", 1),
        ("$.a[=1", 3),
        ("$.a[*]=1", 3),
        ("$..a=1", 1),
        ("$.a b=1", 3),
    ],
)
def test_a_path_that_is_none_is_refused_with_its_place(criterion: str, position: int) -> None:
    with pytest.raises(InvalidPath) as raised:
        body_criterion(criterion)
    assert raised.value.position == position
    assert raised.value.hint


def test_paths_have_names_and_indexes() -> None:
    assert parse_path(r"$.a[0]['b c']['it\'s'][-1]=x=y") == (("a", 0, "b c", "it's", -1), "x=y")
    assert parse_path("$=1") == ((), "1")


@pytest.mark.parametrize("body", [b"", b"\xff\xfe", b"{", b"[" * 100_000, b"9" * 10_000, b"{}"])
def test_no_body_is_too_hostile_to_be_judged(body: bytes) -> None:
    assert not body_criterion("$.a=1")(body)


def test_a_path_is_not_looked_for_in_a_very_large_body() -> None:
    body = json.dumps({"a": 1, "b": "x" * MAX_JSON}).encode()
    assert not body_criterion("$.a=1")(body)
    assert body_criterion('"a": 1')(body)


@pytest.mark.parametrize("criterion", ["", "x" * 2_000])
def test_a_criterion_has_a_bounded_length(criterion: str) -> None:
    with pytest.raises(LocalProtocolError):
        body_criterion(criterion)


def test_all_criteria_hold_and_a_body_is_read_only_where_it_decides() -> None:
    content = content_of("o-17", ("region", None), ("c",))
    assert content is not None
    headers = {"region": "eu", "correlation": "c"}
    assert content.is_in(headers, lambda: b"an o-17")
    assert not content.is_in(headers, lambda: b"an o-18")
    assert not content.is_in({"region": "eu", "correlation": "d"}, lambda: pytest.fail("read"))
    assert not content.is_in({"correlation": "c"}, lambda: pytest.fail("read"))
    assert content_of(None, None) is None


def test_a_header_has_a_name_and_perhaps_a_value() -> None:
    assert parse_header("region=eu=west") == ("region", "eu=west")
    assert parse_header("region") == ("region", None)
    with pytest.raises(LocalProtocolError):
        parse_header("=eu")

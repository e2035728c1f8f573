"""Names of branches: as psycopg2 writes them, and never confused with others'."""

from __future__ import annotations

from base64 import b64encode
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg2 import extensions

from txmq.errors import LocalProtocolError
from txmq.tx.xid import FORMAT, LONGEST_NODE, XaBranch, Xid, branches, log_digits, node_of

TheirXid: Any = extensions.Xid
LOG = UUID("0123456789ab4cde8f00000000000001")
TOKEN = UUID("0192d3c4b5a67f8899aabbccddeeff00")
GTRID = f"orders:0123456789ab:{TOKEN.hex}"
nodes = st.from_regex(r"(?!\.)[A-Za-z0-9._-]{1,18}", fullmatch=True)
tokens = st.uuids().map(lambda u: UUID(int=u.int & ~(0xF << 76) & ~(3 << 62) | 7 << 76 | 2 << 62))
parts = st.binary(max_size=64)


def gid(format_id: object, gtrid: bytes | str, bqual: bytes | str) -> str:
    text = [
        b64encode(part if isinstance(part, bytes) else part.encode()).decode()
        for part in (gtrid, bqual)
    ]
    return f"{format_id}_{text[0]}_{text[1]}"


def test_a_gid_is_what_it_was_found_to_be() -> None:
    assert Xid(42, b"txmq:g-1", b"br/1").gid == "42_dHhtcTpnLTE=_YnIvMQ=="
    assert Xid(0, b"", b"").gid == "0__"
    [one, two] = branches("orders", LOG, TOKEN, 2)
    assert one.gid == gid(1954049393, GTRID, "1")
    assert two.gid == gid(1954049393, GTRID, "2")


@given(st.integers(0, 2**31 - 1), parts, parts)
def test_every_xid_comes_back_from_its_gid(format_id: int, gtrid: bytes, bqual: bytes) -> None:
    xid = Xid(format_id, gtrid, bqual)
    assert Xid.parse(xid.gid) == xid
    assert len(xid.gid) < 200  # PostgreSQL's limit


@given(nodes, st.uuids(), tokens, st.integers(1, 200))
def test_every_branch_comes_back_and_psycopg2_reads_it(
    node: str, log: UUID, token: UUID, count: int
) -> None:
    branch = branches(node, log, token, count)[-1]
    assert XaBranch.parse(branch.gid) == branch
    assert branch.log == log_digits(log) != log_digits(UUID(int=log.int ^ 1 << 127))
    theirs = TheirXid.from_string(branch.gid)
    assert (theirs.format_id, theirs.gtrid, theirs.bqual) == (
        FORMAT,
        *(p.decode() for p in branch.xid[1:]),
    )


@pytest.mark.parametrize(
    "foreign",
    [
        "",
        "by hand",
        TOKEN.hex,
        gid(FORMAT + 1, GTRID, "1"),
        gid(0, GTRID, "1"),
        gid(f"0{FORMAT}", GTRID, "1"),
        gid(f"+{FORMAT}", GTRID, "1"),
        gid("\u0661", GTRID, "1"),  # a digit, to int()
        gid(FORMAT + 2**32, GTRID, "1"),
        gid(FORMAT, GTRID, "1") + "\n",
        gid(FORMAT, GTRID, "1").rstrip("="),
        gid(FORMAT, GTRID, "1") + "=",
        gid(FORMAT, GTRID, "1").replace("MQ==", "MR=="),  # decodes to the same
        gid(FORMAT, GTRID, "1").replace("_", " _"),
        gid(FORMAT, GTRID, "1") + "_",
        gid(FORMAT, GTRID, "0"),
        gid(FORMAT, GTRID, "01"),
        gid(FORMAT, GTRID, "1000"),
        gid(FORMAT, GTRID, "1 "),
        gid(FORMAT, GTRID, ""),
        gid(FORMAT, GTRID, "\u0661"),
        gid(FORMAT, "", "1"),
        gid(FORMAT, f"{GTRID}\n", "1"),
        gid(FORMAT, f"{GTRID}0", "1"),
        gid(FORMAT, GTRID.upper(), "1"),
        gid(FORMAT, f".{GTRID}", "1"),
        gid(FORMAT, f"n:{GTRID}", "1"),
        gid(FORMAT, GTRID.replace("orders", ""), "1"),
        gid(FORMAT, GTRID.replace("orders", "n" * 19), "1"),
        gid(FORMAT, GTRID.replace("orders", "n" * 99), "1"),
        gid(FORMAT, b"\xff" + GTRID.encode(), "1"),
        gid(FORMAT, GTRID.replace("a67f", "a64f"), "1"),  # a UUID, but none of version 7
        gid(FORMAT, GTRID.replace("7f8899", "7f8819"), "1"),
    ],
)
def test_what_is_not_to_the_letter_ours_is_foreign(foreign: str) -> None:
    assert XaBranch.parse(foreign) is None


@given(st.text(max_size=199))
def test_no_text_is_too_strange(text: str) -> None:
    xid = Xid.parse(text)
    assert xid is None or xid.gid == text
    assert XaBranch.parse(text) is None


def test_a_node_fits_in_a_gtrid() -> None:
    assert node_of("orders") == "orders"
    long = [node_of("a-very-long-name-of-a-service-1"), node_of("a-very-long-name-of-a-service-2")]
    assert all(name.startswith("a-very-lo.") and len(name) == LONGEST_NODE for name in long)
    assert long[0] != long[1]
    [branch] = branches(long[0], LOG, TOKEN, 1)
    assert len(branch.xid.gtrid) == 64


@pytest.mark.parametrize("node", ["", ".", "a:b", "a b", "n" * 19, "Zürich", "a\n"])
def test_an_impossible_node_is_refused(node: str) -> None:
    with pytest.raises(LocalProtocolError, match="invalid node name"):
        branches(node, LOG, TOKEN, 1)


def test_too_many_branches_are_refused() -> None:
    with pytest.raises(LocalProtocolError, match="too many"):
        branches("orders", LOG, TOKEN, 201)

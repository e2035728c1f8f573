"""Rows of replies, in the form in which commands show them."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable
from typing import Any


def with_places(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of a table with the places of messages as commands take them."""
    parts = ("topic", "partition", "offset")
    return [
        {"place": "/".join(str(row[part]) for part in parts)}
        | {name: value for name, value in row.items() if name not in parts}
        for row in rows
    ]


def with_decoded_body(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of a reply with the message's body decoded, where it has one."""
    body = row.pop("body", None)
    return row if body is None else row | body_fields(b64decode(body))


def body_fields(body: bytes) -> dict[str, str]:
    """Return a body as a field of text if it is UTF-8, otherwise of base64."""
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": b64encode(body).decode()}

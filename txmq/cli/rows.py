"""Rows of replies, in the form in which commands show them."""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Iterable
from typing import Any

IN_PLACE = re.compile(r"\(attempt \d+ of \d+ in place\)")


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


def last_line(text: str) -> str:
    """Return the last line of a traceback, which is the error itself.

    A note about attempts in place may stand behind it.
    """
    lines = (line.strip() for line in reversed(text.splitlines()))
    return next((line for line in lines if line and not IN_PLACE.fullmatch(line)), "")

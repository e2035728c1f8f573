"""Kombu's messages as the bodies of txmq's."""

from __future__ import annotations

from base64 import b64decode
from datetime import UTC, datetime
from typing import Any, Final

from kombu.utils.json import loads

SHORTEST_S: Final = 0.001  # a message without time is gone before anybody sees it


def read(body: bytes) -> dict[str, Any]:
    """Return a message of Kombu's. Raises ValueError for anything else."""
    try:
        message: dict[str, Any] = loads(body)  # if it is one
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    match message:
        case {"body": str(text), "headers": dict(), "properties": {"delivery_info": dict()}}:
            encoding = message["properties"].get("body_encoding")
            if encoding == "base64":
                b64decode(text)
            elif encoding not in (None, "utf-8"):
                raise ValueError(f"its body has the encoding {encoding!r}")
            return message
    raise ValueError("it is no message of Kombu's")


def due_at(message: dict[str, Any]) -> datetime | None:
    """Return when a task of Celery's is due; None = now."""
    eta = (message.get("headers") or {}).get("eta")
    if not isinstance(eta, str):
        return None
    at = datetime.fromisoformat(eta)
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def lifetime(message: dict[str, Any], longest: float | None = None) -> float | None:
    """Return the seconds after which a message expires, at most `longest`; None =
    never.
    """
    expiration = message["properties"].get("expiration")  # in ms, as a text
    times = [] if expiration is None else [int(expiration) / 1_000]
    times += [] if longest is None else [longest]
    return max(SHORTEST_S, min(times)) if times else None

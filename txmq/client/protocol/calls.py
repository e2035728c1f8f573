"""The control calls of a client, for work of several calls: its reads and changes are
coroutines over one function, which each face gives in its own way.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

Calls: TypeAlias = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]


def calls_by(call: Callable[..., dict[str, Any]]) -> Calls:
    """Return a client's blocking `call` for such work, which never suspends then."""

    async def made(name: str, args: dict[str, Any]) -> dict[str, Any]:
        return call(name, **args)

    return made

"""Stories of frameworks on asyncio, with an end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from txmq.testing.wait import PATIENCE_S


def run(story: Callable[[], Awaitable[Any]]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(PATIENCE_S):
            return await story()

    return asyncio.run(bounded())


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110  # whatever it is about
            await asyncio.sleep(0.02)

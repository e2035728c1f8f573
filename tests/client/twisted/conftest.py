"""Both kinds of reactors: beside the loop of the client, and around it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from twisted.internet.asyncioreactor import AsyncioSelectorReactor

from tests.client.reactor_thread import running_reactor


@pytest.fixture(scope="module", params=["select", "asyncio"])
def reactor(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "select":
        with running_reactor() as reactor:
            yield reactor
        return
    with (
        closing(asyncio.SelectorEventLoop()) as loop,
        running_reactor(lambda: AsyncioSelectorReactor(loop)) as reactor,
    ):
        yield reactor

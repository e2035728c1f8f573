"""A core to drive, with a topic in it."""

from __future__ import annotations

import pytest

from tests.core.driver import Driver
from txmq.core.topics.topics import CreateTopic


@pytest.fixture
def core() -> Driver:
    driver = Driver()
    driver.do(CreateTopic("t", 2))
    return driver

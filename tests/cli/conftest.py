"""A process that has just begun, for each command."""

from __future__ import annotations

import pytest
import structlog


@pytest.fixture(autouse=True)
def unconfigured() -> None:
    """Undo what tests before this one told structlog: a command's JSON stands alone on
    standard output.
    """
    structlog.reset_defaults()

"""The clients' fixture `connect`, for tests of the relay."""

from __future__ import annotations

from tests.client.conftest import connect  # noqa: F401  # a fixture

"""The clients' broker and client, for tests of frameworks."""

from __future__ import annotations

from tests.client.conftest import client, real, shared_broker  # noqa: F401  # fixtures

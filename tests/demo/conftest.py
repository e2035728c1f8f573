"""The fixture `patient_clients`."""

from __future__ import annotations

from tests.patient_clients import patient_clients  # noqa: F401  # a fixture

"""What the broker knows of consumer groups, as plain objects."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Consumers:
    """All consumer groups."""

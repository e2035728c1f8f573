"""What the broker knows of its disk: how much space there is, and what could not be written."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Disk:
    """`troubles` tells by its name ("index", "snapshot", "retention") what is tried again and again, and why."""

    troubles: dict[str, str] = field(default_factory=dict)

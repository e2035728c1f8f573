"""Damage to stored messages."""

from __future__ import annotations

import mmap
from pathlib import Path


def damage(data: Path, body: bytes) -> None:
    """Change a bit of a body that one stored message has, in a data directory."""
    changed = 0
    for path in (data / "log").iterdir():
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as segment:
            if (at := segment.find(body)) >= 0:
                segment[at] ^= 1
                changed += 1
    assert changed == 1, f"{body!r} is in {changed} segments"

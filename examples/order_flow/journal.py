"""A file in which a process counts its actions, one per line, so that SIGKILL loses
none.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path


class Journal:
    """The counts of one process."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def count(self, word: str, count: int = 1) -> None:
        os.write(self._file, f"{word} {count}\n".encode())


def totals(directory: Path) -> Counter[str]:
    """Return the counts of all processes in the directory."""
    found = Counter[str]()
    for path in directory.glob("*.journal"):
        for line in path.read_text("ascii").splitlines():
            word, count = line.split()
            found[word] += int(count)
    return found

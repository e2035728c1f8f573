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
        self._counted = Counter[str]()

    def count(self, word: str, count: int = 1) -> None:
        self._counted[word] += count
        os.write(self._file, f"{word} {count}\n".encode())

    def count_to(self, word: str, total: int) -> None:
        """Count what a total of this process has more than was counted of it."""
        if more := total - self._counted[word]:
            self.count(word, more)


def totals(directory: Path) -> Counter[str]:
    """Return the counts of all processes in the directory."""
    found = Counter[str]()
    for path in directory.glob("*.journal"):
        for line in path.read_text("ascii").splitlines():
            word, count = line.split()
            found[word] += int(count)
    return found

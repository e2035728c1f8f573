"""The `txmq` command on a machine whose clock is wrong by as much as a file says."""

from __future__ import annotations

import time
from pathlib import Path
from unittest.mock import patch

from txmq.testing.forked import txmq_command


def run(wrong: str, *arguments: str) -> None:
    """Run the command with these arguments, by the clock that the file `wrong` sets."""
    right = time.time_ns

    def wall() -> int:
        return right() + int(Path(wrong).read_text("utf-8") or 0) * 1_000

    with patch.object(time, "time_ns", wall):
        txmq_command(*arguments)

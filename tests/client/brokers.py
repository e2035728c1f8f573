"""Brokers as processes of their own, for tests that want the real one, killed and restarted where they say so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self
from uuid import uuid4

START_S = 60.0  # on a loaded machine

SETTINGS = """
[broker]
data = "{directory}/data"
listen = "127.0.0.1:{port}"
partitions = 4
preallocate_bytes = 1048576
"""


class BrokerProcess:
    """A broker with a directory of its own. It keeps its address over restarts."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: subprocess.Popen[str] | None = None
        self.url = ""

    def start(self) -> Self:
        """Returns once it serves."""
        port = self.url.rpartition(":")[2] or "0"
        settings = self._directory / "settings.toml"
        settings.write_text(SETTINGS.format(directory=self._directory, port=port))
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "txmq", "broker", "--config", str(settings)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=Path(__file__).parents[2],
            )
        assert self._process.stdout is not None
        word, _, self.url = self._process.stdout.readline().strip().partition(" ")
        assert word == "ready", (self._directory / "log").read_text()
        return self

    def kill(self) -> None:
        """Ends it as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._end()

    def stop(self) -> None:
        """Ends it in good order."""
        if self._process is not None:
            self._process.terminate()
            self._end()

    def _end(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        self._process.wait(START_S)
        self._process.stdout.close()
        self._process = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def fresh(what: str) -> str:
    """A name that no other test has."""
    return f"{what}-{uuid4().hex[:8]}"

"""A broker for tests that kill it: a process of its own, on a port that it keeps over
restarts.
"""

from __future__ import annotations

import signal
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from txmq.testing.ports import free_port
from txmq.testing.processes import ProcessEnded, Running

KILLED: Final = -signal.SIGKILL


class OwnBroker:
    """A broker whose data, settings and log are in `directory`. `settings` is TOML
    (`txmq.config.broker`).

    With a block it is started, and killed at its end if it still runs.
    """

    def __init__(self, directory: Path, settings: str = "") -> None:
        self.directory = directory
        self.data = directory / "data"
        directory.mkdir(parents=True, exist_ok=True)
        config = directory / "broker.toml"
        config.write_text(settings, encoding="utf-8")
        address = f"127.0.0.1:{free_port()}"
        self.url = f"txmq://{address}"
        self.lives = 0
        self._arguments = ("--config", str(config), "--data", str(self.data), "--listen", address)
        self._running: Running | None = None

    @property
    def process(self) -> Running:
        """The present process, or the last one."""
        if self._running is None:
            raise ProcessEnded("the broker was never started")
        return self._running

    @property
    def log(self) -> str:
        """What it has logged in all its lives."""
        return (self.directory / "err").read_text("utf-8", "replace")

    def start(self) -> Self:
        """Returns once it serves; recovery after a crash is done by then. Raises
        ProcessEnded.
        """
        self.launch()
        self.process.first_line()
        return self

    def launch(self) -> None:
        """Starts the process, and does not wait until it serves."""
        self._running = Running(self.directory, "broker", *self._arguments)
        self.lives += 1

    def kill(self) -> None:
        """SIGKILL. Raises ProcessEnded where it had ended before, by itself."""
        if self.process.end(signal.SIGKILL) != KILLED:
            raise self.process.ended()

    def stop(self) -> int:
        """SIGTERM: it drains. Returns its exit status."""
        return self.process.end(signal.SIGTERM)

    def restart(self) -> None:
        """Kills it and starts it again."""
        self.kill()
        self.start()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._running is not None and self._running.alive:
            self.kill()

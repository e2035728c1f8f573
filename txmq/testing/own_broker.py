"""A broker process for tests that kill it; its port stays the same over restarts."""

from __future__ import annotations

import signal
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from txmq.testing.ports import free_port
from txmq.testing.processes import ProcessEnded, Running

KILLED: Final = -signal.SIGKILL


class OwnBroker:
    """A broker with its data, settings and log in `directory`.

    `settings` is TOML (`txmq.config.broker`). A with-block starts the broker, and kills
    it at the end if it still runs.
    """

    def __init__(self, directory: Path, settings: str = "") -> None:
        self.directory = directory
        self.data = directory / "data"
        directory.mkdir(parents=True, exist_ok=True)
        config = directory / "broker.toml"
        config.write_text(settings, encoding="utf-8")
        address = f"127.0.0.1:{free_port()}"
        self.url = f"txmq://{address}"
        self.starts = 0
        places = ("--config", str(config), "--data", str(self.data), "--listen", address)
        self._arguments = (*places, "--create-topics")
        self._running: Running | None = None

    @property
    def process(self) -> Running:
        """The present process, or the last one."""
        if self._running is None:
            raise ProcessEnded("the broker was never started")
        return self._running

    @property
    def log(self) -> str:
        """The log of all its processes."""
        return (self.directory / "err").read_text("utf-8", "replace")

    def start(self) -> Self:
        """Start the broker and wait until it serves, after any recovery.

        Raises ProcessEnded.
        """
        self.launch()
        self.process.first_line()
        return self

    def launch(self) -> None:
        """Start the process without waiting until it serves."""
        self._running = Running(self.directory, "broker", *self._arguments)
        self.starts += 1

    def kill(self) -> None:
        """Send SIGKILL. Raises ProcessEnded where the process had already ended."""
        if self.process.terminate(signal.SIGKILL) != KILLED:
            raise self.process.unexpected_end()

    def stop(self) -> int:
        """Send SIGTERM, on which the broker drains; return its exit status."""
        return self.process.terminate(signal.SIGTERM)

    def restart(self) -> None:
        """Kill the broker and start it again."""
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

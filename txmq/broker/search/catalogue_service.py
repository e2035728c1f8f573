"""Catalogues of keys and ids, built by a process beside the broker, and searches with
them.

No send waits for a catalogue. A search scans the batches behind the newest catalogue,
so catalogues are built seldom: after a certain amount of log, or after some time for
less.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import structlog
from twisted.python.failure import Failure

from txmq.broker.search.search import (
    PAGE_BATCHES,
    PAGE_READ_BYTES,
    BegunBatch,
    Search,
    SearchPage,
    SearchQuery,
)
from txmq.errors import StoreError
from txmq.model.units import MIB
from txmq.store.catalogue.catalogue import discard, open_catalogues
from txmq.store.catalogue.pages import DamagedPage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from uuid import UUID

    from txmq.broker.data_directory.storage import OpenedDirectory
    from txmq.broker.engine.engine import Engine
    from txmq.broker.reactor.interfaces import Clock, RunInThread
    from txmq.config.broker import CatalogueSettings as Settings
    from txmq.core.state.state import Topic
    from txmq.store.catalogue.catalogue import Catalogue
    from txmq.store.filesystem import FileSystem

    Build = Callable[[], list[Catalogue]]

CHEAP_BYTES = 256 << 10  # of log: scanned in a millisecond or two
AFTER_FAILURE_S = 60.0
MODULE = "txmq.broker.search.catalogue_build"
log = structlog.get_logger()


class CatalogueBuilder:
    """Builds catalogues in a process of its own, which ends when it has caught up.
    Blocks; for a thread.
    """

    def __init__(self, fs: FileSystem, directory: str, log_id: UUID) -> None:
        self._fs, self._directory, self._log_id = fs, directory, log_id
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def __call__(self) -> list[Catalogue]:
        """Build, and return all catalogues. Raises StoreError if the process fails."""
        command = [sys.executable, "-P", "-m", MODULE, self._directory]
        here = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with subprocess.Popen(  # noqa: S603  # our own command
            command, env=here, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as process:
            self._process = process
            _out, errors = process.communicate()
        if process.returncode and not self._stopped:
            why = (errors.decode(errors="replace").strip().splitlines() or ["no word"])[-1]
            raise StoreError(f"making catalogues ended with {process.returncode}: {why}")
        return open_catalogues(self._fs, self._directory, self._log_id)

    def stop(self) -> None:
        """End the process if it runs; its finished catalogues stay."""
        self._stopped = True
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()


def build_beside(
    fs: FileSystem,
    directory: str,
    opened: OpenedDirectory,
    catalogues: CatalogueService,
    in_thread: RunInThread,
) -> CatalogueBuilder:
    """Start building the catalogues of an open data directory in a process beside this
    one.
    """
    found = open_catalogues(fs, directory, opened.log.log_id, opened.log.end)
    process = CatalogueBuilder(fs, directory, opened.log.log_id)
    catalogues.start_building(fs, process, in_thread, lambda: opened.tables.position, found)
    return process


class CatalogueService:
    """Starts builds, and keeps the open catalogues. All methods belong to the reactor's
    thread.
    """

    def __init__(self, engine: Engine, settings: Settings, clock: Clock) -> None:
        self._engine, self._settings, self._clock = engine, settings, clock
        self._in_thread: RunInThread | None = None
        self._busy = self._failed = False
        self._built_to = 0  # what was published up to that position of the log is in catalogues
        self._due_at = 0.0
        self.catalogues: Sequence[Catalogue] = ()

    def start_building(
        self,
        fs: FileSystem,
        make: Build,
        in_thread: RunInThread,
        position: Callable[[], int],
        found: Sequence[Catalogue],
    ) -> None:
        """Build from now on. `position` is that of the tables on disk, `found` are the
        existing catalogues.
        """
        self._fs, self._build, self._in_thread, self._position = fs, make, in_thread, position
        self.catalogues = found
        self._built_to = max(
            (one.header.position for one in found), default=self._engine.store.first
        )
        self._due_at = self._clock.seconds() + self._settings.every_s

    @property
    def uncatalogued(self) -> int:
        """Bytes of log behind the newest catalogue, which a search for a key scans."""
        return self._engine.store.durable - self._built_to

    def tick(self) -> None:
        """Timer: begin a build, if it is due."""
        if (
            self._in_thread is None
            or self._busy
            or self._engine.failed is not None
            or self._engine.disk.refusing
        ):
            return
        position, patient = self._position(), self._clock.seconds() < self._due_at
        enough = self._settings.mib * MIB if patient else min(CHEAP_BYTES, self._settings.mib * MIB)
        if not enough or position - self._built_to < enough or (self._failed and patient):
            return
        self._busy = True
        self._in_thread(self._build).addBoth(self._built, position).addErrback(self._engine.fail)

    def _built(self, result: list[Catalogue] | Failure, position: int) -> None:
        self._busy, self._failed = False, isinstance(result, Failure)
        if isinstance(result, Failure):
            result.trap(StoreError)
            log.warning("catalogue.failed", error=str(result.value))
            self._engine.disk.troubles["catalogue"] = str(result.value)
        else:
            self._engine.disk.troubles.pop("catalogue", None)
            self.catalogues, self._built_to = result, position
        self._due_at = self._clock.seconds() + (
            AFTER_FAILURE_S if self._failed else self._settings.every_s
        )

    def search(
        self,
        topic: Topic,
        wanted: SearchQuery,
        partitions: range,
        offset: int,
        *,
        batches: int = PAGE_BATCHES,
        size: int = PAGE_READ_BYTES,
        begun: BegunBatch | None = None,
    ) -> SearchPage:
        """Return a page of a topic. A damaged catalogue is discarded and built
        again.
        """
        while True:
            try:
                engine = self._engine
                search = Search(
                    engine.store,
                    engine.state,
                    topic,
                    wanted,
                    self.catalogues,
                    batches=batches,
                    size=size,
                    begun=begun,
                )
                return search.page(partitions, offset)
            except DamagedPage as error:
                log.warning("catalogue.damaged", path=error.path)
                self.catalogues = [one for one in self.catalogues if one.path != error.path]
                self._built_to = 0
                discard(self._fs, error.path)

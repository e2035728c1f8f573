"""Has catalogues of keys and ids made of what was published, by a process beside the
broker, and searches with them.

Nothing of this is on the way of a send. What the newest catalogue does not have is
looked through, so it matters little when one is made: after so much of log, or for
little of it after some time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import structlog
from twisted.python.failure import Failure

from txmq.broker.search.search import Page, Search, Wanted
from txmq.errors import StoreError
from txmq.store.catalogue import discard, open_catalogues
from txmq.store.pages import DamagedPage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from uuid import UUID

    from txmq.broker.data_directory.storage import Opened
    from txmq.broker.engine import Engine
    from txmq.broker.reactor.protocols import Clock, InThread
    from txmq.config.storage import Catalogues as Settings
    from txmq.core.state.state import Topic
    from txmq.store.catalogue import Catalogue
    from txmq.store.fs import FileSystem

    Make = Callable[[], list[Catalogue]]

MIB = 1 << 20
LITTLE = 256 << 10  # bytes of log that are looked through in a millisecond or two
AFTER_FAILURE_S = 60.0
MODULE = "txmq.broker.catalogues.catalogue_build"
log = structlog.get_logger()


class CatalogueProcess:
    """Makes catalogues in a process of its own, which ends when it has caught up.
    Blocks, for a thread.
    """

    def __init__(self, fs: FileSystem, directory: str, log_id: UUID) -> None:
        self._fs, self._directory, self._log_id = fs, directory, log_id
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def __call__(self) -> list[Catalogue]:
        """All catalogues that are there then. Raises StoreError where the process
        failed.
        """
        command = [sys.executable, "-P", "-m", MODULE, self._directory]
        here = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with subprocess.Popen(  # our own command
            command, env=here, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as process:
            self._process = process
            _out, errors = process.communicate()
        if process.returncode and not self._stopped:
            why = (errors.decode(errors="replace").strip().splitlines() or ["no word"])[-1]
            raise StoreError(f"making catalogues ended with {process.returncode}: {why}")
        return open_catalogues(self._fs, self._directory, self._log_id)

    def stop(self) -> None:
        """End the process, if it runs: what it has finished is there."""
        self._stopped = True
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()


def catalogue_beside(
    fs: FileSystem, directory: str, opened: Opened, cataloguing: Cataloguing, in_thread: InThread
) -> CatalogueProcess:
    """Have the catalogues of a data directory that was opened made by a process beside
    this one.
    """
    found = open_catalogues(fs, directory, opened.log.log_id, opened.log.end)
    process = CatalogueProcess(fs, directory, opened.log.log_id)
    cataloguing.make_with(fs, process, in_thread, lambda: opened.tables.position, found)
    return process


class Cataloguing:
    """All methods belong to the reactor's thread."""

    def __init__(self, engine: Engine, settings: Settings, clock: Clock) -> None:
        self._engine, self._settings, self._clock = engine, settings, clock
        self._in_thread: InThread | None = None
        self._busy = self._failed = False
        self._made_to = 0  # what was published up to that position of the log is in catalogues
        self._patient_until = 0.0
        self.catalogues: Sequence[Catalogue] = ()

    def make_with(
        self,
        fs: FileSystem,
        make: Make,
        in_thread: InThread,
        position: Callable[[], int],
        found: Sequence[Catalogue],
    ) -> None:
        """From now on have them made; `position` is that of the tables on disk, `found`
        are there already.
        """
        self._fs, self._make, self._in_thread, self._position = fs, make, in_thread, position
        self.catalogues = found
        self._made_to = max((one.about.position for one in found), default=self._engine.store.first)
        self._patient_until = self._clock.seconds() + self._settings.every_s

    @property
    def waiting(self) -> int:
        """Bytes of log since catalogues were made: of their messages a search for a key
        looks through all.
        """
        return self._engine.store.durable - self._made_to

    def tick(self) -> None:
        """Timer: begin, if it is time."""
        if (
            self._in_thread is None
            or self._busy
            or self._engine.failed is not None
            or self._engine.disk.refusing
        ):
            return
        position, patient = self._position(), self._clock.seconds() < self._patient_until
        enough = self._settings.mib * MIB if patient else min(LITTLE, self._settings.mib * MIB)
        if not enough or position - self._made_to < enough or (self._failed and patient):
            return
        self._busy = True
        self._in_thread(self._make).addBoth(self._made, position).addErrback(self._engine.fail)

    def _made(self, result: list[Catalogue] | Failure, position: int) -> None:
        self._busy, self._failed = False, isinstance(result, Failure)
        if isinstance(result, Failure):
            result.trap(StoreError)
            log.warning("catalogue.failed", error=str(result.value))
            self._engine.disk.troubles["catalogue"] = str(result.value)
        else:
            self._engine.disk.troubles.pop("catalogue", None)
            self.catalogues, self._made_to = result, position
        self._patient_until = self._clock.seconds() + (
            AFTER_FAILURE_S if self._failed else self._settings.every_s
        )

    def search(self, topic: Topic, wanted: Wanted, partitions: range, offset: int) -> Page:
        """A page of a topic; a catalogue that turns out to be damaged is thrown away,
        and made again.
        """
        while True:
            try:
                engine = self._engine
                return Search(engine.store, engine.state, topic, wanted, self.catalogues).page(
                    partitions, offset
                )
            except DamagedPage as error:
                log.warning("catalogue.damaged", path=error.path)
                self.catalogues = [one for one in self.catalogues if one.path != error.path]
                self._made_to = 0
                discard(self._fs, error.path)

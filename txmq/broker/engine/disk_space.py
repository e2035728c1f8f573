"""Disk space: how much is left, what could not be written, and the refusal of writes
before the disk is full.

Acks, decisions and retention, which frees space, still need some when clients' writes
are refused. Where other programs take that space away, the ballast file is released.
Reads go on in any case.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ParamSpec

import structlog

from txmq.core.topics.sends import StoreBatch, StoreBatches
from txmq.core.transactions.batched import StoreBundles
from txmq.core.transactions.half_storage import StorePart
from txmq.errors import DiskFull, ReadOnly, RequestRejected, StoreError
from txmq.model.units import MIB
from txmq.store.ballast import Ballast

if TYPE_CHECKING:
    from collections.abc import Callable

    from txmq.config.broker import DiskSettings
    from txmq.store.filesystem import FileSystem, Space

P = ParamSpec("P")
WRITES = (StoreBatch, StoreBatches, StorePart, StoreBundles)
log = structlog.get_logger()


@dataclass(slots=True)
class Disk:
    """`space` is the last measurement, None = none yet. `low`: less than the operator
    wants. `ballast_fits`: the ballast fits, and still leaves more than the operator
    wants.

    `troubles` maps work that is retried ("index", "snapshot", "retention", "ballast",
    "catalogue") to its error.
    """

    space: Space | None = None
    low: bool = False
    ballast_fits: bool = False
    refusing: bool = False
    ballast: Ballast | None = None
    troubles: dict[str, str] = field(default_factory=dict)

    def refusal(self, command: object) -> RequestRejected | None:
        """Refuse a command that would store messages, while there is too little space
        for them.
        """
        if not self.refusing or not isinstance(command, WRITES):
            return None
        message = (
            f"the broker's disk has {self.free_mib} MiB left: it takes no messages, but serves them"
        )
        return ReadOnly(message, hint="free space on its disk, or keep messages for less long")

    def write_with_ballast(
        self, write: Callable[P, object], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Write; if there is no space, release the ballast and write again. Blocks, in
        any thread.
        """
        try:
            write(*args, **kwargs)
        except DiskFull:
            if not self.release_ballast():
                raise
            write(*args, **kwargs)

    def release_ballast(self) -> bool:
        """Release the ballast. False = there is none. Blocks, in any thread."""
        if self.ballast is None or not self.ballast.exists:
            return False
        self.refusing = True  # before senders can take the space
        self.space, self.ballast_fits = None, False  # the measurement is out of date
        log.error("disk.ballast_given_up", bytes=self.ballast.size)
        return self.ballast.release()

    @property
    def free_mib(self) -> int:
        return 0 if self.space is None else self.space.free // MIB


class DiskWatch:
    """Measures the disk's space; that takes no longer than an access to memory."""

    def __init__(self, fs: FileSystem, directory: str, disk: Disk, limits: DiskSettings) -> None:
        self._fs, self._directory, self._disk, self._limits = fs, directory, disk, limits
        disk.ballast = Ballast(fs, directory, limits.ballast_mib * MIB)

    def use(self, limits: DiskSettings) -> None:
        """Go by other limits; the ballast stays as it is."""
        self._limits = limits

    def tick(self) -> None:
        """Timer: measure, and begin or end the refusal of writes."""
        disk, limits = self._disk, self._limits
        try:
            disk.space = self._fs.space(self._directory)
        except StoreError as error:
            disk.troubles["space"] = error.message
            return
        disk.troubles.pop("space", None)
        disk.low = disk.space.free < limits.warn_free_mib * MIB
        disk.ballast_fits = disk.space.free >= (limits.warn_free_mib + limits.ballast_mib) * MIB
        enough = limits.resume_free_mib if disk.refusing else limits.refuse_free_mib
        refusing = disk.space.free < enough * MIB
        if refusing is not disk.refusing:
            (log.error if refusing else log.info)(
                "disk.refusing" if refusing else "disk.resumed", mib=disk.free_mib
            )
        disk.refusing = refusing

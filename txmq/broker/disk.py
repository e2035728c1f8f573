"""What the broker knows of its disk: how much space there is, and what could not be written.

Before a disk is full, writes of clients are refused: acks, decisions and retention, which makes space, still need some.
Reads go on, whatever the disk says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from txmq.broker.core.parts import StorePart
from txmq.broker.core.sends import Send
from txmq.broker.core.state import Rejected
from txmq.broker.core.together import StoreTogether
from txmq.errors import ReadOnly, StoreError

if TYPE_CHECKING:
    from txmq.config_storage import DiskSpace
    from txmq.store.fs import FileSystem, Space

MIB = 1 << 20
WRITES = (Send, StorePart, StoreTogether)
log = structlog.get_logger()


@dataclass(slots=True)
class Disk:
    """`space` is what was last seen, None = nothing yet; `low`: less than an operator wants.

    `troubles` tells by its name ("index", "snapshot", "retention", "catalogue") what is tried again and again, and why.
    """

    space: Space | None = None
    low: bool = False
    refusing: bool = False
    troubles: dict[str, str] = field(default_factory=dict)

    def refusal(self, command: object) -> Rejected | None:
        """The no to a command that would store messages, while there is too little space for them."""
        if not self.refusing or not isinstance(command, WRITES):
            return None
        message = f"the broker's disk has {self.free_mib} MiB left: it takes no messages, but serves them"
        return Rejected(ReadOnly, message, "free space on its disk, or keep messages for less long")

    @property
    def free_mib(self) -> int:
        return 0 if self.space is None else self.space.free // MIB


class DiskWatch:
    """Looks at the disk every second; that blocks no longer than a look at memory."""

    def __init__(self, fs: FileSystem, directory: str, disk: Disk, limits: DiskSpace) -> None:
        self._fs, self._directory, self._disk, self._limits = fs, directory, disk, limits

    def tick(self) -> None:
        """Timer."""
        disk, limits = self._disk, self._limits
        try:
            disk.space = self._fs.space(self._directory)
        except StoreError as error:
            disk.troubles["space"] = error.message
            return
        disk.troubles.pop("space", None)
        disk.low = disk.space.free < limits.warn_free_mib * MIB
        enough = limits.resume_free_mib if disk.refusing else limits.refuse_free_mib
        refusing = disk.space.free < enough * MIB
        if refusing is not disk.refusing:
            (log.error if refusing else log.info)("disk.refusing" if refusing else "disk.resumed", mib=disk.free_mib)
        disk.refusing = refusing

"""What the broker knows of its disk: how much space there is, and what could not be
written.

Before a disk is full, writes of clients are refused: acks, decisions and retention,
which makes space, still need some. Where others take that away, the ballast is given up
for them. Reads go on, whatever the disk says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ParamSpec

import structlog

from txmq.core.state.state import Rejected
from txmq.core.topics.sends import Send, SendTogether
from txmq.core.transactions.batched import StoreTogether
from txmq.core.transactions.half_storage import StorePart
from txmq.errors import DiskFull, ReadOnly, StoreError
from txmq.store.ballast import Ballast

if TYPE_CHECKING:
    from collections.abc import Callable

    from txmq.config.storage import DiskSpace
    from txmq.store.fs import FileSystem, Space

P = ParamSpec("P")
MIB = 1 << 20
WRITES = (Send, SendTogether, StorePart, StoreTogether)
log = structlog.get_logger()


@dataclass(slots=True)
class Disk:
    """`space` is what was last seen, None = nothing yet; `low`: less than an operator
    wants.

    `troubles` tells by its name ("index", "snapshot", "retention", "ballast",
    "catalogue") what is tried again and again, and why. `roomy`: there is space for the
    `ballast`, and more than an operator wants besides.
    """

    space: Space | None = None
    low: bool = False
    roomy: bool = False
    refusing: bool = False
    ballast: Ballast | None = None
    troubles: dict[str, str] = field(default_factory=dict)

    def refusal(self, command: object) -> Rejected | None:
        """The no to a command that would store messages, while there is too little
        space for them.
        """
        if not self.refusing or not isinstance(command, WRITES):
            return None
        message = (
            f"the broker's disk has {self.free_mib} MiB left: it takes no messages, but serves them"
        )
        return Rejected(ReadOnly, message, "free space on its disk, or keep messages for less long")

    def insist(self, write: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Write what space must be made for: where there is none, with that of the
        ballast. Blocks, in any thread.
        """
        try:
            write(*args, **kwargs)
        except DiskFull:
            if not self.give_up():
                raise
            write(*args, **kwargs)

    def give_up(self) -> bool:
        """Give up the ballast, for whatever is not refused; False = there is none.
        Blocks, in any thread.
        """
        if self.ballast is None or not self.ballast.there:
            return False
        self.refusing = True  # before anybody who writes messages can take the space
        self.space, self.roomy = None, False  # what was seen then is over
        log.error("disk.ballast_given_up", bytes=self.ballast.size)
        return self.ballast.give_up()

    @property
    def free_mib(self) -> int:
        return 0 if self.space is None else self.space.free // MIB


class DiskWatch:
    """Looks at the disk every second; that blocks no longer than a look at memory."""

    def __init__(self, fs: FileSystem, directory: str, disk: Disk, limits: DiskSpace) -> None:
        self._fs, self._directory, self._disk, self._limits = fs, directory, disk, limits
        disk.ballast = Ballast(fs, directory, limits.ballast_mib * MIB)

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
        disk.roomy = disk.space.free >= (limits.warn_free_mib + limits.ballast_mib) * MIB
        enough = limits.resume_free_mib if disk.refusing else limits.refuse_free_mib
        refusing = disk.space.free < enough * MIB
        if refusing is not disk.refusing:
            (log.error if refusing else log.info)(
                "disk.refusing" if refusing else "disk.resumed", mib=disk.free_mib
            )
        disk.refusing = refusing

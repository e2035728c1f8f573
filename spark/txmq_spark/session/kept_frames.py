"""Frames that several queries read, and that are computed once."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Final

from pyspark import StorageLevel
from pyspark.sql import DataFrame

# On the disks of executors: the size of a frame is no matter of memory.
LEVEL: Final = StorageLevel.DISK_ONLY


class KeptFrames(AbstractContextManager["KeptFrames"]):
    """Frames that executors keep until the block ends."""

    def __init__(self) -> None:
        self._frames: list[DataFrame] = []

    def keep(self, frame: DataFrame) -> DataFrame:
        """Have executors keep a frame from its first use on."""
        self._frames.append(frame.persist(LEVEL))
        return frame

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for frame in self._frames:
            frame.unpersist()


def computed(frame: DataFrame) -> DataFrame:
    """Compute a frame now, and never again: on executors' disks, or where a user has
    given Spark a directory, which the loss of an executor leaves.
    """
    if frame.sparkSession.sparkContext.getCheckpointDir() is not None:
        return frame.checkpoint()
    return frame.localCheckpoint(storageLevel=LEVEL)

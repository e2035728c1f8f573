"""Marks of the messages that handlers have, beside a local store.

The store counts an attempt on disk before it begins, so that the attempt counts even if
it kills the process. Other messages that were handed out then, but that no handler had
begun, must not count: these marks tell them apart.

    <store>/handed_out   16s boot id of the machine, then slots of 32 bytes
    slot                 u32 topic id, u32 partition, u64 offset, u32 attempt, u32 mark,
                         u32 CRC32C of all before, 4 zeros

They are written without a sync. What a process has written outlives it, but not its
machine. So after another boot no mark is believed, and each attempt counts.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from google_crc32c import value

from txmq.recover.local.values import Place

NAME = "handed_out"
HANDED_OUT, BEGUN = 1, 2
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SLOT = Struct("<IIQII")
_CRC = Struct("<I4x")
_SIZE = _SLOT.size + _CRC.size
_HEADER = 16


class Attempt(NamedTuple):
    """An attempt at a message, which was counted."""

    place: Place
    attempt: int


class Mark:
    """The mark of one attempt. `begin` may be called in any thread."""

    def __init__(self, marks: HandedOut, slot: int, attempt: Attempt) -> None:
        self._marks, self.slot, self._attempt = marks, slot, attempt
        self.ended = False

    def begin(self) -> None:
        """Note that a handler begins."""
        if not self.ended:
            self._marks.write(self.slot, self._attempt, BEGUN)


class HandedOut:
    """The marks of one open store. For one thread.

    `not_begun` has the attempts that an earlier process has counted, and not begun.
    """

    not_begun: tuple[Attempt, ...] = ()

    def __init__(self, directory: str) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        boot, self._file = _boot_id(), -1
        with suppress(OSError):  # without marks, each attempt counts
            self._file = os.open(f"{directory}/{NAME}", flags, 0o600)
            size = os.fstat(self._file).st_size
            self.not_begun = _not_begun(os.pread(self._file, size, 0), boot)
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, boot, 0)
        self._marks: dict[Place, Mark] = {}
        self._free: list[int] = []

    def hand_out(self, place: Place, attempt: int) -> Mark:
        """Mark a message, before its attempt is counted."""
        self.end(place)
        slot = self._free.pop() if self._free else len(self._marks)
        mark = self._marks[place] = Mark(self, slot, Attempt(place, attempt))
        self.write(slot, Attempt(place, attempt), HANDED_OUT)
        return mark

    def end(self, place: Place) -> None:
        """Remove the mark of a message whose outcome is on disk."""
        mark = self._marks.pop(place, None)
        if mark is not None:
            mark.ended = True
            self._free.append(mark.slot)
            self._pwrite(bytes(_SIZE), mark.slot)

    def write(self, slot: int, attempt: Attempt, mark: int) -> None:
        """Write a slot. Where that fails, the attempt counts."""
        fields = _SLOT.pack(*attempt.place, attempt.attempt, mark)
        self._pwrite(fields + _CRC.pack(value(fields)), slot)

    def _pwrite(self, data: bytes, slot: int) -> None:
        with suppress(OSError):
            os.pwrite(self._file, data, _HEADER + slot * _SIZE)

    def close(self) -> None:
        """Close the file; the marks stay. Idempotent."""
        for mark in self._marks.values():
            mark.ended = True
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _boot_id() -> bytes:
    """Return the id of this boot; zeros where it is not known."""
    with suppress(OSError, ValueError):
        return bytes.fromhex(_BOOT_ID.read_text("ascii").strip().replace("-", ""))
    return bytes(_HEADER)


def _not_begun(data: bytes, boot: bytes) -> tuple[Attempt, ...]:
    if boot == bytes(_HEADER) or data[:_HEADER] != boot:
        return ()
    found = []
    for start in range(_HEADER, len(data) - _SIZE + 1, _SIZE):
        fields = data[start : start + _SLOT.size]
        topic_id, partition, offset, attempt, mark = _SLOT.unpack(fields)
        (checksum,) = _CRC.unpack_from(data, start + _SLOT.size)
        if mark == HANDED_OUT and checksum == value(fields):
            found.append(Attempt(Place(topic_id, partition, offset), attempt))
    return tuple(found)

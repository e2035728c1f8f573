"""Checks of the machine: clock, open files, and the disk of the data directory."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import ssl
import stat
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from txmq.broker.data_directory.private_files import foreign_file
from txmq.cli.doctor.check_result import CheckResult, Health, judged
from txmq.model.units import MIB
from txmq.store.filesystem import not_permitted
from txmq.version import __version__

if TYPE_CHECKING:
    from txmq.config.broker import DiskSettings

MIN_FILES = 16_384
PACKAGES = ("Twisted", "pyOpenSSL", "lmdb", "psycopg2-binary", "psycopg2", "pydantic")
SYNCS, SYNC_BYTES = 65, 4_096
# A flash disk with protected memory takes longer: a faster sync has reached no disk.
FASTEST_SYNC_S = 15e-6
SLOW_SYNC_S = 0.03
TIME_ERROR = 5  # adjtimex: nobody sets this clock
TIMEX_BYTES = 512  # more than any C library's struct timex
VOLATILE = frozenset({"tmpfs", "ramfs", "devtmpfs"})
REMOTE = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "glusterfs"})
LAYERED = frozenset({"overlay", "aufs"})


def check_machine() -> Iterator[CheckResult]:
    """Check versions, the limit of open files and the clock."""
    yield CheckResult("versions", Health.OK, ", ".join(_versions()))
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    infinite = hard == resource.RLIM_INFINITY
    yield judged(
        "open files",
        "no limit" if infinite else f"{hard}",
        failed=not infinite and hard < MIN_FILES,
        advice="each connection is a file: raise it, as with LimitNOFILE= of systemd",
        fatal=False,
    )
    free_running = _is_free_running()
    yield judged(
        "clock",
        "set by nobody" if free_running else "synchronized",
        failed=free_running,
        advice="run an NTP client, such as chrony",
        fatal=False,
    )


def _versions() -> Iterator[str]:
    """Yield the versions that a bug report should name."""
    yield f"txmq {__version__}"
    yield f"Python {platform.python_version()}"
    yield platform.platform(terse=True)
    yield ssl.OPENSSL_VERSION.partition("  ")[0]
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            yield f"{package} {metadata.version(package)}"


def _is_free_running() -> bool:
    """Return whether the kernel knows of nobody who sets the clock."""
    adjust = getattr(ctypes.CDLL(None), "adjtimex", None)
    if adjust is None:
        return False  # a system without the call: nothing is known
    return bool(adjust(ctypes.create_string_buffer(TIMEX_BYTES)) == TIME_ERROR)


def check_disk(data: Path, limits: DiskSettings) -> Iterator[CheckResult]:
    """Check the disk of the data directory, which need not exist yet."""
    place = next(folder for folder in (data, *data.absolute().parents) if folder.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        yield CheckResult(
            "data directory",
            Health.FAILURE,
            f"{place} is not a directory that this user may write",
            "give it to the broker's user, and run this command as that user",
        )
        return
    foreign = foreign_file(data) if place == data else None
    if foreign is not None:
        found = f"{foreign} cannot be read and written by this user"
        yield CheckResult("data directory", Health.FAILURE, found, not_permitted())
        return
    mode = stat.S_IMODE(place.stat().st_mode) if place == data else 0o700
    is_shared = bool(mode & (stat.S_IWGRP | stat.S_IWOTH))
    yield judged(
        "data directory",
        f"{data}, mode {mode:04o}" if is_shared else str(data),
        failed=is_shared,
        advice="who may write there owns the broker: chmod go-w",
        fatal=bool(mode & stat.S_IWOTH),
    )
    yield _file_system(place)
    free = shutil.disk_usage(place).free // MIB
    yield judged(
        "free space",
        f"{free} MiB",
        failed=free < limits.warn_free_mib,
        advice=f"the alarm disk.low is raised below {limits.warn_free_mib} MiB, "
        f"and sends are refused below {limits.refuse_free_mib}",
        fatal=free < limits.refuse_free_mib,
    )
    yield _sync_time(place)


def _file_system(place: Path) -> CheckResult:
    kind = file_system_of(place, Path("/proc/self/mountinfo").read_text("utf-8"))
    if kind in VOLATILE | REMOTE:
        why = "keeps nothing over a restart" if kind in VOLATILE else "is not a local disk"
        advice = "use a disk of this machine, such as one with ext4 or XFS"
        return CheckResult("file system", Health.FAILURE, f"{kind}, which {why}", advice)
    return judged(
        "file system",
        kind,
        failed=kind in LAYERED,
        advice="mount a volume there: what is written into a container goes with it",
        fatal=False,
    )


def file_system_of(place: Path, mountinfo: str) -> str:
    """Return the type of the file system that has `place`."""
    kind, depth = "unknown", -1
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        mount = Path(left.split()[4].replace("\\040", " "))
        if place.resolve().is_relative_to(mount) and len(mount.parts) > depth:
            kind, depth = right.split()[0], len(mount.parts)
    return kind


def _sync_time(place: Path) -> CheckResult:
    """Measure the time of a sync. One that takes no time was none."""
    with _scratch_file(place) as file:
        times = []
        for _ in range(SYNCS):
            os.pwrite(file, bytes(SYNC_BYTES), 0)
            began = time.perf_counter()
            os.fdatasync(file)
            times.append(time.perf_counter() - began)
    median = statistics.median(times)
    found = f"{median * 1e6:.0f} µs, at most {max(times) * 1e3:.1f} ms"
    if median < FASTEST_SYNC_S:
        advice = "the disk answers before it has written: switch its write cache off"
        return CheckResult("sync", Health.WARNING, found, advice)
    return judged(
        "sync",
        found,
        failed=median > SLOW_SYNC_S,
        advice="every reply waits for such a sync: use a faster disk, with nothing else on it",
        fatal=False,
    )


@contextmanager
def _scratch_file(place: Path) -> Iterator[int]:
    """Yield a file on the disk that has no name, or goes with the block."""
    try:
        file = os.open(place, os.O_TMPFILE | os.O_WRONLY, 0o600)
    except OSError:  # a file system without such files
        with tempfile.NamedTemporaryFile(dir=place, prefix=".txmq-doctor-") as named:
            yield named.fileno()
        return
    try:
        yield file
    finally:
        os.close(file)

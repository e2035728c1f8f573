"""Search for bytes that a reader takes badly, led by the coverage of its code.

    python -m tests.fuzz.coverage_fuzzer READER RUNS [DIRECTORY]

Atheris (libFuzzer) changes bytes, and keeps those that reach new code: in DIRECTORY,
where a later search goes on. A failure ends the program with a status other than 0, and
prints the bytes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["txmq"]):
    from tests.fuzz.parsers import PARSERS, tried

LONGEST, SECONDS, MIB = 4_096, 10, 1_024  # of an input, for one, of memory


def search(name: str, runs: int, directory: Path) -> None:
    """Try so many inputs; does not return."""
    parser = PARSERS[name]
    for number, data in enumerate(parser.accepted()):
        (directory / f"accepted-{number}").write_bytes(data)
    limits = [f"-runs={runs}", f"-max_len={LONGEST}", f"-timeout={SECONDS}", f"-rss_limit_mb={MIB}"]
    # What fails is printed; no file of it is left in the working directory.
    flags = [*limits, "-seed=1", f"-artifact_prefix={directory}/"]
    atheris.Setup([sys.argv[0], *flags, str(directory)], lambda data: tried(parser, data))
    atheris.Fuzz()


if __name__ == "__main__":
    kept = Path(sys.argv[3]) if len(sys.argv) > 3 else Path(tempfile.mkdtemp())
    kept.mkdir(exist_ok=True, parents=True)
    search(sys.argv[1], int(sys.argv[2]), kept)

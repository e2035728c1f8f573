"""The packages as one zip file, for `spark-submit --py-files`.

    python -m txmq_spark.shipping txmq.zip

Executors need the packages that txmq depends on, and either txmq installed or this
file. It has what jobs use: no broker, no command `txmq`, and nothing of the tests.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import txmq
import txmq_spark

LEFT_OUT: Final = frozenset({"admin", "broker", "cli", "testing", "__pycache__"})
MODE: Final = 0o644 << 16


def write_zip(path: Path) -> int:
    """Write the zip file; return the number of its files.

    The same packages give the same bytes.
    """
    files = [
        (file, file.relative_to(root.parent))
        for root in (Path(package.__file__ or "").parent for package in (txmq, txmq_spark))
        for file in sorted(root.rglob("*"))
        if file.is_file() and not LEFT_OUT & set(file.relative_to(root).parts)
    ]
    with ZipFile(path, "w", ZIP_DEFLATED) as archive:
        for file, name in files:
            entry = ZipInfo(name.as_posix())
            entry.compress_type, entry.external_attr = ZIP_DEFLATED, MODE
            archive.writestr(entry, file.read_bytes())
    return len(files)


if __name__ == "__main__":
    write_zip(Path(sys.argv[1]))

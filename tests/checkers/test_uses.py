"""Type checkers know the public names: they take right uses, and refuse wrong ones."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import is_typeddict

import txmq.aio

ROOT = Path(__file__).parents[2]
FILES = ("tests/checkers/uses.py", "examples")
PYRIGHT = {
    "extraPaths": [str(ROOT), str(ROOT / "spark")],
    "typeCheckingMode": "standard",
    "useLibraryCodeForTypes": False,  # a library without types says nothing, as for mypy
    "enableTypeIgnoreComments": True,
    "reportUnnecessaryTypeIgnoreComment": "error",
}


def test_mypy_takes_right_uses_and_refuses_wrong_ones() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *FILES],
        cwd=ROOT, capture_output=True, check=False, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout


def pyright(tmp_path: Path, *files: Path) -> str:
    """Return what Pyright says of files. Fails where it finds an error."""
    settings = tmp_path / "pyrightconfig.json"
    settings.write_text(json.dumps(PYRIGHT | {"include": list(map(str, files))}))
    ran = subprocess.run(
        [sys.executable, "-m", "basedpyright",
         "--project", str(settings), "--pythonpath", sys.executable],
        capture_output=True, check=False, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout
    return ran.stdout


def test_pyright_takes_right_uses_and_refuses_wrong_ones(tmp_path: Path) -> None:
    pyright(tmp_path, *(ROOT / name for name in FILES))


def public_methods() -> Iterator[tuple[str, str]]:
    """Yield the methods of the public classes, each with the name of its class."""
    for module in (txmq, txmq.aio):
        for name in module.__all__:
            kind = getattr(module, name)
            if isinstance(kind, type) and not (
                is_typeddict(kind) or hasattr(kind, "__parameters__")
            ):
                methods = (method for method in dir(kind) if method[0] != "_")
                yield from ((f"{module.__name__}.{name}", method) for method in methods)


def test_pyright_knows_the_types_of_public_methods(tmp_path: Path) -> None:
    methods = list(public_methods())
    assert ("txmq.Client", "letters") in methods
    uses = [f"def use{n}(one: {kind}) -> None: reveal_type(one.{method})\n"
            for n, (kind, method) in enumerate(methods)]  # fmt: skip
    shown = tmp_path / "shown.py"
    shown.write_text("import txmq\n" + "".join(uses))
    types = [line for line in pyright(tmp_path, shown).splitlines() if "Type of" in line]
    assert len(types) == len(methods)
    assert [line for line in types if "Unknown" in line] == []

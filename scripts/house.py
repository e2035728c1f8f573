"""Count what makes the code easy or hard to read: layout, imports, names, types, prose.

The program parses the sources of a checkout and imports none of them. The production
code and the tests are counted apart.
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib.util import resolve_name
from itertools import chain
from pathlib import Path
from statistics import median_low
from typing import Final, NamedTuple, TypeVar

ROOT: Final = Path(__file__).resolve().parents[1]
COLUMNS: Final = {"production": ("txmq", "spark", "examples"), "tests": ("tests",)}
FACADES: Final = ("txmq", "txmq.twisted", "txmq_spark")  # the modules that users import
IMPORT_ROOTS: Final = ("spark",)  # folders whose packages are imported without their name
CODE_COLUMNS, PROSE_COLUMNS = 100, 88
QUESTION: Final = re.compile(r"(What|Who|Which|How|Where)(ever)?\b|Whether\b|Whose\b|Whom\b")
CONSTANT: Final = re.compile(r"_?[A-Z][A-Z0-9_]*")
UNIT_OF_TIME: Final = re.compile(
    r"_?(((MICRO|MILLI)?SECOND|MINUTE|HOUR|DAY|WEEK)S?(_M?S|_US)?|[MU]S)", re.IGNORECASE
)
MICROSECONDS: Final = 1_000_000
DOCUMENTED: Final = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Found(NamedTuple):
    """A count and its cases with their files; `extreme` names the file of a maximum."""

    name: str
    number: int
    cases: Sequence[str] = ()
    extreme: str = ""


class Module:
    """A module with its syntax tree."""

    def __init__(self, root: Path, path: Path) -> None:
        relative = path.relative_to(root)
        parts = relative.with_suffix("").parts[relative.parts[0] in IMPORT_ROOTS :]
        self.file, self.folder = relative.as_posix(), relative.parent.as_posix()
        self.is_package = parts[-1] == "__init__"
        self.name = ".".join(parts[:-1] if self.is_package else parts)
        self.text = path.read_text("utf-8")
        self.tree = ast.parse(self.text)

    @cached_property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    def at(self, line: int, text: str = "") -> str:
        return f"{self.file}:{line} {text}".rstrip()

    def imports(self, known: Mapping[str, Module]) -> set[str]:
        """Return the known modules that this one imports, wherever it does."""
        found: set[str] = set()
        package = self.name if self.is_package else self.name.rpartition(".")[0]
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = resolve_name("." * node.level + (node.module or ""), package)
                names = (f"{base}.{alias.name}" for alias in node.names)
                found.update(name if name in known else base for name in names)
        return found.intersection(known) - {self.name}

    def docstrings(self) -> Iterator[Docstring]:
        for node in self.nodes:
            if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
                private = not isinstance(node, ast.Module) and node.name.startswith("_")
                yield Docstring(self, node.body[0].lineno, text, private=private)

    def prose_lines(self) -> Iterator[int]:
        """Yield the lines of docstrings and of comments that stand alone."""
        for node in self.nodes:
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
                yield from range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
                yield token.start[0]


class Docstring(NamedTuple):
    """The docstring of a module, a class or a function."""

    module: Module
    line: int
    text: str
    private: bool

    def __str__(self) -> str:
        return self.module.at(self.line, self.text.splitlines()[0])


def layout(modules: list[Module]) -> Iterator[Found]:
    by_size = sorted(modules, key=lambda module: module.lines)
    yield Found("modules", len(modules))
    yield Found("median module, lines", median_low(module.lines for module in modules))
    yield Found("largest module, lines", by_size[-1].lines, extreme=by_size[-1].file)
    folders = grouped((module.folder, module.file) for module in modules)
    deepest = max(folders, key=lambda folder: folder.count("/"))
    yield Found("folders below the top one, deepest", deepest.count("/"), extreme=deepest)
    fullest = max(folders, key=lambda folder: len(folders[folder]))
    yield Found("files in one folder, most", len(folders[fullest]), extreme=fullest)


def circles(modules: list[Module]) -> Iterator[Found]:
    """Count circles of imports; modules at the top of a tree stand for themselves."""
    known = {module.name: module for module in modules}
    arrows = {module.name: module.imports(known) for module in modules}
    tops = set(chain.from_iterable(COLUMNS.values()))
    place = {
        module.name: module.file if module.folder in tops else module.folder for module in modules
    }
    between: dict[str, set[str]] = {folder: set() for folder in place.values()}
    for name, targets in arrows.items():
        between[place[name]] |= {place[target] for target in targets} - {place[name]}
    for what, graph in (("modules", arrows), ("folders", between)):
        rings = rings_of(graph)
        members = [f"{len(ring)}: {' '.join(sorted(ring))}" for ring in rings]
        yield Found(f"circles of {what}", len(rings), members)
        yield Found(f"{what} in circles", sum(map(len, rings)))


def rings_of(graph: Mapping[str, set[str]]) -> list[frozenset[str]]:
    """Return the sets of several nodes that all reach each other, largest first."""
    reached = {node: reach(graph, node) for node in graph}
    rings = {
        frozenset(other for other in reached[node] if node in reached[other])
        for node in graph
        if node in reached[node]
    }
    return sorted(rings, key=lambda ring: (-len(ring), sorted(ring)))


def reach(graph: Mapping[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    ahead = [start]
    while ahead:
        fresh = graph[ahead.pop()] - found
        found |= fresh
        ahead.extend(fresh)
    return found


def names(modules: list[Module]) -> Iterator[Found]:
    classes = grouped(
        (node.name, (module.file, node.lineno))
        for module in modules
        for node in module.nodes
        if isinstance(node, ast.ClassDef)
    )
    yield several("class names in several modules", classes)
    files = grouped((Path(module.file).name, (module.file, 1)) for module in modules)
    files.pop("__init__.py", None)
    yield several("file names in several folders", files)
    constants = grouped(
        (f"{name} = {ast.unparse(value)}", (module.file, line))
        for module in modules
        for line, name, value in assignments(module.tree.body)
        if CONSTANT.fullmatch(name) and not isinstance(value, ast.Call)
    )
    yield several("constants of one name and value in several modules", constants)


def several(name: str, found: Mapping[str, list[tuple[str, int]]]) -> Found:
    """Count the names that more than one file has."""
    twice = {
        each: places
        for each, places in sorted(found.items())
        if len({file for file, _line in places}) > 1
    }
    shown = [
        f"{each}: {' '.join(f'{file}:{line}' for file, line in places)}"
        for each, places in twice.items()
    ]
    return Found(name, len(twice), shown)


def times(modules: list[Module]) -> Iterator[Found]:
    units = grouped(
        (number, module.at(line, f"{name} = {ast.unparse(value)}"))
        for module in modules
        for line, name, value in assignments(module.nodes)
        if UNIT_OF_TIME.fullmatch(name) and (number := folded(value)) is not None
    )
    again = [place for _unit, places in sorted(units.items()) for place in places[1:]]
    yield Found("units of time defined again", len(again), again)
    written = [
        module.at(node.lineno, ast.unparse(node))
        for module in modules
        for node in module.nodes
        if isinstance(node, ast.BinOp)
        and any(folded(side) == MICROSECONDS for side in (node.left, node.right))
    ]
    yield Found("microseconds written out in arithmetic", len(written), written)


def folded(node: ast.expr) -> float | None:
    """Return the value of a number or of a product of numbers."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            one, other = folded(left), folded(right)
            return None if one is None or other is None else one * other
    return None


def types(modules: list[Module]) -> Iterator[Found]:
    used = [
        module.at(node.lineno)
        for module in modules
        for node in module.nodes
        if (isinstance(node, ast.Name) and node.id == "Any")
        or (isinstance(node, ast.Attribute) and node.attr == "Any")
    ]
    yield Found("Any in annotations", len(used), used)


def prose(modules: list[Module]) -> Iterator[Found]:
    docstrings = [found for module in modules for found in module.docstrings()]
    asks = [found for found in docstrings if QUESTION.match(found.text)]
    title = "docstrings that open with What, Whether, Who, Which, How, Where"
    yield Found(title, len(asks), [str(found) for found in asks])
    public = [str(found) for found in asks if not found.private]
    yield Found("  of them not of private names", len(public), public)
    exported = exported_modules(modules)
    users = [str(found) for found in asks if found.module.name in exported]
    yield Found("  of them in modules that users import from", len(users), users)
    short = [str(found) for found in docstrings if len(found.text.split()) < 3]
    yield Found("docstrings of one or two words", len(short), short)


def exported_modules(modules: list[Module]) -> set[str]:
    """Return the modules whose names users import, directly or through packages."""
    known = {module.name: module for module in modules}
    found: set[str] = set()
    ahead = [known[name] for name in FACADES if name in known]
    while ahead:
        module = ahead.pop()
        if module.name not in found and (module.is_package or module.name in FACADES):
            ahead.extend(known[name] for name in module.imports(known))
        found.add(module.name)
    return found


def widths(modules: list[Module]) -> Iterator[Found]:
    code, text = [], []
    for module in modules:
        prose_lines = set(module.prose_lines())
        for number, line in enumerate(module.text.splitlines(), 1):
            if number in prose_lines and len(line) > PROSE_COLUMNS:
                text.append(module.at(number))
            elif number not in prose_lines and len(line) > CODE_COLUMNS:
                code.append(module.at(number))
    yield Found(f"code lines over {CODE_COLUMNS} columns", len(code), code)
    yield Found(f"lines of docstrings and comments over {PROSE_COLUMNS}", len(text), text)


PARTS: Final[tuple[Callable[[list[Module]], Iterator[Found]], ...]] = (
    layout,
    circles,
    names,
    times,
    types,
    prose,
    widths,
)


def assignments(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str, ast.expr]]:
    """Yield the line, the name and the value of each assignment to one name."""
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield node.lineno, name, value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                yield node.lineno, name, value


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    found = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return dict(found)


def measure(root: Path) -> dict[str, list[Found]]:
    found = {}
    for column, folders in COLUMNS.items():
        files = chain.from_iterable(sorted((root / folder).rglob("*.py")) for folder in folders)
        modules = [Module(root, file) for file in files]
        found[column] = [one for part in PARTS for one in part(modules)]
    return found


def main() -> None:
    parser = ArgumentParser(description="Count the numbers of the code's structure.")
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="the checkout to measure")
    parser.add_argument("--names", action="store_true", help="list the production's cases")
    parser.add_argument("--json", action="store_true", help="print JSON, with the cases of both")
    options = parser.parse_args()
    found = measure(options.root.resolve())
    if options.json:
        told = {column: [one._asdict() for one in numbers] for column, numbers in found.items()}
        print(json.dumps(told, indent=2))
        return
    print(f"{'':66}" + "".join(f"{column:>12}" for column in found))
    for row in zip(*found.values(), strict=True):
        numbers = "".join(f"{one.number:12}" for one in row)
        print(f"{row[0].name:66}{numbers}  {row[0].extreme}".rstrip())
        for case in row[0].cases if options.names else ():
            print(f"    {case}")


if __name__ == "__main__":
    main()

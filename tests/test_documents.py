"""Documents name only what exists: files that they link to, functions of the walks."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("spark/*.md")])
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
NAME = re.compile(r"`([a-z_/]+\.py):(\w+)`")
ROW = re.compile(r"^\| [^|]+ \| [^|]+ \| ([^|]+) \|$", re.MULTILINE)
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
README_WORDS = 900


def broken_links(document: Path) -> list[str]:
    """Return the links of a document to files that do not exist."""
    links = LINK.findall(document.read_text("utf-8"))
    return [link for link in links if "://" not in link and not (document.parent / link).exists()]


def missing_names(text: str, root: Path) -> list[str]:
    """Return the `path.py:function` references in a text that name nothing."""
    return [
        f"{path}:{name}"
        for path, name in NAME.findall(text)
        if not (root / path).is_file() or name not in names_in(root / path)
    ]


def uneven_rows(text: str) -> list[str]:
    """Return the rows of tables that have not as many cells as the first row."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cells = [row.replace("\\|", "").count("|") for row in rows]
    return [row for row, number in zip(rows, cells, strict=True) if number != cells[0]]


def names_in(file: Path) -> set[str]:
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    tree = ast.parse(file.read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, definitions)}


def missing_modules(glossary: str, *roots: Path) -> list[str]:
    """Return the owning modules of a glossary's words that do not exist."""
    owners = [name for cell in ROW.findall(glossary) for name in re.findall("`([^`]+)`", cell)]
    return [name for name in owners if not any((root / name).exists() for root in roots)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(document: Path) -> None:
    assert broken_links(document) == []


def test_the_walks_name_functions_that_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    assert len(NAME.findall(text)) >= 15
    assert missing_names(text, ROOT / "txmq") == []


def test_the_modules_that_own_words_exist() -> None:
    glossary = (ROOT / "docs" / "GLOSSARY.md").read_text("utf-8")
    assert len(ROW.findall(glossary)) > 80
    assert missing_modules(glossary, ROOT / "txmq", ROOT / "spark" / "txmq_spark") == []


def test_each_row_of_the_glossary_has_all_its_cells() -> None:
    assert uneven_rows((ROOT / "docs" / "GLOSSARY.md").read_text("utf-8")) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_blocks_of_python_are_python(document: Path) -> None:
    for block in PYTHON.findall(document.read_text("utf-8")):
        compile(block, str(document), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").split()) < README_WORDS


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("[here](page.md#part) [there](missing.md) [web](https://example.org/x)")
    assert broken_links(document) == ["missing.md"]


def test_a_missing_function_is_found(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("def present(): ...\n")
    text = "`module.py:present` `module.py:absent` `other.py:present`"
    assert missing_names(text, tmp_path) == ["module.py:absent", "other.py:present"]


def test_a_missing_module_is_found(tmp_path: Path) -> None:
    (tmp_path / "present.py").touch()
    table = "| word | meaning | `present.py`, `absent.py` |\n"
    assert missing_modules(table, tmp_path) == ["absent.py"]


def test_a_row_without_all_its_cells_is_found() -> None:
    table = "| word | meaning |\n|---|---|\n| torn |\n| whole | row |\n"
    assert uneven_rows(table) == ["| torn |"]


def numbering_errors(decisions: Path) -> list[str]:
    """Return what is wrong with the numbers and the list of decisions."""
    files = sorted(decisions.glob("[0-9]*.md"))
    numbers = [file.name[:4] for file in files]
    twice = [number for number in sorted(set(numbers)) if numbers.count(number) > 1]
    page = (decisions / "README.md").read_text("utf-8")
    listed = LINK.findall(page)
    return [
        *(f"number {number} is used twice" for number in twice),
        *(
            f"the title of {file.name} has another number"
            for file in files
            if not file.read_text("utf-8").startswith(f"# {file.name[:4]}: ")
        ),
        *(
            f"the list has {file.name} {listed.count(file.name)} times"
            for file in files
            if listed.count(file.name) != 1
        ),
    ]


def missing_decisions(text: str, decisions: Path) -> list[str]:
    """Return the decisions that a text cites and that are not there."""
    cited = sorted(set(re.findall(r"docs/decisions/(\d{4}[\w-]*)", text)))
    return [name for name in cited if not [*decisions.glob(f"{name}*.md")]]


def test_code_and_documents_cite_decisions_that_exist() -> None:
    folders = ("txmq", "spark/txmq_spark", "examples", "tests", "scripts", "docs")
    files = [file for name in folders for file in (ROOT / name).rglob("*.[mp][dy]")]
    texts = [file.read_text("utf-8") for file in files if file.name != "test_documents.py"]
    assert missing_decisions("\n".join(texts), ROOT / "docs" / "decisions") == []


def test_a_missing_decision_is_found(tmp_path: Path) -> None:
    (tmp_path / "0001-one.md").touch()
    text = "docs/decisions/0001, docs/decisions/0001-one.md, docs/decisions/0001-two.md"
    assert missing_decisions(text, tmp_path) == ["0001-two"]


def test_each_decision_has_a_number_of_its_own_and_is_listed_once() -> None:
    assert numbering_errors(ROOT / "docs" / "decisions") == []


def test_wrong_numbers_of_decisions_are_found(tmp_path: Path) -> None:
    (tmp_path / "0001-one.md").write_text("# 0001: One\n")
    (tmp_path / "0001-another.md").write_text("# 0002: Another\n")
    (tmp_path / "README.md").write_text("- [0001 One](0001-one.md)\n")
    assert numbering_errors(tmp_path) == [
        "number 0001 is used twice",
        "the title of 0001-another.md has another number",
        "the list has 0001-another.md 0 times",
    ]

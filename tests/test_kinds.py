"""Each test belongs to one target of the Makefile, and `make test` skips none."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from tests.kinds import DEEP, STORIES, is_deep, is_needed

ROOT = Path(__file__).parents[1]
FILES = sorted(file.relative_to(ROOT).as_posix() for file in (ROOT / "tests").rglob("test_*.py"))
PLACES = [place for places in DEEP.values() for place in places]
# brackets, so that the text does not match itself
MAY_SKIP = re.compile(
    r"pytest[.]skip|mark[.]skip|import[o]rskip|needs_[p]gbouncer|needs_[k]afka|: [B]rowser\b"
)


def chosen_by(text: str) -> dict[str, Callable[..., bool]]:
    """Return what each target of a Makefile chooses by the marks of a test."""
    named = dict(re.findall(r"^(\w+) := (.+)$", text, re.MULTILINE))
    rules = re.findall(
        r"^(test|deep|soak): .*\n\t@.* pytest .*-m (\w+|\"[^\"]+\")", text, re.MULTILINE
    )
    found = {}
    for target, marks in rules:
        expression = re.sub(r"\$\((\w+)\)", lambda name: named[name[1]], marks.strip('"'))
        found[target] = lambda asked=expression, **marks: bool(eval(asked, {}, marks))
    return found


def functions_of(file: Path) -> set[str]:
    """Return the names of the functions in a file."""
    tree = ast.parse(file.read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_each_test_belongs_to_one_target_whatever_its_marks() -> None:
    targets = chosen_by((ROOT / "Makefile").read_text("utf-8"))
    assert targets.keys() == {"test", "deep", "soak"}
    for deep, soak in product((False, True), repeat=2):
        assert [chooses(deep=deep, soak=soak) for chooses in targets.values()].count(True) == 1


def test_a_target_that_leaves_tests_out_would_be_seen() -> None:
    text = (ROOT / "Makefile").read_text("utf-8")
    targets = chosen_by(text.replace("deep and not soak", "deep and soak"))
    assert not any(chooses(deep=True, soak=False) for chooses in targets.values())


def test_all_parts_are_run_before_a_change_is_taken() -> None:
    assert "for part in test check deep;" in (ROOT / ".ci" / "run").read_text("utf-8")


@pytest.mark.parametrize("place", [*PLACES, *STORIES.values()])
def test_what_the_tables_name_exists(place: str) -> None:
    file, *names = re.split("::|\\[", place)
    assert (ROOT / file).exists()
    for name in names[:1]:
        assert re.search(rf"\b{name}\b", (ROOT / file).read_text("utf-8"))


def test_a_file_that_is_left_out_has_deep_tests_only() -> None:
    left_out = [file for file in FILES if not is_needed(file)]
    assert 20 < len(left_out) < len(FILES) / 2
    for file in left_out:
        assert all(is_deep(f"{file}::{name}") for name in functions_of(ROOT / file))


def test_each_story_is_told_by_every_change() -> None:
    assert [story for story in STORIES.values() if is_deep(story)] == []


def test_no_test_of_every_change_may_be_skipped() -> None:
    may_be = []
    for file in filter(is_needed, FILES):
        for node in ast.parse((ROOT / file).read_text("utf-8")).body:
            text, test = ast.unparse(node), f"{file}::{getattr(node, 'name', '')}"
            if MAY_SKIP.search(text) and not is_deep(test) and "mark.soak" not in text:
                may_be.append(test)
    assert may_be == []

"""The page of faults, the tests that show them and the planted bugs agree."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from tests.faults import BUGS, FAULTS

TABLES = Path(__file__).with_name("faults.py")
PAGE = Path(__file__).parents[1] / "docs" / "FAULTS.md"
MARKS = ("*Not built yet.*", "*Open: not survived yet.*")


def section(page: str, title: str) -> str:
    """Return the text of a section of the page, without its heading."""
    heading = rf"^## \d+ {title}$(.*?)(?=^## |\Z)"
    (text,) = re.findall(heading, page, re.MULTILINE | re.DOTALL)
    return str(text)


def rows(page: str) -> Iterator[tuple[int, str]]:
    """Return the number and the text of each fault of the page."""
    item = r"^- \*\*(\d+)\. (.*?)(?=^- |^#|\Z)"
    faults = section(page, "Faults")
    for number, text in re.findall(item, faults, re.MULTILINE | re.DOTALL):
        yield int(number), text


# Numbers given to work that goes on at a time; those that were not needed stay free.
GIVEN_OUT = frozenset([267, 268])


def misnumbered(numbers: Collection[int]) -> list[str]:
    """Return what keeps the numbers from counting up from 1, each once."""
    counts = Counter(numbers)
    missing = sorted({*range(1, max(counts, default=1) + 1)} - counts.keys() - GIVEN_OUT)
    repeated = {number: times for number, times in counts.items() if times > 1}
    return [
        *(f"{number} is missing" for number in missing),
        *(f"{number} is there {times} times" for number, times in repeated.items()),
    ]


def exceptions(page: str) -> set[int]:
    """Return the faults that the page names as exceptions from another promise."""
    lists = re.findall(r"(?:Except|Open:)\s+rows?\s+([\d\s,andto]+)", page)
    return {int(number) for text in lists for number in re.findall(r"\d+", text)}


def disagreements(page: str, tested: Collection[int]) -> list[str]:
    """Return where the page and the table of tests contradict each other."""
    faults = dict(rows(page))
    marked = {number for number, text in faults.items() if any(mark in text for mark in MARKS)}
    there, shown = faults.keys(), {*tested}
    return [
        *misnumbered([number for number, _text in rows(page)]),
        *(f"{number} has tests and is not on the page" for number in sorted(shown - there)),
        *(f"{number} has neither tests nor a mark" for number in sorted(there - shown - marked)),
        *(f"{number} has tests and a mark" for number in sorted(shown & marked)),
        *(f"{number} is excepted without a mark" for number in sorted(exceptions(page) - marked)),
    ]


def test_every_fault_of_the_page_has_tests_or_a_mark() -> None:
    assert disagreements(PAGE.read_text("utf-8"), FAULTS) == []


@pytest.mark.parametrize(
    ("title", "item", "least"),
    [
        ("Invariants", r"^- \*\*I(\d+)\*\* ", 16),
        ("Hostile input", r"^- \*\*(\d+)\.\*\* ", 78),
    ],
)
def test_other_lists_of_the_page_are_numbered_without_gaps(
    title: str, item: str, least: int
) -> None:
    text = section(PAGE.read_text("utf-8"), title)
    numbers = [int(found) for found in re.findall(item, text, re.MULTILINE)]
    assert misnumbered(numbers) == []
    assert max(numbers) >= least


SMALL_PAGE = """
## 1 Words
- **9. Not a fault.**
## 2 Faults
### Broker
- **1. Killed.**
  Nothing is lost.
  Except row 3.
- **2. No replica.** *Not built yet.*
### Time
- **3. A clock that jumps.**
  Today all is lost.
  *Open: not survived yet.*
## 3 Invariants
- **9. Not a fault either.**
"""


@pytest.mark.parametrize(
    ("old", "new", "tested", "found"),
    [
        ("", "", {1}, []),
        ("", "", set(), ["1 has neither tests nor a mark"]),
        ("", "", {1, 2}, ["2 has tests and a mark"]),
        ("", "", {1, 4}, ["4 has tests and is not on the page"]),
        ("**2.", "**4.", {1}, ["2 is missing"]),
        ("**2.", "**3.", {1}, ["2 is missing", "3 is there 2 times"]),
        ("*Not built yet.*", "", {1}, ["2 has neither tests nor a mark"]),
        ("row 3.", "rows 2 and 5.", {1}, ["5 is excepted without a mark"]),
        ("*Open: not survived yet.*", "", {1, 3}, ["3 is excepted without a mark"]),
    ],
)
def test_a_page_that_contradicts_the_tests_is_found(
    old: str, new: str, tested: set[int], found: list[str]
) -> None:
    assert old in SMALL_PAGE
    assert disagreements(SMALL_PAGE.replace(old, new) if old else SMALL_PAGE, tested) == found


def test_every_test_that_shows_a_fault_is_there() -> None:
    there = {
        name
        for file in Path(__file__).parent.rglob("test_*.py")
        for name in re.findall(
            r"^(?:async )?def (test_\w+)\(", file.read_text("utf-8"), re.MULTILINE
        )
    }
    missing = {fault: {*names} - there for fault, names in FAULTS.items()}
    assert {fault: names for fault, names in missing.items() if names} == {}


def test_every_bug_that_a_checker_must_find_is_planted() -> None:
    files = [file for file in Path(__file__).parent.rglob("*.py") if file != TABLES]
    texts = [file.read_text("utf-8") for file in files]
    names = {name for planted in BUGS.values() for name in planted}
    assert {name for name in names if not any(name in text for text in texts)} == set()

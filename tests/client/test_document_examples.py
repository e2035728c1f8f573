"""Every example of README and docs runs as it stands, in a process of its page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.document_examples import ELSEWHERE, ROOT, Examples, Place, blocks, to_run
from txmq.errors import TransactionAborted
from txmq.testing.broker_thread import BrokerThread
from txmq.testing.wait import PATIENCE_S

PAGES = [
    str(page.relative_to(ROOT))
    for page in sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("spark/*.md")])
]


@pytest.mark.parametrize("page", [page for page in PAGES if to_run(page)])
def test_the_examples_of_a_page_run(page: str, database: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.document_examples", page, database],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'adapters' / 'faststream'}"},
        capture_output=True, check=False, text=True, timeout=4 * PATIENCE_S,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_what_does_not_run_here_is_there() -> None:
    there = {block[:3] for page in PAGES for block in blocks(page)}
    assert ELSEWHERE.keys() <= there


def test_readmes_remedy_for_the_hook_is_one(tmp_path: Path, database: str) -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    [remedy] = re.findall(r"^`(txmq\.sqlalchemy\.enlist\(.*?\))`", readme, re.MULTILINE)
    hook = next(blocks("README.md"))
    _first, *rest = hook.text.splitlines()
    with BrokerThread(tmp_path / "data", databases={"shop": database}) as broker, ExitStack() as s:
        place = Place(broker.url, database, s)
        with pytest.raises(TransactionAborted):
            Examples("README.md", place).run_block(hook._replace(text="\n".join([remedy, *rest])))


def test_a_block_that_does_not_run_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: str
) -> None:
    (tmp_path / "page.md").write_text("A page.\n\n```python\nordinary = 1\n1 / 0\n```\n")
    monkeypatch.setattr("tests.document_examples.ROOT", tmp_path)
    with ExitStack() as stack, pytest.raises(ZeroDivisionError) as raised:
        Examples("page.md", Place("txmq://127.0.0.1:1", database, stack)).run()
    assert raised.traceback[-1].lineno == 4, "the line of the page, from 0"
    assert raised.value.__notes__ == ["page.md, block 1 of python"]

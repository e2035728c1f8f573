"""Readers of strangers' bytes: refused by a TxmqError, or read as they were written."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tests.fuzz.mutation import changed
from tests.fuzz.parsers import PARSERS, tried
from txmq.wire.payload_reader import PayloadReader

ROOT = Path(__file__).parents[2]
TRIES, SEARCHED = 500, 500_000


@pytest.mark.parametrize("name", PARSERS)
def test_what_is_accepted_is_read(name: str) -> None:
    parser = PARSERS[name]
    assert all(tried(parser, data) for data in parser.accepted())


@pytest.mark.parametrize("name", PARSERS)
def test_what_is_nearly_right_is_read_or_refused(name: str) -> None:
    parser, random = PARSERS[name], Random(name)
    some = parser.accepted()
    read = sum(tried(parser, changed(random, some)) for _ in range(TRIES))
    assert read > 0, "all was refused"


def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    read = PayloadReader.read

    def believes(reader: PayloadReader, size: int) -> bytes:
        assert size == 0 or reader.payload[reader.at + size - 1] >= 0
        return read(reader, size)

    monkeypatch.setattr(PayloadReader, "read", believes)
    parser, random = PARSERS["emitted"], Random(0)
    some = parser.accepted()
    with pytest.raises(IndexError):
        any(tried(parser, changed(random, some)) for _ in range(TRIES))


@pytest.mark.soak
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="pip install atheris")
@pytest.mark.parametrize("name", PARSERS)
def test_a_search_led_by_coverage_finds_nothing(name: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "tests.fuzz.coverage_fuzzer", name, f"{SEARCHED}", f"{tmp_path}"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, check=False)
    printed = done.stderr.decode(errors="replace")
    assert done.returncode == 0, printed[-4_000:]
    assert f"Done {SEARCHED} runs" in printed, printed[-4_000:]

"""The table of docs/SECURITY.md is the code's."""

from __future__ import annotations

import re
from pathlib import Path

from txmq.model.access import ROLES, VERBS

PAGE = Path(__file__).parents[3] / "docs" / "SECURITY.md"


def test_the_page_has_the_table_of_verbs_and_roles() -> None:
    text = PAGE.read_text("utf-8")
    assert "| verb | on | " + " | ".join(ROLES) + " |" in text
    rows = re.findall(r"^\| (\w+) \| (topic|group|service|cluster) \| (.*) \|$", text, re.MULTILINE)
    assert [(kind, verb) for verb, kind, _cells in rows] == [
        (kind, verb) for kind, verbs in VERBS.items() for verb in verbs
    ]
    for verb, kind, cells in rows:
        told = [cell.strip() == "yes" for cell in cells.split("|")]
        assert told == [(verb, kind) in permissions for permissions in ROLES.values()], (verb, kind)

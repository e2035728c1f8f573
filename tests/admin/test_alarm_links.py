"""Alarms on the first page of the console lead to the pages of what they are about."""

from __future__ import annotations

import re

import pytest

from tests.admin.console_support import ConsoleInMemory
from tests.broker.monitoring.alarm_desk import AlarmBroker
from tests.broker.monitoring.alarm_stories import STORIES
from txmq.admin.console.overview import PAGES_OF_ALARMS
from txmq.broker.monitoring.alarm_rules import ALARM_RULES
from txmq.wire.calls.alarms import REPORTED_NAMES

# the others name what has no page: the log, the clock, the broker itself
LINKED = (
    "cluster.", "disk.", "fence.", "group.", "heuristic.", "plan.", "resolver.", "retention.",
    "store.", "transaction.",
)  # fmt: skip
WAITING = {"broker.silent", "disk.behind", "disk.full"}  # pages wait for the disk, as all else


@pytest.mark.parametrize("name", sorted(STORIES.keys() - WAITING))
def test_an_alarm_leads_to_what_it_is_about(name: str) -> None:
    desk = AlarmBroker()
    story = STORIES[name](desk)
    next(story)
    next(story)
    console = ConsoleInMemory(desk.broker)
    page = console.get("/").body
    [article] = [
        one
        for one in re.findall(r'<article class="alarm.*?</article>', page, re.DOTALL)
        if f"<h3>{name} " in one
    ]
    links = re.findall(r'href="\./([^"]+)"', article)
    assert bool(links) is name.startswith(LINKED)
    for link in links:
        assert console.get(f"/{link}").status == 200, link


def test_lists_are_those_of_alarms_that_there_are() -> None:
    assert PAGES_OF_ALARMS.keys() <= {rule.name for rule in ALARM_RULES} | {*REPORTED_NAMES}
    assert WAITING - {"broker.silent"} <= PAGES_OF_ALARMS.keys()
    console = ConsoleInMemory()
    for path, _text in PAGES_OF_ALARMS.values():
        assert console.get(f"/{path}").status == 200, path

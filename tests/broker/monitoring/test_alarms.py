"""Alarms: each is raised, listed and logged once while its condition holds, and cleared
afterwards.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.broker.access.support import BrokerWithUsers
from tests.broker.monitoring.alarm_desk import AlarmBroker, Handler
from tests.broker.monitoring.alarm_stories import STORIES, Certificates
from tests.broker.support import Client
from txmq.broker.monitoring import alarms, group_conditions
from txmq.broker.monitoring.alarm_rules import ALARM_RULES
from txmq.config.broker import AlarmSettings
from txmq.core.topics.restored_log import NoteBackup
from txmq.model.message import Decision
from txmq.model.units import DAY, SECOND


def test_each_alarm_has_its_story() -> None:
    assert STORIES.keys() == {rule.name for rule in ALARM_RULES}


SUBJECTS = (
    ("plan", r"plans.* as (\w+) of group"),
    ("tx", r"transaction.* ([0-9a-f]{32})\b"),
    ("group", r"group (\w+)"),
)


def subject(text: str) -> str:
    """Return the one thing that an alarm's text names."""
    for kind, pattern in SUBJECTS:
        if (found := re.search(pattern, text)) is not None:
            return f"{kind}:{next(filter(None, found.groups()))}"
    return ""


@pytest.mark.parametrize("name", STORIES)
def test_an_alarm_is_raised_and_cleared(name: str) -> None:
    desk = AlarmBroker()
    story = STORIES[name](desk)
    with capture_logs() as logs:
        assert next(story) == ""
        assert name not in desk.names()
        text = next(story)
        began = desk.broker.now()
        [alarm] = [alarm for alarm in desk.alarms() if alarm["name"] == name]
        assert text in alarm["text"]
        assert alarm["about"] == subject(alarm["text"])
        assert began - SECOND <= alarm["since"] <= began
        desk.broker.pass_time(3)
        assert alarm["since"] in [one["since"] for one in desk.alarms() if one["name"] == name]
        next(story, None)
        assert name not in desk.names()
        desk.broker.pass_time(3)
    told = [(log["event"], log["log_level"]) for log in logs if log.get("alarm") == name]
    assert told == [("alarm.raised", "error"), ("alarm.cleared", "info")]


def test_each_group_has_alarms_of_its_own_and_sets_their_severity() -> None:
    desk = AlarmBroker()
    Handler(desk).fail(dead=True)
    other = Handler(desk, group="other")
    other.fail(dead=True)

    def severities() -> dict[str, str]:
        return {one["about"]: one["severity"] for one in desk.alarms()}

    assert severities() == {"group:billing": "warning", "group:other": "warning"}
    assert "txmq dlq stats other counts" in desk.alarms()[1]["action"]
    since = [one["since"] for one in desk.alarms() if one["about"] == "group:billing"]
    desk.broker.pass_time(3)
    other.set_severity("critical")
    assert severities() == {"group:other": "critical", "group:billing": "warning"}
    other.set_severity("off")
    assert [one["since"] for one in desk.alarms()] == since
    other.set_severity("default")
    assert severities() == {"group:billing": "warning", "group:other": "warning"}


def test_of_very_many_groups_some_are_told_and_the_others_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_conditions, "MAX_GROUPS", 2)
    desk = AlarmBroker()
    for number in range(5):
        Handler(desk, group=f"g{number}").fail(dead=True)
    told = [one["text"] for one in desk.alarms() if one["name"] == "group.letters"]
    assert len(told) == 3
    assert told[-1] == "and of 3 more groups"


def test_a_guarded_group_and_its_lost_stores_name_one_another() -> None:
    desk = AlarmBroker()
    handler = Handler(desk, flood_keys=1, mode="concurrent")
    handler.store()
    handler.publish()
    handler.fetch()
    handler.fail(offset=1, error={"type": "OSError", "fingerprint": "f"})
    handler.leave()
    desk.broker.pass_time(61)
    texts = {one["name"]: one["text"] for one in desk.alarms()}
    assert (
        "1 message cannot be probes, in stores without an owner: see store.no_owner"
        in texts["group.guarded"]
    )
    assert "adopted messages wait for the group, see group.guarded" in texts["store.no_owner"]


def test_a_certificate_is_critical_on_its_last_day_and_behind_it() -> None:
    desk = AlarmBroker()
    certificates = Certificates(desk)

    def shown() -> tuple[str, str]:
        [alarm] = desk.alarms()
        return alarm["severity"], alarm["text"]

    now, name = desk.broker.now(), "the broker's certificate /etc/txmq/broker.pem"
    certificates.at = now + DAY
    assert shown() == ("warning", f"{name} ends in 1 day, 0:00:00")
    certificates.at = now + DAY - SECOND
    assert shown() == ("critical", f"{name} ends in 23:59:59")
    certificates.at = now - 61 * SECOND
    assert shown() == ("critical", f"{name} ended 0:01:01 ago")


@pytest.mark.parametrize(
    ("limit_s", "before_the_first", "a_week_later"),
    [
        (None, [], ["the newest backup of the log is 7 days, 0:00:00 old"]),
        (0.0, [], []),
        (
            100.0,
            ["the log was never backed up"],
            ["the newest backup of the log is 7 days, 0:00:00 old"],
        ),
        (8 * 86_400.0, ["the log was never backed up"], []),
    ],
)
def test_the_age_of_a_backup_counts_from_the_first_one_on_or_where_a_setting_asks_for_it(
    limit_s: float | None, before_the_first: list[str], a_week_later: list[str]
) -> None:
    desk = AlarmBroker()
    desk.broker.assembly.alarms.use(AlarmSettings(backup_s=limit_s))

    def shown() -> list[str]:
        return [one["text"] for one in desk.alarms() if one["name"] == "log.backup_old"]

    assert shown() == before_the_first
    desk.broker.do(NoteBackup(desk.broker.now() - 7 * DAY))
    assert shown() == a_week_later


def test_the_critical_ones_come_first() -> None:
    desk = AlarmBroker()
    token = desk.half(check_after=0)
    desk.broker.pass_time(70)
    desk.resolver(failing_s=100)
    assert desk.names() == ["resolver.unreachable", "transaction.oldest_undecided"]
    desk.decide(token, Decision.COMMIT)
    desk.resolver()
    assert desk.alarms() == []


def test_a_plan_that_its_client_leaves_unfinished_is_told() -> None:
    desk = AlarmBroker()
    handler = Handler(desk)
    handler.plan("create", group="billing")
    desk.broker.pass_time(3_500)
    assert "plan.waiting" not in desk.names()
    desk.broker.pass_time(200)
    [alarm] = [alarm for alarm in desk.alarms() if alarm["name"] == "plan.waiting"]
    assert "wait to be completed: 1, as p of group billing for 1:01:" in alarm["text"]


def test_a_plan_that_waits_behind_its_canary_has_nothing_to_mend() -> None:
    desk = AlarmBroker()
    handler = Handler(desk, mode="concurrent")
    handler.fail(dead=True)
    handler.publish()
    handler.fetch()
    handler.fail(dead=True, offset=1)
    settings = {"start": True, "canary": 1, "pause": True}
    handler.plan("create", group="billing", select={}, settings=settings)
    desk.broker.pass_time(1)
    handler.fetch()
    handler.ack(0)
    desk.broker.pass_time(3)
    [alarm] = [found for found in desk.alarms() if found["name"] != "group.letters"]
    assert alarm["name"] == "plan.waiting"
    assert "wait to be resumed: 1, as p of group billing" in alarm["text"]


TOLD = {
    "name": "xa.orphan",
    "severity": "critical",
    "text": "a branch stands",
    "action": "txmq xa doctor",
}
LAG = TOLD | {"name": "relay.lag", "severity": "warning", "text": "60 s behind"}


def tell(desk: AlarmBroker, source: str, *alarms: dict[str, str], for_s: float = 30.0) -> object:
    return desk.broker.connect().call(
        "alarms.report", source=source, alarms=list(alarms), for_s=for_s
    )


def test_reported_alarms_are_listed_until_the_source_clears_them_or_falls_silent() -> None:
    desk = AlarmBroker()
    began = desk.broker.now()
    assert tell(desk, "one", TOLD, LAG) == {}
    desk.broker.pass_time(10)
    tell(desk, "one", TOLD)
    tell(desk, "two", LAG, for_s=100.0)
    [first, second] = desk.alarms()
    assert (first["name"], first["since"], first["text"]) == (
        "xa.orphan",
        began,
        "one: a branch stands",
    )
    assert (second["name"], second["text"]) == ("relay.lag", "two: 60 s behind")
    desk.broker.pass_time(31)
    assert desk.names() == ["relay.lag"]
    tell(desk, "two")
    assert desk.names() == []


def test_the_number_of_reporting_sources_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alarms, "MAX_SOURCES", 2)
    desk = AlarmBroker()
    for source in ("one", "two", "one", "three"):
        told = tell(desk, source, LAG)
        assert (told == {}) == (source != "three")
    assert len(desk.alarms()) == 2
    desk.broker.pass_time(31)
    assert tell(desk, "three", LAG) == {}


def test_a_user_neither_ends_the_alarms_of_others_nor_keeps_them_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(alarms, "MAX_SOURCES", 4)
    broker = BrokerWithUsers()
    shop, billing, root = map(broker.log_in, ("shop", "billing", "root"))

    def report(client: Client, source: str, *told: dict[str, str]) -> object:
        return client.call("alarms.report", source=source, alarms=list(told), for_s=3_600.0)

    def shown() -> list[str]:
        found: Any = root.call("broker.alarms")
        return [one["text"] for one in found["alarms"] if one["name"] in ("xa.orphan", "relay.lag")]

    assert report(shop, "xa", TOLD) == {}
    assert report(billing, "xa") == {}, "its own, of which there is none"
    assert report(billing, "xa", LAG) == {}
    both = ["xa of user shop: a branch stands", "xa of user billing: 60 s behind"]
    assert shown() == both
    for number in range(10):
        report(billing, f"other-{number}", LAG)
    assert len(shown()) == 4
    assert report(shop, "relay", TOLD) == {}
    assert [text for text in shown() if " of user shop" in text] == [
        "xa of user shop: a branch stands",
        "relay of user shop: a branch stands",
    ]
    assert "error" in dict(report(shop, "third", TOLD))  # type: ignore[call-overload]  # a reply in JSON
    assert report(shop, "third") == {}, "nothing to keep"


@pytest.mark.parametrize(
    "wrong", [{"name": "relay.odd"}, {"severity": "loud"}, {"text": ""}, {"text": "x" * 1_001}]
)
def test_an_alarm_that_cannot_be_is_refused(wrong: dict[str, str]) -> None:
    desk = AlarmBroker()
    assert "error" in dict(tell(desk, "one", TOLD | wrong))  # type: ignore[call-overload]  # a reply in JSON
    assert desk.alarms() == []

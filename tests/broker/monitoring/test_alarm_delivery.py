"""Receivers of alarms: told at once, again while it holds, and when it has ended."""

from __future__ import annotations

from http.client import HTTPConnection
from itertools import pairwise
from queue import Queue
from socket import socket
from threading import Thread
from typing import Any, cast
from urllib.error import HTTPError

import pytest
from twisted.internet.defer import Deferred

from tests.broker.access.support import BrokerWithUsers
from tests.broker.monitoring.alarm_desk import AlarmBroker, Handler
from tests.broker.monitoring.listening import half_answering, mailbox, webhook
from txmq.broker.monitoring import alarm_notices
from txmq.broker.monitoring.alarm import Alarm
from txmq.broker.monitoring.alarm_delivery import EVERY_S, FAILING_S, LONGEST_S, AlarmDelivery
from txmq.broker.monitoring.alarm_notices import (
    EXCHANGE_S,
    MAX_TOLD,
    Exchange,
    Notice,
    bodies,
    lines,
    send,
)
from txmq.config.broker import AlarmSettings, MailSettings, SettingsFile, WebhookSettings
from txmq.model.units import SECOND
from txmq.testing.wait import PATIENCE_S, wait_until

LETTERS = Alarm("group.letters", "warning", SECOND, "2 <letters>", "mend", "group:billing")
FULL = Alarm("disk.full", "critical", 2 * SECOND, "the disk is full", "free space")
UNDECIDED = Alarm("transaction.open", "warning", 0, "one is open", "roll back", "tx:07")
REPORTED = Alarm("relay.lag", "warning", 0, "one: it lags", "mend", "source:one")
NOTICE = Notice("b1", 5 * SECOND, 60.0, (LETTERS,), (FULL,))


class Desk:
    """A delivery whose threads answer when they are told to."""

    def __init__(self, *receivers: WebhookSettings) -> None:
        self.now = 0
        self.calls: list[tuple[str, Notice, Deferred[None]]] = []
        self.delivery = AlarmDelivery("b1", AlarmSettings(webhook=receivers), lambda: self.now)
        self.delivery.in_thread = self._in_thread

    def _in_thread(
        self, function: Any, settings: WebhookSettings, notice: Notice, _exchange: Exchange
    ) -> Deferred[None]:
        assert function is send
        self.calls.append((settings.name, notice, Deferred()))
        return self.calls[-1][2]

    def tell(self, *raised: Alarm, after: float = EVERY_S, error: str = "") -> list[Any]:
        """Return what receivers are told: their names, raised and resolved alarms."""
        self.now += round(after * SECOND)
        self.delivery.tell(raised)
        return self.answer(error)

    def answer(self, error: str = "") -> list[Any]:
        calls, self.calls = self.calls, []
        for _name, _notice, told in calls:
            if error:
                told.errback(OSError(error))
            else:
                told.callback(None)
        return [
            (name, [one.name for one in notice.raised], [one.name for one in notice.resolved])
            for name, notice, _told in calls
        ]


def receiver(name: str = "oncall", **more: Any) -> WebhookSettings:
    return WebhookSettings(name=name, url="http://h/", **more)


def test_an_alarm_is_told_at_once_again_and_when_it_has_ended() -> None:
    desk = Desk(receiver(repeat_s=60.0))
    assert desk.tell(LETTERS) == [("oncall", ["group.letters"], [])]
    assert desk.tell(LETTERS) == []
    assert desk.tell(LETTERS, FULL) == [("oncall", ["disk.full"], [])]
    assert desk.tell(LETTERS, FULL, after=40.0) == [("oncall", ["group.letters"], [])]
    assert desk.tell(LETTERS) == [("oncall", [], ["disk.full"])]
    assert desk.tell() == [("oncall", [], ["group.letters"])]
    assert desk.tell(after=600.0) == []


def test_an_alarm_that_comes_and_goes_is_told_from_time_to_time() -> None:
    desk = Desk(receiver())
    told = [desk.tell(*((LETTERS,) if second % 2 else ()), after=1.0) for second in range(60)]
    assert sum(map(len, told)) <= 60 / EVERY_S + 1


def test_an_alarm_that_becomes_critical_is_told_at_once() -> None:
    desk = Desk(receiver())
    worse = LETTERS._replace(severity="critical")
    assert desk.tell(LETTERS) == desk.tell(worse) == [("oncall", ["group.letters"], [])]
    assert desk.tell(worse) == []
    assert desk.tell(LETTERS) == []


def test_an_alarm_about_another_thing_is_the_same_but_for_groups_and_reports() -> None:
    desk = Desk(receiver())
    desk.tell(UNDECIDED, LETTERS, REPORTED)
    others = (UNDECIDED._replace(about="tx:08"), LETTERS._replace(about="group:other"))
    again = REPORTED._replace(about="source:two")
    names = ["group.letters", "relay.lag"]
    assert desk.tell(*others, again) == [("oncall", names, names)]


def test_a_receiver_has_the_alarms_that_are_severe_enough() -> None:
    desk = Desk(receiver("pager", severity="critical"), receiver("chat"))
    assert desk.tell(LETTERS) == [("chat", ["group.letters"], [])]
    assert desk.tell(LETTERS, FULL) == [("pager", ["disk.full"], []), ("chat", ["disk.full"], [])]


def test_what_a_receiver_did_not_take_is_sent_again_ever_more_seldom() -> None:
    desk = Desk(receiver())
    times = [
        desk.now // SECOND
        for _second in range(2_000)
        if desk.tell(LETTERS, after=1.0, error="refused")
    ]
    pauses = [after - before for before, after in pairwise(times)]
    assert pauses[0] == 2 * EVERY_S
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_S
    assert "refused" in desk.delivery.undelivered()["oncall"]
    assert desk.tell(FULL, after=LONGEST_S) == [("oncall", ["disk.full"], [])], "never told of both"
    assert desk.delivery.undelivered() == {}
    assert desk.tell(FULL, LETTERS) == [("oncall", ["group.letters"], [])]


def test_a_receiver_that_does_not_answer_keeps_no_other_waiting() -> None:
    desk = Desk(receiver("slow"), receiver("chat"))
    desk.now = SECOND
    desk.delivery.tell([LETTERS])
    (_slow, _notice, hanging), (_chat, _other, told) = desk.calls
    told.callback(None)
    desk.calls = []
    assert desk.tell(LETTERS, FULL) == [("chat", ["disk.full"], [])]
    desk.tell(LETTERS, FULL, after=FAILING_S)
    assert "no answer" in desk.delivery.undelivered()["slow"]
    hanging.callback(None)
    assert desk.delivery.undelivered() == {}
    assert desk.tell(LETTERS, FULL) == [("slow", ["disk.full"], [])]


@pytest.mark.parametrize(
    ("form", "beginning", "settings"),
    [
        ("webhook", b"HTTP/1.1 2", {"url": "http://127.0.0.1:{}/"}),
        ("webhook", b"\x16\x03\x03", {"url": "https://127.0.0.1:{}/"}),
        (
            "mail",
            b"\x16\x03\x03",
            {"host": "127.0.0.1", "encryption": "tls", "sender": "a@b", "to": ["c@b"]},
        ),
        (
            "mail",
            b"220 her",
            {"host": "127.0.0.1", "encryption": "none", "sender": "a@b", "to": ["c@b"]},
        ),
    ],
)
def test_a_receiver_whose_answer_does_not_end_is_left(
    form: str, beginning: bytes, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alarm_notices, "TIMEOUT_S", PATIENCE_S)  # as if each byte came in time
    ended = Queue[Exception | None]()

    def in_thread(function: Any, *call: Any) -> Deferred[None]:
        def work() -> None:
            try:
                ended.put(function(*call))
            except Exception as error:  # noqa: BLE001  # the test looks at it
                ended.put(error)

        Thread(target=work, daemon=True).start()
        return Deferred()

    with half_answering(beginning) as (port, began):
        place = {"url": settings["url"].format(port)} if "url" in settings else {"port": port}
        one = settings | place | {"name": "slow"}
        now = SECOND
        delivery = AlarmDelivery("b1", AlarmSettings.model_validate({form: [one]}), lambda: now)
        delivery.in_thread = in_thread
        delivery.tell([FULL])
        began.get(timeout=PATIENCE_S)
        delivery.tell([FULL])
        now += round(EXCHANGE_S * SECOND) - 1
        delivery.tell([FULL])
        assert ended.empty()
        now += round(EXCHANGE_S * SECOND)

        def is_left() -> bool:
            delivery.tell([FULL])
            return not ended.empty()

        wait_until(is_left)
    assert repr(ended.get()) == "TimeoutError('no whole answer within 30 s')"


def test_an_exchange_may_end_by_itself_while_it_is_bounded() -> None:
    class Ending:
        """A connection that its thread closes after the first look at it."""

        def __init__(self, *socks: socket) -> None:
            self.socks = [*socks]

        @property
        def sock(self) -> socket | None:
            return self.socks.pop() if self.socks else None

    exchange = Exchange()
    with socket() as sock:
        exchange.take(cast("HTTPConnection", Ending(sock)))
        exchange._since = SECOND
        exchange.bound(SECOND + round(EXCHANGE_S * SECOND))
    assert exchange.is_over


def test_other_settings_change_the_receivers_and_forget_no_other() -> None:
    desk = Desk(receiver("chat"), receiver("pager"))
    desk.tell(LETTERS)
    changed = receiver("pager", severity="critical")
    desk.delivery.use(AlarmSettings(webhook=(receiver("chat"), changed, receiver("new"))))
    assert desk.tell(LETTERS) == [("new", ["group.letters"], [])]


def test_each_form_has_what_its_receiver_reads() -> None:
    with webhook() as server:

        def posted(form: str, key: str | None = None) -> list[Any]:
            settings = WebhookSettings.model_validate(
                {"name": "r", "url": server.url, "form": form, "key": key}
            )
            send(settings, NOTICE, Exchange())
            return [server.posts.get(timeout=PATIENCE_S) for _ in range(server.posts.qsize())]

        [(login, body)] = posted("json", "secret")
        assert login == "Bearer secret"
        assert body["raised"][0]["text"] == "2 <letters>"
        assert [one["name"] for one in body["resolved"]] == ["disk.full"]

        [(login, body)] = posted("slack")
        assert login is None
        assert body["text"].splitlines() == [
            "txmq b1: 1 raised, 1 resolved:",
            "warning group.letters, since 1970-01-01T00:00:01+00:00: 2 &lt;letters&gt;",
            "  -&gt; mend",
            "resolved disk.full",
        ]

        (_login, trigger), (_none, resolve) = posted("pagerduty", "routing")
        assert (trigger["routing_key"], trigger["event_action"]) == ("routing", "trigger")
        assert trigger["dedup_key"] == "b1/group.letters/billing"
        assert trigger["payload"]["severity"] == "warning"
        assert (resolve["event_action"], resolve["dedup_key"]) == ("resolve", "b1/disk.full")

        [(_login, (raised, ended))] = posted("alertmanager")
        assert raised["labels"] == {
            "alertname": "group.letters", "severity": "warning", "broker": "b1", "group": "billing",
        }  # fmt: skip
        assert raised["annotations"] == {"summary": "2 <letters>", "action": "mend"}
        assert raised["endsAt"] == "1970-01-01T00:04:05+00:00", "unless it is repeated"
        assert ended["endsAt"] == "1970-01-01T00:00:05+00:00"

        for server.status in (503, 302):
            with pytest.raises(HTTPError, match=str(server.status)):
                posted("slack")


def test_alertmanager_tells_reports_apart_by_their_sources() -> None:
    alarms = (REPORTED, REPORTED._replace(about="source:two"))
    [body] = bodies(receiver(form="alertmanager"), Notice("b1", 0, 60.0, alarms, ()))
    assert [one["labels"]["source"] for one in body] == ["one", "two"]


def test_alertmanager_is_told_often_because_it_forgets() -> None:
    desk = Desk(receiver(form="alertmanager"))
    desk.tell(LETTERS)
    assert desk.tell(LETTERS, after=60.0) == [("oncall", ["group.letters"], [])]


def test_a_mail_has_all_in_its_text() -> None:
    with mailbox() as box:
        mail = MailSettings(
            name="m", host="127.0.0.1", port=box.port, encryption="none", sender="txmq@shop",
            to=("ops@shop", "boss@shop"),
        )  # fmt: skip
        send(mail, NOTICE, Exchange())
        text = box.mails.get(timeout=PATIENCE_S)
    assert "Subject: txmq b1: 1 raised, 1 resolved" in text
    assert "To: ops@shop, boss@shop" in text
    assert "2 <letters>" in text
    assert "resolved disk.full" in text


def test_a_text_names_so_many_alarms_and_no_more() -> None:
    many = tuple(LETTERS._replace(about=f"group:g{number}") for number in range(MAX_TOLD + 1))
    told = list(lines(NOTICE._replace(raised=many)))
    assert len(told) == 2 * MAX_TOLD + 2
    assert told[-1] == "and more: txmq alarms"


def test_letters_reach_a_receiver_and_so_does_their_end() -> None:
    desk = AlarmBroker()
    told: list[Any] = []

    def in_thread(*call: Any) -> Deferred[None]:
        _function, _settings, notice, _exchange = call
        told.append((desk.broker.clock.seconds(), notice))
        done: Deferred[None] = Deferred()
        done.callback(None)
        return done

    delivery = desk.broker.assembly.alarms.delivery
    delivery.in_thread = in_thread
    delivery.use(AlarmSettings(webhook=(receiver(),)))
    handler = Handler(desk)
    handler.fail(dead=True, error={"type": "KeyError", "fingerprint": "f1"})
    began = desk.broker.clock.seconds()
    desk.broker.pass_time(2)
    [(at, notice)] = told
    assert at - began <= 1
    [alarm] = notice.raised
    assert "KeyError f1 (1); keys that stand behind letters or retries: 1, as t/0/0" in alarm.text
    handler.abandon()
    desk.broker.pass_time(11)
    assert [(notice.raised, len(notice.resolved)) for _at, notice in told[1:]] == [((), 1)]


def test_a_test_alarm_says_which_receivers_had_it() -> None:
    desk = AlarmBroker()
    refused: Any = desk.broker.connect().call("alarms.test")
    assert "nobody is told" in refused["message"]
    delivery = desk.broker.assembly.alarms.delivery
    with webhook() as server:
        at_server = WebhookSettings(name="good", url=server.url)
        wrong = WebhookSettings(name="bad", url="http://127.0.0.1:1/")
        delivery.in_thread = desk.broker._at_once  # what its other threads are
        delivery.use(AlarmSettings(webhook=(at_server, wrong)))
        good, bad = desk.broker.ask("alarms.test")["receivers"]
        first, second = (server.posts.get(timeout=PATIENCE_S).body for _ in range(2))
    assert good == {"receiver": "good", "error": ""}
    assert bad["receiver"] == "bad"
    assert "refused" in bad["error"]
    assert [one["name"] for one in (*first["raised"], *second["resolved"])] == ["alarms.test"] * 2


def test_a_test_that_is_taken_ends_the_alarm_about_its_receiver() -> None:
    desk = Desk(receiver("pager", severity="critical"))
    desk.tell(FULL, error="refused")
    desk.tell(after=600.0)
    assert list(desk.delivery.undelivered()) == ["pager"], "nothing is left to tell it"
    told = desk.delivery.test(FULL)
    desk.answer()
    desk.answer()
    assert desk.delivery.undelivered() == {}
    assert told.result == [{"receiver": "pager", "error": ""}]


def test_only_operators_may_test() -> None:
    broker = BrokerWithUsers()
    refused: Any = broker.log_in("shop").call("alarms.test")
    assert refused["error"] == "AccessDenied"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"webhook": [{"name": "a", "url": "ftp://h"}]}, "url"),
        ({"webhook": [{"name": "a", "url": "http://h", "form": "pagerduty"}]}, "routing key"),
        ({"webhook": [{"name": "a", "url": "http://h"}] * 2}, "two receivers"),
        ({"webhook": [{"name": "a", "url": "http://h", "repeat_s": 1.0}]}, "repeat_s"),
        ({"mail": [{"name": "a", "host": "h", "sender": "me", "to": ["a@b"]}]}, "sender"),
        ({"mail": [{"name": "a", "host": "h", "sender": "a@b", "to": []}]}, "to"),
        (
            {
                "mail": [
                    {
                        "name": "a",
                        "host": "h",
                        "sender": "a@b",
                        "to": ["a@b"],
                        "password": "p",
                        "encryption": "none",
                    }
                ]
            },
            "needs encryption",
        ),
    ],
)
def test_settings_of_receivers_are_checked(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        SettingsFile.model_validate({"broker": {"data": "/data"}, "alarms": wrong})

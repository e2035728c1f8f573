"""Parts of the console by themselves: rendering in turns, streams, paging, charts."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from importlib.resources import files
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
from jinja2 import Environment
from markupsafe import Markup
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.task import Clock
from twisted.python.failure import Failure

from tests.admin.console_support import ConsoleInMemory
from tests.broker.monitoring.alarm_desk import STORE, AlarmBroker, Handler
from txmq.admin.console import listing
from txmq.admin.console.charts import HEIGHT, POINTS, WIDTH, chart, since_known, spots
from txmq.admin.console.listing import MAX_CALLS, SCANNED, by_name
from txmq.admin.console.page import ANSWER_S, PageRequest, Refused
from txmq.admin.console.registry import PAGES, find
from txmq.admin.console.rendering import RenderQueue, Templates, duration_us, number, size, visible
from txmq.admin.console.streams import (
    BEAT_EVERY,
    LIFE_S,
    MAX_OF_USER,
    MAX_STREAMS,
    PERIOD_S,
    REST,
    STUCK_S,
    Streams,
)
from txmq.admin.http import REQUEST_TIMEOUT_S
from txmq.core.consumers.commands import JoinGroup
from txmq.model.units import DAY, HOUR, MINUTE, SECOND
from txmq.wire.calls.users import VerifierArgs
from txmq.wire.scram import MIN_ITERATIONS, make_verifier

SLOW_S = 0.001  # a piece of a page


def unexpected(error: Exception) -> None:
    raise error


class Turns:
    """A clock on which each piece of a page takes a millisecond; the test runs its
    turns.
    """

    def __init__(self) -> None:
        self.now, self.due = 0.0, list[Callable[[], object]]()

    def seconds(self) -> float:
        return self.now

    def callLater(self, delay: float, callable: Callable[..., object], *args: object) -> Any:  # noqa: A002  # Twisted's
        self.due.append(partial(callable, *args))

    def turn(self) -> float:
        """Run a turn; return how long it took."""
        began = self.now
        self.due.pop(0)()
        return self.now - began

    def pieces(self, count: int) -> Iterator[str]:
        for one in range(count):
            self.now += SLOW_S
            yield str(one % 10)


def test_a_long_page_leaves_turns_to_others_and_short_ones_overtake_it() -> None:
    clock, done = Turns(), list[bytes]()
    queue = RenderQueue(clock)
    queue.render(clock.pieces(50), done.append, unexpected)
    queue.render(clock.pieces(3), done.append, unexpected)
    turns = 0
    while clock.due:
        assert clock.turn() < 3 * SLOW_S
        turns += 1
    assert list(map(len, done)) == [3, 50]
    assert turns > 20


def test_a_template_that_fails_is_its_own_readers_trouble() -> None:
    clock, done, failed = Clock(), list[bytes](), list[Exception]()
    queue = RenderQueue(clock)
    queue.render((str(1 // divisor) for divisor in (1, 0)), done.append, failed.append)
    queue.render(iter("ab"), done.append, unexpected)
    clock.advance(0)
    assert (done, [type(one) for one in failed]) == ([b"ab"], [ZeroDivisionError])


class Tab:
    """The browser's end of a stream."""

    def __init__(self) -> None:
        self.got, self.is_full, self.ended = b"", False, False

    def write(self, data: bytes) -> None:
        self.got += data

    def end(self) -> None:
        self.ended = True


class Parts:
    """A live part that the test changes; None = its viewer may not see it any more."""

    def __init__(self) -> None:
        self.text: bytes | None = b"one\ntwo"
        self.rendered = 0

    def __call__(self, give: Callable[[bytes | None], None]) -> None:
        self.rendered += 1
        give(self.text)


def test_a_stream_sends_what_has_changed_at_a_bounded_rate() -> None:
    clock, part, tab = Clock(), Parts(), Tab()
    stream = Streams(clock).make(part, None)
    assert stream is not None
    stream.opened(tab)
    clock.advance(PERIOD_S)
    assert b"event: part\ndata: one\ndata: two\n\n" in tab.got
    sent = tab.got
    clock.pump([PERIOD_S] * (BEAT_EVERY - 1))
    assert (tab.got, part.rendered) == (sent, BEAT_EVERY)
    clock.advance(PERIOD_S)
    assert tab.got.removeprefix(sent).startswith(b":")
    tab.is_full, seen = True, part.rendered
    clock.pump([PERIOD_S] * 3)
    assert part.rendered == seen  # nobody reads: nothing is rendered
    tab.is_full, part.text = False, None
    clock.advance(PERIOD_S)
    assert (b"event: gone" in tab.got, tab.ended) == (True, True)


def test_a_part_that_takes_long_is_rendered_less_often_and_one_without_an_answer_later() -> None:
    clock, tab, gives = Clock(), Tab(), list[Callable[[bytes | None], None]]()
    stream = Streams(clock).make(gives.append, None)
    assert stream is not None
    stream.opened(tab)
    clock.advance(PERIOD_S)
    clock.advance(1.0)  # so long it took
    gives.pop()(b"")
    clock.advance(REST - 0.5)
    assert gives == []
    clock.advance(1.0)
    gives.pop()(b"there it is")
    assert b"data: there it is" in tab.got


def test_a_stream_whose_reader_does_not_read_ends_and_gives_its_place_back() -> None:
    clock, part, tab = Clock(), Parts(), Tab()
    stream = Streams(clock).make(part, None)
    assert stream is not None
    stream.opened(tab)
    tab.is_full = True
    clock.pump([PERIOD_S] * int(STUCK_S / PERIOD_S))
    tab.is_full = False  # slow, but it reads
    clock.advance(PERIOD_S)
    tab.is_full = True
    clock.pump([PERIOD_S] * int(STUCK_S / PERIOD_S))
    assert (tab.ended, part.rendered) == (False, 1)
    clock.advance(PERIOD_S)
    assert tab.ended


def test_streams_are_bounded_and_end() -> None:
    clock, tab = Clock(), Tab()
    streams = Streams(clock)
    made = [streams.make(Parts(), None) for _ in range(MAX_STREAMS)]
    assert all(made)
    assert streams.make(Parts(), None) is None
    first = made[0]
    assert first is not None
    first.opened(tab)
    clock.pump([PERIOD_S] * int(LIFE_S / PERIOD_S + 1))
    assert tab.ended
    first.closed()
    assert clock.getDelayedCalls() == []
    assert streams.make(Parts(), None) is not None


def test_the_connection_of_a_stream_that_nobody_reads_ends_too() -> None:
    console = ConsoleInMemory()
    _channel, transport = console.listen("/live/topics")
    assert transport.producer is not None
    transport.producer.pauseProducing()  # the send buffer is full
    console.broker.pass_time(STUCK_S + 2 * PERIOD_S)
    assert not transport.disconnected
    console.broker.pass_time(REQUEST_TIMEOUT_S)
    assert transport.disconnected


class ListRequest:
    """A request for a list of 12,000 names, by pages."""

    def __init__(self, limit: int = 50, **query: str) -> None:
        self.limit, self.query, self.calls = limit, query, 0
        self.names = [f"t-{one:05}" for one in range(12_000)]

    def text(self, name: str) -> str:
        return self.query.get(name, "")

    async def ask(self, call: str, /, *, after: str, limit: int) -> dict[str, Any]:
        self.calls += 1
        found = [name for name in self.names if name > after]
        rows = [{"name": name} for name in found[:limit]]
        return {call: rows, "next": rows[-1]["name"] if len(found) > limit else None}


def page(request: Any) -> Any:
    return asyncio.run(by_name(request, "topics", "topics", "name"))


def test_a_list_of_thousands_goes_on_from_page_to_page() -> None:
    first = page(ListRequest())
    assert (len(first.rows), first.following) == (50, "t-00049")
    second = page(ListRequest(after=first.following))
    assert second.rows[0]["name"] == "t-00050"
    assert page(ListRequest(after="t-11990")).following is None


def test_a_name_that_is_rare_is_sought_in_bounded_steps() -> None:
    sought = ListRequest(q="T-11999")
    found = page(sought)
    assert (found.rows, found.looked, sought.calls) == ([], SCANNED * MAX_CALLS, MAX_CALLS)
    later = page(ListRequest(q="T-11999", after="t-09999"))
    assert ([row["name"] for row in later.rows], later.following) == (["t-11999"], None)
    some = page(ListRequest(limit=2, q="-0010"))
    assert ([row["name"] for row in some.rows], some.following) == (
        ["t-00100", "t-00101"],
        "t-00101",
    )


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/topics?q=none", "No topic has this in its name. All topics"),
        ("/groups?q=none", "No group has this in its name. All groups"),
        ("/users?q=none", "No user has this in its name. All users"),
        ("/plans?q=none", "No plan has this in its name. All plans"),
        ("/audit?start=2026-01-01T00:00", "No entry matches these fields"),
        ("/audit?end=2026-01-01T00:00", "No entry matches these fields"),
        ("/audit", "No operator has done anything yet"),
        ("/transactions/xa", "No branch waits for a decision"),
        ("/transactions/xa?heuristic=yes", "There are no heuristic decisions"),
    ],
)
def test_a_page_without_rows_says_why(path: str, said: str) -> None:
    assert said in ConsoleInMemory().get(path).text


@pytest.mark.parametrize(("path", "one"), [("topics", "topic"), ("users", "user")])
def test_a_search_that_found_nothing_yet_leads_on(
    monkeypatch: pytest.MonkeyPatch, path: str, one: str
) -> None:
    monkeypatch.setattr(listing, "SCANNED", 1)
    monkeypatch.setattr(listing, "MAX_CALLS", 1)
    console = ConsoleInMemory(users=True)
    for name in ("a-1", "b-2"):
        console.broker.ask("topic.create", name=name, partitions=1)
    page = console.get(f"/{path}?q=no-such-name", "root")
    assert f"No {one} among the first 1 has this in its name" in page.text
    assert "Next page" in page.text


def test_a_broker_that_does_not_answer_is_an_error_with_a_way_out() -> None:
    clock, late = Clock(), list[Callable[[object], None]]()
    calls = SimpleNamespace(ask=lambda _call, _args, answer, *_more: late.append(answer))
    parts: Any = SimpleNamespace(reactor=clock, calls=calls)
    waiting = Deferred.fromCoroutine(PageRequest(parts, None, "", (), {}).ask("broker.show"))
    failures = list[Failure]()
    waiting.addErrback(failures.append)
    clock.advance(ANSWER_S)
    [failure] = failures
    assert isinstance(failure.value, Refused)
    assert (failure.value.status, failure.value.error) == (504, "NoAnswer")
    assert "txmq alarms" in failure.value.hint
    late[0]({})  # nobody waits for it any more


def test_an_open_stream_ends_with_the_rights_of_its_reader() -> None:
    console = ConsoleInMemory()
    _channel, transport = console.listen("/live/topics")
    console.broker.pass_time(PERIOD_S + 0.5)
    assert b"event: part" in transport.value()
    console.broker.ask("user.set", name="ann", roles=["admin"], operator="ann")
    console.broker.pass_time(PERIOD_S + 0.5)
    assert b"event: gone" in transport.value()


def test_an_open_stream_ends_with_the_password_that_opened_it() -> None:
    console = ConsoleInMemory(users=True)
    _channel, transport = console.listen("/live/topics", "root")
    console.broker.pass_time(PERIOD_S + 0.5)
    assert b"event: part" in transport.value()
    password = VerifierArgs.of(make_verifier("another", b"t" * 16, MIN_ITERATIONS))
    console.broker.ask("user.set", name="root", password=password, operator="root")
    console.broker.pass_time(PERIOD_S + 0.5)
    assert b"event: gone" in transport.value()


def test_one_user_does_not_keep_the_others_from_live_pages() -> None:
    console = ConsoleInMemory(users=True)
    for _ in range(MAX_OF_USER):
        assert b"200 OK" in console.listen("/live/topics", "nobody")[1].value()[:20]
    assert b"503" in console.listen("/live/topics", "nobody")[1].value()[:20]
    assert b"200 OK" in console.listen("/live/topics", "root")[1].value()[:20]


@pytest.mark.parametrize("strangers", [3, 5, MAX_STREAMS - 1])
def test_users_who_fill_all_live_pages_leave_each_other_user_a_share(strangers: int) -> None:
    clock, tabs = Clock(), dict[str, list[Tab]]()
    streams = Streams(clock)

    def opened(user: str) -> bool:
        stream, tab = streams.make(Parts(), user), Tab()
        if stream is not None:
            stream.opened(tab)
            tabs.setdefault(user, []).append(tab)
        return stream is not None

    for _ in range(MAX_OF_USER):
        for stranger in range(strangers):
            opened(f"stranger-{stranger}")
    assert len(streams.open) == MAX_STREAMS
    share = MAX_STREAMS // (strangers + 1)
    assert [opened("ann") for _ in range(share)] == [True] * share
    assert len(streams.open) == MAX_STREAMS
    assert [tab.ended for tab in tabs["ann"]] == [False] * share
    for _ in range(2):
        assert not any(opened(f"stranger-{number}") for number in range(strangers))
    assert [tab.ended for tab in tabs["ann"]] == [False] * share


def test_where_there_are_no_users_hosts_have_shares_of_live_pages() -> None:
    streams = Streams(Clock())
    assert all(streams.make(Parts(), None, "10.0.0.1") for _ in range(MAX_STREAMS))
    assert streams.make(Parts(), None, "10.0.0.1") is None
    assert all(streams.make(Parts(), None, "10.0.0.2") for _ in range(MAX_STREAMS // 2))
    for host in ("10.0.0.1", "10.0.0.2"):
        assert streams.make(Parts(), None, host) is None
    assert len(streams.open) == MAX_STREAMS


def test_a_live_page_that_gives_way_has_its_connection_ended() -> None:
    console = ConsoleInMemory(users=True)
    filled = [
        console.listen("/live/topics", user)
        for user in ("nobody", "shop", "billing")
        for _ in range(MAX_OF_USER)
    ]
    assert b"200 OK" in console.listen("/live/topics", "root")[1].value()[:20]
    ended = [transport.value().endswith(b"\r\n0\r\n\r\n") for _channel, transport in filled]
    assert ended == [True] + [False] * (len(filled) - 1)


def test_a_denied_page_leaves_no_timer() -> None:
    console = ConsoleInMemory(users=True)
    console.get("/topics/orders", "nobody")
    timers = len(console.broker.clock.getDelayedCalls())
    assert console.get("/audit", "nobody").status == 403
    assert len(console.broker.clock.getDelayedCalls()) <= timers + 1  # of the connection


def test_no_address_breaks_a_page() -> None:
    console = ConsoleInMemory()
    console.broker.ask("topic.create", name="orders", partitions=1)
    console.broker.do(JoinGroup("billing", "m", "i", "concurrent", ("orders",)))
    asked = (
        *(
            "topics?limit=",
            "topics?after=",
            "topics/orders?from=",
            "groups/billing?from=",
            "?span=",
        ),
        *(f"topics/orders/messages?{one}=" for one in ("partition", "start", "after", "tag")),
        *("audit?after=", "audit?start=", "users?q="),
        *(
            f"groups/billing/reset?topic=orders&to={one}"
            for one in ("", "time&at=", "offset&offset=")
        ),
    )
    values = ("-1", "9" * 18, "%00%ff", "\u202e<x>".encode(), "9999-12-31T23:59", "a" * 5_000)
    statuses = Counter(
        console.get(f"/{one}{quote(value, '%')}").status for one in asked for value in values
    )
    assert statuses.keys() == {200, 400}
    assert sum(statuses.values()) == len(asked) * len(values)


def test_a_stream_whose_browser_is_gone_leaves_nothing() -> None:
    console = ConsoleInMemory()
    timers = len(console.broker.clock.getDelayedCalls())
    channels = [console.listen("/live/topics")[0] for _ in range(MAX_STREAMS)]
    assert b"503" in console.listen("/live/topics")[1].value()[:20]
    for channel in channels:
        channel.connectionLost(Failure(ConnectionDone()))
    assert len(console.broker.clock.getDelayedCalls()) <= timers + 1  # of the one refused
    assert b"200 OK" in console.listen("/live/topics")[1].value()[:20]


def test_signs_that_hide_are_visible() -> None:
    assert visible("a\x1b[31m\x00\x7f\x9b\u202ez\u200b\n\t") == "a␛[31m␀␡\\u009b\\u202ez\\u200b\n\t"
    assert visible("Grüße 你好 🎉") == "Grüße 你好 🎉"


def test_numbers_sizes_and_spans_are_for_people() -> None:
    assert [number(one) for one in (0, 1234567, 0.25, 3.0)] == ["0", "1,234,567", "0.2", "3"]
    assert [size(one) for one in (0, 1023, 1536, 5 << 30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 GiB",
    ]
    spans = (7, 2_500, 9 * SECOND, 100 * SECOND, 5 * MINUTE, 90 * MINUTE, 30 * HOUR, 3 * DAY)
    assert [duration_us(one) for one in spans] == [
        "7 µs", "2.5 ms", "9.0 s", "100 s", "5 min", "90 min", "30 h", "3 d",
    ]  # fmt: skip


def test_templates_escape_after_making_signs_visible() -> None:
    templates = Templates(lambda: 10 * SECOND)
    error = Refused("<b>", "\x1b<script>", "'\"")
    html = "".join(templates.live("error.html", {"error": error, "root": "./", "request": None}))
    assert "&lt;b&gt;" in html
    assert "␛&lt;script&gt;" in html
    assert isinstance(Markup(html), str)
    assert "<script" not in html


def test_every_path_leads_to_one_page_and_every_key_too() -> None:
    assert [len(set(map(field, PAGES))) for field in (lambda one: one.path,)] == [len(PAGES)]
    keys = [one.key for one in PAGES if one.key]
    assert len(set(keys)) == len(keys)
    assert all(one.nav for one in PAGES if one.key)
    found = find("topics/a%3Cb")
    assert found is not None
    assert found.names == ("a<b",)
    assert [find(path) for path in ("topics/", "topics/%FF", "nowhere", "topics/a/b/c/d")] == [
        None, None, None, None,
    ]  # fmt: skip


def test_a_chart_keeps_peaks_and_gaps() -> None:
    values = [None, *([1.0] * 700), 9.0, *([1.0] * 700), None, None, *([2.0] * 40)]
    drawn = chart([*values[:1], *[None] * 60, *values[1:]])
    assert (drawn.top, drawn.shown) == (9.0, 2.0)
    assert sum(len(line.split()) for line in drawn.lines) <= POINTS
    assert f",{1.0}" in drawn.lines[0]  # the peak reaches the top
    assert drawn.areas[0].endswith(f",{HEIGHT}")
    assert chart([]) == ((), (), None, None)
    assert since_known([None] * 90 + [1.0] * 3) == [None] * 9 + [1.0] * 3
    assert since_known([None] * 90 + [1.0] * 30) == [1.0] * 30
    told = list(spots([1.0] * 59 + [None, None, 7.0], 1_000, 10))
    assert (told[0].at, told[0].x) == (1_020, 0)
    assert (told[-1].at, told[-1].value) == (1_000 + 61 * 10, 7.0)
    assert sum(spot.width for spot in told) == pytest.approx(WIDTH, abs=1)
    gap = chart([1.0, None, 0.0, 0.0])
    assert len(gap.lines) == 2


@pytest.mark.parametrize(
    "values", [(1.0,), (1.0, None), (None, 1.0), (None, 1.0, None), (0.0, None, None, 1.0)]
)
def test_a_value_between_gaps_is_a_line_within_its_chart(values: tuple[float | None, ...]) -> None:
    for points in chart(values).lines:
        first, last = (float(point.partition(",")[0]) for point in points.split())
        assert 0 <= first < last <= WIDTH


@pytest.mark.parametrize(
    ("path", "section"),
    [
        ("", ""),
        ("topics", "topics"),
        ("plans", "plans"),
        ("plan/new", "plans"),
        ("policies", "plans"),
    ],
)
def test_the_navigation_says_where_a_page_belongs(path: str, section: str) -> None:
    body = ConsoleInMemory().get(f"/{path}").body
    [marked] = re.findall(r'<a href="([^"]*)"[^>]*aria-current="page"', body.partition("<main")[0])
    assert marked.lstrip("./") == section


def test_templates_are_compiled_before_the_first_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling one holds the reactor's thread for up to 70 ms."""
    console = ConsoleInMemory()
    console.factory.act.__self__.prepare()

    def late(*_args: object, **_fields: object) -> None:
        raise AssertionError("a template is compiled while somebody waits")

    monkeypatch.setattr(Environment, "compile", late)
    assert {console.get(path).status for path in ("/", "/topics", "/letters", "/nowhere")} == {
        200,
        404,
    }


def test_the_calls_of_a_page_that_take_long_are_made_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    console = ConsoleInMemory()
    request = PageRequest(console.parts, None, "", (), {})
    replies: list[object] = []
    clock = console.broker.clock

    async def page() -> None:
        for call in ("broker.alarms", "broker.show", "broker.stats"):
            reply = await request.ask(call)
            replies.append(reply)

    ticks = iter(range(1 << 20))
    with monkeypatch.context() as patch:  # each look at the clock finds it later
        patch.setattr(clock, "seconds", lambda: next(ticks) / 100)
        done = Deferred.fromCoroutine(page())
        assert len(replies) == 1
    console.broker.pass_time(60)
    assert len(replies) == 3
    assert done.called


def test_the_page_of_a_group_shows_local_stores_of_its_consumers() -> None:
    desk = AlarmBroker()
    handler = Handler(desk)
    handler.store()
    owned = ConsoleInMemory(desk.broker).get("/groups/billing")
    assert owned.status == 200
    assert f"{STORE} owned m h 1 " in owned.text
    handler.leave()
    assert f"{STORE} no owner m h 1 " in ConsoleInMemory(desk.broker).get("/groups/billing").text


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(
    ("words", "behind"),
    [("sheet", "accent"), ("sheet", "bad"), ("bad", "sheet"), ("text", "page"), ("quiet", "sheet")],
)
def test_buttons_and_text_have_the_contrast_of_level_aa(
    theme: str, words: str, behind: str
) -> None:
    style = (files("txmq.admin") / "static" / "style.css").read_text("utf-8")
    light, dark = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    colours = dict(re.findall(r"--(\w+): #(\w{6});", light if theme == "light" else dark))
    darker, lighter = sorted((_luminance(colours[words]), _luminance(colours[behind])))
    assert (lighter + 0.05) / (darker + 0.05) >= 4.5


def _luminance(colour: str) -> float:
    """Return the relative luminance of a colour, as WCAG defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue

"""The console in a browser: one broker with users and hostile texts, and all pages."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from typer.testing import Result

import txmq
from tests.admin.test_pages import start
from tests.cli.peer import Peer, peer
from tests.cli.support import run
from tests.fixtures_browser import Browser
from tests.system import set_clock_broker
from txmq.admin.console.actions import ACTIONS
from txmq.admin.console.registry import NAVIGATION, PAGES
from txmq.client.protocol import conversation
from txmq.client.protocol.transaction.tokens import new_token
from txmq.model.decider import ByChecker, ByHome
from txmq.model.retry import RetryPolicy
from txmq.model.units import DAY, SECOND
from txmq.testing.broker_thread import BrokerThread
from txmq.testing.wait import PATIENCE_S, wait_until

PASSWORD = "correct horse battery"
NO_RETRY = RetryPolicy((1.0,), retries=0)
# what would run as a script, or hide, wherever a page does not escape it
TITLE = "document.title='owned'"
HOSTILE = (
    f"<script>{TITLE}</script>",
    f"\"'><img src=x onerror={TITLE}>",
    "</textarea></pre></title><b>bold",
    "{{ 7 * 7 }}{% raw %}",
    "\x1b[2J\x07 \u202egnp.exe \u200b",
)
SHOWN = (*HOSTILE[:4], "␛[2J␇ \\u202egnp.exe \\u200b")


def mark(field: str) -> str:
    """Return a text that would be markup, and says which field has it."""
    return f"\"'><b>{field}</b><img src=x onerror={TITLE}>"


MARKED = ("client", "version", "filter", "alarm", "action", "check", "branch", "found", "heuristic")
# what a page has made of texts that it did not escape, and all texts that it has
FOREIGN = """
const found = document.querySelectorAll("b, img, iframe, script:not([src]), [onerror], [onload]");
return [[...found].map((one) => one.outerHTML), document.documentElement.textContent];
"""
HOLD = """
const [among, label] = arguments;
const button = [...document.querySelectorAll(among)].find(
  (one) => one.textContent.trim() === label && !one.disabled);
if (!button) return null;
const folded = button.closest("details");
if (folded) folded.open = true;
button.focus();
return document.activeElement === button ? button : null;
"""
FOCUS = """
const field = document.querySelector(`[name="${arguments[0]}"]`);
if (field) field.focus();
return Boolean(field) && document.activeElement === field;
"""
PLAN_STATE = """
const facts = [...document.querySelectorAll("dl.facts > *")];
return facts.map((one) => one.innerText).find((text) => /^State/i.test(text)) || "";
"""
NAMES: dict[str, tuple[str, ...]] = {
    "topics": ("orders",),
    "groups": ("billing",),
    "users": ("ann",),
    "plans": ("again",),
}
# The audit has nothing of the first two, and the clock is that of another broker.
# No node could take over from this one.
NOT_AUDITED = {"tx.check", "topic.create", "clock.confirm", "cluster.step_down"}
ODD: list[str] = []  # pages of what has nothing but hostile texts


# The luminance of a page and of its words, as WCAG 2 counts it.
LUMINANCES = """
const luminance = color => {
  const [red, green, blue] = color.match(/\\d+/g).map(Number).map(
    part => part / 255 <= .04045 ? part / 255 / 12.92 : ((part / 255 + .055) / 1.055) ** 2.4);
  return .2126 * red + .7152 * green + .0722 * blue;
};
const style = getComputedStyle(document.body);
return [luminance(style.backgroundColor), luminance(style.color)];
"""


class Console(NamedTuple):
    """A broker with users `ann` (admin) and `eve` (auditor), seen by a browser."""

    url: str
    broker: str
    browser: Browser

    def log_in(self, user: str) -> None:
        header = b64encode(f"{user}:{PASSWORD}".encode()).decode()
        driver = self.browser.driver
        driver.execute_cdp_cmd("Network.enable", {})
        headers = {"headers": {"Authorization": f"Basic {header}"}}
        driver.execute_cdp_cmd("Network.setExtraHTTPHeaders", headers)

    def open(self, path: str, *, denied: bool = False) -> str:
        """Open a page that has nothing to complain about, but that it may be `denied`;
        return its text.
        """
        page = self.browser.open(self.url + path)
        errors = [one for one in page.errors if not (denied and "status of 403" in one)]
        assert (errors, page.outside) == ([], []), path
        return self.text()

    def text(self) -> str:
        """Return what people see of the page. Selenium's own text looks at the style of
        each element, which takes the browser most of its time.
        """
        shown: str = self.browser.driver.execute_script("return document.body.innerText")
        return shown

    def act(self, path: str, label: str, **fields: str) -> str:
        """Open a page, fill a form in, press its button, say that it is meant, and
        return what came of it.
        """
        driver = self.browser.driver
        self.open(path)
        button = self.held_button(label, "form.act button")
        form = button.find_element(By.XPATH, "ancestor::form")
        for name, value in fields.items():
            found = form.find_elements(By.CSS_SELECTOR, f"[name='{name}']:not([type=hidden])")
            if found[0].get_attribute("type") == "checkbox":
                for box in found:
                    if box.is_selected() != (box.get_attribute("value") in value.split()):
                        box.click()
                continue
            if found[0].tag_name != "select":
                found[0].clear()
            found[0].send_keys(value)
        button.click()
        for _ in range(2):
            wait_until(lambda: driver.find_elements(By.CSS_SELECTOR, ".asks, .outcome, .problem"),
                       what="an answer")  # fmt: skip
            sure = driver.find_elements(By.CSS_SELECTOR, ".asks button")
            if not sure:
                break
            driver.find_element(By.NAME, "reason").send_keys(HOSTILE[0])
            sure[0].click()
            wait_until(lambda: not driver.find_elements(By.CSS_SELECTOR, ".asks"), what="the act")
        assert driver.find_elements(By.CSS_SELECTOR, "main script") == []
        return self.text()

    def held_button(self, label: str, among: str) -> Any:  # of selenium
        """Return a button with the focus, by its label. A live part stands still while
        one of its elements has the focus; before, each element may be replaced.
        """
        found: list[Any] = []

        def finds() -> bool:
            found[:] = [self.browser.driver.execute_script(HOLD, among, label)]
            return found[0] is not None

        wait_until(finds, what=f"a button {label!r}")
        return found[0]

    def fill(self, name: str, text: str) -> None:
        """Fill a field in, which holds a live part still."""
        driver = self.browser.driver
        wait_until(lambda: driver.execute_script(FOCUS, name), what=f"a field {name!r}")
        field = driver.switch_to.active_element
        field.clear()
        field.send_keys(text)

    def plan_state(self) -> str:
        """Return what the page of a plan says of its state, read at once."""
        found: str = self.browser.driver.execute_script(PLAN_STATE)
        return found

    def part(self, name: str) -> str:
        """Return the text of the element with this id, "" where there is none, read at
        once: it may be replaced at any time.
        """
        script = "return document.getElementById(arguments[0])?.innerText.trim() ?? ''"
        found: str = self.browser.driver.execute_script(script, name)
        return found

    def state(self) -> str:
        return self.part("live-state")

    def click(self, selector: str) -> None:
        """Click on the first such element at once: it may be replaced at any time."""
        script = "document.querySelector(arguments[0]).click()"
        self.browser.driver.execute_script(script, selector)

    def press(self, keys: str) -> None:
        self.browser.driver.switch_to.active_element.send_keys(keys)


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[Console]:
    directory = tmp_path_factory.mktemp("console")
    ODD.clear()
    for _process, url, http in start(directory):
        with txmq.connect(url, service="shop", timeout=PATIENCE_S) as client, peer(url) as shop:
            client.call("topic.create", name="orders", partitions=2)
            for text in HOSTILE:
                client.send("orders", text.encode(), key=text, tag=text[:60], headers={"h": text})
            places = shop.dead_letters("billing", "orders", len(HOSTILE))
            NAMES["letters"] = ("billing", *map(str, places[0]))
            NAMES["transactions"] = (shop.half("orders", HOSTILE[0].encode(), ByChecker("shop")),)
            shop.call("plan.create", name="again", group="billing", select={"key": HOSTILE[0]},
                      operator="ann", reason=HOSTILE[1])  # fmt: skip
            shop.call("group.pause", group="billing", operator="ann", reason=HOSTILE[1])
            shop.call("group.resume", group="billing", operator="ann", reason=HOSTILE[0])
            shop.call("consumer.join", group="billing", member="m-1", instance="i-1",
                      topics=["orders"], version=HOSTILE[0])  # fmt: skip
            tell_hostile_texts(client, shop)
            (directory / "password").write_text(PASSWORD)
            login = url.replace("//", f"//ann:{PASSWORD.replace(' ', '%20')}@")
            for name, role, by in (("ann", "admin", url), ("eve", "auditor", login)):
                added = run("user", "add", name, "--role", role, "--broker", by,
                            "--password-file", str(directory / "password"))  # fmt: skip
                assert added.exit_code == 0, added.stderr
            made = Console(http, login, browser)
            made.log_in("ann")
            with member_with_odd_names(login):
                yield made
    browser.driver.execute_cdp_cmd("Network.setExtraHTTPHeaders", {"headers": {}})
    browser.driver.get("about:blank")


@contextmanager
def member_with_odd_names(url: str) -> Iterator[None]:
    """A member of a group for the block, whose program has a hostile name."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(conversation, "CLIENT_NAME", mark("client"))
        with txmq.connect(url, service="shop", timeout=PATIENCE_S) as client:
            client.call("consumer.join", group="strangers", member="m", instance=HOSTILE[1][:64],
                        topics=["odd"], version=mark("version"), filter=mark("filter"),
                        session_ms=3_600_000)  # fmt: skip
            patched.undo()
            yield


def tell_hostile_texts(client: txmq.Client, shop: Peer) -> None:
    """Put a hostile text into every field that keeps one: errors, notes, filters, a
    schema, reasons of operators, of check-backs and of branches, reported alarms.
    """
    shop.call("topic.create", name="odd", partitions=1)
    who = {"operator": "ann", "reason": HOSTILE[1]}
    schema = {"title": HOSTILE[0], "description": HOSTILE[1], "type": "object"}
    shop.call("topic.schema", name="odd", json_schema=json.dumps(schema))
    shop.call("topic.alter", name="odd", note="".join(HOSTILE), **who)
    for text in HOSTILE:
        client.send("odd", json.dumps({text: text}).encode(), key=text)
    errors = [{"type": text, "text": text, "fingerprint": text[:64]} for text in HOSTILE]
    places = shop.dead_letters("odd", "odd", len(HOSTILE), errors)
    for text, place in zip(HOSTILE, places, strict=True):
        shop.call("dlq.note", group="odd", fingerprint=text[:64], text=text, **who)
        ODD.append(f"letters/odd/{'/'.join(map(str, place))}")
    shop.call("dlq.save", name="odd", select={"text": HOSTILE[0], "key": HOSTILE[1]}, **who)
    shop.call("policy.set", group="odd", select={"text": HOSTILE[0]}, after_s=1e7, **who)
    shop.call("plan.create", name="whole", group="odd", select={"text": HOSTILE[3]},
              settings={"second_approver": True}, operator="bob", reason=HOSTILE[0])  # fmt: skip
    shop.call("dlq.abandon", group="odd", letters=[places[0]], **who)
    shop.dead_letters("other", "orders", len(HOSTILE))
    shop.call("plan.create", name="few", group="other", select={"key": HOSTILE[3]},
              settings={"second_approver": True}, operator="bob")  # fmt: skip
    shop.call("consumer.join", group="odd", member="m", instance=HOSTILE[1][:64], topics=["odd"],
              version=HOSTILE[2])  # fmt: skip
    shop.call("alarms.report", source="odd", for_s=3_600.0, alarms=[
        {"name": "relay.lost", "severity": "warning", "text": mark("alarm"),
         "action": mark("action")}])  # fmt: skip
    asked = shop.half("orders", b"asked", ByChecker("shop"), check_after_us=3_600 * SECOND)
    shop.call("checks.answer", token=asked, answer="UNKNOWN", reason=mark("check"))
    branch = new_token()
    home = ByHome(shop.log_id.bytes, branch.bytes)
    shop.half("orders", b"branch", home, branch)
    shop.call("xa.heuristic", token=branch.hex, branch=mark("branch"), decided="COMMIT",
              found=mark("found"), operator="recoverer", reason=mark("heuristic"))  # fmt: skip
    token = shop.half("orders", b"decided", ByChecker("shop"))
    shop.call("tx.decide", token=token, outcome="ROLLBACK", **who)
    ODD.extend(["letters/odd", "letters/odd?saved=odd", "topics/odd", "topics/odd/messages",
                "groups/odd", "groups/odd/reset?topic=odd&to=first", "transactions/" + token,
                "trace?key=k", "plan/new?group=odd&saved=odd", "transactions/" + asked,
                "transactions/" + branch.hex, "transactions/xa?heuristic=yes",
                "groups/strangers", "letters/strangers/orders/0/0"])  # fmt: skip


def paths() -> list[str]:
    """Return a path for each page."""
    found: list[str] = []
    for page in PAGES:
        first = page.path.partition("/")[0]
        names = iter((*NAMES.get(first, ()), "0", "0"))
        found.append("/".join(next(names) if one == "*" else one for one in page.path.split("/")))
    letters = [path for path in ODD if path.startswith("letters/odd/")]
    return [*found, *ODD, *(f"{path}/edit" for path in letters[1:])]  # the first one is closed


@pytest.mark.parametrize("user", ["ann", "eve"])
def test_hostile_75_every_page_opens_and_shows_texts_as_texts(console: Console, user: str) -> None:
    console.log_in(user)
    driver, seen = console.browser.driver, ""
    for path in paths() if user == "ann" else [page.path for page in NAVIGATION]:
        text = console.open(path, denied=user == "eve")
        if user == "ann":
            assert driver.find_elements(By.CSS_SELECTOR, ".problem") == [], (path, text)
        assert "owned" not in driver.title
        foreign, texts = driver.execute_script(FOREIGN)
        assert foreign == [], path
        links = re.findall(r' (?:href|src|action)="([^"]*)"', driver.page_source)
        assert all(link.startswith(("./", "../", "?", "#")) for link in links), path
        seen += text + texts
    if user == "ann":
        texts = (*SHOWN, *map(mark, MARKED))
        assert [text for text in texts if text not in seen] == []
    console.log_in("ann")


def test_hostile_50_bodies_keys_and_headers_are_texts_with_visible_signs(console: Console) -> None:
    shown = console.open("topics/orders/messages")
    found = console.browser.driver.find_elements(By.CSS_SELECTOR, "tbody td:first-child a")
    assert len(found) == len(HOSTILE)
    assert all(text in shown for text in SHOWN)
    for link in [one.get_attribute("href") for one in found]:
        assert link is not None
        page = console.open(link.removeprefix(console.url))
        assert sum(text in page for text in SHOWN) == 1


def rows_of(console: Console, path: str) -> list[str]:
    """Return the first cell of each row of a page."""
    console.open(path)
    found = console.browser.driver.find_elements(By.CSS_SELECTOR, "tbody td:first-child")
    return [one.text for one in found]


def test_messages_are_found_by_key_tag_place_and_time(console: Console) -> None:
    driver = console.browser.driver
    console.open("topics/orders/messages")
    console.fill("key", HOSTILE[0] + Keys.ENTER)
    wait_until(lambda: "key=" in driver.current_url, what="the search")
    wait_until(lambda: len(driver.find_elements(By.CSS_SELECTOR, "tbody tr")) == 1, what="a row")
    assert "No message" in console.open("topics/orders/messages?tag=nothing")
    page = "topics/orders/messages?"
    places = [rows_of(console, page + f"partition={number}") for number in range(2)]
    assert sum(map(len, places)) == len(HOSTILE)
    for number, found in enumerate(places):
        offsets = [place.rpartition("/")[2] for place in found]
        assert offsets == [str(offset) for offset in range(len(found))]
        assert rows_of(console, page + f"partition={number}&offset=1") == found[1:]
    assert len(rows_of(console, page + "start=2026-01-01T00:00")) == len(HOSTILE)
    assert rows_of(console, page + "end=2026-01-01T00:00") == []
    assert (
        "needs a partition"
        in console.browser.open(console.url + "topics/orders/messages?offset=3")
        .driver.find_element(By.CLASS_NAME, "problem")
        .text
    )


def test_a_live_part_follows_and_stands_still_for_its_reader(console: Console) -> None:
    driver = console.browser.driver
    console.open("topics")
    wait_until(lambda: console.state() == "live", what="a live page")
    with txmq.connect(console.broker, service="shop", timeout=PATIENCE_S) as client:
        client.call("topic.create", name="arrivals", partitions=1)
    wait_until(lambda: "arrivals" in console.text(), what="the new topic")
    driver.execute_script("getSelection().selectAllChildren(document.querySelector('#live td'))")
    wait_until(lambda: console.state() == "paused: selected", what="a pause")
    console.click("#live-state")
    wait_until(lambda: console.state() == "live", what="a live page again")
    console.press("p")
    wait_until(lambda: console.state() == "paused", what="a pause by key")
    console.press("p")
    wait_until(lambda: console.state() == "live", what="a live page by key")
    console.open("users/eve")
    console.fill("of", "half of a name")
    driver.execute_script("document.activeElement.blur(); scrollTo(0, 0)")
    wait_until(lambda: console.state() == "paused: filled in", what="a pause while it is filled in")
    console.click("#live-state")
    wait_until(lambda: console.state() == "live", what="a live page once it is left")


def test_keys_go_to_pages_rows_and_filters(console: Console) -> None:
    driver = console.browser.driver
    console.open("")
    console.press("gt")
    wait_until(lambda: driver.current_url == console.url + "topics", what="the topics")
    console.press("j")
    assert driver.switch_to.active_element.tag_name == "a"
    driver.execute_script("document.activeElement.blur()")
    console.press("/")
    console.press("no such topic")
    wait_until(lambda: "No topic has this" in console.text(), what="the filtered list")
    console.press(Keys.ESCAPE)
    console.press("?")
    assert driver.find_element(By.ID, "help").is_displayed()
    console.press(Keys.ESCAPE)


def test_a_reset_is_previewed_and_what_is_denied_says_why(console: Console) -> None:
    driver = console.browser.driver
    assert "Delivered again" in console.open("groups/billing/reset?topic=orders&to=first")
    console.log_in("eve")
    try:
        assert "txmq acl grant eve operate group:billing" in console.open("groups/billing/reset")
        assert not driver.find_element(By.CSS_SELECTOR, "button.main").is_enabled()
        page = console.browser.open(console.url + "groups/billing/reset?topic=orders&to=first")
        assert "AccessDenied" in page.driver.find_element(By.CLASS_NAME, "problem").text
        assert "txmq acl grant eve read topic:orders" in console.open("topics/orders/messages")
    finally:
        console.log_in("ann")


def test_groups_topics_and_users_are_changed_by_forms(console: Console) -> None:
    done = [
        console.act("groups/billing", "Pause"),
        console.act("groups/billing", "Resume"),
        console.act("groups/billing", "Copy", to="again"),
        console.act("groups/billing/reset?topic=orders&to=offset&partition=0&offset=1", "Reset"),
        console.act("groups/again", "Delete the group"),
        console.act("topics", "Create", name="spare", partitions="2"),
        console.act("topics/spare", "Change", retention_ms="90s", writable="no", note="ours"),
        console.act("users/eve", "Grant", what="read", kind="topic", of="spare"),
        console.act("users/eve", "Revoke"),
        console.act("users/eve", "Change the quota", topics="5"),
        console.act(
            "users", "Add the user", name="zoe", roles="operator", password=PASSWORD, again=PASSWORD
        ),
        console.act("users/zoe", "Set the password", password="another one", again="another one"),
        console.act("groups/billing", "Change the retries", delays_us="5, 1min", retries="3"),
        console.act("groups/billing", "Change", flood_keys="7", keep_until_exported="yes"),
        console.act("groups/billing", "Change the limits", messages_per_s="500", lease_ms="90s"),
        console.act("users/eve", "Change roles", roles="auditor operator"),
    ]
    assert [text for text in done if "done" not in text] == []
    page = console.open("topics/spare")
    assert "90 s" in page
    assert "ours" in page
    page = console.open("groups/billing")
    for words in ("delays: 5 s, 1 min; retries: 3", "90 s", "500"):
        assert words in page
    assert "operator, auditor" in console.open("users/eve")
    assert "done" in console.act("topics/spare", "Delete the topic")
    assert "spare" not in console.open("topics")
    assert "done" in console.act("users/eve", "Change roles", roles="auditor")
    audited = console.open("audit")
    assert HOSTILE[0] in audited
    for call in ("group.pause", "group.reset", "topic.alter", "acl.revoke", "user.set"):
        assert call in audited


def test_the_other_actions_do_what_their_buttons_say(console: Console) -> None:
    with txmq.connect(console.broker, timeout=PATIENCE_S) as client:
        client.call("user.set", name="temp", roles=[], new=True)
        client.call("token.add", name="temp", token="scripts", digest="0" * 64, expire_s=3_600)
        client.call("topic.create", name="copies", partitions=1)
        client.call("plan.create", name="open", group="other")
        found = client.call("dlq.list", group="other", bodies=False)["letters"]
    copied, tried, *_ = [
        f"letters/other/orders/{one['partition']}/{one['offset']}"
        for one in found
        if one["key"] != HOSTILE[3]
    ]
    done = [
        console.act("topics/odd", "Add partitions", partitions="3"),
        console.act("users/temp", "Revoke the token"),
        console.act("users/temp", "Delete the user"),
        console.act("letters/odd", "Save the note", text=HOSTILE[0]),
        console.act("letters/odd?filter=age%3E0s", "Save the filter", name="mine"),
        console.act("letters/odd", "Remove"),
        console.act(copied, "Copy", to="copies"),
        console.act("policies", "Set the policy", group="odd", after_s="1000000"),
        console.act("plans/open", "Complete"),
        console.act("plans/few", "Approve"),
        console.act("plans/few", "Abandon"),
    ]
    wait_until(lambda: "Delete" in console.open("plans/few"), what="the end of the plan")
    done.append(console.act("plans/few", "Delete"))
    assert [text for text in done if "done" not in text] == []
    with txmq.connect(console.broker, timeout=PATIENCE_S) as client:
        client.call("group.alter", group="other", session_ms=3_600_000)
        client.call("consumer.join", group="other", member="m-2", instance="i-2",
                    topics=["orders"], session_ms=3_600_000)  # fmt: skip
        assert "done" in console.act(tried, "Try once", member="m-2")


def test_heuristic_decisions_are_forgotten_once_data_are_mended(console: Console) -> None:
    token = new_token()
    with peer(console.broker) as shop:
        home = ByHome(shop.log_id.bytes, token.bytes)
        path = "transactions/" + shop.half("orders", b"branch", home, token)
        shop.call("xa.heuristic", token=token.hex, branch="1_YQ==_Yg==", decided="COMMIT",
                  found=HOSTILE[1], operator="recoverer", reason=HOSTILE[0])  # fmt: skip
    shown = console.open(path)
    assert HOSTILE[0] in shown
    assert HOSTILE[1] in shown
    assert token.hex in console.open("transactions/xa?heuristic=yes")
    assert "done" in console.act(path, "Forget them")
    assert "Heuristic decisions" not in console.open(path)
    assert token.hex not in console.open("transactions/xa?heuristic=yes")
    assert "xa.forget" in console.open("audit")


def letters_of(console: Console, group: str) -> list[tuple[str, int, int]]:
    """Make letters of a group that no other test has; return their places."""
    with peer(console.broker) as shop:
        return shop.dead_letters(group, "orders", len(HOSTILE))


def confirm_clock(console: Console, put_ahead: Callable[[], None]) -> None:
    assert "Confirm the clock" not in console.open("")
    put_ahead()
    wait_until(lambda: "clock.jumped" in console.open(""), what="the alarm")
    assert "done" in console.act("", "Confirm the clock")
    wait_until(lambda: "clock.jumped" not in console.open(""), what="no alarm")
    with txmq.connect(console.broker, timeout=PATIENCE_S) as client:
        assert client.call("clock.show")["believed"]


def test_a_clock_that_jumped_is_confirmed(browser: Browser, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"

    def set_clock(by: int) -> None:
        wrong.with_suffix(".new").write_text(str(by), "utf-8")
        wrong.with_suffix(".new").rename(wrong)

    set_clock(0)
    for _process, url, http in start(tmp_path, str(wrong), command=set_clock_broker.run):
        confirm_clock(Console(http, url, browser), lambda: set_clock(30 * DAY))
    browser.driver.get("about:blank")


def test_logs_are_listed_and_their_commands_do_what_they_say(
    browser: Browser, tmp_path: Path
) -> None:
    with BrokerThread(tmp_path / "second") as second:
        for _process, url, http in start(tmp_path):
            console = Console(http, url, browser)
            assert "shares its log with nobody" in console.open("cluster")
            done(run("cluster", "add-log", second.url, "--broker", url))
            assert re.search(r"nodes, logs\s+1, 2", console.open(""), re.IGNORECASE)
            console.open("cluster")
            [_own, listed] = browser.driver.find_elements(By.CSS_SELECTOR, "#live tbody tr")
            assert second.url.removeprefix("txmq://") in listed.text
            command = listed.find_element(By.TAG_NAME, "code").text
            done(run(*command.split()[1:], "--broker", url))
            assert "drained" in console.open("cluster")
        browser.driver.get("about:blank")


def done(result: Result) -> None:
    assert result.exit_code == 0, result.output


def test_lists_go_on_page_by_page(console: Console) -> None:
    driver = console.browser.driver
    console.open("users?limit=1")
    console.click("[rel=next]")
    wait_until(lambda: "after=ann" in driver.current_url, what="the next page")
    wait_until(lambda: "auditor" in console.text(), what="the next user")


class SubPath(BaseHTTPRequestHandler):
    """A proxy that serves a console below `/ops/txmq/`."""

    protocol_version = "HTTP/1.0"  # so that a reply ends with its connection
    target = ""

    def _pass_on(self) -> None:
        _, found, path = self.path.partition("/ops/txmq/")
        if not found:
            self.send_error(404)
            return
        length = int(self.headers.get("Content-Length") or 0)
        with closing(HTTPConnection(self.target, timeout=PATIENCE_S)) as upstream:
            upstream.request(self.command, "/" + path, self.rfile.read(length), dict(self.headers))
            reply = upstream.getresponse()
            self.send_response_only(reply.status)
            for name, value in reply.getheaders():
                if name not in ("Transfer-Encoding", "Connection"):
                    self.send_header(name, value)
            self.end_headers()
            with suppress(OSError):  # the browser has closed a stream
                while data := reply.read1():
                    self.wfile.write(data)

    do_GET = do_POST = _pass_on  # noqa: N815  # as the base class calls them

    def log_message(self, *args: object) -> None:
        """Log nothing."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_dark_or_light_as_their_reader_has_it(console: Console, scheme: str) -> None:
    feature = {"name": "prefers-color-scheme", "value": scheme}
    driver = console.browser.driver
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    try:
        console.open("")
        page, words = driver.execute_script(LUMINANCES)
    finally:
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert (page < words) is (scheme == "dark")
    darker, lighter = sorted((page, words))
    assert (lighter + 0.05) / (darker + 0.05) > 7, "the contrast of level AAA"


def test_behind_a_sub_path_pages_live_parts_and_forms_work(console: Console) -> None:
    handler = type("Handler", (SubPath,), {"target": urlsplit(console.url).netloc})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            proxied = console._replace(url=f"http://127.0.0.1:{server.server_port}/ops/txmq/")
            assert "done" in proxied.act("groups/billing", "Pause")
            assert "paused" in proxied.open("groups/billing")
            wait_until(lambda: proxied.state() == "live", what="a live page")
            assert "done" in proxied.act("groups/billing", "Resume")
            proxied.open("groups/billing")
            proxied.press("gt")
            wait_until(lambda: proxied.browser.driver.current_url == proxied.url + "topics",
                       what="the topics")  # fmt: skip
        finally:
            console.open("me")  # so that no stream is left
            server.shutdown()


def test_the_command_line_shows_the_settings(console: Console) -> None:
    shown = run("config", "show", "--json", "--broker", console.broker)
    assert '"retention"' in shown.stdout


def test_without_a_login_there_is_no_console(console: Console) -> None:
    for path in ("/", "/live/topics", "/static/live.js", "/topics"):
        with closing(
            HTTPConnection(urlsplit(console.url).netloc, timeout=PATIENCE_S)
        ) as connection:
            connection.request("GET", path)
            assert connection.getresponse().status == 401


def acted(console: Console, words: str = "done") -> str:
    """Wait until the dialog of an action has these words; return its text."""
    wait_until(lambda: words in console.part("acting"), what=f"a dialog with {words!r}")
    return console.part("acting")


def press_button(console: Console, label: str, within: str = "main") -> None:
    console.held_button(label, f"#{within} button").click()


def leave(console: Console) -> None:
    """Close the dialog of an action; the page is loaded again."""
    driver = console.browser.driver
    page = driver.find_elements(By.TAG_NAME, "html")
    driver.find_element(By.CSS_SELECTOR, "#acting a.leave").click()
    # while it is loaded there is none
    wait_until(
        lambda: driver.find_elements(By.TAG_NAME, "html") not in ([], page), what="the page again"
    )


def say_why(console: Console, label: str) -> str:
    """Give the reason that a dialog asks for, act, and return what it says then."""
    driver = console.browser.driver
    wait_until(lambda: driver.find_elements(By.NAME, "reason") != [], what="a question")
    driver.find_element(By.NAME, "reason").send_keys(HOSTILE[0])
    press_button(console, label, "acting")
    wait_until(
        lambda: driver.find_elements(By.CSS_SELECTOR, "#acting .outcome, #acting .problem") != [],
        what="an outcome",
    )
    return acted(console)


def test_letters_are_found_edited_and_delivered_again(console: Console) -> None:
    driver, rows = console.browser.driver, len(letters_of(console, "edited"))
    console.open("letters/edited")
    field = driver.find_element(By.NAME, "filter")
    field.send_keys("error:Val")
    offered = "#offers option[value='error:ValueError']"
    wait_until(lambda: driver.find_elements(By.CSS_SELECTOR, offered) != [], what="completion")
    field.send_keys("ueError age<1h" + Keys.ENTER)
    wait_until(lambda: "filter=" in driver.current_url, what="the letters")
    assert len(driver.find_elements(By.NAME, "letters")) == rows
    console.click("tbody a[href*='/orders/']")
    wait_until(lambda: "Attempts" in console.text(), what="the letter")
    assert "no such order" in console.text()
    driver.find_element(By.LINK_TEXT, "Edit").click()
    wait_until(lambda: driver.find_elements(By.NAME, "body") != [], what="the editor")
    body = driver.find_element(By.NAME, "body")
    before = body.get_attribute("value")
    body.clear()
    body.send_keys("mended")
    press_button(console, "Compare and edit")
    acted(console, "+mended")
    assert before is not None
    say_why(console, "Edit the message")
    leave(console)
    driver.get(driver.current_url.removesuffix("/edit"))
    assert "mended" in console.text()
    assert HOSTILE[0] in console.text()
    press_button(console, "Replay")
    acted(console)
    leave(console)
    console.open("letters/edited")
    assert len(driver.find_elements(By.NAME, "letters")) == rows - 1
    console.click("[name=letters]")
    press_button(console, "Abandon")
    assert "done 1" in say_why(console, "Abandon").replace("\n", " ")
    leave(console)
    assert "owned" not in driver.title


def test_messages_that_wait_for_their_retry_are_hastened_buried_and_skipped(
    console: Console,
) -> None:
    with peer(console.broker) as shop:
        assert len(shop.dead_letters("waiting", "orders", 3, delay_ms=3_600_000)) > 2
    for label in ("Retry now", "Bury", "Skip"):
        console.open("letters/waiting?filter=state%3Aretrying")
        console.click("[name=letters]")
        press_button(console, label)
        text = acted(console) if label == "Retry now" else say_why(console, label)
        assert "done 1" in text.replace("\n", " ")
        leave(console)


def test_all_that_is_retried_is_hastened_on_the_page_of_its_group(console: Console) -> None:
    with peer(console.broker) as shop:
        shop.dead_letters("late", "orders", 3, delay_ms=3_600_000)
    assert "done" in console.act("groups/late", "Retry all now")


SMALL = {"width": 1366, "height": 768, "deviceScaleFactor": 1, "mobile": False}
CUT = """
const wide = [...document.querySelectorAll(".table, main, nav")].filter(
  (one) => one.scrollWidth > one.clientWidth + 1);
return wide.map((one) => one.innerText.slice(0, 200));
"""


def test_no_column_is_cut_on_a_small_screen(console: Console) -> None:
    driver = console.browser.driver
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", SMALL)
    try:
        cut = {path: driver.execute_script(CUT) for path in paths() if console.open(path)}
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert [found for found in cut.items() if found[1]] == []


def test_a_page_that_one_may_not_open_is_disabled_in_the_navigation(console: Console) -> None:
    driver = console.browser.driver
    console.log_in("eve")
    try:
        console.open("me")
        [users] = driver.find_elements(By.CSS_SELECTOR, "nav a[aria-disabled]")
        assert users.text == "Users"
        assert "may not admin cluster" in str(users.get_attribute("title"))
        console.press("gu")
        console.press("gg")
        wait_until(lambda: driver.current_url == console.url + "groups", what="the groups")
    finally:
        console.log_in("ann")


@contextmanager
def mended_consumer(url: str) -> Iterator[None]:
    """A consumer for the block, whose handler fails for what is not mended."""
    ended = Event()

    def handle(message: Any) -> None:
        if message.body == b"broken":
            raise ValueError("no such order")

    with txmq.connect(url, service="walk", timeout=PATIENCE_S) as client:
        consumer = client.consumer("walk", topics=["walks"], member="w-1", retry=NO_RETRY)
        work = Thread(target=lambda: consumer.run(handle, stop=ended))
        work.start()
        try:
            client.send("walks", b"broken", key="c-1")
            yield
        finally:
            ended.set()
            work.join()
            consumer.close()


def follow(console: Console, selector: str, words: str) -> None:
    """Follow the first such link, to a page with these words."""
    wait_until(
        lambda: console.browser.driver.find_elements(By.CSS_SELECTOR, selector), what=selector
    )
    console.click(selector)
    wait_until(lambda: words in console.text(), what=words)


def test_from_an_alarm_an_operator_walks_to_the_end_of_a_failure(console: Console) -> None:
    driver = console.browser.driver
    with txmq.connect(console.broker, timeout=PATIENCE_S) as client:
        client.call("topic.create", name="walks", partitions=1)
    with mended_consumer(console.broker):
        alarm = "#alarms a[href$='letters/walk']"
        wait_until(
            lambda: console.open("") and driver.find_elements(By.CSS_SELECTOR, alarm),
            what="an alarm",
        )
        follow(console, alarm, "By error")
        follow(console, "tbody a[href*='/walks/']", "no such order")
        press_button(console, "Try once")
        acted(console)
        leave(console)
        wait_until(lambda: "2 failed" in console.open("letters/walk/walks/0/0"), what="the trial")
        follow(console, "a[href$='/edit']", "Headers, one in a line")
        body = driver.find_element(By.NAME, "body")
        body.clear()
        body.send_keys("mended")
        press_button(console, "Compare and edit")
        say_why(console, "Edit the message")
        leave(console)
        wait_until(lambda: "version 1" in console.text(), what="the letter with its new version")
        console.open("letters/walk")
        follow(console, "a[href*='plan/new']", "1 letter of group walk to replay")
        press_button(console, "Make the plan")
        acted(console)
        leave(console)
        wait_until(lambda: "planned" in console.plan_state(), what="the plan")
        press_button(console, "Start")
        acted(console)
        leave(console)
        wait_until(lambda: "done" in console.plan_state(), what="the end of the plan")
        follow(console, "tbody a[href*='letters/walk']", "it was processed, or never failed")
        follow(console, "a[href*='trace?id=']", "Time line")


def test_a_plan_runs_before_the_eyes_of_its_operator(console: Console) -> None:
    driver = console.browser.driver
    letters_of(console, "bees")
    console.open("plan/new?group=bees&name=bees")
    console.fill("rate", "0.01")
    press_button(console, "Make the plan")
    acted(console)
    leave(console)
    wait_until(lambda: driver.current_url == console.url + "plans/bees", what="the plan")
    assert "no such order" in console.text()
    assert "stay open dead letters" in console.text(), "what Cancel does"
    press_button(console, "Start")
    acted(console)
    leave(console)
    wait_until(lambda: "ramping" in console.plan_state(), what="progress")
    for label, state in (("Pause", "paused"), ("Resume", "ramping"), ("Pause", "paused")):
        press_button(console, label)
        acted(console)
        leave(console)
        wait_until(lambda: state in console.plan_state(), what=state)  # noqa: B023
    press_button(console, "Cancel")
    acted(console, "cannot go on")
    say_why(console, "Cancel the plan")
    leave(console)
    wait_until(lambda: "cancelled" in console.plan_state(), what="the end")


def test_all_letters_that_match_are_taken_and_those_refused_are_named(console: Console) -> None:
    driver = console.browser.driver
    letters_of(console, "matched")
    with peer(console.broker) as shop:
        shop.call("plan.create", name="first", group="matched", select={"key": HOSTILE[0]})
        wait_until(lambda: shop.call("plan.show", name="first")["letters"] == 1, what="its letter")
    console.open("letters/matched?filter=age%3C1h")
    console.click("[name=matching]")
    press_button(console, "Replay")
    assert "first" in acted(console, "1 refused"), "the plan that has a letter"
    leave(console)
    assert len(driver.find_elements(By.NAME, "letters")) == 1


def test_a_transaction_is_decided_with_a_reason(console: Console) -> None:
    [token] = NAMES["transactions"]
    console.open("transactions/" + token)
    press_button(console, "Check back now")
    acted(console)
    leave(console)
    press_button(console, "Roll back by hand")
    acted(console, "final")
    say_why(console, "Decide by hand")
    leave(console)
    wait_until(lambda: "Decision" in console.text(), what="the decision")
    assert HOSTILE[0] in console.text()
    entries = console.open("audit")
    assert "tx.decide" in entries


EVIL = """<!doctype html><title>evil</title><form method="post" action="{url}act/topic.create">
<input name="name" value="stolen"><input name="partitions" value="1"><input name="sure" value="yes">
</form><script>document.forms[0].submit()</script>"""


def test_hostile_71_a_form_of_another_origin_does_nothing(console: Console) -> None:
    class Evil(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(EVIL.format(url=console.url).encode())

        def log_message(self, *args: object) -> None: ...

    driver = console.browser.driver
    console.open("topics")  # the cookie is there, and the login: it is the same site
    with ThreadingHTTPServer(("127.0.0.1", 0), Evil) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        driver.get(f"http://127.0.0.1:{server.server_port}/")
        wait_until(lambda: "WrongOrigin" in driver.page_source, what="the refusal")
        server.shutdown()
    assert "stolen" not in console.open("topics")


def test_each_action_was_done_by_a_form(console: Console, request: pytest.FixtureRequest) -> None:
    """The audit has what the tests before this one did."""
    tests = {name for name in globals() if name.startswith("test_")}
    own = request.session.items.index(request.node)
    before = {one.name.partition("[")[0] for one in request.session.items[: own + 1]}
    if request.session.testsfailed or not tests <= before:
        pytest.skip("some of these tests have not run, or failed")
    with txmq.connect(console.broker, timeout=PATIENCE_S) as client:
        entries = client.call("audit.list", newest=True, limit=1_000)["entries"]
    done = {entry["call"] for entry in entries if entry.get("via") == "console"}
    assert ACTIONS.keys() - done == NOT_AUDITED

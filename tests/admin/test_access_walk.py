"""Every path by GET, as a user without permissions: HTTP shows nothing that the wire
would not.
"""

from __future__ import annotations

import pytest

from tests.admin.console_support import ConsoleInMemory
from txmq.admin.console.registry import PAGES
from txmq.admin.routes import PREFIX, ROUTES

# of the user itself, and forms that show nothing before they are sent
OPEN = {"/me", "/trace", "/plan/new"}
TOKEN = "0" * 32
SHOWN = {
    *(f"/{page.path}" for page in PAGES),
    *(PREFIX + "/".join(pattern) for pattern in ROUTES),
    "/trace?key=k",
    "/trace?key=k&thorough=yes",
    "/metrics",
    "/metrics/partitions",
} - OPEN


def filled(path: str) -> str:
    """Return a path with a name, or a token, and then numbers instead of each `*`."""
    first = TOKEN if "transactions" in path else "t"
    for name in (first, "0", "0", "0"):
        path = path.replace("*", name, 1)
    return path


@pytest.fixture(scope="module", name="console")
def fixture_console() -> ConsoleInMemory:
    return ConsoleInMemory(users=True)


@pytest.mark.parametrize("path", sorted(SHOWN))
def test_nothing_is_shown_to_a_user_without_permissions(
    console: ConsoleInMemory, path: str
) -> None:
    reply = console.get(filled(path), "nobody")
    assert reply.status == 403, reply.text
    assert "txmq acl grant nobody" in reply.text


@pytest.mark.parametrize(
    "path", [page.path for page in PAGES if page.live and f"/{page.path}" not in OPEN]
)
def test_nor_by_a_live_part(console: ConsoleInMemory, path: str) -> None:
    _channel, transport = console.listen(filled(f"/live/{path}"), "nobody")
    console.broker.pass_time(4)
    assert b"event: gone" in transport.value()
    assert b"event: part" not in transport.value()


def test_an_error_page_says_nothing_of_alarms_to_whom_they_are_hidden() -> None:
    console = ConsoleInMemory(users=True)
    console.broker.engine.faults.record("a test", ValueError("a bug"))
    console.broker.pass_time(2)
    assert "1 alarm" in console.get("/nowhere", "root").text
    reply = console.get("/nowhere", "nobody")
    assert reply.status == 404
    assert "alarm" not in reply.text
    assert "nobody Log out" in reply.text


@pytest.mark.parametrize("token", ["t", "%00", "0" * 33, "<script>"])
def test_a_token_that_is_none_is_a_mistake_of_the_address(
    console: ConsoleInMemory, token: str
) -> None:
    for user in ("root", "nobody"):
        assert console.get(f"/transactions/{token}", user).status == 400


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ("cross-site no-cors image", 403),
        ("same-site no-cors script", 403),
        ("cross-site navigate iframe", 403),
        ("cross-site", 403),
        ("cross-site navigate document", 200),  # a link
        ("same-origin cors empty", 200),
        ("none navigate document", 200),
        ("", 200),
    ],
)
def test_a_page_of_another_site_leads_to_the_console_and_loads_nothing_of_it(
    console: ConsoleInMemory, fields: str, status: int
) -> None:
    names = ("Sec-Fetch-Site", "Sec-Fetch-Mode", "Sec-Fetch-Dest")
    sent = dict(zip(names, fields.split(), strict=False))
    for path in ("/trace?key=k&thorough=yes", "/api/v1/topics", "/metrics"):
        assert console.request("GET", path, sent, user="root").status == status, path


def test_a_wrong_host_has_a_reason_that_people_read(console: ConsoleInMemory) -> None:
    reply = console.send(b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n")
    assert reply.head.splitlines()[0] == "HTTP/1.1 421 Misdirected Request"

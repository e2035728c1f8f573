"""The admin pages of a broker in a process of its own, over loopback."""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

import txmq.admin
from tests.cli.peer import peer
from tests.cli.support import reply, run
from txmq.model.decider import ByChecker
from txmq.testing.forked import txmq_command
from txmq.testing.processes import Command, Running, running
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.wire.calls.registry import CALLS

STATIC = Path(txmq.admin.__file__).parent / "static"
TEMPLATES = Path(txmq.admin.__file__).parent / "templates" / "console"


class Answer(NamedTuple):
    """A reply."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    def json(self) -> Any:
        assert self.headers["Content-Type"] == "application/json"
        return json.loads(self.body)


class Served(NamedTuple):
    """A broker that runs, with a half message and two dead letters."""

    process: Running
    url: str
    console: str
    token: str

    def ask(self, path: str, method: str = "GET", **headers: str) -> Answer:
        with closing(
            http.client.HTTPConnection(urlsplit(self.console).netloc, timeout=PATIENCE_S)
        ) as connection:
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())

    def api(self, path: str) -> Any:
        answer = self.ask("/api/v1/" + path)
        assert answer.status == 200, answer.body
        return answer.json()


def start(
    directory: Path, *before: str, command: Command = txmq_command
) -> Iterator[tuple[Running, str, str]]:
    """Run a broker; `before` are arguments before those of the broker."""
    where = (
        "--create-topics",
        "--data",
        str(directory / "data"),
        "--listen",
        "127.0.0.1:0",
        "--http",
        "127.0.0.1:0",
    )
    with running(directory, *before, "broker", *where, command=command) as process:
        url = process.first_line().removeprefix("ready ")
        [console] = [
            event["console"] for event in process.events() if event["event"] == "admin.serving"
        ]
        yield process, url, console


def _send(url: str, count: int) -> None:
    for number in range(count):
        reply("send", "orders", f"secret body {number}", "--partition", "1", broker=url)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    for process, url, console in start(tmp_path_factory.mktemp("admin")):
        reply("topic", "create", "orders", "--partitions", "3", broker=url)
        with peer(url) as shop:
            _send(url, 2)
            shop.dead_letters("billing", "orders", 2)
            _send(url, 3)
            token = shop.half("orders", b"secret half", ByChecker("shop"))
        yield Served(process, url, console, token)


def test_probes_say_that_the_broker_is_well(served: Served) -> None:
    for path in ("/healthz", "/readyz"):
        answer = served.ask(path)
        assert (answer.status, answer.body) == (200, b"ok\n")


def test_the_api_and_the_command_line_give_the_same_replies(served: Served) -> None:
    for path, command in (
        ("broker", None),
        ("topics", ("topic", "list")),
        ("topics/orders", ("topic", "show", "orders")),
        (f"transactions/{served.token}", ("tx", "show", served.token)),
        (
            f"transactions/{served.token}?after=1&limit=5",
            ("tx", "show", served.token, "--after", "1", "--limit", "5"),
        ),
        ("alarms", None),
        ("audit?limit=1&call=dlq.", None),
        ("groups", ("group", "list")),
        ("groups/billing", ("group", "show", "billing")),
        ("stores", ("recover", "list")),
        ("plans", ("plan", "list")),
        ("policies", ("policy", "list")),
        ("letters/billing/stats", ("dlq", "stats", "billing")),
        ("letters/billing?limit=100", ("dlq", "list", "billing")),
        ("transactions?state=undecided", ("tx", "list")),
        ("transactions?state=in-doubt&limit=5", ("tx", "list", "--state", "in-doubt")),
        ("transactions?state=waiting", ("tx", "list", "--state", "waiting")),
        ("transactions?state=conflicts", ("tx", "list", "--state", "conflicts")),
    ):
        output = served.api(path)
        assert output
        if command is not None:
            if command[1:] == ("list",) and command[0] in (
                "topic",
                "group",
                "recover",
                "plan",
                "policy",
            ):
                assert output.pop("next") is None  # the command reads all pages
            assert steady(output) == steady(reply(*command, broker=served.url)), path


def steady(output: Any) -> Any:
    """Return the value without fields that grow with time."""
    if isinstance(output, dict):
        return {
            name: steady(value) for name, value in output.items() if name not in ("age_ms", "why")
        }
    return [steady(item) for item in output] if isinstance(output, list) else output


def test_the_numbers_are_those_of_the_broker(served: Served) -> None:
    broker = served.api("broker")
    assert (broker["topics"], broker["groups"], broker["undecided"]) == (1, 1, 1)
    [topic] = served.api("topics")["topics"]
    assert (topic["name"], topic["partitions"], topic["messages"]) == ("orders", 3, 5)
    [group] = served.api("groups")["groups"]
    assert (group["group"], group["letters"], group["members"]) == ("billing", 2, 0)
    [half] = served.api("transactions")["transactions"]
    assert (half["token"], half["messages"]) == (served.token, 1)
    shown = served.api(f"transactions/{served.token}")
    assert [batch["topic"] for batch in shown["batches"]] == ["orders"]


def test_letters_come_page_by_page_and_without_bodies(served: Served) -> None:
    first = served.api("letters/billing?limit=1")
    [letter] = first["letters"]
    assert (letter["error_type"], letter["error_text"], letter["fingerprint"]) == (
        "ValueError",
        "no such order",
        "f-1",
    )
    [other] = served.api(f"letters/billing?limit=1&cursor={first['next']}")["letters"]
    assert other["number"] > letter["number"]
    assert "body" not in letter
    assert b"secret" not in served.ask("/api/v1/letters/billing").body


@pytest.mark.parametrize(
    ("path", "status", "error"),
    [
        ("topics/nothing", 404, "UnknownTopic"),
        ("groups/nobody", 404, "UnknownGroup"),
        ("groups/nobody%40m-1", 404, "UnknownGroup"),
        ("letters/nobody", 404, "UnknownGroup"),
        ("letters/nobody/stats", 404, "UnknownGroup"),
        ("transactions/019a0000000070008000000000000001", 404, "UnknownTransaction"),
        ("transactions/zz", 400, "BadRequest"),
        ("transactions?state=all", 400, "BadRequest"),
        ("transactions?limit=501", 400, "BadRequest"),
        ("transactions?limit=0", 400, "BadRequest"),
        ("transactions?limit=-1", 400, "BadRequest"),
        ("transactions?limit=1&limit=2", 400, "BadRequest"),
        ("letters/billing?limit=%EF%BC%91", 400, "BadRequest"),
        ("letters/billing?cursor=%FF", 400, "BadRequest"),
        ("letters/billing?bodies=true", 400, "BadRequest"),
        ("letters/billing?cursor=9999999999999999999999", 400, "BadRequest"),
        ("letters/billing?died_from=9999999999999999999999", 400, "BadRequest"),
        ("letters/billing?states=dead", 400, "BadRequest"),
        ("letters/billing?select=x", 400, "BadRequest"),
        ("letters/billing/stats?topic=nowhere", 404, "UnknownTopic"),
        ("topics?create=true", 400, "BadRequest"),
        ("topics/..%2f..%2fetc%2fpasswd", 400, "BadRequest"),
        ("topics/%00", 400, "BadRequest"),
        ("topics/%3Cscript%3E", 400, "BadRequest"),
        ("topics/%FF", 400, "BadRequest"),
        ("topics/", 400, "BadRequest"),
        ("letters", 404, "NotFound"),
        ("groups/billing/members", 404, "NotFound"),
        ("", 404, "NotFound"),
    ],
)
def test_what_is_not_there_or_no_question_is_an_error_with_a_name(
    served: Served, path: str, status: int, error: str
) -> None:
    answer = served.ask("/api/v1/" + path)
    assert (answer.status, answer.json()["error"]) == (status, error)
    assert b"<" not in answer.body


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd",
        "/..%2f..%2fetc%2fpasswd",
        "/%2e%2e/site.py",
        "/static/../site.py",
        "/static/",
        "/static/live.js/",
        "//static/live.js",
        "/static/live.js%00",
        "/templates/console/base.html",
        "/./",
        "/api",
        "/api/v2/broker",
        "/config",
        "/favicon.ico",
        "*",
    ],
)
def test_no_path_reaches_a_file_that_is_not_in_the_table(served: Served, path: str) -> None:
    assert served.ask(path).status == 404


def test_no_path_makes_a_call_that_changes_anything(served: Served) -> None:
    before = served.api("broker")["end"]
    for call in CALLS:
        served.ask(f"/api/v1/{call}")
        served.ask("/api/v1/" + call.replace(".", "/"))
    for path in (
        "topics/new",
        "groups/new",
        "groups/billing/pause",
        f"transactions/{served.token}/commit",
    ):
        for method in ("GET", "HEAD", "POST", "PUT", "DELETE"):
            served.ask("/api/v1/" + path, method)
    assert served.api("broker")["end"] == before


def test_a_strangers_host_and_every_other_method_are_refused(served: Served) -> None:
    assert served.ask("/api/v1/broker", Host="evil.example").status == 421
    assert served.ask("/api/v1/broker", Origin="http://evil.example").status == 403
    assert served.ask("/api/v1/broker", "POST").status == 405
    assert served.ask("/", "DELETE").status == 405


def test_metrics_are_what_prometheus_reads(served: Served) -> None:
    answer = served.ask("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    found: dict[tuple[Any, ...], float] = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.body.decode())
        for sample in family.samples
    }
    assert found["txmq_topic_messages_total", ("topic", "orders")] == 5
    assert found["txmq_topic_partitions", ("topic", "orders")] == 3
    assert found["txmq_group_letters", ("group", "billing")] == 2
    assert found["txmq_group_unprocessed", ("group", "billing")] == 5
    assert found["txmq_group_unsettled", ("group", "billing")] == 3
    assert found["txmq_group_at_consumers", ("group", "billing")] == 0
    assert found["txmq_group_stores_lost", ("group", "billing")] == 0
    assert found["txmq_group_unprocessed_seconds", ("group", "billing")] >= 0
    assert found["txmq_transactions_undecided",] == 1
    assert 0 < found["txmq_transactions_oldest_undecided_seconds",] < 600
    assert found["txmq_log_durable_bytes",] == served.api("broker")["durable"]
    assert found["process_open_fds",] > 0
    assert {name for name, *labels in found if name.startswith("txmq_") and not labels} >= {
        "txmq_log_read_only"
    }
    assert {label for _, *labels in found for label, _ in labels} == {
        "name",
        "log_id",
        "topic",
        "group",
        "consumergroup",
        "error",
        "le",
        "verb",
        "outcome",
        "reason",
        "severity",
    }
    pair = (("consumergroup", "billing"), ("topic", "orders"))
    assert found["txmq_consumergroup_lag", *pair] == 5
    assert found["txmq_consumergroup_messages_total", *pair] == 0  # two letters are not processed
    letters = [value for (name, *_), value in found.items() if name == "txmq_dead_letters"]
    assert sum(letters) == 2
    documented = re.findall(r"^\| `(\w+)`", METRICS.read_text("utf-8"), re.MULTILINE)
    families = {f.name for f in text_string_to_metric_families(answer.body.decode())}
    ours = {name for name in families if name.startswith("txmq_")}
    assert {name for name in ours if not name.endswith("_created")} <= set(documented)


def test_metrics_of_partitions_are_on_a_path_of_their_own(served: Served) -> None:
    order = ("consumergroup", "topic", "partition")

    def metrics(query: str = "") -> dict[tuple[Any, ...], float]:
        answer = served.ask(f"/metrics/partitions{query}")
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return {
            (sample.name, *(sample.labels[name] for name in order if name in sample.labels)): (
                sample.value
            )
            for family in text_string_to_metric_families(answer.body.decode())
            for sample in family.samples
        }

    found = metrics()
    current = "txmq_topic_partition_current_offset"
    assert sum(found[current, "orders", str(number)] for number in range(3)) == 5
    lags = [
        found["txmq_consumergroup_partition_lag", "billing", "orders", str(n)] for n in range(3)
    ]
    assert sum(lags) == 5
    assert found["txmq_partition_metrics_cut",] == 0
    assert {key[1] for key in metrics("?topic=orders") if key[0] == current} == {"orders"}
    assert not [key for key in metrics("?group=other") if key[0].startswith("txmq_consumer")]
    assert served.ask("/metrics/partitions?by=x").status == 400


METRICS = Path(__file__).parents[2] / "docs" / "METRICS.md"
LINKED = re.compile(r"<(?:script|link)[^>]* (?:src|href)=\"\./([^\"?]*)\?v=\w+\"")


def test_the_console_needs_nothing_but_its_own_files(served: Served) -> None:
    page = served.ask("/")
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    wanted = LINKED.findall(page.body.decode())
    assert {"static/live.js", "static/style.css", "static/vendor/htmx.min.js"} <= set(wanted)
    for file in wanted:
        answer = served.ask("/" + file)
        assert (answer.status, answer.body) == (200, (STATIC.parent / file).read_bytes())
        assert "immutable" in answer.headers["Cache-Control"]


def test_templates_have_no_scripts_styles_or_addresses_of_others() -> None:
    for template in TEMPLATES.iterdir():
        source = template.read_text("utf-8")
        assert re.search(r"<script(?! src=)|<style| on\w+=| style=|\|\s*safe", source) is None
        assert re.search(r"https?:", source) is None, template.name
        links = re.findall(r"(?:href|src|action)=\"([^\"{]*)", source)
        assert {one for one in links if one[:1] != "#"} <= {""}, template.name


def test_ten_thousand_bytes_of_header_are_too_many(served: Served) -> None:
    assert served.ask("/", **{"X-Long": "x" * 10_000}).status == 400


def test_an_open_console_does_not_keep_a_broker_from_draining(tmp_path: Path) -> None:
    for process, _url, console in start(tmp_path):
        place = urlsplit(console)
        with closing(
            socket.create_connection((place.hostname, place.port), timeout=PATIENCE_S)
        ) as open_one:
            open_one.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert open_one.recv(1)
            assert process.terminate() == 0
        assert process.out.read_text().count("\n") == 1
        lives = [event.get("state") for event in process.events()]
        assert lives.index("DRAINING") < lives.index("CLOSED")


def test_an_address_that_is_taken_is_an_error_of_that_setting(
    served: Served, tmp_path: Path
) -> None:
    taken = urlsplit(served.console).netloc
    where = ("--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0", "--http", taken)
    with running(tmp_path, "broker", *where) as second:
        assert second.status() == 1
    output = second.err.read_text().splitlines()[-1]
    assert output.startswith("txmq: broker.http: ")
    assert taken in output
    assert second.out.read_text() == ""


@pytest.mark.parametrize(
    "address", ["0.0.0.0:7651", "192.168.1.2:7651", "[::]:7651", "example.org:7651", "7651"]
)
def test_an_address_that_others_can_reach_is_refused(tmp_path: Path, address: str) -> None:
    ran = run("broker", "--data", str(tmp_path / "data"), "--http", address)
    assert (ran.exit_code, ran.stdout) == (1, "")
    assert ran.stderr.startswith("txmq: broker.http: ")
    assert not (tmp_path / "data").exists()


def test_without_the_option_nothing_is_served(tmp_path: Path) -> None:
    with running(
        tmp_path, "broker", "--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0"
    ) as process:
        process.first_line()
        wait_until(lambda: "SERVING" in process.err.read_text(), what="a broker that serves")
        assert "admin" not in process.err.read_text()

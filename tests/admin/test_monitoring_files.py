"""Dashboards and alert rules name metrics that exist, promtool accepts the rules, and a
real Prometheus scrapes a broker with users and TLS by the example.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from tests.certificates import Authority
from tests.cli.support import reply, run
from txmq.testing.ports import free_port
from txmq.testing.processes import Running, running
from txmq.testing.wait import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]
PROMETHEUS, GRAFANA = ROOT / "packaging" / "prometheus", ROOT / "packaging" / "grafana"
NAME = re.compile(r"\btxmq_\w+")


@pytest.fixture(scope="module")
def documented() -> set[str]:
    """The series that a scrape has."""
    names = set[str]()
    row = re.compile(r"^\| `(\w+)` \| (\w+) \|", re.MULTILINE)
    for name, kind in row.findall((ROOT / "docs" / "METRICS.md").read_text("utf-8")):
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
        names.update(name + suffix for suffix in suffixes.get(kind, ("",)))
    return names


@pytest.fixture(scope="module")
def dashboards() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dashboards", ROOT / "scripts" / "dashboards.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_dashboards_are_those_of_the_script(dashboards: ModuleType) -> None:
    texts = dashboards.texts()
    assert {path.name: path.read_text("utf-8") for path in GRAFANA.iterdir()} == texts
    assert len(texts) == 5


def test_dashboards_ask_for_metrics_that_exist(documented: set[str]) -> None:
    for path in GRAFANA.iterdir():
        panels = json.loads(path.read_text("utf-8"))["panels"]
        queries = [target["expr"] for panel in panels for target in panel["targets"]]
        assert queries
        named = {name for query in queries for name in NAME.findall(query)}
        assert named <= documented, path.name


def test_rules_ask_for_metrics_that_exist(documented: set[str]) -> None:
    rules = (PROMETHEUS / "txmq.rules.yml").read_text("utf-8")
    named = {name for line in re.findall(r"expr: (.+)", rules) for name in NAME.findall(line)}
    assert len(named) >= 10
    assert named <= documented


def test_each_rule_has_a_scene_in_which_it_is_raised() -> None:
    rules = (PROMETHEUS / "txmq.rules.yml").read_text("utf-8")
    scenes = (PROMETHEUS / "txmq.rules.test.yml").read_text("utf-8")
    raised = set(re.findall(r"alertname: (\w+)\n +exp_alerts:\n", scenes))
    assert raised == set(re.findall(r"- alert: (\w+)", rules))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (package prometheus)")
@pytest.mark.parametrize(
    "command",
    [
        "check config --syntax-only prometheus.yml",  # its files are of another machine
        "check config --syntax-only ../container/prometheus.yml",  # its rules are mounted
        "test rules txmq.rules.test.yml",
    ],
)
def test_promtool_accepts(command: str) -> None:
    ran = subprocess.run(
        ["promtool", *command.split()],
        cwd=PROMETHEUS, capture_output=True, check=False, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr


class Secured(NamedTuple):
    """A broker with users and TLS."""

    process: Running
    url: str  # of its admin
    http: str  # host and port
    ca: Path


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Secured]:
    """A broker whose certificate ends soon."""
    authority, http = Authority(tmp_path), f"127.0.0.1:{free_port()}"
    files = authority.sign("broker", days=10)
    settings, password, data = (tmp_path / name for name in ("broker.toml", "password", "data"))
    settings.write_text(
        f'[broker]\ndata = "{data}"\nlisten = "127.0.0.1:0"\nhttp = "{http}"\n'
        f'[tls]\ncert = "{files.cert}"\nkey = "{files.key}"\n'
    )
    password.write_text("a long password")
    named = ("--data", str(data), "--password-file", str(password))
    assert run("user", "init-admin", "root", *named).exit_code == 0
    with running(tmp_path / "broker", "broker", "--config", str(settings)) as process:
        place = process.first_line().removeprefix("ready txmqs://")
        login = f"ca={authority.ca}&password_file={password}"
        yield Secured(process, f"txmqs://root@{place}/?{login}", http, authority.ca)


class Prometheus:
    """A Prometheus by the example, which scrapes often."""

    def __init__(self, directory: Path, broker: Secured) -> None:
        self.token, self._port = directory / "txmq.token", free_port()
        self._settings, self._data = directory / "prometheus.yml", directory / "prometheus"
        shutil.copy(PROMETHEUS / "txmq.rules.yml", directory)
        text = (PROMETHEUS / "prometheus.yml").read_text("utf-8")
        for old, new in (
            ("/etc/txmq/ca.pem", str(broker.ca)),
            ("/etc/prometheus/txmq.token", str(self.token)),
            ("broker.example.org:7651", broker.http),
            ("scrape_interval: 15s", "scrape_interval: 2s\n  evaluation_interval: 1s"),
        ):
            assert old in text
            text = text.replace(old, new)
        self._settings.write_text(text)

    @property
    def command(self) -> tuple[str, ...]:
        return (
            "prometheus",
            f"--config.file={self._settings}",
            f"--storage.tsdb.path={self._data}",
            f"--web.listen-address=127.0.0.1:{self._port}",
        )

    def is_up(self) -> str:
        """Return "1" where the last scrape succeeded, "" without one."""
        found = self._ask("query", query='up{job="txmq"}')
        return found["result"][0]["value"][1] if found and found["result"] else ""

    def alerts(self) -> dict[str, str]:
        """Return the states of alerts, by their names."""
        found = self._ask("alerts")
        return {one["labels"]["alertname"]: one["state"] for one in found.get("alerts", ())}

    def _ask(self, path: str, **query: str) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urlencode(query)}"
        try:
            with urlopen(url, timeout=PATIENCE_S) as answer:
                data: dict[str, Any] = json.load(answer)["data"]
        except URLError:  # it is yet to listen
            return {}
        return data


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus")
def test_prometheus_scrapes_a_broker_with_users_and_tls_by_the_example(
    secured: Secured, tmp_path: Path
) -> None:
    example = (PROMETHEUS / "prometheus.yml").read_text("utf-8").replace("\n#", "")
    commands = re.findall(r"txmq ((?:user|acl) [^;.]+)[;.]", example)
    assert len(commands) == 3
    for command in commands:
        made = reply(*shlex.split(command), broker=secured.url)
    scraping = Prometheus(tmp_path, secured)
    scraping.token.write_text(made["token"])
    with running(tmp_path / "scraping", command=scraping.command):
        wait_until(lambda: scraping.is_up() == "1", what="a scrape")
        wait_until(
            lambda: (
                {("TxmqCertificateEnds", "firing"), ("TxmqAlarm", "pending")}
                <= scraping.alerts().items()
            ),
            what="the alerts of a certificate that ends soon",
        )
        assert "TxmqDown" not in scraping.alerts()
        reply("user", "token", "revoke", "scraper", "prometheus", broker=secured.url)
        wait_until(lambda: scraping.is_up() == "0", what="a scrape that is refused")
        wait_until(lambda: "TxmqDown" in scraping.alerts(), what="its alert")


def health_checks() -> dict[str, list[str]]:
    """Return the health checks of brokers with TLS that documents and examples have."""
    page = (ROOT / "docs" / "SECURITY.md").read_text("utf-8")
    compose = (ROOT / "packaging" / "container" / "compose.yml").read_text("utf-8")
    curl = re.search(r"^curl .*https://.*$", page, re.MULTILINE)
    python = re.search(r'# test: \[CMD, python3, -c, "(.*https://.*)"\]', compose)
    assert curl is not None
    assert python is not None
    return {"curl": shlex.split(curl[0]), "python": [sys.executable, "-c", python[1]]}


@pytest.mark.parametrize("name", health_checks())
def test_a_health_check_of_a_broker_with_tls_needs_the_authority_and_no_login(
    secured: Secured, tmp_path: Path, name: str
) -> None:
    command = health_checks()[name]
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]}")

    def status(ca: Path) -> int:
        words = [word.replace("/etc/txmq/ca.pem", str(ca)) for word in command]
        place = re.compile(r"(?<=https://)[\w.]+:7651")
        words = [place.sub(secured.http, word) for word in words]
        return subprocess.run(words, check=False, capture_output=True).returncode

    assert status(secured.ca) == 0
    assert status(Authority(tmp_path, "other").ca) != 0
    secured.process.terminate()
    assert status(secured.ca) != 0

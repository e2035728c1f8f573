"""A broker with TLS and users."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import txmq
from tests.certificates import Authority
from tests.cli.support import run
from tests.spark.consuming import drain
from tests.spark.stream_driver import texts
from tests.system.test_security import keys
from txmq.testing.processes import Running
from txmq.testing.wait import PATIENCE_S

PASSWORD = "a-password-of-a-test"
# what spark/README.md names
GRANTS = (
    ("consumer", "topic:orders"),
    ("producer", "topic:copies"),
    ("producer", "service:txmq-spark"),
    ("consumer", "group:billing"),
    ("operator", "group:billing"),
)


class Secured(NamedTuple):
    """A broker with TLS, and a user named spark."""

    place: str
    words: Path  # a file with the password of all users
    ca: Path

    def url(self, user: str) -> str:
        return f"txmqs://{user}:{PASSWORD}@{self.place}/?ca={self.ca}"

    @property
    def options(self) -> dict[str, str]:
        files = {"passwordFile": str(self.words), "ca": str(self.ca)}
        return {"url": f"txmqs://{self.place}", "user": "spark", **files}


@contextmanager
def secured_broker(directory: Path) -> Iterator[Secured]:
    """Run a broker for the block: user spark has what GRANTS says, root everything."""
    authority, words = Authority(directory), directory / "words"
    files = authority.sign("broker")
    words.write_text(PASSWORD)
    settings = directory / "broker.toml"
    settings.write_text(
        f'[broker]\ndata = "{directory / "data"}"\nlisten = "127.0.0.1:0"\n'
        f'[tls]\ncert = "{files.cert}"\nkey = "{files.key}"\n'
    )
    data = ("--data", str(directory / "data"), "--password-file", str(words))
    assert run("user", "init-admin", "root", *data).exit_code == 0
    running = Running(directory, "broker", "--create-topics", "--config", str(settings))
    place = running.first_line().removeprefix("ready txmqs://").strip()
    broker = Secured(place, words, authority.ca)
    try:
        prepare(broker)
        yield broker
    finally:
        running.terminate()


def prepare(broker: Secured) -> None:
    with txmq.connect(broker.url("root"), service="tests", timeout=PATIENCE_S) as root:
        for topic in ("orders", "copies", "secrets", "doomed"):
            root.call("topic.create", name=topic, partitions=1)
        root.call("user.set", name="spark", roles=[], new=True, password=keys(PASSWORD))
        for topic in ("orders", "doomed"):
            root.send_many(topic, texts(*range(5)))
        drain(root, "billing", "orders", lambda message: message.body != b"3")
        for verb, resource in GRANTS:
            root.call("acl.grant", name="spark", what=verb, resource=resource)

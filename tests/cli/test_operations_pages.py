"""Each command of docs/operations runs as its page has it, with names put in, at a real
broker and a real database.
"""

from __future__ import annotations

import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from threading import Event, Thread
from uuid import uuid4

import psycopg2
import pytest

import txmq
from tests.cli.peer import Peer, peer
from tests.cli.support import NOBODY, reply, run
from tests.cli.test_documented_commands import command_lines
from tests.cli.test_recover import Shop
from txmq.batch import encode_one
from txmq.client.protocol.transaction.tokens import new_token
from txmq.model.decider import ByChecker
from txmq.model.message import Message
from txmq.testing.own_broker import OwnBroker
from txmq.testing.processes import running
from txmq.tx.outbox_entry import OutboxEntry, pack_entries
from txmq.tx.postgres.blocking import enqueue, insert_token
from txmq.tx.postgres.outbox import NewOutboxRow

# Those of cluster.md need a Kafka: tests/broker/cluster/test_failover.py has them.
PAGES = sorted(
    page
    for page in (Path(__file__).parents[2] / "docs" / "operations").glob("*.md")
    if page.name != "cluster.md"
)
PASSWORD = "correct-horse-battery"
TOPICS = ("orders", "orders.late", "orders.old")
LETTERS = 9
ERRORS = [
    {"type": name, "text": "no such order", "fingerprint": "f-1"}
    for name in ("TimeoutError", "TooOld", "WrongShop")
]
MODEL = "from pydantic import BaseModel\n\n\nclass Order(BaseModel):\n    amount: int\n"
SETTINGS = """
[broker]
data = "served"
listen = "127.0.0.1:0"
[[resolver]]
name = "shop"
dsn = "{dsn}"
[[xa.database]]
name = "shop"
dsn = "{dsn}"
"""
# they end by a signal; each prints a line before
UNTIL_STOPPED = {
    "broker --config /etc/txmq.toml": signal.SIGTERM,
    "relay run --dsn DSN --broker URL": signal.SIGTERM,
    "resolver --config FILE --broker URL": signal.SIGTERM,
    "xa recover --config FILE --watch": signal.SIGTERM,
    "audit --follow": signal.SIGINT,
}
# what others have done before a command, so that it has something to do
BEFORE = {
    'dlq redrive GROUP --where error:WrongShop --to-group shop-b --abandon --reason "…"': (
        "group reset shop-b orders --to last --yes"
    ),
    "relay accept DSN": "relay create DSN",
    'schema brokers DSN --forget LOG_ID --reason "…"': (
        "schema brokers DSN --take-over LOG_ID --directory ID --reason x"
    ),
}
# exit status 1 where something is found, and the tests' server has fsync off
FINDS = {"doctor --config /etc/txmq.toml", "alarms test"}
RECEIVER = (
    '[[alarms.webhook]]\nname = "nobody"\nurl = "http://127.0.0.1:1/"\n'  # it does not answer
)
UNTIL = "2026-07-01T12:00:00Z"
NUMBERS = count()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnBroker]:
    """A broker with users `root`, an admin, and `shop`."""
    directory = tmp_path_factory.mktemp("operations")
    (directory / "password").write_text(PASSWORD)
    with OwnBroker(directory / "broker", RECEIVER) as made, txmq.connect(made.url) as client:
        for name in TOPICS:
            client.call("topic.create", name=name, partitions=1)
        with peer(made.url) as shop:
            for group in ("billing", "shop-b"):
                shop.call("consumer.join", group=group, member="m", instance="i", topics=["orders"])
        add = ("--role", "admin", "--password-file", str(directory / "password"))
        reply("user", "add", "root", *add, broker=made.url)
        made.url = made.url.replace("//", f"//root:{PASSWORD}@")
        reply("user", "add", "shop", *add, broker=made.url)
        yield made


@dataclass
class Page:
    """What the commands of a page are about: a group with dead letters, and others."""

    broker: OwnBroker
    dsn: str
    group: str
    client: txmq.Client
    shop: Peer
    began: str = field(default_factory=lambda: datetime.now(UTC).isoformat())
    message_id: str = ""
    open: ExitStack = field(default_factory=ExitStack)

    def fill(self) -> None:
        """Make dead letters."""
        for _ in range(LETTERS):
            body = b'{"amount": 1, "order": {"id": 17}}'
            sent = self.client.send("orders", body, key="order-17", headers={"trace": "t"})
            self.message_id = sent.message_id
        self.shop.dead_letters(self.group, "orders", LETTERS, ERRORS)

    def words(self, line: str) -> list[str]:
        """Return the words of a command, with what the page leaves to its reader."""
        values = {
            "GROUP": self.group, "TOPIC": "orders", "NEW": f"new-{next(NUMBERS)}",
            "DSN": self.dsn, "DSN...": self.dsn, "URL": self.broker.url,
            "MESSAGE_ID": self.message_id, "FINGERPRINT": "f-1", "FILE": "txmq.toml",
            "LOG_ID": self.shop.log_id.hex, "ID": uuid4().hex, "/etc/txmq.toml": "txmq.toml",
            "/backup/txmq": "backup", UNTIL: self.began,
        }  # fmt: skip
        if "TOPIC/PARTITION/OFFSET" in line:
            values["TOPIC/PARTITION/OFFSET"] = self.open_letter()
        if "TOKEN" in line:
            values["TOKEN"] = self.shop.half("orders", b"{}", ByChecker("shop"))
        if "SEQ" in line:
            values |= {"SEQ": outbox_row(self.dsn), "FILE": "kept"}
        if "DIR" in line and not line.startswith("recover"):
            values["DIR"] = self.copied()
        if line.startswith(("recover", "retry")):
            values |= self.store(line)
        words = [values.get(word, word) for word in shlex.split(line)]
        if line in UNTIL_STOPPED and words[0] == "audit":  # in another process
            words += ["--broker", self.broker.url]
        return words

    def open_letter(self) -> str:
        """Return the place of an open letter, the same one as long as it is open."""
        is_open = {"states": ["open"]}
        [one] = self.client.call("dlq.list", group=self.group, select=is_open, limit=1)["letters"]
        return "{topic}/{partition}/{offset}".format(**one)

    def copied(self) -> str:
        """Return a directory with a copy of the broker's data."""
        name = f"copied-{next(NUMBERS)}"
        shutil.copytree(self.broker.data, name)
        return name

    def store(self, line: str) -> dict[str, str]:
        """Return what a command needs to know of a local store, whose owner has gone,
        or of what is retried from it; a producer's spool is beside it.
        """
        directory = Path(f"stores-{next(NUMBERS)}").absolute()
        shop = Shop(self.shop, self.broker.url, directory, f"g-{next(NUMBERS)}")
        self.open.callback(shop.store.close)
        if line.startswith("recover"):  # the owner of what is retried hears of it
            shop.leave()
        values = {"GROUP": shop.group, "STORE": shop.id, "DIR": str(directory)}
        values["TOPIC/PARTITION/OFFSET"] = "orders/0/0"
        if "--export" in line:
            values["FILE"] = f"export-{next(NUMBERS)}"
            exported = run("recover", "export", "--data", values["DIR"], "--json")
            Path(values["FILE"]).write_text(exported.stdout)
        if "drain --data" in line or "drop --data" in line:
            values["DIR"] = f"spool-{next(NUMBERS)}"
            with txmq.connect(NOBODY, service="shop", spool=values["DIR"], timeout=0.1) as client:
                assert client.send("orders", b"{}", key="k", partition=0).spooled
        return values


def outbox_row(dsn: str) -> str:
    """Commit a message into the outbox; return the number of its row."""
    token, log_id = new_token(), uuid4()
    batch = encode_one(Message(b"{}"), producer_id=token.bytes, epoch=0, sequence=0, born_at=1)
    with closing(psycopg2.connect(dsn)) as connection, connection, connection.cursor() as cursor:
        insert_token(connection, token, [log_id])
        content = pack_entries([OutboxEntry("orders", None, None, batch)])
        enqueue(connection, [NewOutboxRow(log_id, token, None, "shop", 1, [1], content)])
        cursor.execute("SELECT max(seq) FROM txmq_outbox")
        return str(cursor.fetchall()[0][0])


@contextmanager
def page_of(name: str, broker: OwnBroker, dsn: str) -> Iterator[Page]:
    """What a page is about, for the block."""
    with txmq.connect(broker.url, service="shop") as client, peer(broker.url) as shop:
        made = Page(broker, dsn, f"g-{name}", client, shop)
        made.fill()
        with made.open:
            if name == "letters":
                made.open.enter_context(member(client, made.group, "billing-2"))
            yield made


@contextmanager
def member(client: txmq.Client, group: str, name: str) -> Iterator[None]:
    """A member of a group for the block, which processes whatever it gets."""
    ended = Event()
    with client.consumer(group, topics=["orders"], member=name) as consumer:
        thread = Thread(target=consumer.run, args=(lambda _message: None,), kwargs={"stop": ended})
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logical_database: str) -> Path:
    """The working directory of an operator, with the files that pages name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("EDITOR", "sed -i s/1/2/")
    for name in [name for name in sys.modules if name.partition(".")[0] == "shop"]:
        monkeypatch.delitem(sys.modules, name)
    Path("shop").mkdir()
    for name in ("orders", "models"):
        Path("shop", f"{name}.py").write_text(MODEL)
    Path("order.json").write_text('{"amount": 3}')
    Path("txmq.toml").write_text(SETTINGS.format(dsn=logical_database))
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_do_what_it_says(
    page: Path,
    broker: OwnBroker,
    directory: Path,
    logical_database: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TXMQ_BROKER", broker.url)
    failed: dict[str, str] = {}
    with page_of(page.stem, broker, logical_database) as world:
        for line in command_lines(page.read_text("utf-8")):
            if line in BEFORE:
                assert run(*world.words(BEFORE[line])).exit_code == 0
            if line in UNTIL_STOPPED:
                run_until_stopped(directory, world.words(line), UNTIL_STOPPED[line])
                continue
            result = run(*world.words(line), stdin="y\n")
            if result.exit_code not in ({0, 1} if line in FINDS else {0}):
                failed[line] = result.stdout + result.stderr
            if line == "config export":
                Path("cluster.json").write_text(result.stdout)
    assert failed == {}, "\n".join(f"{line}: {said}" for line, said in failed.items())


def run_until_stopped(directory: Path, words: list[str], stop: signal.Signals) -> None:
    """Run a command in a process of its own until it has printed a line."""
    with running(directory / f"process-{next(NUMBERS)}", *words) as process:
        assert process.first_line()
        assert process.terminate(stop) == 0

"""Reconciliation of a broker with a database.

It covers all classes of letters, rows without messages, and the replay of the plan.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID, uuid4

import psycopg2
import pytest

import txmq
from tests.cli.support import run
from tests.fixtures_postgres import Databases
from tests.spark.consuming import drain
from txmq.client.protocol import conversation
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import ConfigError, LogChanged, UnknownTopic
from txmq.model.decider import ByJob, ByPostgres
from txmq.model.message import ReceivedMessage
from txmq.testing.own_broker import OwnBroker
from txmq.testing.postgres_server import PostgresServer
from txmq.testing.wait import PATIENCE_S
from txmq.tx.postgres.blocking import claim, read_server
from txmq.tx.postgres.inbox import Position
from txmq.tx.postgres.session import connect, transaction
from txmq.wire.bundle import (
    NO_DIGEST,
    BundleDescription,
    BundlePart,
    bundle_digest,
    pack_part,
)
from txmq.wire.data_requests import Opcode
from txmq_spark import reconcile
from txmq_spark.commands import plan_commands
from txmq_spark.commands.command_line import main
from txmq_spark.database import snapshot as database_snapshot
from txmq_spark.database.mapping import BusinessTable, Mapping
from txmq_spark.evidence import token_states
from txmq_spark.evidence.inputs import fix_inputs, mapping_of_read, require_same_topics
from txmq_spark.plan.directory import MADE, read_plan
from txmq_spark.plan.parts import PlacedLetters, in_parts
from txmq_spark.plan.rules import SAFE, LetterClass, PlanRules
from txmq_spark.plan.summary import MissingMessage
from txmq_spark.reconcile import ReconcileOptions, Reconciliation, reconciled
from txmq_spark.source.broker_link import BrokerLink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ORDERS, REFUNDS, GROUP = "orders", "refunds", "billing"
OLD = UUID("01890000-0000-7000-8000-000000000001")  # of 2023
SETTINGS = """
[broker]
partitions = 1
[[resolver]]
name = "shop"
dsn = "{dsn}"
"""


KILL = """
SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
WHERE application_name = %s AND datname = current_database()
"""


class ReconciledShop(NamedTuple):
    """A broker, and the database of a service."""

    broker: OwnBroker
    dsn: str
    client: txmq.Client

    @property
    def url(self) -> str:
        return self.broker.url


@contextmanager
def open_shop(directory: Path, database: str) -> Iterator[ReconciledShop]:
    settings = SETTINGS.format(dsn=database.replace("\\", "\\\\"))
    with OwnBroker(directory, settings) as broker:
        with (
            closing(connect(database, application_name="tests")) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute("CREATE TABLE orders (id text PRIMARY KEY, version int8 NOT NULL)")
            cursor.execute("CREATE TABLE effects (body text)")
        with txmq.connect(broker.url, service="shop", timeout=PATIENCE_S) as client:
            yield ReconciledShop(broker, database, client)


def order(shop: ReconciledShop, key: str, version: int = 1) -> None:
    """Write an order and send its message in one transaction."""
    with (
        closing(psycopg2.connect(shop.dsn)) as connection,
        shop.client.transaction(connection) as tx,
    ):
        with connection.cursor() as cursor:
            cursor.execute(
                "INSERT INTO orders VALUES (%s, %s)"
                " ON CONFLICT (id) DO UPDATE SET version = excluded.version",
                (key, version),
            )
        tx.send(ORDERS, f"{key} {version}".encode(), key=key, headers={"version": str(version)})
    tx.wait_published(PATIENCE_S)


def execute(shop: ReconciledShop, statement: str, *values: object) -> None:
    with (
        closing(connect(shop.dsn, application_name="tests")) as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute(statement, values)


def apply(shop: ReconciledShop, message: ReceivedMessage) -> None:
    """Apply the effect of a message once."""
    with (
        closing(connect(shop.dsn, application_name="tests")) as connection,
        transaction(connection) as cursor,
    ):
        position = next(
            Position(
                GROUP, str(shop.client.log_id), place["topic_id"], message.partition, place["epoch"]
            )
            for place in shop.client.call("group.show", group=GROUP)["positions"]
            if (place["topic"], place["partition"]) == message[:2]
        )
        if claim(cursor.connection, {position: [message.offset]}):
            cursor.execute("INSERT INTO effects VALUES (%s)", (message.body.decode(),))


def effects(shop: ReconciledShop) -> list[str]:
    with (
        closing(connect(shop.dsn, application_name="tests")) as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute("SELECT body FROM effects")
        return sorted(body for (body,) in cursor.fetchall())


def consume(shop: ReconciledShop, dead: frozenset[str], lost: frozenset[str] = frozenset()) -> None:
    """Consume with an inbox.

    Messages in `dead` fail, those in `lost` after their effect was committed.
    """

    def good(message: ReceivedMessage) -> bool:
        body = message.body.decode()
        if body not in dead - lost:
            apply(shop, message)
        return body not in dead

    def reason(message: ReceivedMessage) -> str:
        return "it makes no sense" if message.key == "bad" else "the service it needs was not there"

    drain(shop.client, GROUP, ORDERS, good, "concurrent", reason)


def question(shop: ReconciledShop, **fields: object) -> ReconcileOptions:
    mapping = Mapping(tables=(BusinessTable(name="orders", key="id"),))
    asked = ReconcileOptions(shop.url, (GROUP,), shop.dsn, mapping=mapping)
    return asked._replace(**fields)  # type: ignore[arg-type] # fields of a question


DEAD = frozenset(
    {"fine 1", "chain 1", "chain 2", "applied 1", "old 1", "gone 1", "ghost 1", "busy 1", "bad 1"}
)
CLASSES = {
    "fine": LetterClass.REPLAY_ALONE,
    "chain": LetterClass.REPLAY_CHAIN,
    "applied": LetterClass.APPLIED,
    "old": LetterClass.SUPERSEDED,
    "gone": LetterClass.NO_BUSINESS_ROW,
    "ghost": LetterClass.NO_BUSINESS_ROW,
    "busy": LetterClass.PENDING,
    "bad": LetterClass.POISON,
    None: LetterClass.POISON,  # its body does not fit the schema of its topic
}


@contextmanager
def failed_shop(
    directory: Path, postgres: PostgresServer, databases: Databases
) -> Iterator[ReconciledShop]:
    """Yield a shop whose consumer has failed in each way."""
    name = databases.borrow()
    with open_shop(directory, postgres.dsn(name)) as shop:
        for key in (*filter(None, CLASSES), "well"):
            order(shop, key)
        order(shop, "chain", 2)
        order(shop, "old", 2)
        consume(shop, DEAD, frozenset({"applied 1"}))
        shop.client.send(REFUNDS, b"no JSON")
        drain(shop.client, GROUP, REFUNDS, lambda _message: False, "concurrent")
        shop.client.call("topic.schema", name=REFUNDS, json_schema='{"type": "object"}')
        execute(shop, "DELETE FROM orders WHERE id = 'gone'")
        execute(shop, "DELETE FROM txmq_token WHERE tok = %s", str(token_of_letter(shop, "ghost")))
        reserve(shop, "busy")
        yield shop
    databases.give_back(name)


@pytest.fixture(scope="module")
def failed(
    tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer, databases: Databases
) -> Iterator[ReconciledShop]:
    """Such a shop, of which no test changes what is reconciled."""
    with failed_shop(tmp_path_factory.mktemp("failed"), postgres, databases) as shop:
        yield shop


def letter(shop: ReconciledShop, key: str) -> dict[str, object]:
    with BrokerLink(shop.url) as link:
        [found] = [one for one in link.letters(GROUP, bodies=False) if one["key"] == key]
    return found


def token_of_letter(shop: ReconciledShop, key: str) -> UUID:
    return UUID(str(letter(shop, key)["message_id"]).partition("-")[0])


def reserve(shop: ReconciledShop, key: str) -> UUID:
    """Store an undecided replay of another transaction."""
    one, token = letter(shop, key), new_token()
    action = ("replay", GROUP, one["topic"], one["partition"], one["offset"])
    store(shop, token, BundleDescription(ByJob(new_token().bytes), actions=(action,)))
    return token


def store(shop: ReconciledShop, token: UUID, description: BundleDescription) -> None:
    part = BundlePart(
        token.bytes,
        0,
        0,
        sealed=True,
        commit=False,
        digest=NO_DIGEST,
        description=description,
        batches=(),
    )
    whole = pack_part(part._replace(digest=bundle_digest([part])))
    shop.client._core.request(Opcode.GROUP, whole)


def classes_of(found: Reconciliation) -> dict[str, LetterClass]:
    return {row["key"]: LetterClass(row["class"]) for row in found.letters.collect()}


class Reconciled(NamedTuple):
    """What the command has done: in a first run, and in another one."""

    directory: Path
    deaths: tuple[str, ...]  # one in each run
    errors: str  # of the first run
    out: str  # of the second
    kept: int  # frames that the session keeps behind both

    @property
    def plan(self) -> Path:
        return self.directory / "plan"


@pytest.fixture(scope="module")
def made(
    spark: SparkSession, failed: ReconciledShop, tmp_path_factory: pytest.TempPathFactory
) -> Reconciled:
    """A plan by the command, whose servers die.

    PostgreSQL ends the connections of the first run's tasks and its snapshot, once the
    letters are there. In the second run the broker is killed behind the letters and
    before the log, and serves again.
    """
    directory, deaths = tmp_path_factory.mktemp("made"), list[str]()

    def killing(letters: DataFrame) -> PlacedLetters:
        if deaths:
            failed.broker.restart()
            deaths.append("broker")
        else:
            execute(failed, KILL, "txmq reconcile")
            deaths.append("database")
        return in_parts(letters)

    asked = arguments(failed, directory)
    out, errors, kept = io.StringIO(), io.StringIO(), frames_kept(spark)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(errors):
        patch.setattr(plan_commands, "job_session", lambda: nullcontext(spark))
        patch.setattr(reconcile, "in_parts", killing)
        patch.setenv("TXMQ_DSN", failed.dsn)
        assert main(["reconcile", *asked]) == 1
        assert not (directory / "plan").exists()
        assert main(["reconcile", *asked]) == 0
    kept = frames_kept(spark) - kept
    return Reconciled(directory, tuple(deaths), errors.getvalue(), out.getvalue(), kept)


def arguments(shop: ReconciledShop, directory: Path) -> list[str]:
    """Return those of the command, for a plan in a directory and one of the broker."""
    mapping = directory / "shop.toml"
    mapping.write_text('[[table]]\nname = "orders"\nkey = "id"\n')
    bad = str(letter(shop, "bad")["fingerprint"])
    assert bad != str(letter(shop, "fine")["fingerprint"]), "the failures look different"
    asked = [f"--broker={shop.url}", f"--plan={directory / 'plan'}", f"--group={GROUP}"]
    asked += [f"--mapping={mapping}", f"--report={directory / 'report.html'}"]
    asked += ["--include=applied", f"--poison-fingerprint={bad}"]
    return [*asked, "--table=public.plans", "--broker-plan=night", "--operator=ada"]


def frames_kept(spark: SparkSession) -> int:
    """Return the number of frames that the session keeps on executors' disks."""
    kept = spark._jsparkSession.sharedState().cacheManager().numCachedEntries()
    return int(kept)


def test_a_job_whose_broker_or_database_dies_changes_nothing_and_runs_again(
    failed: ReconciledShop, made: Reconciled
) -> None:
    assert made.deaths == ("database", "broker")
    assert made.kept == 0
    assert "reading the database" in made.errors
    assert failed.broker.starts == 2
    assert failed.client.call("dlq.stats", group=GROUP)["letters"] == len(DEAD) + 1


def test_every_letter_gets_its_class(
    spark: SparkSession, failed: ReconciledShop, made: Reconciled
) -> None:
    plan = read_plan(spark, str(made.plan))
    letters = plan.letters.collect()
    assert {row["key"]: LetterClass(row["class"]) for row in letters} == CLASSES
    replayed = ["applied", "chain", "chain", "fine"]
    assert sorted(row["key"] for row in letters if row["replay"]) == replayed
    [unfit] = [row["reason"] for row in letters if row["key"] is None]
    assert unfit.startswith("its body does not fit the schema of its topic: the body is no JSON")
    facts = plan.manifest.facts
    assert (facts.groups, facts.ends) == ((GROUP,), {ORDERS: (len(DEAD) + 2,), REFUNDS: (1,)})
    assert facts.evidence == ("applied", "tokens", "business")
    assert "Dead letters of billing" in made.out
    assert f"table: public.plans ({len(letters)} rows), broker: night" in made.out
    assert (made.directory / "report.html").read_text().startswith("<!doctype html>")
    shown = failed.client.call("plan.show", name="night")
    assert (shown["state"], shown["letters"], shown["by"][:3]) == ("planned", 4, "ada")
    with closing(connect(failed.dsn, application_name="tests")) as connection:
        cursor = connection.cursor()
        cursor.execute("SELECT key, class FROM plans WHERE replay ORDER BY key")
        assert [key for key, _class in cursor] == replayed


def test_the_same_data_make_the_same_plan(
    spark: SparkSession,
    failed: ReconciledShop,
    made: Reconciled,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With other tasks than those of the command, which met a restart of the broker."""
    monkeypatch.setattr(database_snapshot, "TASK_PAGES", 1)
    monkeypatch.setattr(token_states, "TOKENS_PER_CALL", 1)
    spark.conf.set("spark.sql.shuffle.partitions", 3)
    rules = PlanRules(
        include=SAFE | {LetterClass.APPLIED},
        fingerprints=frozenset({str(letter(failed, "bad")["fingerprint"])}),
    )
    other = tmp_path / "other"
    with reconciled(spark, question(failed, rules=rules)) as found:
        found.write(str(other))
        assert found.summary.letters == len(DEAD) + 1
        assert found.summary.missing == {("row", "missing"): 1}
    spark.conf.set("spark.sql.shuffle.partitions", 2)
    files = [
        {one.name: one.read_bytes() for one in path.glob("*.json")} for path in (made.plan, other)
    ]
    for plan in files:
        assert json.loads(plan.pop(MADE))["snapshot_at"]
    assert files[0] == files[1]


def test_without_a_database_letters_are_the_only_evidence(
    spark: SparkSession, failed: ReconciledShop
) -> None:
    """Of two groups, one without letters."""
    drain(failed.client, "audit", ORDERS)
    with reconciled(spark, ReconcileOptions(failed.url, (GROUP, "audit"))) as found:
        assert classes_of(found) == dict.fromkeys(CLASSES, LetterClass.REPLAY_ALONE) | {
            "chain": LetterClass.REPLAY_CHAIN,
            "busy": LetterClass.PENDING,
            None: LetterClass.POISON,
        }
        assert (missing(found), found.manifest.facts.evidence) == ((), ())
        assert found.manifest.replays == {"audit": 0, GROUP: len(DEAD) - 1}


def test_a_plan_is_replayed_once_by_the_command(
    spark: SparkSession,
    postgres: PostgresServer,
    databases: Databases,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(plan_commands, "job_session", lambda: nullcontext(spark))
    at_once = ["--rate=0", "--ramp=0"]
    with failed_shop(tmp_path / "shop", postgres, databases) as shop:
        monkeypatch.setenv("TXMQ_DSN", shop.dsn)
        assert main(["reconcile", *arguments(shop, tmp_path)]) == 0
        capsys.readouterr()
        asked = [f"--broker={shop.url}", f"--plan={tmp_path / 'plan'}", "--operator=ada"]
        assert main(["replay", *asked, "--dry-run"]) == 0
        assert capsys.readouterr().out == "4 planned\n"
        shop.client.call("plan.cancel", name="night")
        assert main(["replay", *asked, *at_once, "--no-wait"]) == 0
        assert "plan spark-" in capsys.readouterr().out
        consume(shop, frozenset())
        assert effects(shop) == ["applied 1", "chain 1", "chain 2", "fine 1", "old 2", "well 1"]
        assert main(["replay", *asked, *at_once]) == 0
        assert "4 processed" in capsys.readouterr().out
        assert main(["replay", *asked, "--plan=/etc", "--dry-run"]) == 1
    assert (
        "/etc has no plan.json (name a directory that reconcile wrote)" in capsys.readouterr().err
    )
    with pytest.raises(SystemExit) as wrong:
        main(["replay", *asked, "--canary=0"])
    assert wrong.value.code == 2


def test_what_could_not_be_written_in_the_end_is_refused_at_the_beginning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--group=g", f"--plan={tmp_path}"]
    wrong = {
        f"--report={tmp_path}/missing/page.html": f"no file can be made in {tmp_path}/missing",
        "--table=plans": "a database is needed",
        "--table=a.b.c": "none of a table",
    }
    for option, says in wrong.items():
        dsn = ["--dsn=host=nowhere"] if "." in option else ["--dsn="]
        assert main(["reconcile", *asked, *dsn, option]) == 1
        assert says in capsys.readouterr().err
    for option in ("--name=n", "--rate=5", "--ramp=0", "--canary=3", "--pause"):
        assert main(["replay", "--plan=p", "--to-topic=t", option]) == 1
        told = capsys.readouterr().err
        assert told.startswith(f"txmq: {option.partition('=')[0]}: ")
        assert "leave it out" in told


def test_a_directory_that_is_no_plan_is_refused_before_the_work(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def worked(*_asked: object) -> None:
        pytest.fail("it has begun")

    monkeypatch.setattr(plan_commands, "job_session", lambda: nullcontext(spark))
    monkeypatch.setattr(plan_commands, "reconciled", worked)
    (tmp_path / "photo.jpg").touch()
    for place, says in (
        (str(tmp_path), "photo.jpg, which is of no plan"),
        ("s3a://bucket/plan", "S3AFileSystem not found"),
    ):
        assert main(["reconcile", "--group=g", f"--plan={place}"]) == 1
        assert says in capsys.readouterr().err


def test_a_mapping_of_an_unknown_topic_is_refused(
    broker: str, topic: str, client: txmq.Client
) -> None:
    client.send(topic, b"x")
    tables = tuple(
        BusinessTable(name=name, key="id", topics=(name,)) for name in (topic, "typing error")
    )
    with BrokerLink(broker) as link:
        assert mapping_of_read(link, Mapping(tables=tables[:1]), {topic}).tables == tables[:1]
        assert mapping_of_read(link, Mapping(tables=tables[:1]), ["elsewhere"]).tables == ()
        with pytest.raises(ConfigError, match="the broker has no topic typing error"):
            mapping_of_read(link, Mapping(tables=tables), {topic})


def test_a_topic_that_is_made_again_meanwhile_ends_the_job(
    broker: str, topic: str, client: txmq.Client
) -> None:
    client.send(topic, b"x")
    drain(client, topic, topic)
    with BrokerLink(broker) as link:
        inputs = fix_inputs(link, None, (topic,))
        require_same_topics(inputs)
        client.call("topic.delete", name=topic)
        with pytest.raises(UnknownTopic):
            require_same_topics(inputs)
        client.call("topic.create", name=topic, partitions=1)
        with pytest.raises(LogChanged, match="made again meanwhile"):
            require_same_topics(inputs)


@pytest.fixture
def shop(tmp_path: Path, database: str) -> Iterator[ReconciledShop]:
    with open_shop(tmp_path / "broker", database) as shop:
        yield shop


def test_versions_and_queries_are_evidence_and_rows_without_messages_are_found(
    spark: SparkSession, shop: ReconciledShop
) -> None:
    execute(shop, "CREATE TABLE billed (id text, version int)")
    execute(shop, "ALTER TABLE orders ADD writer uuid")
    dead = ("new", "same", "old", "moved")
    for key in (*dead, "told", "gone"):
        order(shop, key, 3)
    consume(shop, frozenset(f"{key} 3" for key in dead))
    execute(shop, "INSERT INTO billed VALUES ('new', 2), ('same', 3), ('old', 4)")
    execute(shop, "UPDATE orders SET version = 9 WHERE id = 'moved'")
    execute(shop, "UPDATE orders SET writer = %s WHERE id = 'told'", str(OLD))
    execute(shop, "UPDATE orders SET writer = %s WHERE id = 'new'", str(uuid4()))  # no token
    execute(shop, "INSERT INTO orders VALUES ('untold', 1)")
    execute(shop, "DELETE FROM orders WHERE id = 'gone'")
    lost, waiting = tokens_without_their_messages(shop)
    kept = frames_kept(spark)
    mapping = Mapping(
        tables=(
            BusinessTable(name="orders", key="id", version="version", token="writer"),
            BusinessTable(name="billed", key="id", topics=("other",)),  # which nobody reads
        ),
        version="header:version",
        applied="SELECT id AS key, version FROM billed",
    )
    with reconciled(spark, question(shop, mapping=mapping)) as found:
        assert classes_of(found) == {
            "new": LetterClass.REPLAY_ALONE,
            "same": LetterClass.APPLIED,
            "old": LetterClass.SUPERSEDED,
            "moved": LetterClass.SUPERSEDED,
        }
        assert {(one.what, one.table, one.name, one.state) for one in missing(found)} == {
            ("transaction", None, lost.hex, "missing"),
            ("transaction", None, waiting.hex, "pending"),
            ("transaction", None, OLD.hex, "forgotten"),
            ("key", "orders", "untold", "missing"),
            ("row", "orders", "gone", "missing"),
        }
    assert frames_kept(spark) == kept
    wrong = (
        ({"key": "idd"}, "it has no column idd, only id, version"),
        ({"key": "id", "version": "id"}, "column id is of type text"),
        ({"key": "id", "topics": ["ordres"]}, "the broker has no topic ordres"),
    )
    for columns, says in wrong:
        bad = Mapping.model_validate({"table": [{"name": "orders", **columns}]})
        with (
            pytest.raises(ConfigError, match=says),
            reconciled(spark, question(shop, mapping=bad)),
        ):
            pytest.fail("it was read")


def test_rows_whose_messages_a_restored_log_has_lost_are_found(
    spark: SparkSession, shop: ReconciledShop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order(shop, "kept")
    consume(shop, frozenset())
    backup = str(tmp_path / "backup")
    assert run("log", "backup", backup, "--broker", shop.url).exit_code == 0
    order(shop, "lost")
    shop.broker.kill()
    shutil.rmtree(shop.broker.data)
    assert run("log", "restore", backup, "--data", str(shop.broker.data)).exit_code == 0
    shop.broker.start()
    for name in ("_newest_epochs", "_incarnations"):  # as in a new process
        monkeypatch.setattr(conversation, name, {})
    listed = run("log", "lost", shop.dsn, "--json", "--broker", shop.url).stdout
    [commit] = json.loads(listed)["transactions"]
    with reconciled(spark, question(shop)) as found:
        assert {(one.what, one.table, one.name, one.state) for one in missing(found)} == {
            ("transaction", None, commit["token"], "missing"),
            ("key", "orders", "lost", "missing"),
        }


def tokens_without_their_messages(shop: ReconciledShop) -> tuple[UUID, UUID]:
    """Write rows of a lost transaction and of a waiting one; and of others, whose
    messages are in another topic or log.
    """
    with BrokerLink(shop.url) as link:
        log_id = link.log_id
    lost, waiting, elsewhere = new_token(), new_token(), new_token()
    with closing(connect(shop.dsn, application_name="tests")) as connection:
        server = read_server(connection).identity
    hour = 3_600_000_000
    store(
        shop,
        waiting,
        BundleDescription(ByPostgres(*server, xid=None, position=1), check_after=hour),
    )
    with shop.client.transaction() as tx:
        tx.send("other", b"x")
    logs = dict.fromkeys((lost, waiting, tx.token), log_id) | {elsewhere: str(new_token())}
    for token, log in logs.items():
        execute(shop, "INSERT INTO txmq_token (tok, log_id) VALUES (%s, %s)", str(token), log)
    return lost, waiting


def missing(found: Reconciliation) -> tuple[MissingMessage, ...]:
    return found.summary.missing_samples

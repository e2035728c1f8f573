"""Reconciliation of a broker with a database.

It covers all classes of letters, rows without messages, and the replay of the plan.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID

import psycopg2
import pytest

import txmq
from tests.spark.consuming import drain
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import ConfigError, TxmqError
from txmq.model.decider import ByJob, ByPostgres
from txmq.model.message import ReceivedMessage
from txmq.testing.own_broker import OwnBroker
from txmq.tx.postgres.blocking import claim, read_server
from txmq.tx.postgres.inbox import Position
from txmq.tx.postgres.session import connect, transaction
from txmq.wire.bundle import NO_DIGEST, BundleDescription, BundlePart, bundle_digest
from txmq_spark import database_snapshot, reconcile, token_states
from txmq_spark.broker_link import BrokerLink
from txmq_spark.command_line import reconcile_main, replay_main
from txmq_spark.mapping import BusinessTable, Mapping
from txmq_spark.plan import LetterClass, PlanRules
from txmq_spark.plan_directory import MADE, PlacedLetters, in_parts
from txmq_spark.plan_summary import MissingMessage
from txmq_spark.reconcile import ReconcileOptions, Reconciliation, reconciled
from txmq_spark.replay import ReplayOptions, replay

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.timeout(300)  # includes the start of a JVM on a loaded machine
ORDERS, GROUP = "orders", "billing"
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


@pytest.fixture
def shop(tmp_path: Path, database: str) -> Iterator[ReconciledShop]:
    with OwnBroker(
        tmp_path / "broker", SETTINGS.format(dsn=database.replace("\\", "\\\\"))
    ) as broker:
        with (
            closing(connect(database, application_name="tests")) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute("CREATE TABLE orders (id text PRIMARY KEY, version int8 NOT NULL)")
        with txmq.connect(broker.url, service="shop") as client:
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
    tx.wait_published(30)


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
}


@pytest.fixture
def failed(shop: ReconciledShop) -> ReconciledShop:
    """A shop whose consumer has failed in each way."""
    execute(shop, "CREATE TABLE effects (body text)")
    for key in (*CLASSES, "well"):
        order(shop, key)
    order(shop, "chain", 2)
    order(shop, "old", 2)
    consume(shop, DEAD, frozenset({"applied 1"}))
    execute(shop, "DELETE FROM orders WHERE id = 'gone'")
    execute(shop, "DELETE FROM txmq_token WHERE tok = %s", str(token_of_letter(shop, "ghost")))
    reserve(shop, "busy")
    return shop


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
    with BrokerLink(shop.url) as link:
        link.store(part._replace(digest=bundle_digest([part])))


def classes_of(found: Reconciliation) -> dict[str, LetterClass]:
    return {row["key"]: LetterClass(row["class"]) for row in found.letters.collect()}


def test_every_letter_gets_its_class_and_what_is_safe_is_replayed_once(
    spark: SparkSession, failed: ReconciledShop, tmp_path: Path
) -> None:
    shop = failed
    rules = PlanRules(fingerprints=frozenset({str(letter(shop, "bad")["fingerprint"])}))
    prints = {str(letter(shop, key)["fingerprint"]) for key in ("bad", "fine")}
    assert len(prints) == 2, "the failures look different"
    with reconciled(spark, question(shop, rules=rules)) as found:
        assert classes_of(found) == CLASSES
        plan = found.write(str(tmp_path / "plan"))
        assert found.summary.letters == len(DEAD)
        assert found.summary.missing == {("row", "missing"): 1}
        facts = plan.manifest.facts
        assert (facts.groups, facts.ends) == ((GROUP,), {ORDERS: (len(CLASSES) + 3,)})
        assert facts.evidence == ("applied", "tokens", "business")
        replayed = plan.letters.where("replay").collect()
        assert sorted(row["key"] for row in replayed) == ["chain", "chain", "fine"]
        options = ReplayOptions(shop.url, settings={"rate": 0, "stop_after": 0}, wait=False)
        assert replay(plan, options).plans[0]["letters"] == 3
    consume(shop, frozenset())
    assert effects(shop) == ["applied 1", "chain 1", "chain 2", "fine 1", "old 2", "well 1"]
    assert replay(plan, options._replace(wait=True)).counts == {"processed": 3}


def test_the_same_data_make_the_same_plan(
    spark: SparkSession, failed: ReconciledShop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_snapshot, "TASK_PAGES", 1)
    monkeypatch.setattr(token_states, "TOKENS_PER_CALL", 1)
    with reconciled(spark, question(failed)) as one:
        one.write(str(tmp_path / "one"))
    monkeypatch.undo()
    spark.conf.set("spark.sql.shuffle.partitions", 5)
    with reconciled(spark, question(failed)) as other:
        other.write(str(tmp_path / "other"))
    spark.conf.set("spark.sql.shuffle.partitions", 2)
    files = [
        {one.name: one.read_bytes() for one in (tmp_path / name).glob("*.json")}
        for name in ("one", "other")
    ]
    for plan in files:
        assert json.loads(plan.pop(MADE))["snapshot_at"]
    assert files[0] == files[1]
    assert one.manifest.digest == other.manifest.digest


def test_a_job_whose_broker_or_database_dies_changes_nothing_and_runs_again(
    spark: SparkSession,
    failed: ReconciledShop,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The broker is killed behind the letters and before the log, and serves again.

    The connections of a server that dies go with it: so do those of the first run's
    tasks and its snapshot, once the letters are there.
    """
    deaths: list[str] = []

    def killing(letters: DataFrame) -> PlacedLetters:
        if deaths:
            failed.broker.restart()
            deaths.append("broker")
        else:
            execute(failed, KILL, "txmq reconcile")
            deaths.append("database")
        return in_parts(letters)

    monkeypatch.setattr(reconcile, "in_parts", killing)
    path = tmp_path / "plan"
    with pytest.raises(TxmqError, match="reading the database"):
        reconcile.reconcile(spark, question(failed), str(path))
    assert not path.exists()
    found = reconcile.reconcile(spark, question(failed), str(path))
    assert deaths == ["database", "broker"]
    assert failed.broker.starts == 2
    assert classes_of(found) == CLASSES | {"bad": LetterClass.REPLAY_ALONE}
    assert failed.client.call("dlq.stats", group=GROUP)["letters"] == len(DEAD)


def test_rows_without_messages_are_found(spark: SparkSession, shop: ReconciledShop) -> None:
    order(shop, "told")
    drain(shop.client, GROUP, ORDERS)
    execute(shop, "INSERT INTO orders VALUES ('untold', 1)")
    with BrokerLink(shop.url) as link:
        log_id = link.log_id
    lost, waiting, elsewhere = new_token(), new_token(), new_token()
    with closing(connect(shop.dsn, application_name="tests")) as connection:
        server = read_server(connection).identity
    hour = 3_600_000_000
    store(shop, waiting, BundleDescription(ByPostgres(*server, xid=None), check_after=hour))
    with shop.client.transaction() as tx:
        tx.send("other", b"x")
    for token in (lost, waiting, tx.token):
        execute(shop, "INSERT INTO txmq_token (tok, log_id) VALUES (%s, %s)", str(token), log_id)
    execute(
        shop,
        "INSERT INTO txmq_token (tok, log_id) VALUES (%s, %s)",
        str(elsewhere),
        str(new_token()),
    )
    execute(
        shop,
        "ALTER TABLE orders ADD writer uuid; UPDATE orders SET writer = %s WHERE id = 'told'",
        str(OLD),
    )
    order(shop, "gone")
    execute(shop, "DELETE FROM orders WHERE id = 'gone'")
    tables = (BusinessTable(name="orders", key="id", token="writer"),)
    with reconciled(spark, question(shop, mapping=Mapping(tables=tables))) as found:
        assert {(one.what, one.table, one.name, one.state) for one in missing(found)} == {
            ("transaction", None, lost.hex, "missing"),
            ("transaction", None, waiting.hex, "pending"),
            ("transaction", None, OLD.hex, "forgotten"),
            ("key", "orders", "untold", "missing"),
            ("row", "orders", "gone", "missing"),
        }


def test_versions_and_queries_are_evidence(spark: SparkSession, shop: ReconciledShop) -> None:
    execute(shop, "CREATE TABLE effects (body text); CREATE TABLE billed (id text, version int)")
    for key, version in (("new", 3), ("same", 3), ("old", 3), ("moved", 3)):
        order(shop, key, version)
    consume(shop, frozenset({"new 3", "same 3", "old 3", "moved 3"}))
    execute(shop, "INSERT INTO billed VALUES ('new', 2), ('same', 3), ('old', 4)")
    execute(shop, "UPDATE orders SET version = 9 WHERE id = 'moved'")
    mapping = Mapping(
        tables=(BusinessTable(name="orders", key="id", version="version"),),
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
    unread = mapping.model_copy(update={"version": "json:v", "applied": None})
    with reconciled(spark, question(shop, mapping=unread)) as found:
        assert set(classes_of(found).values()) == {LetterClass.POISON}
    wrong = (
        ({"key": "idd"}, "it has no column idd, only id, version"),
        ({"key": "id", "version": "id"}, "column id is of type text"),
    )
    for columns, says in wrong:
        bad = Mapping.model_validate({"table": [{"name": "orders", **columns}]})
        with (
            pytest.raises(ConfigError, match=says),
            reconciled(spark, question(shop, mapping=bad)),
        ):
            pytest.fail("it was read")


def missing(found: Reconciliation) -> tuple[MissingMessage, ...]:
    return found.summary.missing_samples


def test_without_a_database_letters_are_the_only_evidence(
    spark: SparkSession, failed: ReconciledShop
) -> None:
    """Of two groups, one without letters."""
    drain(failed.client, "audit", ORDERS)
    with reconciled(spark, ReconcileOptions(failed.url, (GROUP, "audit"))) as found:
        assert classes_of(found) == dict.fromkeys(CLASSES, LetterClass.REPLAY_ALONE) | {
            "chain": LetterClass.REPLAY_CHAIN,
            "busy": LetterClass.PENDING,
        }
        assert (missing(found), found.manifest.facts.evidence) == ((), ())
        assert found.manifest.replays == {"audit": 0, GROUP: len(DEAD) - 1}
    failed.client.call("topic.schema", name=ORDERS, json_schema='{"type": "object"}')
    with reconciled(spark, ReconcileOptions(failed.url, (GROUP,))) as found:
        reasons = {row["key"]: row["reason"] for row in found.letters.collect()}
    assert reasons.pop("busy") == "an undecided transaction acks or replays it"
    begin = "its body does not fit the schema of its topic: the body is no JSON"
    assert all(reason.startswith(begin) for reason in reasons.values())
    assert len(reasons) == len(CLASSES) - 1


def test_the_jobs_run_from_the_command_line(
    spark: SparkSession,
    failed: ReconciledShop,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from contextlib import nullcontext

    from txmq_spark import job_options

    monkeypatch.setattr(job_options, "job_session", lambda: nullcontext(spark))
    monkeypatch.setenv("TXMQ_DSN", failed.dsn)
    plan, report = tmp_path / "plan", tmp_path / "report.html"
    mapping = tmp_path / "shop.toml"
    mapping.write_text('[[table]]\nname = "orders"\nkey = "id"\n')
    asked = [f"--url={failed.url}", f"--plan={plan}"]
    told = [f"--group={GROUP}", f"--mapping={mapping}", f"--report={report}", "--include=applied"]
    more = ["--table=public.plans", "--broker-plan=night", "--operator=ada"]
    assert reconcile_main([*asked, *told, *more]) == 0
    out = capsys.readouterr().out
    assert "Dead letters of billing" in out
    assert "table: public.plans (9 rows), broker: night" in out
    assert report.read_text().startswith("<!doctype html>")
    shown = failed.client.call("plan.show", name="night")
    assert (shown["state"], shown["letters"], shown["by"][:3]) == ("planned", 5, "ada")
    with closing(connect(failed.dsn, application_name="tests")) as connection:
        cursor = connection.cursor()
        cursor.execute("SELECT key, class FROM plans WHERE replay ORDER BY key")
        assert [key for key, _class in cursor] == ["applied", "bad", "chain", "chain", "fine"]
    assert replay_main([*asked, "--dry-run"]) == 0
    assert capsys.readouterr().out == "5 planned\n"
    assert replay_main([*asked, "--name=night", "--rate=100", "--no-wait", "--operator=ada"]) == 0
    assert "plan night: " in capsys.readouterr().out
    assert replay_main([*asked, "--plan=/etc", "--dry-run"]) == 1
    assert (
        "/etc has no plan.json (name a directory that reconcile wrote)" in capsys.readouterr().err
    )
    with pytest.raises(SystemExit) as wrong:
        replay_main([*asked, "--canary=0"])
    assert wrong.value.code == 2

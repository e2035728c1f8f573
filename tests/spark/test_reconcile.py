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
from txmq.model.decider import ByJob, ByPostgres
from txmq.model.message import ReceivedMessage
from txmq.testing.own_broker import OwnBroker
from txmq.tx.postgres.blocking import claim, read_server
from txmq.tx.postgres.inbox import Position
from txmq.tx.postgres.session import connect, transaction
from txmq.wire.bundle import NO_DIGEST, BundleDescription, BundlePart, bundle_digest
from txmq_spark.broker_link import BrokerLink
from txmq_spark.command_line import reconcile_main, replay_main
from txmq_spark.database_tables import BusinessTable
from txmq_spark.plan import LetterClass, PlanRules
from txmq_spark.plan_file import decode_plan
from txmq_spark.reconcile import ReconcileOptions, reconcile
from txmq_spark.replay import replay

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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


class ReconciledShop(NamedTuple):
    """A broker, and the database of a service."""

    url: str
    dsn: str
    client: txmq.Client


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
            yield ReconciledShop(broker.url, database, client)


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
    asked = ReconcileOptions(shop.url, GROUP, shop.dsn, business=BusinessTable("orders", "id"))
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


def test_every_letter_gets_its_class_and_what_is_safe_is_replayed_once(
    spark: SparkSession, failed: ReconciledShop
) -> None:
    shop = failed
    rules = PlanRules(fingerprints=frozenset({str(letter(shop, "bad")["fingerprint"])}))
    prints = {str(letter(shop, key)["fingerprint"]) for key in ("bad", "fine")}
    assert len(prints) == 2, "the failures look different"
    found = reconcile(spark, question(shop, rules=rules))
    classes = {(item.letter.key, item.cls) for item in found.planned}
    assert classes == set(CLASSES.items())
    assert len(found.planned) == len(DEAD)
    facts = found.manifest.header.facts
    assert (facts.group, facts.ends) == (GROUP, {ORDERS: (len(CLASSES) + 3,)})
    assert facts.evidence == ("applied", "tokens", "business")
    assert [entry.key for entry in found.manifest.replays] == ["fine", "chain", "chain"]

    done = replay(spark, shop.url, found.manifest)
    assert [one.outcome for one in done.outcomes] == ["done"] * 3
    consume(shop, frozenset())
    assert effects(shop) == ["applied 1", "chain 1", "chain 2", "fine 1", "old 2", "well 1"]

    again = reconcile(spark, question(shop, rules=rules))
    assert {item.letter.key for item in again.planned} == CLASSES.keys() - {"fine", "chain"}
    assert again.manifest.replays == ()


def test_a_plan_is_a_function_of_log_and_database(
    spark: SparkSession, failed: ReconciledShop
) -> None:
    one, other = (reconcile(spark, question(failed)) for _ in range(2))
    assert one.data.split(b"\n")[1:] == other.data.split(b"\n")[1:]
    headers = [found.manifest.header.model_copy(update={"digest": ""}) for found in (one, other)]
    moments = [
        header.facts.model_copy(update={"snapshot_at": 0, "snapshot": ""}) for header in headers
    ]
    assert moments[0] == moments[1]
    assert decode_plan(one.data).entries == one.manifest.entries


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
    found = reconcile(spark, question(shop, business=BusinessTable("orders", "id", token="writer")))
    assert {(row.what, row.name, row.state) for row in found.missing} == {
        ("transaction", lost.hex, "missing"),
        ("transaction", waiting.hex, "pending"),
        ("transaction", OLD.hex, "forgotten"),
        ("key", "untold", "missing"),
    }
    assert found.unlisted == 0


def test_versions_and_queries_are_evidence(spark: SparkSession, shop: ReconciledShop) -> None:
    execute(shop, "CREATE TABLE effects (body text); CREATE TABLE billed (id text, version int)")
    for key, version in (("new", 3), ("same", 3), ("old", 3), ("moved", 3)):
        order(shop, key, version)
    consume(shop, frozenset({"new 3", "same 3", "old 3", "moved 3"}))
    execute(shop, "INSERT INTO billed VALUES ('new', 2), ('same', 3), ('old', 4)")
    execute(shop, "UPDATE orders SET version = 9 WHERE id = 'moved'")
    asked = question(
        shop, version="header:version", business=BusinessTable("orders", "id", "version")
    )
    found = reconcile(spark, asked._replace(applied_query="SELECT id AS key, version FROM billed"))
    assert {item.letter.key: item.cls for item in found.planned} == {
        "new": LetterClass.REPLAY_ALONE,
        "same": LetterClass.APPLIED,
        "old": LetterClass.SUPERSEDED,
        "moved": LetterClass.SUPERSEDED,
    }
    unread = reconcile(spark, asked._replace(version="json:v"))
    assert {item.cls for item in unread.planned} == {LetterClass.POISON}


def test_without_a_database_letters_are_the_only_evidence(
    spark: SparkSession, failed: ReconciledShop
) -> None:
    found = reconcile(spark, ReconcileOptions(failed.url, GROUP))
    classes = {item.letter.key: item.cls for item in found.planned}
    assert classes == dict.fromkeys(CLASSES, LetterClass.REPLAY_ALONE) | {
        "chain": LetterClass.REPLAY_CHAIN,
        "busy": LetterClass.PENDING,
    }
    assert (found.missing, found.manifest.header.facts.evidence) == ((), ())


def test_the_jobs_run_from_the_command_line(
    spark: SparkSession,
    failed: ReconciledShop,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from contextlib import nullcontext

    from txmq_spark import command_line

    monkeypatch.setattr(command_line, "job_session", lambda: nullcontext(spark))
    monkeypatch.setenv("TXMQ_DSN", failed.dsn)
    plan, report, outcomes = (
        tmp_path / name for name in ("plan.jsonl", "report.html", "outcomes.jsonl")
    )
    asked = [f"--url={failed.url}", f"--plan={plan}"]
    told = [
        f"--group={GROUP}",
        "--business=orders",
        "--business-key=id",
        f"--report={report}",
        "--include=applied",
    ]
    assert reconcile_main([*asked, *told]) == 0
    assert "Dead letters of billing" in capsys.readouterr().out
    assert report.read_text().startswith("<!doctype html>")
    assert replay_main([*asked, "--dry-run"]) == 0
    assert capsys.readouterr().out == "5 planned\n"
    assert replay_main([*asked, f"--outcomes={outcomes}"]) == 0
    assert capsys.readouterr().out.startswith("5 done (job ")
    lines = [json.loads(line) for line in outcomes.read_text().splitlines()]
    assert sorted(line["key"] for line in lines) == ["applied", "bad", "chain", "chain", "fine"]
    assert replay_main([*asked]) == 0
    assert "an earlier run replayed this plan" in capsys.readouterr().out
    plan.write_bytes(plan.read_bytes().replace(b"fine", b"evil"))
    assert replay_main([*asked]) == 1
    assert "it was changed after it was made" in capsys.readouterr().err
    with pytest.raises(SystemExit) as wrong:
        replay_main([*asked, "--canary=0"])
    assert wrong.value.code == 2

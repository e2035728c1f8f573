"""Jobs on a standalone cluster: shipped and installed, with stragglers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import pyarrow.parquet as pq
import pytest

import txmq
from tests.spark.cluster import PACKAGES, Cluster, running_cluster
from tests.spark.stream_driver import texts
from tests.spark.test_writing import bodies, undecided
from txmq_spark import shipping

pytestmark = pytest.mark.timeout(400)  # many JVMs on a busy machine
PROGRAM = Path(__file__).with_name("cluster_program.py")
SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.interval": "50ms",
    "spark.speculation.minTaskRuntime": "50ms",
}
ROWS = 400


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shipped") / "txmq.zip"
    shipping.write_zip(path)
    return path


def test_what_is_shipped_has_nothing_of_the_tests_and_is_always_the_same(
    shipped: Path, tmp_path: Path
) -> None:
    with ZipFile(shipped) as archive:
        names = archive.namelist()
    assert {"txmq/__init__.py", "txmq_spark/report.html", "txmq/tx/postgres/schema_4.sql"} <= set(
        names
    )
    assert [name for name in names if name.startswith(("txmq/testing", "txmq/broker"))] == []
    shipping.write_zip(tmp_path / "again.zip")
    assert (tmp_path / "again.zip").read_bytes() == shipped.read_bytes()


def test_jobs_run_shipped_and_installed_and_send_once_though_stragglers_are_run_twice(
    cluster: Cluster, broker: str, topic: str, client: txmq.Client, shipped: Path, tmp_path: Path
) -> None:
    installed = tmp_path / "installed"
    with ZipFile(shipped) as archive:
        archive.extractall(installed)
    before = undecided(client)
    client.call("topic.create", name=topic, partitions=2)
    client.send_many(topic, texts(*range(ROWS)))
    targets = [f"{topic}-batch", f"{topic}-stream"]
    for target in targets:
        client.call("topic.create", name=target, partitions=3)
    done = cluster.submit(
        PROGRAM,
        *(broker, topic, str(tmp_path), str(shipped), PACKAGES),
        settings=SPECULATION,
        path=str(installed),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"landed: {ROWS} messages, skipped 0\n"
    origins = (tmp_path / "origins").read_text().splitlines()
    assert origins[0] == f"{installed}/txmq_spark/source.py"
    assert origins[1].endswith("/txmq.zip/txmq_spark/source.py")
    lines = (tmp_path / "attempts").read_text().splitlines()
    attempts = Counter(
        what
        for what, partition, attempt in map(str.split, lines)
        if (partition, int(attempt) > 0) == ("0", True)
    )
    assert attempts.keys() == {"batch", "stream"}
    for target in targets:
        assert bodies(broker, target) == Counter(texts(*range(ROWS)))
    assert undecided(client) == before
    files = list((tmp_path / "lake" / f"topic={topic}").glob("date=*/*.parquet"))
    in_files = [body for file in files for body in pq.read_table(file).column("body").to_pylist()]
    assert Counter(in_files) == Counter(texts(*range(ROWS)))

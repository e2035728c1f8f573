"""Jobs on a standalone cluster: shipped and installed, with stragglers."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

import pyarrow.parquet as pq
import pytest

import txmq
from tests.spark.cluster import PACKAGES, SUBMIT_S, Cluster, running_cluster
from tests.spark.consuming import let_die
from tests.spark.dying_program import CASES
from tests.spark.secured import PASSWORD, secured_broker
from tests.spark.stream_driver import texts
from tests.spark.test_writing import bodies, sent, undecided
from tests.wheels import install_wheel
from txmq.testing.processes import ENVIRONMENT
from txmq.testing.wait import PATIENCE_S
from txmq_spark import shipping

PROGRAM = Path(__file__).with_name("cluster_program.py")
SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.interval": "50ms",
    "spark.speculation.minTaskRuntime": "50ms",
}
STRAGGLING = ("batch", "stream")
ROWS, KEYS = 400, 7
JOBS_S = 10 * PATIENCE_S  # two applications, and executors that start again
pytestmark = pytest.mark.timeout(2 * JOBS_S)  # many JVMs on a busy machine


class Jobs(NamedTuple):
    """Jobs that have copied a topic to others."""

    topic: str
    directory: Path
    installed: Path

    def target(self, what: str) -> str:
        return f"{self.topic}-{what}"


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
    assert {
        "txmq/__init__.py",
        "txmq_spark/plan/report.html",
        "txmq/tx/postgres/schema.sql",
    } <= set(names)
    assert [name for name in names if name.startswith(("txmq/testing", "txmq/broker"))] == []
    shipping.write_zip(tmp_path / "again.zip")
    assert (tmp_path / "again.zip").read_bytes() == shipped.read_bytes()


@pytest.fixture(scope="module")
def jobs(
    cluster: Cluster, broker: str, shipped: Path, tmp_path_factory: pytest.TempPathFactory
) -> Jobs:
    """The jobs of one program, which have ended."""
    directory = tmp_path_factory.mktemp("jobs")
    installed = directory / "installed"
    with ZipFile(shipped) as archive:
        archive.extractall(installed)
    done = Jobs("jobs", directory, installed)
    keys = [f"k{n % KEYS}" for n in range(ROWS)]
    with txmq.connect(broker, service="tests", timeout=PATIENCE_S) as client:
        before = undecided(client)
        client.call("topic.create", name=done.topic, partitions=2)
        client.send_many(done.topic, texts(*range(ROWS)), keys=keys)
        for target in (*STRAGGLING, *CASES):
            client.call("topic.create", name=done.target(target), partitions=3)
        ended = cluster.submit(
            PROGRAM,
            *(broker, done.topic, str(directory), str(shipped), PACKAGES),
            settings=SPECULATION,
            path=str(installed),
            limit_s=JOBS_S,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert undecided(client) <= before
    return done


def test_jobs_run_shipped_and_installed_and_send_once_though_stragglers_are_run_twice(
    jobs: Jobs, broker: str
) -> None:
    origins = (jobs.directory / "origins").read_text().splitlines()
    assert origins[0] == f"{jobs.installed}/txmq_spark/source/data_source.py"
    assert origins[1].endswith("/txmq.zip/txmq_spark/source/data_source.py")
    lines = (jobs.directory / "attempts").read_text().splitlines()
    attempts = Counter(
        what
        for what, partition, attempt in map(str.split, lines)
        if (partition, int(attempt) > 0) == ("0", True)
    )
    assert attempts.keys() == set(STRAGGLING)
    for what in STRAGGLING:
        assert bodies(broker, jobs.target(what)) == Counter(texts(*range(ROWS)))


@pytest.mark.parametrize("case", CASES)
def test_an_attempt_that_is_killed_behind_its_bundle_sends_nothing(
    jobs: Jobs, broker: str, case: str
) -> None:
    lines = (jobs.directory / "steps").read_text().splitlines()
    victim = 1 if "-copy-" in case else 0
    [count] = [line.split()[-1] for line in lines if f"{case} {victim} stored" in line]
    assert 0 < int(count) < ROWS
    of_keys = dict[str | None, list[int]]()
    for _partition, message in sent(broker, jobs.target(case)):
        of_keys.setdefault(message.key, []).append(int(message.body))
    assert of_keys == {f"k{n}": [*range(n, ROWS, KEYS)] for n in range(KEYS)}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_wheel(tmp_path_factory.mktemp("wheel"))


def test_the_program_of_the_wheel_lands_from_a_broker_with_tls_by_shipped_files(
    cluster: Cluster, installed: Path, tmp_path: Path
) -> None:
    """As spark/README.md says it, in the directory of the shipped files. Executors have
    them in theirs.
    """
    directory = tmp_path / "secured"
    directory.mkdir()
    with secured_broker(directory) as secured:
        zipped, lake = tmp_path / "txmq.zip", tmp_path / "lake"
        shipping.write_zip(zipped)
        assert secured.words.parent == secured.ca.parent == directory
        files = f"{secured.words},{secured.ca}"
        names = f"password_file={secured.words.name}&ca={secured.ca.name}"
        done = cluster.submit(
            installed / "txmq_spark" / "__main__.py",
            *("land", "--broker", f"txmqs://spark@{secured.place}?{names}"),
            *("--topic", "orders", "--path", str(lake)),
            settings={
                "spark.submit.pyFiles": str(zipped),
                "spark.files": files,
                "spark.cores.max": "1",  # one executor
            },
            cwd=directory,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout == "landed: 5 messages, skipped 0\n"
        assert PASSWORD not in done.stderr
    parts = lake.glob("topic=orders/date=*/*.parquet")
    landed = [body for part in parts for body in pq.read_table(part).column("body").to_pylist()]
    assert sorted(landed) == texts(*range(5))


def test_the_wheel_brings_the_command(installed: Path) -> None:
    done = run_command(installed, "reconcile", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--report" in done.stdout


@pytest.mark.soak
def test_the_command_of_the_wheel_reconciles_and_writes_its_report(
    installed: Path, broker: str, topic: str, client: txmq.Client, tmp_path: Path
) -> None:
    client.call("topic.create", name=topic, partitions=1)
    client.send_many(topic, texts(1, 2))
    let_die(client, topic, topic, texts(1, 2), "concurrent")
    places = {"plan": str(tmp_path / "plan"), "report": str(tmp_path / "report.html")}
    done = run_command(
        installed,
        *("reconcile", "--broker", broker, "--group", topic),
        *(word for name, place in places.items() for word in (f"--{name}", place)),
        *("--version-from", "header:version", "--json"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["letters"][topic]["poison"] == 2
    assert topic in (tmp_path / "report.html").read_text("utf-8")


def run_command(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command of the wheel."""
    return subprocess.run(
        [installed / "bin" / "txmq-spark", *arguments],
        capture_output=True,
        text=True,
        env={**ENVIRONMENT, "PYTHONPATH": str(installed)},
        cwd=installed.parent,
        timeout=SUBMIT_S,
        check=False,
    )

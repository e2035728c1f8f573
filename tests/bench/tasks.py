"""Celery's tasks over txmq, beside RabbitMQ and Redis (Debian's packages)."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from tests.bench.brokers import broker
from tests.bench.clients.celery_tasks import CONFIRMED
from tests.bench.harness import BenchError, measured, python
from tests.bench.rows import Goal, Row, Run, at_least, benchmark, row
from txmq.testing.ports import free_port
from txmq.testing.wait import wait_until

CLIENT = "tests.bench.clients.celery_tasks"
READY_S = 60.0
# What the script of /usr/sbin starts, which changes the user.
RABBITMQ = "/usr/lib/rabbitmq/bin/rabbitmq-server"
HERE = "127.0.0.1"


@benchmark("flow.celery", "Celery's tasks that do nothing")
def celery(run: Run) -> Iterator[Row]:
    tasks = run.count(10_000)
    with rabbitmq(run.directory / "rabbitmq") as url:
        rabbit = measured(python(CLIENT, url, tasks))
        confirmed = measured(python(CLIENT, url + CONFIRMED, tasks))
    with redis(run.directory / "redis") as url:
        fast = measured(python(CLIENT, url, tasks))
    with broker(run) as program:
        ours = measured(python(CLIENT, program.address, tasks))
        stored = measured(python(CLIENT, program.address + CONFIRMED, tasks))
    what = "tasks that do nothing, sent and done; neither side confirms them, beside RabbitMQ"
    yield _pair("rabbitmq", what, "per_s", ours, rabbit, at_least(1.0))
    what = "the same where each task is stored when it is sent"
    yield _pair("confirmed", what, "per_s", stored, confirmed, at_least(1.0))
    yield _pair("redis", "the same without confirmation beside Redis", "per_s", ours, fast)
    yield _pair("sent", "of these, sent alone, beside RabbitMQ", "sent_per_s", ours, rabbit)
    yield _pair("done", "and done alone", "done_per_s", ours, rabbit)
    what = "CPU of the sender for a task, beside RabbitMQ's"
    yield _pair("sender_cpu", what, "sent_us", ours, rabbit)
    yield _pair("worker_cpu", "and of the worker", "done_us", ours, rabbit)


def _pair(
    name: str,
    what: str,
    figure: str,
    ours: Mapping[str, float],
    theirs: Mapping[str, float],
    goal: Goal | None = None,
) -> Row:
    unit = "µs" if figure.endswith("us") else "tasks/s"
    return row(f"flow.celery_{name}", what, unit, ours[figure], yardstick=theirs[figure], goal=goal)


@contextmanager
def redis(directory: Path) -> Iterator[str]:
    """Run Redis without persistence."""
    _require("redis-server")
    port = free_port()
    argv = ["redis-server", "--port", str(port), "--bind", HERE, "--save", "", "--dir", "."]
    with _serving(argv, directory, port, {}):
        yield f"redis://{HERE}:{port}/0"


@contextmanager
def rabbitmq(directory: Path) -> Iterator[str]:
    """Run RabbitMQ, with a node's daemon of its own."""
    _require(RABBITMQ, "epmd")
    port, epmd, distribution = free_port(), free_port(), free_port()
    settings = {
        "RABBITMQ_NODENAME": f"txmq{port}@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": HERE,
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(distribution),
        "RABBITMQ_MNESIA_BASE": str(directory / "mnesia"),
        "RABBITMQ_LOG_BASE": str(directory / "log"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "plugins"),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        "ERL_EPMD_PORT": str(epmd),
        "ERL_EPMD_ADDRESS": HERE,
        "HOME": str(directory),
    }
    try:
        with _serving([RABBITMQ], directory, port, settings):
            yield f"amqp://guest:guest@{HERE}:{port}//"
    finally:  # the server has left a daemon behind, which ends when it knows of no node
        ending = partial(
            subprocess.run,
            ["epmd", "-kill"],
            env=os.environ | settings,
            capture_output=True,
            text=True,
        )
        wait_until(lambda: "Killed" in ending().stdout, READY_S, what="epmd has ended")


@contextmanager
def _serving(
    argv: list[str], directory: Path, port: int, settings: Mapping[str, str]
) -> Iterator[None]:
    directory.mkdir()
    with (directory / "out").open("wb") as out:
        process = subprocess.Popen(
            argv, cwd=directory, env=os.environ | settings, stdout=out, stderr=out,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            wait_until(lambda: _answers(port), READY_S, what=f"{argv[0]} listens")
            yield
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _require(*programs: str) -> None:
    missing = ", ".join(program for program in programs if shutil.which(program) is None)
    if missing:
        raise BenchError(f"{missing} is missing: install Debian's redis-server, rabbitmq-server")


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection((HERE, port), 1.0):
        return True
    return False

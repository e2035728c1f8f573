"""The benchmark harness: programs, rows, goals and runs."""

from __future__ import annotations

import inspect
import os
import re
import socket
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests import bench
from tests.bench import yardsticks
from tests.bench.__main__ import main
from tests.bench.cluster import delays
from tests.bench.harness import (
    BenchError,
    in_turn,
    measured,
    rss_anon,
    sampled,
    serving,
)
from tests.bench.raw.latency import latency_us, percentile
from tests.bench.rows import ROWS, Benchmark, Row, Run, at_least, at_most, benchmark, row
from tests.bench.suite import BENCHMARKS
from txmq.testing.wait import PATIENCE_S, wait_until


def fields(changed: dict[str, object]) -> dict[str, object]:
    whole = {
        "id": "tx.commit",
        "what": "a commit",
        "unit": "µs",
        "value": 3.0,
        "yardstick": 2.0,
        "ratio": 1.5,
    }
    return whole | {"goal": "ratio <= 2", "met": True} | changed


def python_text(text: str) -> list[str]:
    return [sys.executable, "-c", text]


@pytest.mark.parametrize(
    ("share", "expected"), [(5, 15), (30, 20), (40, 20), (50, 35), (99, 50), (100, 50)]
)
def test_a_percentile_is_the_value_at_the_nearest_rank(share: float, expected: float) -> None:
    assert percentile([35, 20, 15, 50, 40], share) == expected


@given(st.lists(st.floats(allow_nan=False), min_size=1), st.floats(0.1, 100))
def test_a_percentile_is_one_of_the_values_and_bounds_its_share_of_them(
    values: list[float], share: float
) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share / 100 * len(values) - 1e-9 * len(values)


@pytest.mark.parametrize(("values", "share"), [([], 50), ([1.0], 0), ([1.0], 100.1)])
def test_there_is_no_percentile_of_an_empty_sequence_or_above_100(
    values: list[float], share: float
) -> None:
    with pytest.raises(ValueError, match="percentile"):
        percentile(values, share)


def test_latencies_are_in_microseconds() -> None:
    assert latency_us([0.002, 0.001, 0.003]) == pytest.approx({"p50_us": 2_000, "p99_us": 3_000})


def test_measures_are_taken_in_turn_and_give_their_medians() -> None:
    calls: list[str] = []
    figures = {"ours": iter([5.0, 100.0, 6.0]), "bare": iter([1.0, 2.0, 3.0])}

    def measure(name: str) -> float:
        calls.append(name)
        return next(figures[name])

    assert in_turn(3, lambda: measure("ours"), lambda: measure("bare")) == (6.0, 2.0)
    assert calls == ["ours", "bare"] * 3


@pytest.mark.parametrize(
    "changed",
    [
        {"id": "commit"},
        {"id": "raw.commit"},
        {"id": "tx."},
        {"id": "tx.Commit"},
        {"what": ""},
        {"value": float("nan")},
        {"value": "3"},
        {"yardstick": None},
        {"ratio": None},
        {"goal": None},
        {"met": None},
        {"spare": 1},
    ],
)
def test_a_row_that_breaks_the_format_is_refused(changed: dict[str, object]) -> None:
    Row.model_validate(fields({}))
    with pytest.raises(ValidationError):
        Row.model_validate(fields(changed))


def test_a_goal_bounds_the_ratio_where_there_is_a_yardstick() -> None:
    slow = row("store.send_one", "send", "µs", 400, yardstick=200, goal=at_most(1.8))
    fast = row("store.send_one", "send", "µs", 360, yardstick=200, goal=at_most(1.8))
    assert (slow.ratio, slow.goal, slow.met) == (2.0, "ratio <= 1.8", False)
    assert (fast.ratio, fast.met) == (1.8, True)


def test_a_goal_bounds_the_value_where_there_is_none() -> None:
    found = row("recover.start", "start", "s", 3.5, goal=at_least(4))
    assert (found.ratio, found.goal, found.met) == (None, "value >= 4", False)


def test_a_server_is_up_within_the_block_and_gone_after_it() -> None:
    with yardsticks.bare_server() as program:
        host, port = program.address.split(":")
        socket.create_connection((host, int(port))).close()
        assert program.rss_anon() > 0
        assert program.ready_after_s > 0
    assert program.process.poll() is not None


def test_a_killed_server_stays_killed() -> None:
    with yardsticks.bare_server() as program:
        program.kill()
        assert program.process.returncode == -9


@pytest.mark.parametrize(
    ("text", "within_s", "error"),
    [
        ("raise SystemExit('no disk left')", PATIENCE_S, "no disk left"),
        ("print('hello', flush=True)", PATIENCE_S, "ready ADDRESS"),
        ("import signal; signal.pause()", 1.0, "was not ready in time"),
    ],
)
def test_a_server_that_does_not_get_ready_says_why(text: str, within_s: float, error: str) -> None:
    with (
        pytest.raises(BenchError, match=error),
        serving(python_text(text), ready_within_s=within_s),
    ):
        pytest.fail("it was taken for ready")


def test_what_a_program_prints_last_is_its_result() -> None:
    assert measured(python_text('print("warming up"); print(\'{"p50_us": 1.5}\')')) == {
        "p50_us": 1.5
    }


@pytest.mark.parametrize(
    ("text", "within_s", "error"),
    [
        ("raise SystemExit('lost the broker')", PATIENCE_S, "lost the broker"),
        ("while 1: pass", 0.2, "more than 0.2 s"),
    ],
)
def test_a_program_that_fails_or_hangs_gives_no_result(
    text: str, within_s: float, error: str
) -> None:
    with pytest.raises(BenchError, match=error):
        measured(python_text(text), within_s=within_s)


def test_anonymous_memory_is_in_bytes_and_sampled_during_the_block() -> None:
    before = rss_anon(os.getpid())
    with sampled(lambda: rss_anon(os.getpid()), every_s=0.001) as memory:
        held = bytearray(b"x" * (64 << 20))
        wait_until(lambda: memory[-1] > before + (48 << 20), what="the samples show 64 MiB more")
    assert len(held) == 64 << 20
    assert max(memory) < before + (256 << 20)


@benchmark("store.quick", "a benchmark that misses its goal")
def quick(run: Run) -> Iterator[Row]:
    yield row("store.quick_one", "one", "µs", run.count(2_000), yardstick=10, goal=at_most(1.8))
    yield row("store.quick_two", "two", "s", run.seconds(0.5), goal=at_most(5))


@benchmark("tx.broken", "a benchmark that cannot be run")
def broken(run: Run) -> Iterator[Row]:
    yield row("tx.broken_first", "first", "µs", 5)
    raise BenchError("the broker is not there")


@benchmark("tx.fine", "one that can")
def fine(run: Run) -> Iterator[Row]:
    yield row("tx.fine", "fine", "µs", 1)


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    return ["--out", str(tmp_path / "bench.json"), "--directory", str(tmp_path / "scratch")]


def written(tmp_path: Path) -> dict[str, Row]:
    return {one.id: one for one in ROWS.validate_json((tmp_path / "bench.json").read_bytes())}


def test_a_missed_goal_is_printed_and_fails_nothing(
    tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*options, "--scale", "0.5"], [quick]) == 0
    rows = written(tmp_path)
    assert (
        rows["store.quick_one"].value,
        rows["store.quick_one"].ratio,
        rows["store.quick_one"].met,
    ) == (
        1000,
        100,
        False,
    )
    assert (rows["store.quick_two"].value, rows["store.quick_two"].met) == (0.25, True)
    output = capsys.readouterr()
    assert "goal missed: store.quick_one: ratio <= 1.8, is 100" in output.out
    assert "store.quick: a benchmark that misses its goal" in output.err
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_failed_benchmark_is_printed_and_the_others_run(
    tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options, [broken, fine]) == 1
    assert set(written(tmp_path)) == {"tx.broken_first", "tx.fine"}
    assert "not run: tx.broken: the broker is not there" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        ("store.", {"store.quick_one", "store.quick_two"}),
        ("store.quick_t", {"store.quick_two"}),
        ("tx.f", {"tx.fine"}),
    ],
)
def test_only_what_begins_with_the_prefix_is_run_and_written(
    tmp_path: Path, options: list[str], only: str, expected: set[str]
) -> None:
    assert main([*options, "--only", only], [quick, broken, fine]) == 0
    assert set(written(tmp_path)) == expected


def test_a_prefix_that_fits_nothing_is_wrong_usage(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*options, "--only", "disk."], [quick]) == 2
    assert "store.quick" in capsys.readouterr().err


def test_a_row_outside_its_benchmarks_prefix_is_a_mistake(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    @benchmark("flow.orders", "rows of another area")
    def stray(run: Run) -> Iterator[Row]:
        yield row("tx.orders", "orders", "tx/s", 1)

    assert main(options, [stray, fine]) == 1
    output = capsys.readouterr().out
    assert "not run: flow.orders: ValueError: " in output
    assert "tx.fine" in output


def test_an_interrupt_leaves_what_was_measured(
    tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    @benchmark("tx.slow", "one that is interrupted")
    def slow(run: Run) -> Iterator[Row]:
        yield row("tx.slow_first", "first", "µs", 5)
        raise KeyboardInterrupt

    assert main(options, [fine, slow, quick]) == 130
    assert set(written(tmp_path)) == {"tx.fine", "tx.slow_first"}
    assert "tx.slow_first" in capsys.readouterr().out


def test_the_suite_has_each_benchmark_that_is_written() -> None:
    written = {
        measure
        for name in iter_modules(bench.__path__)
        if name.name != "__main__"
        for measure in vars(import_module(f"tests.bench.{name.name}")).values()
        if isinstance(measure, Benchmark)
    }
    assert written == set(BENCHMARKS)


def test_each_benchmark_has_a_prefix_of_its_own() -> None:
    prefixes = [one.prefix for one in BENCHMARKS]
    assert len(set(prefixes)) == len(prefixes)


def test_the_rows_of_each_benchmark_begin_with_its_prefix() -> None:
    strays = [
        f"{one.prefix}: {name}"
        for one in BENCHMARKS
        for name in re.findall(r'\brow\(\s*f?"([^"{]+)', inspect.getsource(one.measure))
        if not name.startswith(one.prefix)
    ]
    assert strays == []


def test_a_follower_is_late_by_the_time_since_a_flush_was_answered() -> None:
    led = [(1.0, 10), (2.0, 20), (3.0, 30), (4.0, 40), (5.0, 50)]
    followed = [(0.5, 5), (1.5, 15), (2.25, 20), (2.75, 35), (4.5, 40)]
    assert delays(led, followed, 2.0, 5.0) == [0.25, 0.0, 0.5]

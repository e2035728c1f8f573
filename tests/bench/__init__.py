"""Benchmarks of txmq: each figure beside the least that the same machine needs for the
same job, in the same run.

`make bench`, or `python -m tests.bench --only tx. --scale 0.1`; `--list` names them.
Every figure is a row of `bench.json` (`rows.Row`): `id` begins with `store.`, `tx.`,
`consumer.`, `recover.`, `letters.`, `spark.` or `flow.`; `ratio` is `value /
yardstick`; a goal bounds the ratio, or the value where there is no yardstick. A missed
goal is printed, it does not fail the run.

Adding a benchmark: a function in a module here, and its name in `suite.BENCHMARKS`.

    @benchmark("store.send_one", "one send of 1 KiB with fsync, and its receipt")
    def send_one(run: Run) -> Iterator[Row]:
        def ours() -> float:
            argv = [sys.executable, "-m", "txmq", "broker", "--data", ..., "--listen", "127.0.0.1:0"]
            with serving(argv) as broker:
                return measured(python("tests.bench.clients.send_one", broker.address, run.count(3_000)))["p50_us"]

        def bare() -> float:
            with bare_server(answers="txmq_answer") as server:
                echo = measured(python("tests.bench.clients.send_one", f"txmq://{server.address}", run.count(3_000)))
            return disk(run)["p50_us"] + echo["p50_us"]

        value, yardstick = in_turn(3, ours, bare)
        yield row("store.send_one_p50", "...: p50", "µs", value, yardstick=yardstick, goal=at_most(1.8))

- The prefix given to `@benchmark` begins the ids of all its rows; small benchmarks let `--only` skip more.
- `harness`: `serving` runs a server until the block ends (it prints `ready ADDRESS`; `.ready_after_s`, `.rss_anon()`,
  `.kill()`), `measured` runs a program to its end and reads the JSON object it prints last, `in_turn` measures ours and
  the yardstick alternately, `sampled` watches memory under load, `percentile` and `latency_us` sum up times.
  What is measured runs in processes of its own.
- `yardsticks`: `disk`, `echo`, `bare_server`, `sink_per_s`, `best_sink_per_s`, `stream_mb_per_s`, `plain_commit`.
- `run.directory` is a scratch directory on the disk to be measured, gone at the end; `run.count` and `run.seconds`
  scale with `--scale`; `run.database.dsn()` is a PostgreSQL, started when first asked for unless one is named.
- Raise `BenchError` where a figure would mean nothing; the other benchmarks still run and the exit status is 1.
"""

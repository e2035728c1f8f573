"""Benchmarks of txmq, beside the least time of the same machine for the same job.

`make bench`, or `python -m tests.bench --only tx. --scale 0.1`; `--list` names them.
Every figure is a row of `bench.json` (`rows.Row`): `id` begins with `store.`, `tx.`,
`consumer.`, `recover.`, `letters.`, `spark.`, `cluster.` or `flow.`; `ratio` is
`value / yardstick`; a goal bounds the ratio, or the value where there is no yardstick.
A missed goal is printed and does not fail the run.

To add a benchmark, write a function in a module here and list it in `suite.BENCHMARKS`.

    @benchmark("store.send_one", "one send of 1 KiB with fsync, and its receipt")
    def send_one(run: Run) -> Iterator[Row]:
        def ours() -> float:
            with broker(run) as program:
                argv = python(f"{CLIENTS}.send_one", program.address, run.count(3_000))
                return measured(argv)["p50_us"]

        def bare() -> float:
            with bare_server(answers="txmq_answer") as server:
                url = f"txmq://{server.address}"
                echo = measured(python(f"{CLIENTS}.send_one", url, run.count(3_000)))
            return disk(run)["p50_us"] + echo["p50_us"]

        value, yardstick = in_turn(3, ours, bare)
        p50, goal = "store.send_one_p50", at_most(1.8)
        yield row(p50, "p50", "µs", value, yardstick=yardstick, goal=goal)

- The prefix given to `@benchmark` begins the ids of all its rows. Small benchmarks let
  `--only` skip more.
- `harness.serving` runs a server during a block; the server prints `ready ADDRESS`.
  `measured` runs a program and parses the JSON object on its last line of output.
  `in_turn` measures txmq and the yardstick alternately, `sampled` samples memory.
  Measured code runs in processes of its own.
- `yardsticks` has `disk`, `echo`, `bare_server`, `sink_per_s`, `best_sink_per_s`,
  `stream_mb_per_s` and `plain_commit`.
- `run.directory` is a temporary directory on the disk to measure. `run.count` and
  `run.seconds` scale with `--scale`. `run.database.dsn()` is a PostgreSQL database, on
  a server that is started at first use unless one is named.
- Raise `BenchError` where a figure would mean nothing. The other benchmarks still run,
  and the exit status is 1.
"""

"""The yardsticks: minimal programs for a job, of at most 60 lines of code each.

Each runs as `python -m tests.bench.raw.NAME`. A server prints `ready HOST:PORT` and
serves until it is terminated; the others print one line of JSON at the end. Replace a
yardstick by a faster version: a ratio means something only beside the best that plain
Python can do.
"""

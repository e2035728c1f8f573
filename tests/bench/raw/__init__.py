"""The yardsticks: the least a machine can do for a job, in plain calls of at most 60
lines each.

Each is a program (`python -m tests.bench.raw.NAME`). A server prints `ready HOST:PORT`
and serves until it is terminated; the others print one line of JSON at the end. A
faster version of one replaces it: a ratio means something only against the best that
plain Python can do.
"""

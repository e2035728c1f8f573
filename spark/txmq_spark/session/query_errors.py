"""Errors of queries, of which Spark tells the text only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.errors.exceptions.captured import convert_exception

from txmq.errors import TxmqError

# The last line of a Python traceback that ends with an error of ours.
OURS: Final = re.compile(r"^txmq[\w.]*\.(\w+: .+)$", re.MULTILINE)
# The end of any other Python traceback, behind its lines of code.
PYTHON: Final = re.compile(r"Traceback \(most recent call last\):\n(?: .*\n)+(\w.*)$", re.MULTILINE)


# What Spark says where another run has written to the log of the checkpoint, or of the
# landed directory, what this run was about to write (4.3.0, 2026-11-28).
OTHER_RUN: Final = (
    "CONCURRENT_STREAM_LOG_UPDATE",
    "Race while writing batch",
    "Multiple streaming queries are concurrently using",
)


class QueryFailed(TxmqError):
    """A query of a job has ended with an error; its progress is in its checkpoint."""

    advice = "mend the cause and run the job again: it goes on where it was"


class CheckpointShared(QueryFailed):
    """Another run of a query is at work with the same checkpoint, and goes on."""

    advice = "leave that run alone: nothing is lost, nor done twice"


class JobFailed(TxmqError):
    """A task of a job has failed, more often than Spark tries it."""

    advice = "mend the cause and run the job again: it goes on with what is done"


@contextmanager
def job_errors() -> Iterator[None]:
    """Turn errors of tasks into errors of txmq. Raises JobFailed."""
    try:
        yield
    except (PySparkException, Py4JJavaError) as error:  # Spark does not translate all
        raise JobFailed(cause_of(error)) from error


def query_failure(error: PySparkException | Py4JJavaError) -> QueryFailed:
    """Return the error of a query, with the error of txmq that caused it if one did."""
    if any(sign in str(error) for sign in OTHER_RUN):
        return CheckpointShared("another run of this job has the same checkpoint, and was faster")
    return QueryFailed(cause_of(error))


def cause_of(error: Exception) -> str:
    """Return what an error of Spark says, with its cause in txmq or in Java."""
    ours = OURS.findall(str(error))
    if ours:
        return str(ours[-1])
    # Of itself an error of Java tells only which call has failed.
    told = error.java_exception.toString() if isinstance(error, Py4JJavaError) else error
    text, root = str(told).partition("\n")[0], _root_cause(error)
    if python := PYTHON.findall(str(error)):  # Spark's first line only tells that there is one
        return f"{text.removesuffix(': Traceback (most recent call last):')}: {python[-1]}"
    message = root.partition(": ")[2] or root  # without the class of the error
    return text if message in text else f"{text}, caused by {root}"


def _root_cause(error: Exception) -> str:
    """Return the error of Java behind all others; empty = there is none.

    Spark's own errors tell where it failed, and often not why, as of a full disk.
    """
    found: Any = error
    with suppress(Py4JError, OSError):  # the JVM may have ended
        if isinstance(error, Py4JJavaError):
            found = convert_exception(error.java_exception)
    root = ""
    while (found := getattr(found, "_cause", None)) is not None:
        root = found._desc  # noqa: SLF001  # with its text comes the stack of Java
    return root.partition("\n")[0]

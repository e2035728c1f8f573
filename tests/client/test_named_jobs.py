"""Names of jobs: one generation of each is committed."""

from __future__ import annotations

from typing import Any

from txmq.client.protocol.call_steps import run_calls
from txmq.client.protocol.named_jobs import NamedJob, current_job, job_token


class Jobs:
    """The jobs of a broker, by generation.

    Each has its outcome, or None, and the number of stored bundles.
    """

    def __init__(self, *generations: tuple[str | None, int]) -> None:
        self._jobs = {job_token("n", number).hex: job for number, job in enumerate(generations)}

    def call(self, name: str, /, **args: Any) -> dict[str, Any]:
        assert name == "job.show"
        known, groups = self._jobs[args["token"]]
        return {"outcome": known, "groups": ["aa"] * groups}


def current(*generations: tuple[str | None, int]) -> NamedJob:
    return run_calls(Jobs(*generations).call, current_job("n"))


def test_the_current_generation_is_the_first_that_is_not_rolled_back() -> None:
    assert current((None, 0)) == (job_token("n", 0), False)
    assert current(("ROLLBACK", 0), ("ROLLBACK", 0), ("COMMIT", 0)) == (
        job_token("n", 2),
        True,
    )
    assert current((None, 3), (None, 0)) == (job_token("n", 0), False)


def test_tokens_of_jobs_differ_by_name_and_generation() -> None:
    tokens = {
        job_token(name, generation) for name in ("a", "b", "a 1", "") for generation in range(3)
    }
    assert len(tokens) == 12
    assert {token.version for token in tokens} == {8}
    assert job_token("a") == job_token("a", 0)

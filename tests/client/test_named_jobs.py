"""Names of jobs: one generation of each is committed."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from txmq.client.protocol.calls import calls_by
from txmq.client.protocol.named_jobs import NamedJob, current_job, job_token
from txmq.faces import run

GENERATIONS = {job_token("n", number).hex: number for number in range(3_000)}


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
    return run(current_job(calls_by(Jobs(*generations).call), "n"))


def test_the_current_generation_is_the_first_that_is_not_rolled_back() -> None:
    assert current((None, 0)) == (job_token("n", 0), False)
    assert current(("ROLLBACK", 0), ("ROLLBACK", 0), ("COMMIT", 0)) == (
        job_token("n", 2),
        True,
    )
    assert current((None, 3), (None, 0)) == (job_token("n", 0), False)


class ChangingJobs:
    """A broker on which other runs roll generations back, and commit one, between the
    calls.
    """

    def __init__(self, rolled_back: int, changes: list[int], commits: int | None) -> None:
        self.rolled_back, self.calls = rolled_back, 0
        self._changes, self._commits = iter(changes), commits

    def call(self, name: str, /, *, token: str) -> dict[str, Any]:
        assert name == "job.show"
        self.calls += 1
        if not self.committed:
            self.rolled_back += next(self._changes, 0)
        number = GENERATIONS[token]
        if number < self.rolled_back:
            return {"outcome": "ROLLBACK"}
        return {"outcome": "COMMIT" if self.committed and number == self.rolled_back else None}

    @property
    def committed(self) -> bool:
        """Whether the generation behind those that are rolled back is committed."""
        return self._commits is not None and self.calls >= self._commits


@given(
    st.integers(0, 1_000),
    st.lists(st.sampled_from([0, 0, 0, 1, 2, 9]), max_size=30),
    st.none() | st.integers(0, 30),
)
def test_the_generation_is_the_first_one_left_at_the_last_call(
    rolled_back: int, changes: list[int], commits: int | None
) -> None:
    jobs = ChangingJobs(rolled_back, changes, commits)
    found = run(current_job(calls_by(jobs.call), "n"))
    assert found == (job_token("n", jobs.rolled_back), jobs.committed)
    if not any(changes):
        assert jobs.calls <= 2 * (rolled_back + 1).bit_length() + 1


def test_tokens_of_jobs_differ_by_name_and_generation() -> None:
    tokens = {
        job_token(name, generation) for name in ("a", "b", "a 1", "") for generation in range(3)
    }
    assert len(tokens) == 12
    assert {token.version for token in tokens} == {8}
    assert job_token("a") == job_token("a", 0)

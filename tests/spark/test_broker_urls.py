"""URLs with user, password file and authority, from options and environments."""

from __future__ import annotations

import pytest

from txmq.errors import ConfigError
from txmq_spark.source.broker_urls import full_url, job_url
from txmq_spark.source.options import parse_read_options, parse_write_options

VARIABLES = ("TXMQ_USER", "TXMQ_PASSWORD_FILE", "TXMQ_PASSWORD", "TXMQ_CA")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("url", "given", "whole"),
    [
        ("txmq://a:1,b:2", (), "txmq://a:1,b:2"),
        ("txmq://a:1", ("o'hara@x",), "txmq://o%27hara%40x@a:1"),
        ("txmq://a:1", ("u", "/run/p w"), "txmq://u@a:1?password_file=/run/p+w"),
        ("txmqs://u@a:1/?verify=ca", (None, "p", "ca.pem"),
         "txmqs://u@a:1/?verify=ca&password_file=p&ca=ca.pem"),
    ],
)  # fmt: skip
def test_options_are_in_the_url(url: str, given: tuple[str | None, ...], whole: str) -> None:
    assert full_url(url, *given) == whole


@pytest.mark.parametrize(
    ("url", "given", "says"),
    [
        ("txmq://u:words@a:1", ("v",), "has a user, too"),
        ("txmq://a:1", (None, "p"), "a password without a user"),
        ("txmq://u:words@a:1", (None, None, "ca.pem"), "has options of TLS"),
        ("txmqs://u:words@a:1/?ca=x", (None, None, "y"), "repeated option"),
        ("http://u:words@a:1", (), "does not begin with txmq://"),
    ],
)
def test_what_does_not_fit_is_refused_without_a_password(
    url: str, given: tuple[str | None, ...], says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        full_url(url, *given)
    assert "words" not in str(refused.value)


def test_a_job_takes_names_from_the_environment_and_no_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in zip(VARIABLES, ("ann", "p.txt", "words", "ca.pem"), strict=True):
        monkeypatch.setenv(name, value)
    assert job_url("txmq://a:1") == "txmq://ann@a:1?password_file=p.txt"
    secured = "txmqs://ann@a:1?password_file=p.txt&ca=ca.pem"
    assert job_url("txmqs://a:1") == secured
    given = job_url("txmqs://bob@a:1/?ca=b.pem&password_file=q.txt")
    assert given == "txmqs://bob@a:1/?ca=b.pem&password_file=q.txt"
    assert job_url("txmq://bob:x@a:1") == "txmq://bob:x@a:1"


def test_options_of_a_source_name_the_user_and_no_password() -> None:
    given = {"url": "txmqs://a:1", "user": "u", "passwordfile": "p", "ca": "c", "topic": "t"}
    from pyspark.sql.datasource import CaseInsensitiveDict  # as Spark gives them

    for parse in (parse_read_options, parse_write_options):
        options = parse(CaseInsensitiveDict(given))
        assert options.url == "txmqs://u@a:1?password_file=p&ca=c"
        with pytest.raises(ConfigError, match="a password is no option"):
            parse({**given, "password": "words"})

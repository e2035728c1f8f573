"""URLs with a login and with TLS, and what is shown of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from txmq.client.protocol.address import Address, TlsSettings, parse_url, place_of, safe, url_at
from txmq.errors import ConfigError

URL = "txmqs://shop:s3cr%40t@a:7650,b/?ca=/etc/ca.pem&verify=ca"


def test_a_url_has_user_password_and_tls() -> None:
    found = parse_url(URL)
    assert list(found) == [Address("a", 7650), Address("b", 7650)]
    assert found.login is not None
    assert (found.login.user, found.login.get_password()) == ("shop", "s3cr@t")
    assert found.tls == TlsSettings("/etc/ca.pem", None, None, check_host=False)
    plain = parse_url("txmq://127.0.0.1")
    assert (plain.login, plain.tls) == (None, None)


def test_the_password_comes_from_the_url_or_a_file_or_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "password"
    file.write_text("of the file\n")

    def password(url: str) -> str:
        login = parse_url(url).login
        assert login is not None
        return login.get_password()

    with pytest.raises(ConfigError, match="no password"):
        password("txmq://shop@a")
    monkeypatch.setenv("TXMQ_PASSWORD_FILE", str(file))
    assert password("txmq://shop@a") == "of the file"
    monkeypatch.setenv("TXMQ_PASSWORD", "of the environment")
    assert password("txmq://shop@a") == "of the environment"
    assert password(f"txmq://shop@a/?password_file={file}") == "of the file"
    assert password("txmq://shop:own@a") == "own"
    monkeypatch.setenv("TXMQ_USER", "ada")
    login = parse_url("txmq://a").login
    assert login is not None
    assert login.user == "ada"


def test_no_password_is_shown() -> None:
    found = parse_url("txmq://shop:s3cret@a")
    assert "s3cret" not in repr(found.login)
    assert safe(URL) == "txmqs://shop:***@a:7650,b/?ca=/etc/ca.pem&verify=ca"
    assert place_of(URL) == "txmqs://a:7650,b"
    assert place_of("txmq://a:1") == "txmq://a:1"
    for wrong in (
        "kafka://shop:s3cret@a",
        "txmq://shop:s3cret@a/?ca=x",
        "txmq://shop:s3cret@a/?unknown=x",
        "txmq://shop:s3c/ret@a:0",
        "txmqs://shop:s3cret@a/?verify=none",
        "txmqs://shop:s3cret@a/?key=k",
        "txmq://:s3cret@a",
        "shop:s3cret@a:7650",
        "txmq://shop@a/?password=s3cret",
        "txmq://shop@a/?ca=x&PASSWD=s3cret",
    ):
        with pytest.raises(ConfigError) as caught:
            parse_url(wrong)
        assert "s3c" not in str(caught.value), wrong


def test_a_url_has_other_addresses_with_the_same_login_and_options() -> None:
    [other] = parse_url("txmq://[::1]:7")
    assert url_at("txmq://a:1", ["b:2,c:3"]) == "txmq://b:2,c:3"
    assert url_at("txmq://a:1,txmq://b/", [other]) == "txmq://[::1]:7"
    url = "txmqs://ada:a@b@a:1/?password_file=/run/ada@shop"
    assert url_at(url, [other, "b:2"]) == "txmqs://ada:a@b@[::1]:7,b:2?password_file=/run/ada@shop"


@pytest.mark.parametrize(
    "place", ["\udcff:1", "a..b", f"{'x' * 64}.example", "\u2028", f"h:{'1' * 5_000}"]
)
def test_a_place_that_no_resolver_takes_is_an_error_of_the_url(place: str) -> None:
    with pytest.raises(ConfigError, match="is not a host and port"):
        parse_url(f"txmq://{place}")


def test_names_of_other_scripts_and_of_one_label_are_hosts() -> None:
    assert [one.host for one in parse_url("txmq://b\u00fccher.example,localhost,[::1]:7")] == [
        "b\u00fccher.example", "localhost", "::1"
    ]  # fmt: skip

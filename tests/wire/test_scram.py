"""SCRAM-SHA-256: the vectors of RFC 7677, and both sides against each other."""

from __future__ import annotations

import base64

import pytest

from txmq.errors import LoginFailed
from txmq.wire import scram
from txmq.wire.scram import ScramClient, ScramServer, Verifier

# RFC 7677, section 3
USER, PASSWORD, NONCE = "user", "pencil", "rOprNGfwEbeRWgbNEkqO"
BROKERS = "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
SALT = "W22ZaJ0SNY7soEsUEjb6gQ=="
CLIENT_FIRST = f"n,,n={USER},r={NONCE}"
SERVER_FIRST = f"r={NONCE}{BROKERS},s={SALT},i=4096"
CLIENT_FINAL = f"c=biws,r={NONCE}{BROKERS},p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
SERVER_FINAL = "v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


def verifier(password: str = PASSWORD) -> Verifier:
    return scram.make_verifier(password, base64.b64decode(SALT), 4_096)


def server(name: str = USER) -> ScramServer:
    first = scram.parse_client_first(f"n,,n={name},r={NONCE}")
    return ScramServer(first, verifier(), BROKERS)


def test_both_sides_say_what_rfc_7677_says() -> None:
    client, broker = ScramClient(USER, PASSWORD, NONCE), server()
    assert client.first() == CLIENT_FIRST
    assert broker.challenge() == SERVER_FIRST
    assert client.final(SERVER_FIRST) == CLIENT_FINAL
    assert broker.verify(CLIENT_FINAL) == SERVER_FINAL
    client.finish(SERVER_FINAL)


def test_a_wrong_password_is_no_proof_to_either_side() -> None:
    client, broker = ScramClient(USER, "pen", NONCE), server()
    final = client.final(broker.challenge())
    assert broker.verify(final) is None
    with pytest.raises(LoginFailed, match="did not prove"):
        client.finish(SERVER_FINAL)


@pytest.mark.parametrize(
    "final",
    [
        CLIENT_FINAL.replace("biws", "eSws"),  # another header than the first message had
        CLIENT_FINAL.replace(NONCE, "r" * len(NONCE)),  # another nonce
        CLIENT_FINAL.replace("p=d", "p=e"),
        CLIENT_FINAL[:-1],
        CLIENT_FINAL + ",x=1",
        "",
        "p=" + "A" * 2_000,
    ],
)
def test_a_last_message_that_is_not_of_this_login_is_no_proof(final: str) -> None:
    assert server().verify(final) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "n,,n=,r=" + NONCE,
        "n,,n=u,r=short",
        f"n,,n={'u' * 256},r={NONCE}",
        f"n,,n=u\x00,r={NONCE}",
        f"n,,m=ext,n=u,r={NONCE}",
        f"p=tls-unique,,n=u,r={NONCE}",
        f"n,a=admin,n=u,r={NONCE}",  # acting for another user
    ],
)
def test_a_first_message_that_is_not_valid_is_refused(text: str) -> None:
    with pytest.raises(LoginFailed):
        scram.parse_client_first(text)


@pytest.mark.parametrize(
    "first",
    [
        SERVER_FIRST.replace("i=4096", "i=1"),
        SERVER_FIRST.replace("i=4096", "i=2147483648"),
        SERVER_FIRST.replace(NONCE, "r" * len(NONCE)),
        SERVER_FIRST.replace(SALT, ""),
        SERVER_FIRST + ",m=1",
        "e=other-error",
    ],
)
def test_a_client_takes_no_challenge_that_is_weak_endless_or_of_another_login(first: str) -> None:
    with pytest.raises(LoginFailed):
        ScramClient(USER, PASSWORD, NONCE).final(first)


def test_a_user_that_does_not_exist_always_has_the_same_salt_and_no_password() -> None:
    one, two = (scram.fake_verifier(b"s" * 32, "nobody") for _ in range(2))
    assert (one.salt, one.iterations) == (two.salt, two.iterations)
    assert one.stored_key != two.stored_key
    assert scram.fake_verifier(b"t" * 32, "nobody").salt != one.salt


def test_passwords_are_prepared_and_never_shown() -> None:
    assert scram.prepare("I\u00adX") == b"IX"
    assert scram.prepare("\u00aa\u00a0") == b"a "
    for bad in ("", "a\nb", "\u0007", "x" * 1_025):
        with pytest.raises(ValueError, match="password"):
            scram.prepare(bad)
    made = verifier()
    assert scram.is_password(made, PASSWORD)
    assert not scram.is_password(made, "pen")
    assert not scram.is_password(made, "")
    assert repr(made) == "Verifier(iterations=4096)"

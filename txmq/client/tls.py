"""TLS of clients: contexts of Python's ssl from the options of a URL."""

from __future__ import annotations

import ssl
from functools import lru_cache
from pathlib import Path

from txmq.client.protocol.address import Address, TlsSettings
from txmq.errors import ConfigError

OUT_OF_TIME = (9, 10)  # of OpenSSL's codes: not valid yet, expired


def tls_context(settings: TlsSettings) -> ssl.SSLContext:
    """Return the context of a client, anew once its files have changed. Raises
    ConfigError.
    """
    files = (settings.ca, settings.cert, settings.key)
    times = tuple(_changed_at(file) for file in files if file is not None)
    return _context(settings, times)


def _changed_at(file: str) -> int:
    try:
        return Path(file).stat().st_mtime_ns
    except OSError as error:
        raise unusable(file, error) from None


@lru_cache(maxsize=16)
def _context(settings: TlsSettings, times: tuple[int, ...]) -> ssl.SSLContext:
    del times
    try:
        context = ssl.create_default_context(cafile=settings.ca)
    except OSError as error:  # an SSLError is one
        raise unusable(f"ca={settings.ca}", error) from None
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = settings.check_host
    # `ca` may be the broker's own certificate
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if settings.cert is not None:
        try:
            # a key with a password would be asked for at the terminal
            context.load_cert_chain(settings.cert, settings.key, password=_no_password)
        except (OSError, ValueError) as error:
            raise unusable(own_files(settings), error) from None
    return context


def _no_password() -> str:
    raise ValueError("the key has a password: store it without one")


def own_files(settings: TlsSettings) -> str:
    """Return the names of a client's certificate and key, for errors."""
    same = "the key, which is looked for in the same file,"
    return f"cert={settings.cert}, or {same if settings.key is None else f'key={settings.key}'}"


def unusable(file: str, error: Exception) -> ConfigError:
    """Return the error for a file of a URL's options."""
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
    if isinstance(error, ssl.SSLError) and not error.reason:
        reason = "this is no PEM file with it"
    return ConfigError(
        "url",
        f"{file} cannot be used: {reason or type(error).__name__}",
        hint="ca, cert and key in the URL are PEM files that this process may read",
    )


def not_trusted(address: Address, error: ssl.SSLCertVerificationError) -> ConfigError:
    """Return the error for a broker whose certificate is not the right one."""
    hint = "name its authority with ?ca=FILE, and its host as the certificate does"
    if error.verify_code in OUT_OF_TIME:
        hint = "renew it at the broker, or set the clock of this machine right"
    return ConfigError(
        "url",
        f"the certificate of {address} is not trusted: {error.verify_message}",
        hint=hint,
    )

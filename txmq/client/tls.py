"""TLS of clients: contexts of Python's ssl from the options of a URL."""

from __future__ import annotations

import ssl
from functools import lru_cache
from pathlib import Path

from txmq.client.protocol.address import Address, TlsSettings
from txmq.errors import ConfigError


def tls_context(settings: TlsSettings) -> ssl.SSLContext:
    """Return the context of a client, anew once its files have changed. Raises
    ConfigError.
    """
    files = (settings.ca, settings.cert, settings.key)
    try:
        times = tuple(Path(file).stat().st_mtime_ns for file in files if file is not None)
        return _context(settings, times)
    except OSError as error:  # an SSLError is one
        hint = "check ca, cert and key in the URL: PEM files that this process may read"
        reason = getattr(error, "reason", None) or error.strerror or type(error).__name__
        raise ConfigError("url", f"the files of TLS cannot be used: {reason}", hint=hint) from None


@lru_cache(maxsize=16)
def _context(settings: TlsSettings, times: tuple[int, ...]) -> ssl.SSLContext:
    del times
    context = ssl.create_default_context(cafile=settings.ca)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = settings.check_host
    # `ca` may be the broker's own certificate
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if settings.cert is not None:
        context.load_cert_chain(settings.cert, settings.key)
    return context


def not_trusted(address: Address, error: ssl.SSLCertVerificationError) -> ConfigError:
    """Return the error for a broker whose certificate is not the right one."""
    return ConfigError(
        "url",
        f"the certificate of {address} is not trusted: {error.verify_message}",
        hint="name its authority with ?ca=FILE, and its host as the certificate does",
    )

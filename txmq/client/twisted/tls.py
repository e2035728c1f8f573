"""TLS of the Twisted client. Needs the extra `tls`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from txmq.client.protocol.address import Address, TlsSettings
from txmq.client.tls import own_files, unusable
from txmq.errors.extras import require

require("tls", "OpenSSL", "service_identity")

from OpenSSL import SSL  # noqa: E402  # an extra
from twisted.internet.defer import Deferred  # noqa: E402
from twisted.internet.interfaces import (  # noqa: E402
    IOpenSSLClientConnectionCreator,
    IStreamClientEndpoint,
)
from twisted.internet.ssl import (  # noqa: E402
    Certificate,
    CertificateOptions,
    PrivateCertificate,
    TLSVersion,
    optionsForClientTLS,
    platformTrust,
    trustRootFromCertificates,
)
from twisted.protocols.tls import TLSMemoryBIOFactory  # noqa: E402
from zope.interface import implementer  # noqa: E402


@implementer(IStreamClientEndpoint)
class _EncryptedEndpoint:
    """An endpoint with TLS over another one. Twisted's own takes the clock of the
    global reactor, which may be another one than the client's.
    """

    def __init__(self, reactor: Any, endpoint: Any, creator: Any) -> None:  # noqa: ANN401
        self._reactor, self._endpoint, self._creator = reactor, endpoint, creator

    def connect(self, protocolFactory: Any) -> Deferred[Any]:  # noqa: ANN401, N803  # the interface's
        """Return a Deferred of the protocol."""
        wrapper = TLSMemoryBIOFactory(self._creator, True, protocolFactory, self._reactor)
        connected: Deferred[Any] = self._endpoint.connect(wrapper)
        return connected.addCallback(lambda tls: tls.wrappedProtocol)


def encrypted(reactor: Any, endpoint: Any, settings: TlsSettings, address: Address) -> Any:  # noqa: ANN401
    """Return an endpoint with TLS over another one. Raises ConfigError."""
    file = f"ca={settings.ca}"
    try:
        trust: Any = platformTrust()
        if settings.ca is not None:
            trust = trustRootFromCertificates(_certificates(settings.ca))
        file = own_files(settings)
        own = None if settings.cert is None else _own(settings)
    except (OSError, SSL.Error, ValueError) as error:
        raise unusable(file, error) from None
    if settings.check_host:
        options: Any = {"raiseMinimumTo": TLSVersion.TLSv1_3}
        creator: Any = optionsForClientTLS(
            address.host, trust, own, extraCertificateOptions=options
        )
    else:
        options = {"trustRoot": trust, "raiseMinimumTo": TLSVersion.TLSv1_3}
        if own is not None:
            options |= {"privateKey": own.privateKey.original, "certificate": own.original}
        creator = _AnyHost(CertificateOptions(**options).getContext())
    return _EncryptedEndpoint(reactor, endpoint, creator)


def _certificates(path: str) -> list[Any]:
    end = b"-----END CERTIFICATE-----"
    texts = Path(path).read_bytes().split(end)[:-1]
    return [Certificate.loadPEM(text + end) for text in texts]


def _own(settings: TlsSettings) -> Any:  # noqa: ANN401  # Twisted's
    assert settings.cert is not None, "there is one"
    pem = Path(settings.cert).read_bytes()
    return PrivateCertificate.loadPEM(
        pem if settings.key is None else pem + Path(settings.key).read_bytes()
    )


@implementer(IOpenSSLClientConnectionCreator)
class _AnyHost:
    """Connections to any host with a certificate of the authority."""

    def __init__(self, context: Any) -> None:  # noqa: ANN401  # an OpenSSL context
        self._context = context

    def clientConnectionForTLS(self, tlsProtocol: object) -> Any:  # noqa: ANN401, N802, N803
        """Return a connection. Twisted calls it."""
        del tlsProtocol
        return SSL.Connection(self._context, None)

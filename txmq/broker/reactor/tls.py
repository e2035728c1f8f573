"""TLS of the broker's ports, with certificates that are read anew when their files
change. Needs the extra `tls`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog
from twisted.internet.interfaces import IOpenSSLServerConnectionCreator
from twisted.internet.protocol import connectionDone
from twisted.protocols.tls import BufferingTLSTransport, TLSMemoryBIOFactory
from zope.interface import implementer

from txmq.errors import ConfigError
from txmq.model.units import SECOND

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cryptography.x509 import Certificate
    from twisted.internet.interfaces import IAddress
    from twisted.python.failure import Failure

    from txmq.config.broker import TlsSettings

LOOK_S = 1.0  # between two looks at the files
# of a handshake, chain of certificates included: OpenSSL would keep 128 KiB of a first
# message, and twice as much memory, for a client that nobody knows
HANDSHAKE_BYTES = 32 << 10
log = structlog.get_logger()


class CertificateEnd(NamedTuple):
    """When what a file certifies ends: the broker's certificate with the chain that it
    serves (setting `cert`), or the last of the authorities of clients (`client_ca`).

    `trouble` says why the broker does not use a file that was renewed.
    """

    setting: str
    path: Path
    at: int
    trouble: str = ""


@implementer(IOpenSSLServerConnectionCreator)
class Certificates:
    """The encryption of new connections. Open connections keep theirs."""

    def __init__(self, settings: TlsSettings, clock: Any) -> None:  # noqa: ANN401  # the reactor
        """Raises ConfigError for files that cannot be used."""
        from OpenSSL import SSL  # noqa: PLC0415  # an extra

        self._settings, self._clock, self._ssl = settings, clock, SSL
        self._times = self._read_times()
        self._trouble = ""  # why renewed files are not used
        self._use()
        self._look_at = clock.seconds() + LOOK_S

    def serverConnectionForTLS(self, _tlsProtocol: object) -> Any:  # noqa: ANN401, N802, N803
        """Return the encryption of a new connection. Twisted calls it."""
        self._look()
        return self._ssl.Connection(self._context, None)

    def ends(self) -> list[CertificateEnd]:
        """Return when the certificates end that are in use now."""
        self._look()
        return [one._replace(trouble=self._trouble) for one in self._ends]

    def _look(self) -> None:
        now = self._clock.seconds()
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            self._reload()

    def _use(self) -> None:
        self._context, self._ends = self._load(), tuple(_ends(self._settings))

    def _reload(self) -> None:
        try:
            times = self._read_times()
            if times == self._times:
                self._trouble = ""
                return
            self._use()
            self._times, self._trouble = times, ""
            log.info("tls.reloaded", cert=str(self._settings.cert))
        except (ConfigError, OSError) as error:
            # The old one serves on, and the next look tries again: the new files may
            # not be complete yet, or not ours to read, which no time of theirs shows.
            if str(error) == self._trouble:
                return
            self._trouble = str(error)
            log.error("tls.not_reloaded", error=str(error))  # noqa: TRY400  # no bug of ours

    def _read_times(self) -> tuple[int, ...]:
        settings = self._settings
        files = (settings.cert, settings.key, settings.client_ca)
        try:
            return tuple(file.stat().st_mtime_ns for file in files if file is not None)
        except OSError as error:
            raise _unusable(error.strerror, Path(error.filename)) from None

    def _load(self) -> Any:  # noqa: ANN401  # an OpenSSL context
        settings, SSL = self._settings, self._ssl  # noqa: N806  # a module
        context = SSL.Context(SSL.TLS_METHOD)
        context.set_min_proto_version(
            SSL.TLS1_3_VERSION if settings.min_version == "1.3" else SSL.TLS1_2_VERSION
        )
        context.set_options(SSL.OP_NO_COMPRESSION | SSL.OP_NO_RENEGOTIATION)
        context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
        key = _private_key(settings.key)
        file = settings.cert
        try:
            context.use_certificate_chain_file(str(settings.cert))
            file = settings.key
            context.use_privatekey(key)
            context.check_privatekey()
            if settings.client_ca is not None:
                file = settings.client_ca
                context.load_verify_locations(str(settings.client_ca))
                must = SSL.VERIFY_FAIL_IF_NO_PEER_CERT if settings.require_client_cert else 0
                context.set_verify(SSL.VERIFY_PEER | must)
        except SSL.Error as error:
            reasons = [str(reason[-1]) for reason in error.args[0]] or ["is it PEM?"]
            raise _unusable(reasons[-1], file) from None
        except TypeError:  # as pyOpenSSL says for a key that signs nothing, such as X25519
            raise _unusable("a key of this kind has no certificate", settings.key) from None
        return context


def _ends(settings: TlsSettings) -> Iterator[CertificateEnd]:
    """Yield when the certificates in the files end, which OpenSSL has taken."""
    # a client needs every certificate of the chain, and has one of the authorities
    for setting, path, end_of in (
        ("cert", settings.cert, min),
        ("client_ca", settings.client_ca, max),
    ):
        found = [] if path is None else certificates_in(path)
        if path is not None and found:
            end = end_of(one.not_valid_after_utc for one in found)
            yield CertificateEnd(setting, path, int(end.timestamp()) * SECOND)


def certificates_in(path: Path) -> list[Certificate]:
    """Return the certificates in a file; none if it has a form that only OpenSSL
    reads.
    """
    from cryptography import x509  # noqa: PLC0415  # an extra

    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except ValueError:
        return []


def _private_key(path: Path) -> Any:  # noqa: ANN401  # pyOpenSSL's
    """Return the key in a file. OpenSSL would ask for a password at the terminal, and
    the broker would stand still.
    """
    from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415  # an extra
    from cryptography.hazmat.primitives.serialization import (  # noqa: PLC0415
        load_pem_private_key,
    )

    try:
        return load_pem_private_key(path.read_bytes(), None)
    except OSError as error:
        raise _unusable(error.strerror, path) from None
    except TypeError:  # as it says for a key with a password
        raise _unusable("the key has a password: store it without one", path) from None
    except (ValueError, UnsupportedAlgorithm):
        raise _unusable("this is no key", path) from None


def _unusable(reason: str | None, path: Path) -> ConfigError:
    return ConfigError(
        "tls",
        f"{path}: {reason}",
        hint="cert, key and client_ca are PEM files that belong together, and that this process"
        " may read",
    )


class TlsTransport(BufferingTLSTransport):
    """A transport with TLS for sessions, which use a bit more than Twisted's has."""

    writeSomeData = None  # noqa: N815  # Twisted's: the plain transport's would not encrypt
    _handshake_bytes = 0

    def dataReceived(self, data: bytes) -> None:
        """Take bytes of the client, of which a handshake has few."""
        super().dataReceived(data)  # type: ignore[no-untyped-call]  # Twisted's
        if not self._handshakeDone:
            self._handshake_bytes += len(data)
            if self._handshake_bytes > HANDSHAKE_BYTES:
                self.abortConnection()

    def getHandle(self) -> Any:  # noqa: ANN401, N802  # a socket
        """Return the socket below."""
        below: Any = self.transport
        return below.getHandle()

    def loseConnection(self) -> None:
        """Close after sending what is written. A producer would hold it open."""
        if self._producer is not None:
            self.unregisterProducer()  # type: ignore[no-untyped-call]  # Twisted's
        super().loseConnection()

    def abortConnection(self) -> None:
        """Close at once. Twisted's would fail where the connection is lost already."""
        if self.connected:
            super().abortConnection()  # type: ignore[no-untyped-call]  # Twisted's

    def _tlsShutdownFinished(self, reason: Failure | None) -> None:  # noqa: N802  # Twisted's
        """End as Twisted's transport does, with a failure that holds no frames.

        The frame that has met the failure also has it as a variable. This circle would
        keep the buffers of OpenSSL, tens of KiB, until the collector comes; it counts
        only objects, and comes late (`collect_rarely`).
        """
        if reason is not None and reason.value is not None:
            reason.tb = None
            reason.value.__traceback__ = None
        super()._tlsShutdownFinished(reason)  # type: ignore[no-untyped-call]  # Twisted's

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        super().connectionLost(reason)
        self._producer = None  # it leads to the session, and from there back here


class TlsFactory(TLSMemoryBIOFactory):
    """Wraps the connections of another factory."""

    protocol = TlsTransport
    noisy = False

    def __init__(
        self,
        certificates: Any,  # noqa: ANN401  # Certificates; mypy does not know zope's interfaces
        wrapped: Any,  # noqa: ANN401  # a factory
        reactor: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(certificates, False, wrapped, reactor)  # as Twisted has it

    def buildProtocol(self, addr: IAddress | None) -> Any:  # noqa: ANN401  # a TlsTransport, or None
        """Return a connection, None where the wrapped factory refuses it. Twisted's
        would go on with the handshake, for nobody, and without a time-out.
        """
        wrapped = self.wrappedFactory.buildProtocol(addr)
        return None if wrapped is None else self.protocol(self, wrapped)


def certificate_name(transport: Any, rule: str) -> str | None:  # noqa: ANN401
    """Return the name in a client's certificate by the rule, None without one.

    The handshake has checked the certificate: CN = the subject's common name, DNS = the
    first such subject alternative name.
    """
    get = getattr(transport, "getPeerCertificate", None)
    certificate = None if get is None else get()
    if certificate is None:
        return None
    from cryptography import x509  # noqa: PLC0415  # an extra

    checked = certificate.to_cryptography()
    if rule == "CN":
        names = checked.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
        return str(names[0].value) if len(names) == 1 else None
    try:
        found = checked.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return None
    return next(iter(found.value.get_values_for_type(x509.DNSName)), None)

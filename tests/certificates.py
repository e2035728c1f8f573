"""Certificates for tests: an authority, and what it signs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

SERVER, CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH


class Files(NamedTuple):
    """A certificate and its key, as PEM files."""

    cert: Path
    key: Path


class Authority:
    """An authority with its certificate in `directory`."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self._directory, self._name = directory, _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        made = self._builder(self._name, self._key, 30)
        made = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.ca = directory / f"{name}.pem"
        self.ca.write_bytes(_pem(made.sign(self._key, hashes.SHA256())))

    def sign(
        self, name: str, *, host: str | None = "127.0.0.1", use: x509.ObjectIdentifier = SERVER,
        days: int = 30,
    ) -> Files:  # fmt: skip
        """Write a certificate for a host or a user; negative days = expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        made = self._builder(_name(name), key, days)
        made = made.add_extension(x509.ExtendedKeyUsage([use]), critical=False)
        if host is not None:
            names: list[x509.GeneralName] = [x509.IPAddress(ip_address(host))]
            made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
        files = Files(self._directory / f"{name}.pem", self._directory / f"{name}.key")
        files.cert.write_bytes(_pem(made.sign(self._key, hashes.SHA256())))
        files.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return files

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=60))
            .not_valid_after(now + timedelta(days=days))
        )


def locked_key(file: Path) -> Path:
    """Write the key of a file with a password, and return the new file."""
    key = serialization.load_pem_private_key(file.read_bytes(), None)
    locked = file.with_name("locked.key")
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    return locked


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)

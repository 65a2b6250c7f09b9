"""A certificate authority for tests, which makes keys and certificates of servers and clients in a folder."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALIDITY = datetime.timedelta(days=3650)
DRIFT = datetime.timedelta(minutes=5)
"""How far in the past certificates begin to be valid, because two clocks may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The holder of a certificate. names and addresses: of a server's hosts; a subject without them is a client."""

    common_name: str
    organization: str = ""
    names: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()

    def x509_name(self) -> x509.Name:
        parts = [x509.NameAttribute(NameOID.COMMON_NAME, self.common_name)]
        if self.organization:
            parts.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, self.organization))
        return x509.Name(parts)


HERE = Subject(common_name="test-server", names=("localhost",), addresses=("127.0.0.1",))
"""A server on this machine."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The files with a certificate and its key. authority: the file with the certificate of the signer."""

    certificate: Path
    key: Path
    authority: Path


class Authority:
    """Makes keys and certificates in `folder`: NAME.crt and NAME.key; its own are ca.crt and ca.key.

    signer: the authority that signs this one's certificate; None: itself. Like many private authorities, it writes no
    key identifiers.
    """

    def __init__(self, folder: Path, name: str = "test-authority", signer: Authority | None = None) -> None:
        self._folder = folder
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._begin = datetime.datetime.now(datetime.UTC) - DRIFT
        usage = _usage(signs_certificates=True)
        by = signer or self
        builder = by._builder(self._name, self._key.public_key(), VALIDITY).add_extension(usage, critical=True)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self._save("ca", self._key, builder.sign(by._key, hashes.SHA256()))

    def issue(self, name: str, subject: Subject, *, validity: datetime.timedelta = VALIDITY) -> Identity:
        """Make NAME.crt and NAME.key. validity: counted from DRIFT before the authority was made."""
        key = ec.generate_private_key(ec.SECP256R1())
        server = bool(subject.names or subject.addresses)
        purpose = ExtendedKeyUsageOID.SERVER_AUTH if server else ExtendedKeyUsageOID.CLIENT_AUTH
        builder = self._builder(subject.x509_name(), key.public_key(), validity)
        builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        if server:
            alternatives: list[x509.GeneralName] = [x509.DNSName(each) for each in subject.names]
            alternatives += [x509.IPAddress(ipaddress.ip_address(each)) for each in subject.addresses]
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        self._save(name, key, builder.sign(self._key, hashes.SHA256()))
        return Identity(self._folder / f"{name}.crt", self._folder / f"{name}.key", self._folder / "ca.crt")

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, validity: datetime.timedelta
    ) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name).public_key(key)
        builder = builder.serial_number(x509.random_serial_number())
        return builder.not_valid_before(self._begin).not_valid_after(self._begin + validity)

    def _save(self, name: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        (self._folder / f"{name}.key").write_bytes(private_pem(key))
        (self._folder / f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def private_pem(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    """Return a private key in PEM format, unencrypted."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )

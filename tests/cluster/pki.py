"""The cluster's certificates and kubeconfigs: a certificate authority that lives as long as the cluster's folder."""

from __future__ import annotations

import base64
import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tests.cluster.layout import API_SERVICE_IP, NODE_IP, NODE_NAME

VALIDITY = datetime.timedelta(days=3650)
API_NAMES = (
    "localhost",
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Whom a certificate names. names and addresses: a server's; a subject without them is a client."""

    common_name: str
    organization: str = ""
    names: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()

    def x509_name(self) -> x509.Name:
        parts = [x509.NameAttribute(NameOID.COMMON_NAME, self.common_name)]
        if self.organization:
            parts.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, self.organization))
        return x509.Name(parts)


SUBJECTS = {
    "apiserver": Subject(
        common_name="kube-apiserver", names=API_NAMES, addresses=("127.0.0.1", API_SERVICE_IP, NODE_IP)
    ),
    "kubelet-server": Subject(common_name=NODE_NAME, names=(NODE_NAME,), addresses=(NODE_IP, "127.0.0.1")),
    "apiserver-kubelet-client": Subject(common_name="apiserver-kubelet", organization="system:masters"),
    "front-proxy-client": Subject(common_name="front-proxy-client"),
}
USERS = {
    "admin": Subject(common_name="admin", organization="system:masters"),
    "kube-controller-manager": Subject(common_name="system:kube-controller-manager"),
    "kube-scheduler": Subject(common_name="system:kube-scheduler"),
    "kube-proxy": Subject(common_name="system:kube-proxy"),
    "kubelet": Subject(common_name=f"system:node:{NODE_NAME}", organization="system:nodes"),
}
"""Each gets a kubeconfig."""


class Authority:
    """Makes keys and certificates in `folder`: NAME.crt and NAME.key; its own are ca.crt and ca.key."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test-cluster-ca")])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._begin = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=5)
        usage = _usage(signs_certificates=True)
        builder = self._builder(self._name, self._key.public_key()).add_extension(usage, critical=True)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self._save("ca", self._key, builder.sign(self._key, hashes.SHA256()))

    def issue(self, name: str, subject: Subject) -> None:
        """Make NAME.crt and NAME.key."""
        key = ec.generate_private_key(ec.SECP256R1())
        server = bool(subject.names or subject.addresses)
        purpose = ExtendedKeyUsageOID.SERVER_AUTH if server else ExtendedKeyUsageOID.CLIENT_AUTH
        builder = self._builder(subject.x509_name(), key.public_key())
        builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        if server:
            alternatives: list[x509.GeneralName] = [x509.DNSName(each) for each in subject.names]
            alternatives += [x509.IPAddress(ipaddress.ip_address(each)) for each in subject.addresses]
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        self._save(name, key, builder.sign(self._key, hashes.SHA256()))

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name).public_key(key)
        builder = builder.serial_number(x509.random_serial_number())
        return builder.not_valid_before(self._begin).not_valid_after(self._begin + VALIDITY)

    def _save(self, name: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        (self._folder / f"{name}.key").write_bytes(_private_pem(key))
        (self._folder / f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def make_pki(folder: Path, api_port: int) -> None:
    """Fill the folder (made with mode 0700): certificates, service account keys, a kubeconfig for each of USERS."""
    folder.mkdir(mode=0o700, parents=True)
    authority = Authority(folder)
    for name, subject in {**SUBJECTS, **USERS}.items():
        authority.issue(name, subject)
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    (folder / "sa.key").write_bytes(_private_pem(key))
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / "sa.pub").write_bytes(public)
    for user in USERS:
        (folder / f"{user}.kubeconfig").write_text(_kubeconfig(folder, user, api_port))


def _kubeconfig(folder: Path, user: str, api_port: int) -> str:
    def inline(name: str) -> str:
        return base64.b64encode((folder / name).read_bytes()).decode()

    cluster = {"server": f"https://127.0.0.1:{api_port}", "certificate-authority-data": inline("ca.crt")}
    credentials = {"client-certificate-data": inline(f"{user}.crt"), "client-key-data": inline(f"{user}.key")}
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": user, "user": credentials}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": user}}],
            "current-context": "test",
        }
    )


def _private_pem(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
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

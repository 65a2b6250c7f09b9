"""The cluster's certificates and kubeconfigs, signed by an authority that lives as long as the cluster's folder."""

from __future__ import annotations

import base64
from pathlib import Path

import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.authority import Authority, Subject, private_pem
from tests.cluster.layout import API_SERVICE_IP, NODE_IP, NODE_NAME

API_NAMES = (
    "localhost",
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
)


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


def make_pki(folder: Path, api_port: int) -> None:
    """Fill the folder (made with mode 0700): certificates, service account keys, a kubeconfig for each of USERS."""
    folder.mkdir(mode=0o700, parents=True)
    authority = Authority(folder, "test-cluster-ca")
    for name, subject in {**SUBJECTS, **USERS}.items():
        authority.issue(name, subject)
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    (folder / "sa.key").write_bytes(private_pem(key))
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

"""The cluster's certificates and kubeconfigs, signed by an authority that lives as long as the cluster's folder."""

from __future__ import annotations

import base64
from pathlib import Path

import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.authority import Authority, Subject, private_pem
from tests.cluster.layout import API_SERVICE_IP, NODE_IP, Layout

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
    "apiserver-kubelet-client": Subject(common_name="apiserver-kubelet", organization="system:masters"),
    "front-proxy-client": Subject(common_name="front-proxy-client"),
}
USERS = {
    "admin": Subject(common_name="admin", organization="system:masters"),
    "kube-controller-manager": Subject(common_name="system:kube-controller-manager"),
    "kube-scheduler": Subject(common_name="system:kube-scheduler"),
}
"""Each gets a kubeconfig."""
NODES_MAX = 2


def make_pki(folder: Path, name: str, api_port: int) -> None:
    """Fill the folder (made with mode 0700): certificates, service account keys, a kubeconfig for each of USERS.

    Those of all nodes that the cluster may have: the authority's key stays in this process.
    """
    folder.mkdir(mode=0o700, parents=True)
    authority = Authority(folder, "test-cluster-ca")
    for each, subject in {**SUBJECTS, **USERS}.items():
        authority.issue(each, subject)
    for number in range(1, NODES_MAX + 1):
        _for_node(authority, folder, Layout(name=name, node=number), api_port)
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    (folder / "sa.key").write_bytes(private_pem(key))
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / "sa.pub").write_bytes(public)
    for user in USERS:
        (folder / f"{user}.kubeconfig").write_text(_kubeconfig(folder, user, "127.0.0.1", api_port))


def _for_node(authority: Authority, folder: Path, node: Layout, api_port: int) -> None:
    name, server = node.node_name, "127.0.0.1" if node.node == 1 else NODE_IP
    serving = Subject(common_name=name, names=(name,), addresses=(node.node_ip, "127.0.0.1"))
    authority.issue(f"kubelet-server{node.credentials}", serving)
    users = {
        "kubelet": Subject(common_name=f"system:node:{name}", organization="system:nodes"),
        "kube-proxy": Subject(common_name="system:kube-proxy"),
    }
    for user, subject in users.items():
        named = f"{user}{node.credentials}"
        authority.issue(named, subject)
        (folder / f"{named}.kubeconfig").write_text(_kubeconfig(folder, named, server, api_port))


def _kubeconfig(folder: Path, user: str, server: str, api_port: int) -> str:
    def inline(name: str) -> str:
        return base64.b64encode((folder / name).read_bytes()).decode()

    cluster = {"server": f"https://{server}:{api_port}", "certificate-authority-data": inline("ca.crt")}
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

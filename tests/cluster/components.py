"""What runs on the node: the command line of every component, and the files that configure them. Pure."""

from __future__ import annotations

import json
from typing import Any

import yaml

from tests.cluster.layout import (
    CONTAINERD_SOCKET,
    Layout,
    node_root,
)

SERVICE_RANGE = "10.96.0.0/16"
PAUSE_IMAGE = "localhost/pause:1"
ETCD = "http://127.0.0.1:2379"
ETCD_PEER = "http://127.0.0.1:2380"
NO_OOM_SCORE = 0
"""Root in a container often lacks CAP_SYS_RESOURCE, and can't lower any process's score."""

OF_NODES = ("pod-garbage-collector-controller", "node-lifecycle-controller")
"""Controllers that a cluster without a node goes without."""

CONTAINERD_CONFIG = """\
version = 2
root = "{state}/containerd"
state = "/run/containerd/state"
oom_score = {oom_score}
[grpc]
  address = "{socket}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{state}/containerd-opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  disable_apparmor = true
  # Without CAP_SYS_RESOURCE each sandbox fails with "can't get final child's PID from pipe".
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
        BinaryName = "{node}/usr/sbin/runc"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{node}/usr/lib/cni"
    conf_dir = "{state}/cni"
"""
COREFILE = """\
.:53 {{
  errors
  ready
  kubernetes cluster.local in-addr.arpa {{
    kubeconfig {kubeconfig} test
  }}
  cache 5
}}
"""


def first_components(layout: Layout, api_port: int, *, api_only: bool) -> dict[str, list[str]]:
    """What needs nothing else to run: name to command line. The control plane is on the first node."""
    containerd = {"containerd": ["containerd", "--config", f"{layout.state}/containerd.toml"]}
    if layout.node > 1:
        return containerd
    etcd = [
        "etcd",
        f"--data-dir={layout.state}/etcd",
        f"--listen-client-urls={ETCD}",
        f"--advertise-client-urls={ETCD}",
        f"--listen-peer-urls={ETCD_PEER}",
        f"--initial-advertise-peer-urls={ETCD_PEER}",
        f"--initial-cluster=default={ETCD_PEER}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]
    return {"etcd": etcd, "kube-apiserver": _apiserver(layout, api_port)} | ({} if api_only else containerd)


def later_components(layout: Layout, *, api_only: bool) -> dict[str, list[str]]:
    """What is started when the API answers: name to command line."""
    of_each_node = {
        "kubelet": [
            "kubelet",
            f"--config={layout.state}/kubelet.yaml",
            f"--kubeconfig={layout.pki}/kubelet{layout.credentials}.kubeconfig",
            f"--hostname-override={layout.node_name}",
            f"--node-ip={layout.node_ip}",
        ],
        "kube-proxy": ["kube-proxy", f"--config={layout.state}/kube-proxy.yaml"],
    }
    if layout.node > 1:
        return of_each_node
    found = {
        "kube-controller-manager": [
            "kube-controller-manager",
            *_with_kubeconfig(layout, "kube-controller-manager"),
            f"--cluster-signing-cert-file={layout.pki}/ca.crt",
            f"--cluster-signing-key-file={layout.pki}/ca.key",
            f"--root-ca-file={layout.pki}/ca.crt",
            f"--service-account-private-key-file={layout.pki}/sa.key",
            "--use-service-account-credentials=true",
            # With the default limit a new namespace gets its service account seconds late.
            "--kube-api-qps=500",
            "--kube-api-burst=1000",
            "--leader-elect=false",
            "--allocate-node-cidrs=false",
        ]
    }
    if api_only:
        # No kubelet is there on whose word these two wait: after 40 to 60 s they would remove the pods that a test has
        # bound to a node of its own, also those made a moment ago, and taint the Nodes that it has made.
        found["kube-controller-manager"].append(f"--controllers=*,{','.join(f'-{each}' for each in OF_NODES)}")
        return found
    return found | {
        "kube-scheduler": ["kube-scheduler", *_with_kubeconfig(layout, "kube-scheduler"), "--leader-elect=false"],
        **of_each_node,
        "coredns": ["coredns", "-conf", f"{layout.state}/Corefile"],
    }


def _apiserver(layout: Layout, port: int) -> list[str]:
    pki = layout.pki
    return [
        "kube-apiserver",
        f"--etcd-servers={ETCD}",
        f"--service-cluster-ip-range={SERVICE_RANGE}",
        f"--advertise-address={layout.node_ip}",
        f"--secure-port={port}",
        f"--tls-cert-file={pki}/apiserver.crt",
        f"--tls-private-key-file={pki}/apiserver.key",
        f"--client-ca-file={pki}/ca.crt",
        f"--service-account-key-file={pki}/sa.pub",
        f"--service-account-signing-key-file={pki}/sa.key",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        f"--kubelet-client-certificate={pki}/apiserver-kubelet-client.crt",
        f"--kubelet-client-key={pki}/apiserver-kubelet-client.key",
        f"--kubelet-certificate-authority={pki}/ca.crt",
        # The node's name is in no DNS: logs and exec would look for it.
        "--kubelet-preferred-address-types=InternalIP,Hostname",
        f"--requestheader-client-ca-file={pki}/ca.crt",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-username-headers=X-Remote-User",
        f"--proxy-client-cert-file={pki}/front-proxy-client.crt",
        f"--proxy-client-key-file={pki}/front-proxy-client.key",
    ]


def _with_kubeconfig(layout: Layout, user: str) -> list[str]:
    path = layout.pki / f"{user}.kubeconfig"
    return [f"--{kind}kubeconfig={path}" for kind in ("", "authentication-", "authorization-")]


def node_files(layout: Layout) -> dict[str, str]:
    """Path below the state folder to text."""
    containerd = CONTAINERD_CONFIG.format(
        state=layout.state, node=node_root(), pause=PAUSE_IMAGE, socket=CONTAINERD_SOCKET, oom_score=NO_OOM_SCORE
    )
    return {
        "containerd.toml": containerd,
        "cni/10-test.conflist": json.dumps(_network(layout)),
        "kubelet.yaml": yaml.safe_dump(_kubelet(layout)),
        "kube-proxy.yaml": yaml.safe_dump(_kube_proxy(layout)),
        "resolv.conf": f"nameserver {layout.dns_ip}\n",
        "Corefile": COREFILE.format(kubeconfig=layout.kubeconfig),
    }


def _network(layout: Layout) -> dict[str, Any]:
    addresses = {
        "type": "host-local",
        "dataDir": f"{layout.state}/cni-addresses",
        "ranges": [[{"subnet": layout.pod_range}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    pair = {"type": "ptp", "ipMasq": False, "mtu": 1500, "ipam": addresses}
    return {"cniVersion": "1.0.0", "name": "test", "plugins": [pair]}


def _kubelet(layout: Layout) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{layout.pki}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": f"{layout.pki}/kubelet-server{layout.credentials}.crt",
        "tlsPrivateKeyFile": f"{layout.pki}/kubelet-server{layout.credentials}.key",
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{layout.cgroup}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "oomScoreAdj": NO_OOM_SCORE,
        "clusterDNS": [layout.dns_ip],
        "clusterDomain": "cluster.local",
        "resolvConf": f"{layout.state}/resolv.conf",
        # The machine's disk is not the node's own: it never cleans up because others filled it.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "1%",
            "nodefs.inodesFree": "1%",
            "imagefs.available": "1%",
        },
        "serializeImagePulls": False,
        # By default both take a minute, and tests would wait for little else.
        "syncFrequency": "10s",
        "volumeStatsAggPeriod": "10s",
    }


def _kube_proxy(layout: Layout) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clusterCIDR": layout.pod_range,
        "hostnameOverride": layout.node_name,
        "clientConnection": {"kubeconfig": f"{layout.pki}/kube-proxy{layout.credentials}.kubeconfig"},
        "oomScoreAdj": NO_OOM_SCORE,
        # Zero leaves the machine's connection tracking limits as they are.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }

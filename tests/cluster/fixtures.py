"""Fixtures of the cluster tier: a cluster, the project's image in it, a namespace a test, an S3 server that pods reach.

With KUBECONFIG set the tests run on that cluster. E2E_IMAGE names an image that its nodes can pull or hold already,
E2E_TRAIN_IMAGE one that has scikit-learn (examples/digits/Dockerfile makes it),
E2E_S3_ENDPOINT, E2E_S3_ACCESS_KEY and E2E_S3_SECRET_KEY an S3 server that its pods and this machine reach. What needs
the node itself (`own_node`) is deselected there. Otherwise a cluster of this machine's is started, and ended with the
session; one that `make cluster-up` started is used when KUBECONFIG names it, and stays.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml

from tests.cluster import cluster as clusters
from tests.cluster.image import IMAGE, TRAIN_IMAGE, TRAINER, image_archive
from tests.cluster.image import obstacle as image_obstacle
from tests.cluster.kube import REMOVED_S, Kube, KubeError, NotInTime
from tests.cluster.layout import REPOSITORY, Layout
from tests.servers import Server, run_versitygw

NAMESPACE_LIMIT_S = 300.0
ROLLOUT_S = 300.0
SYSTEM = "datastore-system"
PRIVATE_RANGES = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "127.0.0.0/8")
"""Where the tests' S3 servers are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where the tests run. own: the cluster if its node is this machine; image: what pods name."""

    kube: Kube
    own: clusters.Cluster | None
    image: str

    def container(self, *command: str) -> dict[str, object]:
        """A container of our image that runs the command."""
        return {"name": "main", "image": self.image, "imagePullPolicy": self.pull_policy, "command": list(command)}

    @property
    def pull_policy(self) -> str:
        return "Never" if self.own else "IfNotPresent"


def given_kubeconfig() -> Path | None:
    """The user's cluster, or None."""
    value = os.environ.get("KUBECONFIG", "")
    return Path(value) if value else None


def obstacle() -> str:
    """Why the cluster tier can't run here, or ''."""
    if given_kubeconfig() is None:
        return clusters.obstacle() or image_obstacle()
    missing = [name for name in ("E2E_IMAGE", "E2E_S3_ENDPOINT") if not os.environ.get(name)]
    if _ours(given_kubeconfig()) or not missing:
        return ""
    return f"KUBECONFIG is set, but not {' and '.join(missing)}"


def _ours(kubeconfig: Path | None) -> clusters.Cluster | None:
    """The running cluster of `make cluster-up` whose configuration this is."""
    if kubeconfig is None or len(kubeconfig.parts) < 3:
        return None
    name = kubeconfig.parent.parent.name
    try:
        same = Layout(name=name).kubeconfig == kubeconfig
    except ValueError:
        return None
    return clusters.find(name) if same else None


def own_site() -> bool:
    """Whether the node is this machine."""
    kubeconfig = given_kubeconfig()
    return kubeconfig is None or _ours(kubeconfig) is not None


def _cannot(reason: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def api_server(nothing_stays_behind: None) -> Iterator[clusters.Cluster]:
    """A cluster without a node, for tests of what only talks to the API."""
    if reason := clusters.obstacle(api_only=True):
        _cannot(reason)
    clusters.sweep()
    cluster = clusters.up(f"api-{uuid.uuid4().hex[:8]}", api_only=True, owned=True)
    try:
        yield cluster
    finally:
        cluster.end()


@pytest.fixture(scope="session")
def site(nothing_stays_behind: None) -> Iterator[Site]:
    """The cluster, with the image where it can be put."""
    if reason := obstacle():
        _cannot(reason)
    kubeconfig = given_kubeconfig()
    running = _ours(kubeconfig)
    if kubeconfig is not None and running is None:
        yield Site(kube=Kube(kubeconfig, also=(SYSTEM,)), own=None, image=os.environ["E2E_IMAGE"])
        return
    with ExitStack() as ending:
        archive = image_archive()
        clusters.sweep()
        cluster = running or clusters.up(f"e2e-{uuid.uuid4().hex[:8]}", owned=True)
        if running is None:
            ending.callback(cluster.end)
        cluster.load(archive)
        yield Site(kube=Kube(cluster.kubeconfig, also=(SYSTEM,)), own=cluster, image=IMAGE)


@pytest.fixture(scope="session")
def train_image(site: Site) -> str:
    """An image with scikit-learn, which has nothing of ours."""
    if site.own is not None:
        site.own.load(image_archive(TRAINER))
        return TRAIN_IMAGE
    return os.environ.get("E2E_TRAIN_IMAGE") or _cannot("KUBECONFIG is set, but not E2E_TRAIN_IMAGE")


@pytest.fixture(scope="session")
def kube(site: Site) -> Kube:
    return site.kube


@dataclass(frozen=True, slots=True)
class Product:
    """Datastore in the cluster. manifests: what `kubectl apply -k` was given; seconds: until all of it was ready."""

    manifests: Path
    seconds: float


@pytest.fixture(scope="session")
def product(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    """Installed by one `kubectl apply -k`; at the end removed in the documented order, of which nothing may stay."""
    kube, manifests = site.kube, _overlay(site.image, tmp_path_factory.mktemp("overlay"))
    begun = time.monotonic()
    kube.kubectl("apply", "--kustomize", str(manifests))
    wait_rolled_out(kube)
    yield Product(manifests, time.monotonic() - begun)
    kube.kubectl("delete", "datastores", "--all", "--all-namespaces", timeout_s=ROLLOUT_S)
    kube.kubectl("delete", "--kustomize", str(manifests), "--ignore-not-found", timeout_s=REMOVED_S)
    assert kube.items("pv", selector="app.kubernetes.io/managed-by=datastore-controller") == []


@pytest.fixture(scope="session")
def models_controller(kube: Kube, product: Product, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The product with the component models; afterwards without."""
    folder = tmp_path_factory.mktemp("models")
    base, component = (
        os.path.relpath(path, folder.resolve()) for path in (product.manifests, REPOSITORY / "manifests" / "models")
    )
    images = yaml.safe_load((product.manifests / "kustomization.yaml").read_text())["images"]
    overlay = {"kind": "Kustomization", "resources": [base], "components": [component], "images": images}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    kube.kubectl("apply", "--kustomize", str(folder))
    for name in ("models", "servings"):
        _rolled_out(kube, f"deployment/datastore-{name}")
    yield
    files = [f"--filename={REPOSITORY / 'manifests' / 'models' / name}.yaml" for name in ("models", "servings")]
    kube.kubectl("delete", *files, timeout_s=ROLLOUT_S)


def wait_rolled_out(kube: Kube) -> None:
    """Wait for the controllers, and for the node plugin, which is ready when the mount daemon is."""
    controllers = [f"deployment/datastore-{name}" for name in ("controller", "training-controller")]
    for workload in (*controllers, "daemonset/datastore-node"):
        _rolled_out(kube, workload)


def _rolled_out(kube: Kube, workload: str) -> None:
    limit = f"--timeout={ROLLOUT_S:.0f}s"
    try:
        kube.kubectl("rollout", "status", workload, f"--namespace={SYSTEM}", limit, timeout_s=ROLLOUT_S + 60)
    except KubeError as error:
        raise NotInTime(f"{error}\n{kube.diagnosis(SYSTEM)}") from error


def _overlay(image: str, folder: Path) -> Path:
    """An overlay of manifests/ in which our workloads run this image, and the tests' S3 servers may be asked."""
    name, _, tag = image.rpartition(":")
    allowed = {"name": "ALLOW_RANGES", "value": ",".join(PRIVATE_RANGES)}
    patches = [
        {"patch": yaml.safe_dump(_patch(kind, workload, container, allowed))}
        for kind, workload, container in (
            ("Deployment", "datastore-controller", "controller"),
            ("DaemonSet", "datastore-node", "node"),
        )
    ]
    base = os.path.relpath(REPOSITORY / "manifests", folder.resolve())
    document = {
        "resources": [base],
        "images": [{"name": IMAGE.rpartition(":")[0], "newName": name, "newTag": tag}],
        "patches": patches,
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(document))
    return folder


def _patch(kind: str, workload: str, container: str, variable: Mapping[str, str]) -> dict[str, Any]:
    containers = [{"name": container, "env": [variable]}]
    metadata = {"name": workload, "namespace": SYSTEM}
    spec = {"template": {"spec": {"containers": containers}}}
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": metadata, "spec": spec}


@pytest.fixture(scope="session")
def ending_namespaces(kube: Kube) -> Iterator[list[str]]:
    """Those whose deletion was asked for. That none hangs is looked at once: each may take a quarter of a minute."""
    names: list[str] = []
    yield names
    for name in names:
        gone = f"end of namespace {name}"
        kube.wait_for(gone, partial(_absent, kube, name), limit_s=NAMESPACE_LIMIT_S, namespace=name)


def _absent(kube: Kube, namespace: str) -> bool:
    return kube.get("namespace", namespace) is None


@pytest.fixture
def namespace(kube: Kube, ending_namespaces: list[str]) -> Iterator[str]:
    """An empty namespace with its default service account; removed, with what is in it, after the test."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    kube.wait_for("service account", lambda: bool(kube.get("serviceaccount", "default", namespace=name)))
    yield name
    kube.delete("namespace", name, wait=False)
    ending_namespaces.append(name)


@dataclass(frozen=True, slots=True)
class Storage:
    """An S3 server. here: as this machine reaches it; endpoint: as pods do."""

    here: Server
    endpoint: str


@pytest.fixture(scope="session")
def storage(site: Site) -> Iterator[Storage]:
    """versitygw on this machine, or the server that the environment names."""
    if site.own is None:
        server = Server(
            name="given",
            endpoint=os.environ["E2E_S3_ENDPOINT"],
            access_key=os.environ["E2E_S3_ACCESS_KEY"],
            secret_key=os.environ["E2E_S3_SECRET_KEY"],
        )
        yield Storage(server, server.endpoint)
        return
    with run_versitygw() as server:
        port = int(server.endpoint.rpartition(":")[2])
        with site.own.exposing(port) as address:
            yield Storage(server, f"http://{address}")

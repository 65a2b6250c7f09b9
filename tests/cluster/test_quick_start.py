"""docs/QUICKSTART.md as written: its commands in one shell, its manifests with another server's address and keys."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
import uuid
from datetime import datetime
from pathlib import Path

import pytest
import sklearn.datasets

from datastore.api.datastore import API_VERSION
from tests.cluster.fixtures import ROLLOUT_S, SYSTEM, Product, Site, Storage, wait_rolled_out
from tests.cluster.image import IMAGE, TRAIN_IMAGE
from tests.cluster.kube import Kube, Manifest
from tests.cluster.layout import REPOSITORY
from tests.cluster.volumes import LOOP, Loop, Volume
from tests.promises import promise
from tests.servers import boto_client, make_bucket, tools_dir

pytestmark = [pytest.mark.e2e_cluster, pytest.mark.timeout(1500, func_only=True)]
DOCUMENT = REPOSITORY / "docs" / "QUICKSTART.md"
READY_S = 240.0
STEP_S = 900.0


class Guide:
    """The document's blocks, in a folder where its commands work as they stand."""

    def __init__(self, kube: Kube, namespace: str, folder: Path, product: Product, replaced: dict[str, str]) -> None:
        self.folder = folder
        text = DOCUMENT.read_text()
        (folder / "manifests").symlink_to(product.manifests)
        self.commands = re.findall(r"^```console\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        for name, body in re.findall(r"^```yaml\n# (\S+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            (folder / name).write_text(_replaced(body, replaced))
        self.environment = {**os.environ, "KUBECONFIG": str(folder / "kubeconfig")}
        self.environment["PATH"] = f"{tools_dir()}:{os.environ['PATH']}"
        shutil.copy(kube.kubeconfig, folder / "kubeconfig")
        self.shell(f"kubectl config set-context --current --namespace={namespace}")

    def follow(self, which: int) -> str:
        """Run the lines of a block that begin with `$ `; the first that fails ends it. What was printed."""
        lines = [line.removeprefix("$ ") for line in self.commands[which].splitlines() if line.startswith("$ ")]
        return self.shell("\n".join(lines))

    def shell(self, script: str) -> str:
        done = subprocess.run(
            ["bash", "-e", "-c", script],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=STEP_S,
            check=False,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}"
        return done.stdout


def _replaced(text: str, replaced: dict[str, str]) -> str:
    for placeholder, real in replaced.items():
        text = text.replace(placeholder, real)
    return text


@pytest.fixture
def bucket(storage: Storage) -> str:
    """A bucket with the digits in it, as the document supposes."""
    name = make_bucket(storage.here, f"digits-{uuid.uuid4().hex[:12]}")
    digits = Path(sklearn.datasets.__path__[0], "data", "digits.csv.gz").read_bytes()
    boto_client(storage.here).put_object(Bucket=name, Key="digits.csv.gz", Body=digits)
    return name


@pytest.fixture
def guide(
    kube: Kube,
    site: Site,
    namespace: str,
    tmp_path: Path,
    product: Product,
    storage: Storage,
    bucket: str,
    train_image: str,
) -> Guide:
    replaced = {
        "http://s3.example.org:9000": storage.endpoint,
        "bucket: digits": f"bucket: {bucket}",
        "KEY_ID: access": f"KEY_ID: {storage.here.access_key}",
        "ACCESS_KEY: secret": f"ACCESS_KEY: {storage.here.secret_key}",
        IMAGE: site.image,
        TRAIN_IMAGE: train_image,
    }
    return Guide(kube, namespace, tmp_path, product, replaced)


@promise("S-70")
def test_the_quick_start_as_written(
    guide: Guide, kube: Kube, namespace: str, storage: Storage, bucket: str, product: Product
) -> None:
    install, apply, train, look, clean_up = range(5)
    guide.follow(install)
    begun = time.monotonic()
    guide.follow(apply)
    ready_s = time.monotonic() - begun

    begun_at = time.time()
    try:
        trained = guide.follow(train)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{kube.diagnosis(namespace)}\n{kube.diagnosis(SYSTEM)}") from error
    assert "1797 digits read" in trained
    accuracy = float(re.findall(r"accuracy ([0-9.]+)", trained)[0])
    assert accuracy > 0.97
    first_line = guide.shell("kubectl logs --timestamps job/train").split(maxsplit=1)[0]
    read_s = datetime.fromisoformat(re.sub(r"(\.\d{6})\d*", r"\1", first_line)).timestamp() - begun_at
    state = kube.items("pod", namespace=namespace)[0]["status"]["containerStatuses"][0]["state"]
    mounted_s = datetime.fromisoformat(state["terminated"]["startedAt"]).timestamp() - begun_at

    seen = guide.follow(look)
    assert "latest -> first" in seen
    assert "/data/runs/first/plots:\ntotal 0\n" in seen
    assert "model.joblib" in seen
    keys = {each["Key"] for each in boto_client(storage.here).list_objects_v2(Bucket=bucket)["Contents"]}
    assert {"digits.csv.gz", "runs/first/model.joblib", "runs/first/plots/"} <= keys

    guide.follow(clean_up)
    assert kube.items("pvc", namespace=namespace) == []
    assert keys <= {each["Key"] for each in boto_client(storage.here).list_objects_v2(Bucket=bucket)["Contents"]}
    print(
        f"install {product.seconds:.1f} s; a Datastore from apply to Ready {ready_s:.1f} s; "
        f"a Job from apply to its start with the mount {mounted_s:.0f} s, to its first read, after the imports of "
        f"scikit-learn, {read_s:.1f} s; accuracy {accuracy}"
    )


def datastore(name: str, namespace: str, spec: Manifest) -> Manifest:
    s3 = {**spec["s3"], "credentialsSecret": "keys"}
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": API_VERSION, "kind": "Datastore", "metadata": metadata, "spec": {"s3": s3}}


@promise("S-89")
def test_a_rolling_update_of_the_controller_disturbs_nobody(
    site: Site, kube: Kube, namespace: str, storage: Storage, product: Product
) -> None:
    """Nor do a claim and its volume change."""
    volume = Volume(site, storage, namespace, make_bucket(storage.here, f"bucket-{namespace}"))
    kube.apply(volume.secret(), datastore("data", namespace, volume.spec), namespace=namespace)
    kube.wait_condition("datastore", "data", "Ready", namespace=namespace, limit_s=READY_S)
    claim = kube.get("pvc", "data", namespace=namespace)
    kube.apply(volume.pod("loop", LOOP), namespace=namespace)
    kube.wait_phase("loop", "Running", namespace=namespace, limit_s=READY_S)
    loop = Loop(kube, volume)
    loop.goes_on()
    kube.kubectl("rollout", "restart", "deployment/datastore-controller", f"--namespace={SYSTEM}", timeout_s=ROLLOUT_S)
    wait_rolled_out(kube)
    loop.goes_on()
    kube.apply(datastore("next", namespace, volume.spec), namespace=namespace)
    kube.wait_condition("datastore", "next", "Ready", namespace=namespace, limit_s=READY_S)
    loop.goes_on()
    after = kube.get("pvc", "data", namespace=namespace)
    assert claim is not None
    assert after is not None
    assert (after["metadata"]["uid"], after["spec"]) == (claim["metadata"]["uid"], claim["spec"])
    kube.delete("pod", "loop", namespace=namespace)
    kube.kubectl("delete", "datastores", "data", "next", f"--namespace={namespace}", timeout_s=ROLLOUT_S)

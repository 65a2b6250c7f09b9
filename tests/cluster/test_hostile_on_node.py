"""All hostile servers at once on a real node: another tenant's Datastores become Ready, his pod reads and writes on."""

from __future__ import annotations

import time

import pytest

from tests.cluster.controlled import condition, datastore_of
from tests.cluster.fixtures import SYSTEM, Product, Site, Storage
from tests.cluster.kube import Kube, Manifest
from tests.cluster.volumes import DRIVER, LOOP, Loop, Volume
from tests.hostile.servers import ATTACKS, Talk, hostile
from tests.promises import promise
from tests.servers import make_bucket

pytestmark = [pytest.mark.e2e_cluster, pytest.mark.own_node, pytest.mark.timeout(1200, func_only=True)]
READY_S = 240.0
OURS = 20
MOUNTED = ("redirecting", "lying-length", "endless-object", "whole-in-place-of-range")
"""Attacks that let a volume be mounted, and begin when it is read."""
STUCK = ("silent", "endless-listing")
READS = """
import os, threading, time
def read(folder):
    while True:
        try:
            for name in os.listdir(folder):
                with open(os.path.join(folder, name), "rb") as file:
                    print("read", folder, len(file.read(1 << 20)), flush=True)
        except OSError as error:
            print("refused", folder, error.strerror, flush=True)
        time.sleep(0.2)
for name in os.listdir("/hostile"):
    threading.Thread(target=read, args=(f"/hostile/{name}",)).start()
"""
CONFINED = """
import glob, json, pathlib
from datastore import controlclient
for each in glob.glob("/var/lib/kubelet/plugins/csi.datastore.dev/state/*/control.sock"):
    try:
        told = controlclient.status(pathlib.Path(each).parent)
        status = pathlib.Path(f"/proc/{told['serverPid']}/status").read_text().split("\\n")
    except (OSError, controlclient.NotAnswering):
        continue
    held = (line.split()[1] for line in status if line.startswith(("Seccomp:", "NoNewPrivs:")))
    print(json.dumps(told["unconfined"]), *held)
"""
"""In the mount daemon's pod: what holds each mount server."""


def by_bucket(talk: Talk) -> None:
    """The attack that the bucket is called after."""
    name = talk.target.split(b"?")[0].split(b"/")[1].decode()
    ATTACKS.get(name, ATTACKS["page"])(talk)


@promise("S-210", "S-215")
def test_a_pod_reads_and_writes_beside_all_hostile_servers(
    site: Site, kube: Kube, product: Product, storage: Storage, namespace: str, ending_namespaces: list[str]
) -> None:
    assert site.own is not None
    theirs = f"{namespace}-hostile"
    ours = Volume(site, storage, namespace, make_bucket(storage.here, f"bucket-{namespace}"))
    kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": theirs}})
    try:
        with hostile(by_bucket) as server, site.own.exposing(server.port) as address:

            def location(attack: str) -> Manifest:
                return {"bucket": attack, "endpoint": f"http://{address}", "credentialsSecret": "keys"}

            def inline(attack: str) -> Manifest:
                attributes = {"bucket": attack, "endpoint": f"http://{address}", "readOnly": "true"}
                secret = {"name": "keys"}
                return {"driver": DRIVER, "volumeAttributes": attributes, "nodePublishSecretRef": secret}

            def pod(name: str, attacks: tuple[str, ...]) -> Manifest:
                container = site.container("python3", "-u", "-c", READS)
                container["volumeMounts"] = [{"name": each, "mountPath": f"/hostile/{each}"} for each in attacks]
                volumes = [{"name": each, "csi": inline(each)} for each in attacks]
                spec = {"containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": 0}
                return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}

            s3 = {**ours.spec["s3"], "credentialsSecret": "keys"}
            kube.apply(ours.secret(), namespace=namespace)
            kube.apply(datastore_of("data", {"s3": s3}), namespace=namespace)
            kube.apply(ours.pod("loop", LOOP), namespace=namespace)
            loop = Loop(kube, ours)
            kube.wait_phase("loop", "Running", namespace=namespace, limit_s=READY_S)
            loop.goes_on()
            secret = {**ours.secret(), "metadata": {"name": "keys"}}
            kube.wait_for("service account", lambda: bool(kube.get("serviceaccount", "default", namespace=theirs)))
            kube.apply(secret, pod("reads", MOUNTED), pod("stuck", STUCK), namespace=theirs)
            kube.apply(*[datastore_of(each, {"s3": location(each)}) for each in ATTACKS], namespace=theirs)
            kube.wait_for("hostile servers are asked", lambda: len(server.heads) > len(ATTACKS), limit_s=READY_S)
            began = time.monotonic()
            specs = {f"d{n}": {"s3": {**s3, "prefix": f"{n}/"}} for n in range(OURS)}
            kube.apply(*[datastore_of(name, spec) for name, spec in specs.items()], namespace=namespace)

            def ready() -> bool:
                found = kube.items("datastores", namespace=namespace)
                return sum(condition(each, "Ready").get("status") == "True" for each in found) == OURS + 1

            kube.wait_for("ours Ready", ready, limit_s=READY_S, namespace=namespace)
            ready_s = time.monotonic() - began

            def asked() -> bool:
                said = kube.tail("reads", 1000, namespace=theirs)
                return "refused /hostile/redirecting Input/output error" in said

            kube.wait_phase("reads", "Running", namespace=theirs, limit_s=READY_S)
            kube.wait_for("hostile files are read", asked, limit_s=READY_S, namespace=theirs)
            loop.goes_on()
            (daemon,) = kube.items("pods", namespace=SYSTEM, selector="app.kubernetes.io/component=mount-daemon")
            inside = ("exec", daemon["metadata"]["name"], f"--namespace={SYSTEM}", "--", "python3", "-c", CONFINED)
            confined: list[str] = []

            def all_confined() -> bool:
                # One that is busy with its hostile server may not answer at the first look.
                confined[:] = kube.kubectl(*inside).splitlines()
                assert set(confined) <= {"[] 1 2"}, confined
                return len(confined) >= 1 + len(MOUNTED)

            kube.wait_for("an answer of every mount server", all_confined, limit_s=READY_S, namespace=theirs)
            refused = kube.tail("reads", 12, namespace=theirs)
            print(f"{OURS} Datastores Ready after {ready_s:.1f} s; rounds {loop.reached}; {len(server.heads)} requests")
            print(f"{confined}\n{refused}")
            for name in ("reads", "stuck"):
                kube.delete("pod", name, namespace=theirs)
            kube.delete("pod", "loop", namespace=namespace)
    finally:
        kube.delete("namespace", theirs, wait=False)
        ending_namespaces.append(theirs)

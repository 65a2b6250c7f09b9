"""datastore.kubeclient over the official client and a played API server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from datastore.api.resources import DATASTORES, NODES, PODS
from datastore.errors import (
    AccessDenied,
    CredentialsInvalid,
    DatastoreError,
    InvalidManifest,
    InvalidRequest,
    Unreachable,
)
from datastore.kubeclient import EVERYWHERE, Conflict, KubeClient, in_cluster, of_context
from tests.authority import HERE, Authority
from tests.playedapi import PlayedApi, played_api

TEAM = "/apis/datastore.dev/v1alpha1/namespaces/team/datastores"


@pytest.fixture
def api() -> Iterator[PlayedApi]:
    with played_api() as played:
        yield played


@pytest.fixture
def client(api: PlayedApi, tmp_path: Path) -> KubeClient:
    return logged_in(api.kubeconfig(tmp_path))


def logged_in(kubeconfig: Path, namespace: str = "") -> KubeClient:
    return of_context({"KUBECONFIG": str(kubeconfig)}, namespace)


def test_an_object_is_found_in_the_contexts_namespace_or_another(api: PlayedApi, client: KubeClient) -> None:
    api.objects[f"{TEAM}/digits"] = {"spec": {}}
    assert client.get(DATASTORES, "digits") == {"spec": {}}
    assert client.get(DATASTORES, "digits", namespace="other") is None
    assert api.authorization == "Bearer of-the-user"


def test_over_tls(tmp_path: Path) -> None:
    """By an authority that writes no key identifiers, as those of old clusters; from Python 3.13 on that is refused by
    default."""
    identity = Authority(tmp_path).issue("api", HERE)
    with played_api(identity) as api:
        api.objects[f"{TEAM}/digits"] = {"spec": {}}

        def found(**trust: object) -> object:
            return logged_in(api.kubeconfig(tmp_path, trust=trust)).get(DATASTORES, "digits")

        known = {"certificate-authority": str(identity.authority)}
        assert found(**known) == {"spec": {}}
        assert found(**{"insecure-skip-tls-verify": True}) == {"spec": {}}
        with pytest.raises(Unreachable, match="CERTIFICATE_VERIFY_FAILED"):
            found()
        identity.authority.write_text("no certificate")
        with pytest.raises(InvalidManifest, match="the certificate authority of the cluster can't be read"):
            found(**known)


def test_all_pages_of_a_list_come(api: PlayedApi, client: KubeClient) -> None:
    api.page = 2
    for number in range(5):
        api.objects[f"/api/v1/pods/{number}"] = {"number": number}
    found = client.list(PODS, namespace=EVERYWHERE, selector="a=b")
    assert [each["number"] for each in found] == [0, 1, 2, 3, 4]
    assert ["labelSelector=a%3Db" in target for _, target, _ in api.asked] == [True] * 3


def test_a_null_in_a_merge_patch_takes_a_field_away(api: PlayedApi, client: KubeClient) -> None:
    api.objects["/api/v1/nodes/n"] = {"spec": {"taints": [{"key": "a"}], "other": 1}}
    client.patch(NODES, "n", {"spec": {"taints": None}})
    assert api.objects["/api/v1/nodes/n"] == {"spec": {"other": 1}}
    client.patch(NODES, "n", [{"op": "test", "path": "/spec", "value": 1}])
    assert api.asked[-1] == ("PATCH", "/api/v1/nodes/n", [{"op": "test", "path": "/spec", "value": 1}])


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, CredentialsInvalid),
        (403, AccessDenied),
        (409, Conflict),
        (422, InvalidRequest),
        (429, Unreachable),
        (503, Unreachable),
    ],
)
def test_a_refusal_has_the_servers_words(
    api: PlayedApi, client: KubeClient, status: int, kind: type[DatastoreError]
) -> None:
    api.refused["/api/v1/nodes"] = (status, "nodes is forbidden: User x cannot get it")
    with pytest.raises(kind, match="GET /api/v1/nodes/n: the API server says: nodes is forbidden: User x cannot"):
        client.get(NODES, "n")
    assert len(api.asked) == 1, "nothing is tried again here"


def test_an_unreachable_server_is_reported_at_once(client: KubeClient, api: PlayedApi, tmp_path: Path) -> None:
    api.url = "http://127.0.0.1:9"
    nowhere = logged_in(api.kubeconfig(tmp_path))
    with pytest.raises(Unreachable, match=r"the API server does not answer: .*Connection refused"):
        nowhere.get(NODES, "n")


def test_a_pods_http_answer_is_returned_as_text(api: PlayedApi, client: KubeClient) -> None:
    api.objects["/api/v1/namespaces/s/pods/p:9808/proxy/metrics"] = {"text": "up 1\n"}
    assert client.text("/api/v1/namespaces/s/pods/p:9808/proxy/metrics") == "up 1\n"


def test_a_login_by_a_program_is_used(api: PlayedApi, tmp_path: Path) -> None:
    """As those of cloud providers."""
    program = tmp_path / "login"
    given = '{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": "given"}}'
    program.write_text(f"#!/bin/sh\necho '{given}'\n")
    program.chmod(0o755)
    run = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(program), "args": []}
    client = logged_in(api.kubeconfig(tmp_path, exec=run), "mine")
    assert client.list(PODS) == []
    assert (api.authorization, api.asked[0][1]) == ("Bearer given", "/api/v1/namespaces/mine/pods?limit=500")


def test_a_pod_logs_in_with_its_service_account(api: PlayedApi, tmp_path: Path) -> None:
    host, _, port = api.url.removeprefix("http://").partition(":")
    inside = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
    assert in_cluster(inside, tmp_path) is None
    (tmp_path / "token").write_text("of-the-pod")
    (tmp_path / "namespace").write_text("system\n")
    with pytest.raises(DatastoreError, match="can't be used: Service certification file does not exist"):
        in_cluster(inside, tmp_path)
    Authority(tmp_path)  # writes ca.crt
    assert in_cluster({}, tmp_path) is None
    client = in_cluster(inside, tmp_path)
    assert client is not None
    assert client.namespace == "system"


def test_a_token_that_cannot_be_sent_is_not_shown(api: PlayedApi, tmp_path: Path) -> None:
    client = logged_in(api.kubeconfig(tmp_path, token="CANARY\n"))
    with pytest.raises(CredentialsInvalid, match="one line") as refused:
        client.get(NODES, "n")
    assert "CANARY" not in str(refused.value)


def test_without_any_cluster_it_says_where_one_is_looked_for(tmp_path: Path) -> None:
    with pytest.raises(
        DatastoreError, match=r"no cluster is configured for you: .*missing \(KUBECONFIG, ~/.kube/config"
    ):
        logged_in(tmp_path / "missing")


def test_the_login_of_the_home_directory_is_the_default(
    api: PlayedApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".kube").mkdir()
    api.kubeconfig(tmp_path).rename(tmp_path / ".kube/config")
    assert of_context({}).namespace == "team"


def test_on_a_machine_without_a_cluster_the_library_is_not_loaded(tmp_path: Path) -> None:
    """It takes a third of a second, for which each `datastore job` on a laptop would wait."""
    code = "import sys; from datastore.cli.app import run; run(['job', 'list']); print('kubernetes' in sys.modules)"
    alone = {**os.environ, "HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path), "KUBECONFIG": ""}
    done = subprocess.run([sys.executable, "-c", code], env=alone, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n"), done.stdout

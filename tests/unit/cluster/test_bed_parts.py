"""What the test cluster is made of agrees with itself, as far as that can be said without one."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.cluster import fixtures
from tests.cluster.cluster import started_at
from tests.cluster.components import later_components
from tests.cluster.image import CONTEXT
from tests.cluster.layout import REPOSITORY, Layout


def test_the_builder_the_dockerfile_and_dockerignore_name_the_same_files() -> None:
    lines = (REPOSITORY / "Dockerfile").read_text().splitlines()
    copied = {
        source for line in lines if line.startswith("COPY ") and "--from" not in line for source in line.split()[1:-1]
    }
    ignored = (REPOSITORY / ".dockerignore").read_text().splitlines()
    let_through = {line[1:] for line in ignored if line.startswith("!")}
    assert copied == let_through == set(CONTEXT)


def test_the_image_holds_the_versions_that_are_tested() -> None:
    def pins(name: str) -> dict[str, str]:
        return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", (REPOSITORY / ".ci" / name).read_text(), re.MULTILINE))

    tested, shipped = pins("requirements.lock"), pins("requirements-image.lock")
    assert {name: version for name, version in shipped.items() if tested.get(name) != version} == {}


@pytest.mark.parametrize("name", ["", "A", "a/b", "..", "-a", "a" * 40])
def test_a_name_that_could_leave_its_folder_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="can't name a cluster"):
        Layout(name=name)


def test_nobody_removes_the_pods_and_taints_the_nodes_of_a_cluster_without_nodes() -> None:
    """Tests there bind pods to nodes that are not there, and make Nodes without a kubelet."""
    few = later_components(Layout(name="some"), api_only=True)["kube-controller-manager"]
    whole = later_components(Layout(name="some"), api_only=False)["kube-controller-manager"]
    assert [each for each in few if each not in whole] == [
        "--controllers=*,-pod-garbage-collector-controller,-node-lifecycle-controller"
    ]


def test_the_start_of_a_process_is_told_apart_from_the_wall_clock() -> None:
    own = started_at(os.getpid())
    assert 0.0 < own / os.sysconf("SC_CLK_TCK") < time.clock_gettime(time.CLOCK_BOOTTIME)
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert started_at(ended.pid) == 0.0, "it has ended, though nobody has taken leave of it"
    assert ended.wait() == 0
    assert started_at(ended.pid) == 0.0


def test_a_users_cluster_needs_an_image_and_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.delenv("E2E_IMAGE", raising=False)
    monkeypatch.setenv("E2E_S3_ENDPOINT", "http://127.0.0.1:9000")
    assert fixtures.obstacle() == "KUBECONFIG is set, but not E2E_IMAGE"
    monkeypatch.setenv("E2E_IMAGE", "registry/datastore:1")
    assert fixtures.obstacle() == ""
    assert not fixtures.own_site()

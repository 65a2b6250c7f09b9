"""The digits demo on every transport, on a laptop and as a cluster's node mounts it: one table at the end.

The training script is examples/digits/train.py, with no changed line. A laptop is the real command. A node is the CSI
driver over gRPC; with the kernel's NFS client it is a guest that has one.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from sklearn.datasets import load_digits

from tests.csi.driver import Driver, Pod, context_of, secrets_of
from tests.csi.driver import running as running_driver
from tests.csi.takenover import check_confined, check_reaches_nothing
from tests.glusterfs.mounts import made as gluster_made
from tests.glusterfs.server import GlusterServer
from tests.glusterfs.server import obstacle as gluster_obstacle
from tests.mount.mounts import CommandMount
from tests.mount.mounts import mounted as s3_mounted
from tests.nfs.host.guest import CHECKOUT, Guest
from tests.nfs.host.server import NFSServer
from tests.nfs.mounts import mounted as nfs_mounted
from tests.nfs.test_csi_kernel import Node, Volume
from tests.nfs.test_laptop_kernel import Laptop
from tests.patience import eventually
from tests.promises import promise
from tests.servers import Server, make_bucket
from tests.sftp.mounts import mounted as sftp_mounted
from tests.sftp.sshd import running

pytestmark = [pytest.mark.fuse, pytest.mark.timeout(1800, func_only=True)]
TRAIN = CHECKOUT / "examples/digits/train.py"
PICTURES = 300
LEAST_ACCURACY = 0.8
"""Of 75 that were held out; all 1,797 pictures give 0.97."""
TRAIN_TIMEOUT_S = 600.0
REASONS = {
    ("sftp", "cluster"): "spec.sftp is a laptop's: the API server refuses it",
    ("claim", "laptop"): "a claim is a cluster's: only its pods can mount it",
    ("claim", "cluster"): "another driver mounts it: tier e2e-cluster (tests/cluster/test_controller_on_node.py)",
}
ROWS = ("s3", "nfs kernel", "nfs libnfs", "sftp", "glusterfs", "claim")


def put_pictures(place: Path) -> None:
    """The first digits of scikit-learn, as the demo has them."""
    digits = load_digits()
    for number in range(PICTURES):
        folder = place / "digits" / str(digits.target[number])
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.images[number] * (255 / 16)).astype("uint8")).save(folder / f"{number:04}.png")
    (place / "out").mkdir()


def judged(output: str) -> str:
    """The cell. Errors: AssertionError."""
    accuracy = re.search(r"accuracy on held-out pictures: ([0-9.]+)", output)
    assert accuracy is not None, output
    assert float(accuracy[1]) > LEAST_ACCURACY, output
    return f"ok, accuracy {accuracy[1]}"


def train(place: Path) -> str:
    """Put the pictures there, train, look at what training left."""
    put_pictures(place)
    command = [sys.executable, str(TRAIN), str(place / "digits"), str(place / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TRAIN_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert (place / "out/latest").resolve(strict=True).name == "epoch-30.joblib"
    return judged(done.stdout)


def on_a_laptop(mount: CommandMount, transport: str) -> str:
    """A mount that the command made; it says which transport it is."""
    assert mount.status()["via"]["transport"] == transport
    cell = train(mount.path)
    done = mount.umount()
    assert done.returncode == 0, done.stderr
    return cell


@contextmanager
def gluster_server(network: Any) -> Iterator[GlusterServer]:
    """In the network of the NFS host."""
    assert not gluster_obstacle()
    server = GlusterServer(Path(tempfile.mkdtemp(prefix="gl-", dir="/var/tmp")) / "server", network, shared=True)
    try:
        server.up()
        server.volume("digits")
        yield server
    finally:
        server.down()
        server.directory.parent.rmdir()


def volume_of(driver: Driver, context: dict[str, str], secrets: dict[str, str]) -> Pod:
    """One that is on no node yet."""
    return Pod(driver=driver, volume_id=f"team/{uuid.uuid4().hex[:8]}/1", context=context, secrets=secrets)


def on_a_node(driver: Driver, context: dict[str, str], secrets: dict[str, str], engine: str) -> str:
    """A volume from its stage to its end; it says which transport it is."""
    pod = volume_of(driver, context, secrets)
    cell = train(pod.start())
    eventually(lambda: engine in pod.condition(), f"it says that it is {engine}")
    pod.end()
    return cell


def beside_another(driver: Driver, pod: Pod, server: Server) -> None:
    """What a volume's server may do to the volume of a bucket beside it: nothing (S-215)."""
    pod.start()
    check_confined(driver, pod)
    other = volume_of(driver, context_of(server, make_bucket(server, "beside")), secrets_of(server))
    other.start()
    check_reaches_nothing(driver, pod, other)
    other.end()
    pod.end()


def on_roots_laptop(guest: Guest, server: str, path: str) -> str:
    """By the command of root in the guest, whose kernel has the client. The pictures are on the export."""
    laptop = Laptop(guest, server)
    laptop.mount(path)
    assert laptop.status()["via"]["transport"] == "kernel"
    cell = trained_in(guest, laptop.path, "out-of-root")
    laptop.call("umount", laptop.path)
    return cell


def trained_in(guest: Guest, place: str, out: str) -> str:
    """The training, in the guest."""
    guest.shell(f"mkdir {place}/{out}")
    python = f"{CHECKOUT}/.venv/bin/python"
    return judged(guest.run(python, str(TRAIN), f"{place}/digits", f"{place}/{out}", timeout_s=TRAIN_TIMEOUT_S))


def in_the_guest(guest: Guest, server: str, path: str, directory: Path) -> str:
    """By the kernel's client: the plugin in a guest, and the training there too. The pictures are on the export."""
    node = Node(guest, directory)
    node.start()
    try:
        volume = Volume(node, server, path, "matrix")
        place = volume.start()
        said = "kernel's NFS client"
        eventually(lambda: said in volume.stats().volume_condition.message, f"it says that it is the {said}")
        cell = trained_in(guest, place, "out-of-guest")
        volume.unpublish()
        volume.unstage()
    finally:
        node.kill()
    return cell


def table(cells: dict[tuple[str, str], str]) -> str:
    lines = [f"{'transport':<11} {'laptop':<90} cluster"]
    lines += [f"{row:<11} {cells[row, 'laptop']:<90} {cells[row, 'cluster']}" for row in ROWS]
    return "\n".join(lines)


@promise("S-311", "S-215")
def test_the_demo_on_every_transport(
    nfs_host: NFSServer,
    nfs_client: Guest,
    export: Callable[..., str],
    versitygw: Server,
    clean_environment: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home, cells = clean_environment, dict(REASONS)
    shown = export()
    with ExitStack() as leave:
        gluster = leave.enter_context(gluster_server(nfs_host.network))
        sshd = leave.enter_context(running(home))
        node = leave.enter_context(running_driver())

        with s3_mounted(versitygw, "matrix-laptop", home) as mount:
            cells["s3", "laptop"] = on_a_laptop(mount, "s3")
        context = context_of(versitygw, make_bucket(versitygw, "matrix-node"))
        cells["s3", "cluster"] = on_a_node(node, context, secrets_of(versitygw), "our engine over FUSE")

        with nfs_mounted(nfs_host, shown, home) as mount:
            cells["nfs libnfs", "laptop"] = on_a_laptop(mount, "libnfs")
        cells["nfs kernel", "laptop"] = on_roots_laptop(nfs_client, nfs_host.address, shown)
        cells["nfs kernel", "cluster"] = in_the_guest(nfs_client, nfs_host.address, shown, tmp_path)
        source = {"kind": "nfs", "server": nfs_host.address, "path": export()}
        context = {"datastore.dev/spec": '{"nfs": {}}', "datastore.dev/source": json.dumps(source)}
        cells["nfs libnfs", "cluster"] = on_a_node(node, context, {}, "our engine over libnfs")
        beside_another(node, volume_of(node, context, {}), versitygw)

        (tmp_path / "sftp").mkdir()
        with sftp_mounted(sshd, tmp_path / "sftp", home) as mount:
            cells["sftp", "laptop"] = on_a_laptop(mount, "sftp")

        with gluster_made(gluster, home) as mount:
            mount.mount()
            cells["glusterfs", "laptop"] = on_a_laptop(mount, "glusterfs")
        gluster.volume("node")
        place = {"servers": [gluster.address], "volume": "node"}
        context = {"datastore.dev/spec": json.dumps({"glusterfs": place})}
        cells["glusterfs", "cluster"] = on_a_node(node, context, {}, "GlusterFS's own client")
    assert set(cells) == {(row, column) for row in ROWS for column in ("laptop", "cluster")}
    with capsys.disabled():
        print(f"\n{table(cells)}")

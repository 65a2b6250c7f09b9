"""A node plugin of a later release beside the mount daemon of an earlier one, which is replaced by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from tests.csi.driver import Driver, Pod, until
from tests.promises import promise

pytestmark = pytest.mark.fuse


@pytest.fixture
def driver(directory: Path) -> Iterator[Driver]:
    """A driver with an older mount daemon."""
    made = Driver(directory)
    made.mount_daemon.module = "tests.csi.older_daemon"
    try:
        made.start()
        yield made
    finally:
        made.close()


@promise("S-136")
def test_an_older_mount_daemon_serves_known_requests_and_the_error_for_others_names_the_remedy(
    driver: Driver, pod: Callable[..., Pod]
) -> None:
    old = pod("old")
    (old.start() / "x").write_text("by the older")
    newer = pod("newer", group="2000")
    with pytest.raises(grpc.RpcError) as refused:
        newer.publish()
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    said = str(refused.value.details())
    assert "the mount daemon of node node-1 is older than its node plugin" in said
    assert "'group'" in said
    assert "kubectl delete pod -A -l app.kubernetes.io/name=datastore,app.kubernetes.io/component=mount-daemon" in said
    assert said.endswith("--field-selector spec.nodeName=node-1")
    driver.mount_daemon.end()
    driver.mount_daemon.module = "datastore.csi.mountdaemon"
    driver.mount_daemon.start()
    until(driver.has_adopted, "the new mount daemon has adopted the mount", log=driver.logs)
    assert (newer.publish() / "x").read_text() == "by the older"
    assert (old.target / "x").stat().st_gid == 2000, "one mount, which knows of groups now"

"""A node plugin of a later release beside the keeper's host of an earlier one, which is replaced by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from datastore.csi.errors import KeeperAway
from tests.csi.driver import Driver, Pod, until

pytestmark = pytest.mark.fuse


@pytest.fixture
def driver(directory: Path) -> Iterator[Driver]:
    """With an older keeper's host."""
    made = Driver(directory)
    made.host.module = "tests.csi.older_keeper"
    try:
        made.start()
        yield made
    finally:
        made.close()


def serves(driver: Driver) -> bool:
    try:
        return len(driver.keeper().states()) == 1
    except KeeperAway:
        return False


def test_an_older_keeper_takes_what_it_knows_and_what_it_does_not_names_the_remedy(
    driver: Driver, pod: Callable[..., Pod]
) -> None:
    """S-136"""
    old = pod("old")
    (old.start() / "x").write_text("by the older")
    newer = pod("newer", group="2000")
    with pytest.raises(grpc.RpcError) as refused:
        newer.publish()
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    said = str(refused.value.details())
    assert "the keeper of node node-1 is older than its node plugin" in said
    assert "'group'" in said
    assert "kubectl delete pod -A -l app.kubernetes.io/name=datastore,app.kubernetes.io/component=keeper" in said
    assert said.endswith("--field-selector spec.nodeName=node-1")
    driver.host.end()
    driver.host.module = "datastore.csi.keeper"
    driver.host.start()
    until(lambda: serves(driver), "the new keeper has adopted the mount", log=driver.logs)
    assert (newer.publish() / "x").read_text() == "by the older"
    assert (old.target / "x").stat().st_gid == 2000, "one mount, which knows of groups now"

"""csi-sanity (csi-test 5.4): what the CSI specification asks of every driver."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import grpc
import pytest
import yaml

from datastore.csi.spec import csi_pb2 as csi
from tests.csi.driver import Driver, secrets_of
from tests.promises import promise
from tests.servers import Server, ServerMissing, find_tool

pytestmark = [pytest.mark.fuse, pytest.mark.slow]

SECRETS = (
    "CreateVolumeSecret",
    "DeleteVolumeSecret",
    "ControllerValidateVolumeCapabilitiesSecret",
    "ControllerExpandVolumeSecret",
    "NodeStageVolumeSecret",
    "NodePublishVolumeSecret",
)
LEAST_PASSED = 40
"""5.4 has about 45 tests for the services that we have; the others are skipped by their capability."""


def _sanity() -> str:
    try:
        return find_tool("csi-sanity")
    except ServerMissing as error:
        pytest.fail(str(error))


@pytest.mark.timeout(900)
def test_csi_sanity_passes(driver: Driver, versitygw: Server, bucket: str, directory: Path) -> None:
    secrets = directory / "secrets.yaml"
    secrets.write_text(yaml.safe_dump(dict.fromkeys(SECRETS, secrets_of(versitygw))))
    parameters = directory / "parameters.yaml"
    parameters.write_text(yaml.safe_dump({"bucket": bucket, "endpoint": versitygw.endpoint, "prefix": "volumes/"}))
    report = directory / "sanity.json"
    command = [
        _sanity(),
        f"--csi.endpoint=unix://{driver.settings.csi_socket}",
        f"--csi.mountdir={directory}/sanity-target",
        f"--csi.stagingdir={directory}/sanity-staging",
        f"--csi.secrets={secrets}",
        f"--csi.testvolumeparameters={parameters}",
        "--csi.testvolumeaccesstype=mount",
        "--ginkgo.no-color",
        f"--ginkgo.json-report={report}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=840, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + driver.logs()[-4000:]
    states = [spec["State"] for suite in json.loads(report.read_text()) for spec in suite["SpecReports"] or []]
    assert states.count("passed") >= LEAST_PASSED, re.findall(r"Ran .*", done.stdout)


@promise("S-137")
def test_no_free_capacity_is_invented(driver: Driver) -> None:
    found = driver.controller("ControllerGetCapabilities", csi.ControllerGetCapabilitiesRequest()).capabilities
    assert csi.ControllerServiceCapability.RPC.GET_CAPACITY not in [each.rpc.type for each in found]
    with pytest.raises(grpc.RpcError) as refused:
        driver.controller("GetCapacity", csi.GetCapacityRequest())
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED

"""The identity service: the driver's name, its capabilities, and whether it is ready."""

from __future__ import annotations

from collections.abc import Callable

from google.protobuf.wrappers_pb2 import BoolValue

from datastore.api.volumecontext import DRIVER

from .spec import csi_pb2 as csi
from .spec.csi_pb2_grpc import IdentityServicer
from .status import answered

CONTROLLER = csi.PluginCapability(
    service=csi.PluginCapability.Service(type=csi.PluginCapability.Service.CONTROLLER_SERVICE)
)
EXPANSION = csi.PluginCapability(
    volume_expansion=csi.PluginCapability.VolumeExpansion(type=csi.PluginCapability.VolumeExpansion.ONLINE)
)


class Identity(IdentityServicer):
    """controller: whether this process has the controller service; ready: returns whether the driver can work."""

    def __init__(self, ready: Callable[[], bool], *, version: str, controller: bool) -> None:
        self._version = version
        self._ready = ready
        self._capabilities = [CONTROLLER, EXPANSION] if controller else [EXPANSION]

    @answered
    async def GetPluginInfo(self, _request: csi.GetPluginInfoRequest) -> csi.GetPluginInfoResponse:
        return csi.GetPluginInfoResponse(name=DRIVER, vendor_version=self._version)

    @answered
    async def GetPluginCapabilities(
        self, _request: csi.GetPluginCapabilitiesRequest
    ) -> csi.GetPluginCapabilitiesResponse:
        return csi.GetPluginCapabilitiesResponse(capabilities=self._capabilities)

    @answered
    async def Probe(self, _request: csi.ProbeRequest) -> csi.ProbeResponse:
        """Return whether the driver can work."""
        return csi.ProbeResponse(ready=BoolValue(value=self._ready()))

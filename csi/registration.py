"""The registration with the kubelet, which finds the socket in its plugins_registry directory (pluginregistration.v1).

The kubelet registers the driver again when it starts, and when the socket is recreated. Until then, and after a
refusal, the plugin is not ready.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from datastore.api.volumecontext import DRIVER
from datastore.logs import fields

from .spec import pluginregistration_pb2 as messages
from .spec.pluginregistration_pb2_grpc import RegistrationServicer
from .status import answered

log = logging.getLogger(__name__)

SOCKET = f"{DRIVER}-reg.sock"
CSI_VERSIONS = ["1.0.0"]
"""The versions of CSI that the driver supports, as the kubelet names them."""


class Registration(RegistrationServicer):
    """endpoint: the CSI socket's path on the node. registered: called with the kubelet's decision, True or False."""

    def __init__(self, endpoint: str, registered: Callable[[bool], None]) -> None:
        self._endpoint = endpoint
        self._registered = registered

    @answered
    async def GetInfo(self, _request: messages.InfoRequest) -> messages.PluginInfo:
        """Tell the kubelet the driver's name, socket and versions."""
        return messages.PluginInfo(
            type="CSIPlugin", name=DRIVER, endpoint=self._endpoint, supported_versions=CSI_VERSIONS
        )

    @answered
    async def NotifyRegistrationStatus(
        self, request: messages.RegistrationStatus
    ) -> messages.RegistrationStatusResponse:
        """Log the kubelet's decision and pass it on."""
        if request.plugin_registered:
            log.info("the kubelet has registered the driver")
        else:
            log.error("the kubelet refuses the driver", extra=fields(error=request.error))
        self._registered(request.plugin_registered)
        return messages.RegistrationStatusResponse()

"""The kubelet finds our socket in its plugins_registry directory and asks who we are (pluginregistration.v1).

It asks anew whenever it starts, and when the socket is made anew. Until then, and after a refusal, we are not ready.
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
"""The versions of CSI's protocol that the kubelet tells apart."""


class Registration(RegistrationServicer):
    """endpoint: the CSI socket's path on the node. registered(True or False) is called when the kubelet has decided."""

    def __init__(self, endpoint: str, registered: Callable[[bool], None]) -> None:
        self._endpoint = endpoint
        self._registered = registered

    @answered
    async def GetInfo(self, _request: messages.InfoRequest) -> messages.PluginInfo:
        """Who we are."""
        return messages.PluginInfo(
            type="CSIPlugin", name=DRIVER, endpoint=self._endpoint, supported_versions=CSI_VERSIONS
        )

    @answered
    async def NotifyRegistrationStatus(
        self, request: messages.RegistrationStatus
    ) -> messages.RegistrationStatusResponse:
        """What the kubelet decided."""
        if request.plugin_registered:
            log.info("the kubelet has registered the driver")
        else:
            log.error("the kubelet refuses the driver", extra=fields(error=request.error))
        self._registered(request.plugin_registered)
        return messages.RegistrationStatusResponse()

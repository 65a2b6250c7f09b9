"""The controller service: it creates volumes from a StorageClass's parameters, for provisioners that speak CSI.

The controller (datastore.controller) provisions claims itself, without a sidecar; this service is for clusters that run
external-provisioner, and for csi-sanity. A Provisioner decides where the data is stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from datastore.errors import InvalidManifest

from . import request as parse
from .errors import VolumeNotFound
from .locks import VolumeLocks
from .spec import csi_pb2 as csi
from .spec.csi_pb2_grpc import ControllerServicer
from .status import answered

THREADS = 16
DEFAULT_BYTES = 1 << 40
"""The capacity of a volume for which none is requested: a bucket has no limit, but a claim has to show a number."""

_RPC = csi.ControllerServiceCapability.RPC
# Not GET_CAPACITY: no S3 API says how much more a bucket can store, and a container orchestrator would use any number
# that we made up.
CAPABILITIES = (
    _RPC.CREATE_DELETE_VOLUME,
    _RPC.EXPAND_VOLUME,
    _RPC.SINGLE_NODE_MULTI_WRITER,
)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Provisioned:
    """A volume that was made."""

    volume_id: str
    context: Mapping[str, str]
    capacity_bytes: int


class Provisioner(Protocol):
    """Where volumes are made. Blocking; every method is idempotent and raises DatastoreError."""

    def create(
        self, name: str, capacity_bytes: int, parameters: Mapping[str, str], secrets: Mapping[str, str]
    ) -> Provisioned:
        """Make a volume unless it is there. Errors: VolumeConflict when another volume has this name."""
        ...

    def delete(self, volume_id: str, secrets: Mapping[str, str]) -> None:
        """Remove what create() made; do nothing for an unknown volume."""
        ...

    def exists(self, volume_id: str, context: Mapping[str, str], secrets: Mapping[str, str]) -> bool:
        """Return whether the volume is there."""
        ...


class Controller(ControllerServicer):
    """The service over a Provisioner."""

    def __init__(self, provisioner: Provisioner) -> None:
        self._provisioner = provisioner
        self._locks = VolumeLocks()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="controller")

    async def _run(self, key: str, work: Callable[[], Result]) -> Result:
        """Call `work` in a thread. Errors: VolumeBusy while another call for the same key runs."""

        def locked() -> Result:
            with self._locks.hold(key):
                return work()

        return await asyncio.get_running_loop().run_in_executor(self._pool, locked)

    @answered
    async def CreateVolume(self, request: csi.CreateVolumeRequest) -> csi.CreateVolumeResponse:
        name = parse.needed("name", request.name)
        parse.access_of_bucket(request.volume_capabilities)
        if request.HasField("volume_content_source"):
            raise InvalidManifest("volume_content_source: a Datastore can't be made from a snapshot or another volume")
        size = capacity(request.capacity_range)
        create = partial(self._provisioner.create, name, size, dict(request.parameters), dict(request.secrets))
        made = await self._run(name, create)
        return csi.CreateVolumeResponse(
            volume=csi.Volume(
                volume_id=made.volume_id, capacity_bytes=made.capacity_bytes, volume_context=dict(made.context)
            )
        )

    @answered
    async def DeleteVolume(self, request: csi.DeleteVolumeRequest) -> csi.DeleteVolumeResponse:
        volume_id = parse.needed("volume_id", request.volume_id)
        await self._run(volume_id, partial(self._provisioner.delete, volume_id, dict(request.secrets)))
        return csi.DeleteVolumeResponse()

    @answered
    async def ValidateVolumeCapabilities(
        self, request: csi.ValidateVolumeCapabilitiesRequest
    ) -> csi.ValidateVolumeCapabilitiesResponse:
        """Confirm that a volume can be used as requested; all access modes are supported."""
        volume_id = parse.needed("volume_id", request.volume_id)
        parse.access_of_bucket(request.volume_capabilities)
        await self._check_there(volume_id, dict(request.volume_context), dict(request.secrets))
        return csi.ValidateVolumeCapabilitiesResponse(
            confirmed=csi.ValidateVolumeCapabilitiesResponse.Confirmed(
                volume_context=request.volume_context,
                volume_capabilities=request.volume_capabilities,
                parameters=request.parameters,
            )
        )

    @answered
    async def ControllerExpandVolume(
        self, request: csi.ControllerExpandVolumeRequest
    ) -> csi.ControllerExpandVolumeResponse:
        """Accept a new size. Nothing changes in the storage; the node shows the volume larger."""
        volume_id = parse.needed("volume_id", request.volume_id)
        if not request.HasField("capacity_range"):
            raise InvalidManifest("capacity_range is missing")
        size = capacity(request.capacity_range)
        await self._check_there(volume_id, {}, dict(request.secrets))
        return csi.ControllerExpandVolumeResponse(capacity_bytes=size, node_expansion_required=True)

    @answered
    async def ControllerGetCapabilities(
        self, _request: csi.ControllerGetCapabilitiesRequest
    ) -> csi.ControllerGetCapabilitiesResponse:
        return csi.ControllerGetCapabilitiesResponse(
            capabilities=[csi.ControllerServiceCapability(rpc=_RPC(type=each)) for each in CAPABILITIES]
        )

    async def _check_there(self, volume_id: str, context: Mapping[str, str], secrets: Mapping[str, str]) -> None:
        if not await self._run(volume_id, partial(self._provisioner.exists, volume_id, context, secrets)):
            raise VolumeNotFound(f"there is no volume {volume_id}")


def capacity(asked: csi.CapacityRange) -> int:
    """Return the size of the volume to make, in bytes. Errors: InvalidManifest."""
    required, limit = asked.required_bytes, asked.limit_bytes
    if required < 0 or limit < 0 or (limit and required > limit):
        raise InvalidManifest("capacity_range: required_bytes has to be at most limit_bytes, and neither below 0")
    return required or min(limit or DEFAULT_BYTES, DEFAULT_BYTES)

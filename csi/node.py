"""The node service: it parses a request, passes it to volumes.py in a thread, and replies.

When the kubelet gives up a call, its thread continues and holds the volume's lock until its own deadline. The next call
for the volume waits a few seconds and then gets ABORTED, so no two calls overlap. The pool is large enough that a slow
volume delays no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from . import request as parse
from .settings import Settings
from .spec import csi_pb2 as csi
from .spec.csi_pb2_grpc import NodeServicer
from .status import answered
from .volumes import Volumes

THREADS = 64

Result = TypeVar("Result")
_RPC = csi.NodeServiceCapability.RPC
CAPABILITIES = (
    _RPC.STAGE_UNSTAGE_VOLUME,
    _RPC.GET_VOLUME_STATS,
    _RPC.EXPAND_VOLUME,
    _RPC.VOLUME_CONDITION,
    _RPC.SINGLE_NODE_MULTI_WRITER,
    # The kubelet passes fsGroup to the driver; otherwise it would chown every file, which takes too long in a bucket.
    _RPC.VOLUME_MOUNT_GROUP,
)


class Node(NodeServicer):
    """The node service of one node."""

    def __init__(self, settings: Settings, volumes: Volumes) -> None:
        self._settings = settings
        self._volumes = volumes
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="node")

    async def _run(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    @answered
    async def NodeStageVolume(self, request: csi.NodeStageVolumeRequest) -> csi.NodeStageVolumeResponse:
        """Mount the volume for this node."""
        await self._run(partial(self._volumes.stage, parse.stage(request)))
        return csi.NodeStageVolumeResponse()

    @answered
    async def NodeUnstageVolume(self, request: csi.NodeUnstageVolumeRequest) -> csi.NodeUnstageVolumeResponse:
        """Unmount the volume from this node."""
        volume_id = parse.needed("volume_id", request.volume_id)
        staging = parse.path("staging_target_path", request.staging_target_path)
        await self._run(partial(self._volumes.unstage, volume_id, staging))
        return csi.NodeUnstageVolumeResponse()

    @answered
    async def NodePublishVolume(self, request: csi.NodePublishVolumeRequest) -> csi.NodePublishVolumeResponse:
        """Show the volume to a pod; the kubelet repeats the call, with the Secret's present content."""
        await self._run(partial(self._volumes.publish, parse.publish(request)))
        return csi.NodePublishVolumeResponse()

    @answered
    async def NodeUnpublishVolume(self, request: csi.NodeUnpublishVolumeRequest) -> csi.NodeUnpublishVolumeResponse:
        """Remove the volume from a pod."""
        volume_id = parse.needed("volume_id", request.volume_id)
        target = parse.path("target_path", request.target_path)
        await self._run(partial(self._volumes.unpublish, volume_id, target))
        return csi.NodeUnpublishVolumeResponse()

    @answered
    async def NodeGetVolumeStats(self, request: csi.NodeGetVolumeStatsRequest) -> csi.NodeGetVolumeStatsResponse:
        """Return size, usage and condition within seconds, in whatever state the mount is."""
        volume_id = parse.needed("volume_id", request.volume_id)
        path = parse.needed("volume_path", request.volume_path)
        stats = await self._run(partial(self._volumes.stats, volume_id, path))
        return csi.NodeGetVolumeStatsResponse(
            usage=[
                _usage(csi.VolumeUsage.BYTES, stats.total_bytes, stats.used_bytes),
                _usage(csi.VolumeUsage.INODES, stats.total_files, stats.used_files),
            ],
            volume_condition=csi.VolumeCondition(
                abnormal=bool(stats.trouble), message=stats.trouble or stats.condition
            ),
        )

    @answered
    async def NodeExpandVolume(self, request: csi.NodeExpandVolumeRequest) -> csi.NodeExpandVolumeResponse:
        volume_id = parse.needed("volume_id", request.volume_id)
        path = parse.needed("volume_path", request.volume_path)
        wanted = request.capacity_range.required_bytes
        size = await self._run(partial(self._volumes.expand, volume_id, path, wanted))
        return csi.NodeExpandVolumeResponse(capacity_bytes=size)

    @answered
    async def NodeGetCapabilities(self, _request: csi.NodeGetCapabilitiesRequest) -> csi.NodeGetCapabilitiesResponse:
        return csi.NodeGetCapabilitiesResponse(
            capabilities=[csi.NodeServiceCapability(rpc=_RPC(type=each)) for each in CAPABILITIES]
        )

    @answered
    async def NodeGetInfo(self, _request: csi.NodeGetInfoRequest) -> csi.NodeGetInfoResponse:
        """Return the Node's name, and how many volumes it can take."""
        return csi.NodeGetInfoResponse(node_id=self._settings.node_id, max_volumes_per_node=self._settings.max_volumes)


def _usage(unit: csi.VolumeUsage.Unit, total: int, used: int) -> csi.VolumeUsage:
    return csi.VolumeUsage(unit=unit, total=total, used=min(used, total), available=max(0, total - used))

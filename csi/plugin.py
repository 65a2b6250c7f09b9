"""The plugin's process: its services, its registration with the kubelet, and when it counts as ready.

Ready means: the kubelet knows us, and the keeper's host answers. The start-up taint keeps pods from a node until then.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from functools import partial

import grpc

from datastore.api.volumecontext import DRIVER
from datastore.errors import DatastoreError
from datastore.logs import fields

from .controller import Controller
from .errors import KeeperAway
from .health import HealthServer
from .identity import Identity
from .keeper.protocol import holder_handler
from .kubeapi import KubeApi
from .metrics import of_volumes
from .node import Node
from .registration import SOCKET, Registration
from .server import GrpcServer
from .settings import Settings
from .spec.csi_pb2_grpc import (
    add_ControllerServicer_to_server,
    add_IdentityServicer_to_server,
    add_NodeServicer_to_server,
)
from .spec.pluginregistration_pb2_grpc import add_RegistrationServicer_to_server
from .unixserver import UnixServer
from .usage import Usage
from .volumes import Volumes

log = logging.getLogger(__name__)

STARTUP_TAINT = f"{DRIVER}/agent-not-ready"
WATCH_S = 2.0
KEEPER_GONE_S = 600.0
"""The keeper's host has been away for so long that nobody waits for it any more: users get errors and can end."""
TAINT_TRY_S = 30.0
USAGE_S = 5.0
"""How soon a volume that is new on this node shows how full it is."""


class Plugin:
    """The node plugin. api: None outside of a cluster; controller: serve the controller service too."""

    def __init__(self, settings: Settings, version: str, api: KubeApi | None, controller: Controller | None) -> None:
        self._settings = settings
        self._api = api
        self._volumes = Volumes(settings, api.named if api else None)
        self._usage = Usage(self._volumes, api.usage_of) if api else None
        self._registered = settings.registry_dir is None
        self._keeper_seen_s = 0.0
        self._keeper_there = False
        self._alive_at = time.monotonic()
        identity = Identity(lambda: self._keeper_there, version=version, controller=controller is not None)
        services: list[Callable[[grpc.aio.Server], None]] = [
            partial(add_IdentityServicer_to_server, identity),
            partial(add_NodeServicer_to_server, Node(settings, self._volumes)),
        ]
        if controller is not None:
            services.append(partial(add_ControllerServicer_to_server, controller))
        self._csi = GrpcServer(settings.csi_socket, *services)
        self._registration = self._registrar()
        self._holder = UnixServer(settings.holder_socket, holder_handler(self._volumes.holdings))
        self._health = HealthServer(
            settings.http_port, alive=self._alive, ready=self.ready, metrics=lambda: of_volumes(self._volumes)
        )

    def ready(self) -> bool:
        """Whether a volume could be mounted now."""
        return self._registered and self._keeper_there

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT."""
        ended = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        self._holder.start()
        self._health.start()
        await self._csi.start()
        if self._registration is not None:
            await self._registration.start()
        watches = [asyncio.create_task(self._watch()), asyncio.create_task(self._watch_usage())]
        await ended.wait()
        for watch in watches:
            watch.cancel()
        # The kubelet must not find us while we end.
        if self._registration is not None:
            await self._registration.stop()
        await self._csi.stop()
        self._health.stop()
        self._holder.stop()

    def _registrar(self) -> GrpcServer | None:
        registry = self._settings.registry_dir
        if registry is None:
            return None
        service = Registration(str(self._settings.csi_socket), self._notified)
        return GrpcServer(registry / SOCKET, partial(add_RegistrationServicer_to_server, service))

    def _notified(self, registered: bool) -> None:
        self._registered = registered

    def _alive(self) -> bool:
        """The event loop still turns."""
        return time.monotonic() - self._alive_at < WATCH_S * 15

    async def _watch(self) -> None:
        """Keep copies of what the keeper's host holds, say when it is away, take the taint off the node once ready."""
        taint_at = 0.0
        while True:
            self._alive_at = now = time.monotonic()
            await asyncio.to_thread(self._look_at_keeper, now)
            if self.ready() and self._api is not None and taint_at is not None and now >= taint_at:
                taint_at = now + TAINT_TRY_S if not await asyncio.to_thread(self._untaint) else float("inf")
            await asyncio.sleep(WATCH_S)

    async def _watch_usage(self) -> None:
        """A task of its own: the API server may take its time."""
        while self._usage is not None:
            if self._keeper_there:
                await asyncio.to_thread(self._usage.look, time.monotonic())
            await asyncio.sleep(USAGE_S)

    def _look_at_keeper(self, now: float) -> None:
        try:
            if self._keeper_there:
                self._volumes.ping()
            else:
                self._volumes.hold_all()
        except KeeperAway as error:
            if self._keeper_there:
                log.warning("the keeper's host is away", extra=fields(reason=error))
            self._keeper_there = False
            if now - self._keeper_seen_s > KEEPER_GONE_S and self._volumes.holdings.volumes():
                log.error("the keeper's host does not come back: its mounts end", extra=fields(after_s=KEEPER_GONE_S))
                self._volumes.holdings.clear()
            return
        self._keeper_there, self._keeper_seen_s = True, now

    def _untaint(self) -> bool:
        """Whether that is done."""
        assert self._api is not None
        try:
            if self._api.remove_taint(self._settings.node_id, STARTUP_TAINT):
                log.info("the start-up taint is gone", extra=fields(node=self._settings.node_id))
        except DatastoreError as error:
            log.warning("the start-up taint stays for now", extra=fields(reason=error))
            return False
        return True

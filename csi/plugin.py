"""The process of the node plugin: its services and its registration with the kubelet.

It is ready when the kubelet has registered it and the mount daemon answers. Until then a taint keeps pods off the node.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import grpc

from datastore.api.volumecontext import DRIVER
from datastore.errors import DatastoreError
from datastore.logs import fields

from .cluster import Cluster
from .controller import Controller
from .datastores import Refresher
from .errors import NotAnswering
from .health import HealthServer
from .identity import Identity
from .metrics import of_volumes
from .mountdaemon.protocol import DaemonClient, handles_handler
from .node import Node
from .podlogs import INTERVAL_S as LOGS_S
from .podusage import INTERVAL_S as USAGE_S
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
from .volumes import Volumes

log = logging.getLogger(__name__)

STARTUP_TAINT = f"{DRIVER}/agent-not-ready"
WATCH_S = 2.0
DAEMON_GONE_S = 600.0
"""How long the mount daemon may be away. Then its mounts are ended, so that programs get errors instead of waiting."""
TAINT_TRY_S = 30.0
CACHES_S = 15.0
"""How often the node's cache space is divided again among the volumes, and reduced when the disk runs full."""
REFRESH_S = 5.0
"""How often it is checked which volumes have to be refreshed, so that a new one soon shows its used space."""


class Plugin:
    """The node plugin. cluster: None outside a cluster; controller: the controller service, if it is served too."""

    def __init__(
        self, settings: Settings, version: str, cluster: Cluster | None, controller: Controller | None
    ) -> None:
        self._settings = settings
        self._cluster = cluster
        self._volumes = Volumes(settings, cluster)
        mounted = self._volumes.mounted
        self._refresher = Refresher(lambda: [each.volume_id for each in mounted()], self._volumes.refresh)
        self._registered = settings.registry_dir is None
        self._daemon_seen_s = 0.0
        self._daemon_there = False
        self._alive_at = time.monotonic()
        identity = Identity(lambda: self._daemon_there, version=version, controller=controller is not None)
        services: list[Callable[[grpc.aio.Server], None]] = [
            partial(add_IdentityServicer_to_server, identity),
            partial(add_NodeServicer_to_server, Node(settings, self._volumes)),
        ]
        if controller is not None:
            services.append(partial(add_ControllerServicer_to_server, controller))
        self._csi = GrpcServer(settings.csi_socket, *services)
        self._registration = self._registrar()
        handler = handles_handler(self._volumes.fuse.handles, DaemonClient(settings.daemon_socket, settings.node_id))
        self._handles = UnixServer(settings.handles_socket, handler)
        self._health = HealthServer(
            settings.http_port, alive=self._alive, ready=self.ready, metrics=lambda: of_volumes(self._volumes)
        )

    def ready(self) -> bool:
        """Return whether a volume could be mounted now."""
        return self._registered and self._daemon_there

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT."""
        ended = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        self._volumes.kernel.adopt()
        self._handles.start()
        self._health.start()
        await self._csi.start()
        if self._registration is not None:
            await self._registration.start()
        tasks = [asyncio.create_task(each) for each in self._tasks()]
        await ended.wait()
        for task in tasks:
            task.cancel()
        # First, so that the kubelet does not find a plugin that is ending.
        if self._registration is not None:
            await self._registration.stop()
        await self._csi.stop()
        self._volumes.pod_logs.close()
        self._health.stop()
        self._handles.stop()

    def _tasks(self) -> Iterator[Coroutine[Any, Any, None]]:
        volumes, with_daemon = self._volumes, lambda: self._daemon_there
        yield self._watch()
        yield every(CACHES_S, volumes.fuse.share_caches, with_daemon)
        yield every(LOGS_S, volumes.pod_logs.look)
        if self._cluster is not None:
            # Apart from _watch(), because the API server may be slow.
            yield every(REFRESH_S, lambda: self._refresher.look(time.monotonic()), with_daemon)
        if volumes.pod_usage is not None:
            yield every(USAGE_S, volumes.pod_usage.look)

    def _registrar(self) -> GrpcServer | None:
        registry = self._settings.registry_dir
        if registry is None:
            return None
        service = Registration(str(self._settings.csi_socket), self._notified)
        return GrpcServer(registry / SOCKET, partial(add_RegistrationServicer_to_server, service))

    def _notified(self, registered: bool) -> None:
        self._registered = registered

    def _alive(self) -> bool:
        """Return whether the event loop still runs: _watch() was there recently."""
        return time.monotonic() - self._alive_at < WATCH_S * 15

    async def _watch(self) -> None:
        """Copy the mount daemon's handles, notice when it is away, and remove the node's taint once ready."""
        taint_at = 0.0
        while True:
            self._alive_at = now = time.monotonic()
            await asyncio.to_thread(self._look_at_daemon, now)
            if self.ready() and self._cluster is not None and now >= taint_at:
                taint_at = now + TAINT_TRY_S if not await asyncio.to_thread(self._untaint) else float("inf")
            await asyncio.sleep(WATCH_S)

    def _look_at_daemon(self, now: float) -> None:
        try:
            if self._daemon_there:
                self._volumes.fuse.ping()
            else:
                self._volumes.fuse.adopt()
        except NotAnswering as error:
            if self._daemon_there:
                log.warning("the mount daemon is away", extra=fields(reason=error))
            self._daemon_there = False
            if now - self._daemon_seen_s > DAEMON_GONE_S and self._volumes.fuse.volumes():
                log.error("the mount daemon does not come back: its mounts end", extra=fields(after_s=DAEMON_GONE_S))
                self._volumes.fuse.handles.clear()
            return
        self._daemon_there, self._daemon_seen_s = True, now

    def _untaint(self) -> bool:
        """Remove the start-up taint; return whether that is done."""
        assert self._cluster is not None
        try:
            if self._cluster.remove_taint(self._settings.node_id, STARTUP_TAINT):
                log.info("the start-up taint is gone", extra=fields(node=self._settings.node_id))
        except DatastoreError as error:
            log.warning("the start-up taint stays for now", extra=fields(reason=error))
            return False
        return True


async def every(seconds: float, work: Callable[[], object], wanted: Callable[[], bool] = lambda: True) -> None:
    """Call `work` in a thread, again and again, while it is wanted. An unexpected error, e.g. because a pod's directory
    disappears while it is read, ends this round but not the task."""
    while True:
        await asyncio.sleep(seconds)
        try:
            if wanted():
                await asyncio.to_thread(work)
        except Exception:
            log.exception("a round failed; the next one follows")

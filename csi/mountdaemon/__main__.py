"""`python -m datastore.csi.mountdaemon`: the mount daemon, in a pod of its own.

SIGTERM ends the daemon and all its processes, but unmounts nothing: the next daemon gets the mounts' handles from the
plugin and continues them. Environment: see settings.py.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from datastore import logs, mountinfo
from datastore.errors import DatastoreError
from datastore.logs import fields

from ..errors import NotAnswering
from ..handle import MountHandle
from ..health import HealthServer
from ..settings import Settings, from_environment
from ..unixserver import UnixServer
from .cgroups import Cgroups
from .daemon import MountDaemon
from .metrics import of_mounts
from .mountlogs import LOOK_S, MountLogs
from .protocol import connected, daemon_handler, handles_of

log = logging.getLogger("datastore.csi.mountdaemon")

HANDLES_WAIT_S = 20.0
"""How long to wait for the plugin if there are mounts whose handles it may have. No request is served before that."""
ADOPTIONS = 8
"""How many mounts are taken over at the same time; each starts two processes."""
FLUSH_TIMEOUT_S = 15.0
"""Time for uploads when no plugin has the handles: the node is being shut down, or the driver uninstalled."""
PLUGIN_ENDS_S = 5.0
"""In a shutdown of the node the plugin gets its SIGTERM with the daemon, and takes a second to end."""


def adopt_all(daemon: MountDaemon, settings: Settings) -> None:
    """Take over an earlier daemon's mounts, whose handles the plugin has; wait for it only if something is mounted."""
    ours = any(mount.fstype in mountinfo.SUPERVISED for mount in mountinfo.read().mounts)
    end = time.monotonic() + (HANDLES_WAIT_S if ours else 0.0)
    while True:
        try:
            found = handles_of(settings.handles_socket, "the datastore-node pod")
            break
        except NotAnswering as error:
            if time.monotonic() >= end:
                log.info("nothing to adopt", extra=fields(reason=error))
                return
            time.sleep(0.2)
    with ThreadPoolExecutor(ADOPTIONS, thread_name_prefix="adopt") as pool:
        for handle in found:
            pool.submit(_adopt, daemon, handle)


def _adopt(daemon: MountDaemon, handle: MountHandle) -> None:
    try:
        daemon.adopt(handle)
    except DatastoreError as error:
        log.error("a mount could not be adopted", extra=fields(volume=handle.volume_id, error=error))


def main() -> int:
    """Run the mount daemon; return its exit code."""
    logs.setup()
    settings = from_environment(os.environ)
    settings.plugin_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    daemon = MountDaemon(Cgroups())
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    adopt_all(daemon, settings)
    server = UnixServer(settings.daemon_socket, daemon_handler(daemon))
    server.start()
    log.info("the mount daemon serves", extra=fields(socket=settings.daemon_socket))
    health = HealthServer(settings.http_port, ready=lambda: True, metrics=lambda: of_mounts(daemon.states()))
    health.start()
    mount_logs = MountLogs()
    while not stop.wait(LOOK_S):
        mount_logs.look(daemon.states())
    health.stop()
    server.stop()
    if not _is_shared(settings):
        daemon.flush(FLUSH_TIMEOUT_S)
    daemon.abandon()
    return 0


def _is_shared(settings: Settings) -> bool:
    """Return whether a plugin has the handles, and does not end now."""
    end = time.monotonic() + PLUGIN_ENDS_S
    while time.monotonic() < end:
        try:
            with connected(settings.handles_socket):
                time.sleep(0.2)
        except NotAnswering:
            return False
    return True


if __name__ == "__main__":
    sys.exit(main())

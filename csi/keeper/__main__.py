"""`python -m datastore.csi.keeper`: the keeper's host, in a pod of its own.

SIGTERM ends it and all its processes and unmounts nothing: the next one goes on with the mounts, which the plugin
holds. Environment: settings.py.
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

from ..errors import KeeperAway
from ..health import HealthServer
from ..held import Held
from ..settings import Settings, from_environment
from ..unixserver import UnixServer
from .cgroups import Cgroups
from .host import Host
from .metrics import of_mounts
from .protocol import connected, export_of, host_handler

log = logging.getLogger("datastore.csi.keeper")

HOLDER_WAIT_S = 20.0
"""For the plugin, when mounts are there that it may hold. Nothing is served meanwhile."""
ADOPTIONS = 8
"""At once: each starts two processes."""
FLUSH_TIMEOUT_S = 15.0
"""For uploads, when no plugin holds the mounts: then the node is shut down, or we are uninstalled."""


def adopt_all(host: Host, settings: Settings) -> None:
    """Take over what the plugin holds of an earlier host; waits for it only when something is mounted."""
    ours = any(mount.fstype == mountinfo.FSTYPE for mount in mountinfo.read().mounts)
    end = time.monotonic() + (HOLDER_WAIT_S if ours else 0.0)
    while True:
        try:
            found = export_of(settings.holder_socket, "the datastore-node pod")
            break
        except KeeperAway as error:
            if time.monotonic() >= end:
                log.info("nothing to adopt", extra=fields(reason=error))
                return
            time.sleep(0.2)
    with ThreadPoolExecutor(ADOPTIONS, thread_name_prefix="adopt") as pool:
        for held in found:
            pool.submit(_adopt, host, held)


def _adopt(host: Host, held: Held) -> None:
    try:
        host.adopt(held)
    except DatastoreError as error:
        log.error("a mount could not be adopted", extra=fields(volume=held.volume_id, error=error))


def main() -> int:
    """The process; its exit code."""
    logs.setup()
    settings = from_environment(os.environ)
    settings.plugin_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    host = Host(Cgroups())
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    adopt_all(host, settings)
    server = UnixServer(settings.keeper_socket, host_handler(host))
    server.start()
    log.info("the keeper's host serves", extra=fields(socket=settings.keeper_socket))
    health = HealthServer(settings.http_port, ready=lambda: True, metrics=lambda: of_mounts(host.states()))
    health.start()
    stop.wait()
    health.stop()
    server.stop()
    if not _is_held(settings):
        host.flush(FLUSH_TIMEOUT_S)
    host.abandon()
    return 0


def _is_held(settings: Settings) -> bool:
    try:
        with connected(settings.holder_socket):
            return True
    except KeeperAway:
        return False


if __name__ == "__main__":
    sys.exit(main())

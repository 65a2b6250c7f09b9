"""The driver on a machine with cgroup version 2: `python -m tests.csi.on_version_2 ENDPOINT BUCKET MEMORY KEY SECRET`.

It puts the mount daemon into a group as a container is, mounts the bucket with that ceiling of memory, reads all of it
by many at once, prints as JSON what the kernel counted meanwhile, and then takes so much memory in the mount's group
that the kernel ends its server.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from datastore.api.volumecontext import MEMORY
from datastore.csi.mountdaemon.cgroups import ROOT, group_name
from datastore.csi.request import key_of
from tests.cluster.volumes import OVERGROWN
from tests.csi.driver import Driver, Pod, context_of, secrets_of, until
from tests.servers import Server

VOLUME = "team/data/1234"
READERS = 8


def main(endpoint: str, bucket: str, memory: str, access_key: str, secret_key: str) -> None:
    """Print one line."""
    server = Server(name="given", endpoint=endpoint, access_key=access_key, secret_key=secret_key)
    container = ROOT / "container"
    container.mkdir()
    (ROOT / "cgroup.subtree_control").write_text("+memory")
    (container / "cgroup.procs").write_text(str(os.getpid()))
    with tempfile.TemporaryDirectory(prefix="csi-", dir="/run") as directory:
        driver = Driver(Path(directory))
        try:
            driver.start()
            pod = Pod(driver, VOLUME, {**context_of(server, bucket), MEMORY: memory}, secrets_of(server))
            place = pod.start()
            group = next(container.glob(group_name(VOLUME)))
            before, began = driver.state(VOLUME), time.monotonic()
            sizes: list[int] = []
            done = threading.Event()
            watching = threading.Thread(target=_watch, args=(before.server_pid, sizes, done))
            watching.start()
            with ThreadPoolExecutor(READERS) as pool:
                read = sum(pool.map(_read, [each for each in place.rglob("*") if each.is_file()]))
            done.set()
            watching.join()
            events = dict(line.split() for line in (group / "memory.events").read_text().splitlines())
            said = {
                "limit": int((group / "memory.max").read_text()),
                "peak": int((group / "memory.peak").read_text()),
                "kills": int(events["oom_kill"]),
                "resident": max(sizes),
                "read": read,
                "same_server": driver.state(VOLUME).server_pid == before.server_pid,
                "seconds": time.monotonic() - began,
            }
            which = (group.name, key_of(VOLUME), str(driver.settings.plugin_dir / "state"))
            grown = subprocess.run(
                [sys.executable, "-c", OVERGROWN, *which], capture_output=True, check=True, timeout=300
            )
            said["overgrown"] = json.loads(grown.stdout)
            until(lambda: driver.state(VOLUME).server_pid not in (0, before.server_pid), "another server")
            said["counted"] = driver.state(VOLUME).oom_kills
            said["read_again"] = _read(next(each for each in place.rglob("*") if each.is_file()))
            pod.end()
            until(lambda: not group.exists(), "the end of the group")
            print(json.dumps(said))
        finally:
            driver.close()


def _read(path: Path) -> int:
    read = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            read += len(piece)
    return read


def _watch(pid: int, sizes: list[int], done: threading.Event) -> None:
    """Note the process's size until done."""
    while not done.wait(0.05):
        sizes.append(psutil.Process(pid).memory_info().rss)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The mount server: it builds the store and the file system, serves the kernel and the control socket, ends in order.

    python -m datastore.fuse --server FD --builder module:function     (FD: see supervisor/serverprocess.py)

Exit code 0: the mount is gone, and everything that could be uploaded is. After any other code the supervisor starts a
new server. Threads: the main thread waits for signals and the mount's end, one thread serves the kernel
(kernel/session.py), others serve the control socket.
"""

from __future__ import annotations

import argparse
import errno
import faulthandler
import gc
import importlib
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from datastore import frames, logs, mountinfo
from datastore.api.mountspec import MountSpec, from_json
from datastore.controlclient import Answer
from datastore.errors import DatastoreError, MountFailed
from datastore.frames import PeerGone
from datastore.logs import fields

from .control import ControlServer, Progress, failed, first_of
from .kernel import abi, device
from .kernel.negotiate import Negotiated
from .kernel.session import Session, Settings
from .ops import Filesystem

if TYPE_CHECKING:
    from .prometheus import Endpoint

log = logging.getLogger(__name__)

SPEC_TIMEOUT_S = 10.0
DEVICE_TIMEOUT_S = 60.0
STATUS_TIMEOUT_S = 5.0
SETTINGS_TIMEOUT_S = 12.0
"""Less than the mount daemon waits, because it replaces a server that does not take new settings in time."""
FLUSH_TIMEOUT_S = 3600.0
WARM_TIMEOUT_S = 24 * 3600.0
END_TIMEOUT_S = 45.0
"""How long the last requests and the file system may take to end after the unmount."""
ELSEWHERE_S = 2.0
"""How long after an unmount another mount namespace is looked for that keeps the file system."""
SWITCH_INTERVAL_S = 0.001
"""How soon the event loop gets the interpreter back from a busy lane; Python's 5 ms would slow a cached answer down."""
EXIT_OK, EXIT_FAILED, EXIT_LEFT = 0, 1, 3
LEAVE_S, OLD_KERNEL_LEAVE_S = 5.0, 60.0
"""How long requests may take to end when another server takes over. The kernel sends the rest again, to that server.
Where it can't (before Linux 6.9), they get the second time, and then the rest fails."""
METRICS_TRIES, METRICS_PAUSE_S = 60, 0.5
"""How often, and how many seconds apart, a server that takes over a mount tries to bind the metrics address."""
PREPARED_TIMEOUT_S = 2_000_000.0
"""How long a standby server waits until it is needed or its supervisor ends: 23 days, in effect forever."""


def own_process() -> dict[str, int | float]:
    """Return rssBytes, openFiles, threads and cpuSeconds of this process; without descriptors only the last two."""
    own: dict[str, int | float] = {"threads": threading.active_count(), "cpuSeconds": round(time.process_time(), 2)}
    proc = Path("/proc/self")
    with suppress(OSError):
        own["rssBytes"] = int(proc.joinpath("statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        own["openFiles"] = len(os.listdir(proc / "fd")) - 1  # without the one that lists them
    return own


class Metrics:
    """The mount's Prometheus endpoint at HOST:PORT; '' means that there is none.

    A new mount is refused when the address is in use. A server that takes over a live mount retries for a while, until
    the earlier server has released the address, and otherwise serves without an endpoint.
    """

    def __init__(self, address: str, *, resumed: bool = False) -> None:
        """Errors: MountFailed, unless resumed."""
        self._address = address
        self._endpoint: Endpoint | None = None
        self._stopping = threading.Event()
        if address and not resumed:
            self._endpoint = _endpoint(address)

    def start(self, source: Callable[[], Mapping[str, Any]]) -> None:
        """Serve what `source` returns at each scrape."""
        if self._endpoint is not None:
            self._endpoint.start(source)
        elif self._address:
            threading.Thread(target=self._take_over, args=(source,), name="metrics-bind", daemon=True).start()

    def status(self) -> dict[str, str]:
        """Return {"metrics": the URL to scrape}, or {} without an endpoint."""
        return {} if self._endpoint is None else {"metrics": self._endpoint.url}

    def stop(self) -> None:
        """Stop listening. Idempotent."""
        self._stopping.set()
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.stop()

    def _take_over(self, source: Callable[[], Mapping[str, Any]]) -> None:
        for tried in range(METRICS_TRIES):
            try:
                self._endpoint = _endpoint(self._address)
                self._endpoint.start(source)
                return
            except MountFailed as error:
                if tried == METRICS_TRIES - 1:
                    log.error("there are no metrics", extra=fields(error=error))
            if self._stopping.wait(METRICS_PAUSE_S):
                return


def _endpoint(address: str) -> Endpoint:
    from .prometheus import Endpoint  # here: it takes 60 ms, which a mount without an endpoint saves

    return Endpoint(address)


class MountedStore(Protocol):
    """What a builder makes from a MountSpec, after it has probed the storage (DatastoreError when that fails)."""

    @property
    def filesystem(self) -> Filesystem: ...
    def status(self) -> dict[str, object]:
        """Return the state for `datastore status` quickly, without a request to the storage. `dirty`: each file that is
        not uploaded, with its `bytes` and `error`. `inMemory`, if there: how many bytes of them are on no disk."""

    def warm(self, path: str, progress: Callable[[dict[str, object]], None]) -> dict[str, object]:
        """Fetch all files below `path` (relative to the mount) into the cache; call `progress` now and then."""

    def apply(self, spec: MountSpec) -> dict[str, object]:
        """Apply a new specification of the mount as far as that is possible while it is mounted, credentials at once.

        Return `later`, the names of the fields of MountSpec that changed but need a new server to take effect, and if
        the storage refuses the new credentials, so that the former ones stay, the reason as `refused`.
        """

    def discard(self, path: str) -> int:
        """Drop the versions of a file that could not be uploaded, if it is not open; return how many there were."""

    def flush_all(self) -> list[str]:
        """Upload everything; return one line for each file that could not be uploaded."""


def load_builder(name: str) -> Callable[..., MountedStore]:
    """Import `module:function`, which makes a mount's store: build(spec, resumed=...). Its errors: DatastoreError.

    resumed: the kernel knows inodes from an earlier server of this mount.
    """
    module, _, function = name.partition(":")
    build: Callable[..., MountedStore] = getattr(importlib.import_module(module), function)
    return build


@dataclass(eq=False)
class Server:
    """The server of one mount, in one process."""

    spec: MountSpec
    store: MountedStore
    channel: socket.socket
    metrics: Metrics
    control: ControlServer
    restarts: int
    """How many servers of this mount died before this one."""
    unconfined: list[str] | None
    """The restrictions that confinement.confine() says are missing; None when the server is not to be confined."""

    def __post_init__(self) -> None:
        self._session: Session | None = None
        self._events: SimpleQueue[str] = SimpleQueue()
        self._ended = threading.Event()
        self._crashed = False
        self._started = time.monotonic()

    def run(self, device_fd: int, own_fd: int, opens_fd: int, negotiated: Negotiated | None) -> int:
        """Serve until the mount is gone or another server takes over; return the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._events.put("terminate"))
        signal.signal(signal.SIGUSR2, lambda *_: self._events.put("leave"))
        self.control.operations = {
            "status": (self._status, STATUS_TIMEOUT_S),
            "flush": (self._flush, FLUSH_TIMEOUT_S),
            "discard": (self._discard, STATUS_TIMEOUT_S),
            "warm": (self._warm, WARM_TIMEOUT_S),
            "settings": (self._settings, SETTINGS_TIMEOUT_S),
            "stop": (self._stop, FLUSH_TIMEOUT_S),
        }
        self.control.start()
        self.metrics.start(lambda: self._status({}, lambda _: None))
        if self.spec.transport == "kernel":
            fs, ready = self.store.filesystem, self._ready
            self._session = Session(
                device_fd, fs, Settings(), negotiated=negotiated, opens_fd=opens_fd, own_fd=own_fd, ready=ready
            )
            serve: Callable[[], object] = self._session.serve
        else:
            serve = self._libfuse()
        gc.collect()
        gc.freeze()  # the start-up's objects stay; the collector need not scan them again
        threading.Thread(target=self._serve, args=(serve,), name="fuse-loop", daemon=True).start()
        try:
            event = self._events.get()
            if event == "leave" and self._session is not None:
                # Nothing is flushed: data that is not uploaded is in the journal, and the next server uploads it.
                settled = self._session.negotiated
                self._session.leave(LEAVE_S if settled and settled.has(abi.HAS_RESEND) else OLD_KERNEL_LEAVE_S)
                return EXIT_LEFT
            if event == "terminate" and not self._terminate():
                return EXIT_LEFT
        finally:
            self.control.stop()
            self.metrics.stop()
        return EXIT_FAILED if self._crashed else EXIT_OK

    def _serve(self, serve: Callable[[], object]) -> None:
        try:
            log.info("the mount has ended", extra=fields(how=serve()))
        except Exception:
            log.exception("the session broke off")
            self._crashed = True
        self._ended.set()
        self._events.put("ended")

    def _ready(self, settled: Negotiated) -> None:
        frames.send(self.channel, {"negotiated": asdict(settled)})

    def _libfuse(self) -> Callable[[], object]:
        os.environ.setdefault("FUSE_LIBRARY_NAME", "fuse3")  # mfusepy would take version 2 first
        try:
            from .libfuse.adapter import serve  # here: it needs libfuse and mfusepy, which the other transport doesn't
        except (ImportError, OSError, AttributeError) as error:
            raise MountFailed(
                f"the libfuse transport can't be loaded ({error}); install libfuse (apt-get install libfuse3-3 fuse3)"
                " and kube-datastore[libfuse]"
            ) from error
        spec = self.spec
        return lambda: serve(
            self.store.filesystem,
            mountpoint=spec.mountpoint,
            name=spec.name,
            read_only=spec.read_only,
            allow_other=spec.allow_other,
            ttl_s=spec.believed_s,
            ready=lambda: frames.send(self.channel, {"negotiated": {}}),
        )

    def _terminate(self) -> bool:
        """After SIGTERM or SIGINT: flush and unmount, even when uploads fail; their data stays in the state directory.

        Return False when the mount is left mounted: a confined server may not unmount, so its supervisor does.
        """
        try:
            for line in self.store.flush_all():
                log.error("not in the storage, kept on disk", extra=fields(what=line))
        except MountFailed as error:  # another process has unmounted it by now
            log.info("nothing is flushed", extra=fields(error=error))
        if self.unconfined is not None:
            return False
        try:
            device.unmount(self.spec.mountpoint)
        except MountFailed as error:
            log.warning("detached while in use", extra=fields(error=error))
            device.unmount(self.spec.mountpoint, lazy=True)
        if not self._ended.wait(END_TIMEOUT_S):
            log.warning("processes still used the mount when it ended")
        return True

    # -- control operations

    def _status(self, request: Answer, _progress: Progress) -> Answer:
        session = self._session
        own: Answer = {
            "name": self.spec.name,
            "mountpoint": self.spec.mountpoint,
            "transport": self.spec.transport,
            "serverPid": os.getpid(),
            "supervisorPid": os.getppid(),
            "uptimeSeconds": round(time.monotonic() - self._started, 1),
            "restarts": self.restarts,
            "process": own_process(),
            **self.metrics.status(),
        }
        if session is not None and session.negotiated is not None:
            own["protocol"] = f"{abi.MAJOR}.{session.negotiated.minor}"
            own["features"] = session.negotiated.names()
            own["requests"] = {abi.opcode_name(code): count for code, count in enumerate(session.counts) if count}
            own["inFlight"] = session.in_flight
            own["passthroughOpen"] = session.modes.count()
            own.update(session.traffic.snapshot())
        own["reads"] = self._read_path()
        if self.unconfined is not None:
            own["unconfined"] = self.unconfined
        own["detached"] = not device.is_mounted(self.spec.mountpoint)
        told = {**own, **self.store.status()}
        told["unsent"] = _counted(told["dirty"])
        if request.get("brief") is True:
            del told["dirty"]
        return told

    def _read_path(self) -> Answer:
        """Return on which path a reader gets data that is cached locally, and why (S-53)."""
        if self._session is None:
            return {"path": "keep-cache", "why": "served by libfuse, which has no faster method"}
        if self.spec.read_only:
            return {"path": "no-open", "why": "readOnly: the kernel opens files by itself and keeps their pages"}
        why_not = self._session.modes.why_not()
        if why_not:
            return {"path": "keep-cache", "why": why_not}
        return {"path": "passthrough", "why": "files of 1 MiB and more that are wholly cached; keep-cache for others"}

    def _flush(self, _request: Answer, _progress: Progress) -> Answer:
        errors = first_of(self.store.flush_all())
        return {"ok": not errors, "errors": errors}

    def _discard(self, request: Answer, _progress: Progress) -> Answer:
        path = request.get("path", "")
        return {"discarded": self.store.discard(path)} if isinstance(path, str) else failed("path has to be a text")

    def _warm(self, request: Answer, progress: Progress) -> Answer:
        path = request.get("path", "")
        return self.store.warm(path, progress) if isinstance(path, str) else failed("path has to be a text")

    def _settings(self, request: Answer, _progress: Progress) -> Answer:
        applied = self.store.apply(from_json(str(request.get("spec", ""))))
        log.info("new settings", extra=fields(**applied))
        return applied

    def _stop(self, request: Answer, _progress: Progress) -> Answer:
        force, detach = request.get("force") is True, request.get("detach") is True
        # Counted from the client's request, because the client does so: this thread may have begun late.
        began, within_s = time.monotonic(), float(request.get("withinSeconds", FLUSH_TIMEOUT_S))
        began = min(began, float(request.get("asked", began)))
        errors = first_of(self.store.flush_all())
        lost = self.store.status().get("inMemory", 0) if errors else 0
        if not errors and time.monotonic() - began > within_s:
            errors = [f"it took longer than {within_s:.0f} s, and the caller has given up"]
        if errors and not force:
            return failed(*errors)
        there = mountinfo.read().at(device.canonical(self.spec.mountpoint))
        number = there.device if there is not None else ""
        used = device.unmount_or_detach(self.spec.mountpoint, force=force, detach=detach)
        if used and detach:
            return {"detached": used, "errors": errors}
        if number and not self._ended.wait(ELSEWHERE_S) and (elsewhere := device.seen_elsewhere(number)):
            return {"ok": force or not errors, "errors": errors, "elsewhere": ", ".join(elsewhere)}
        if not self._ended.wait(END_TIMEOUT_S) and not force:
            errors = [*errors, "unmounted, but requests still run"]
        return {"ok": force or not errors, "errors": errors, "inMemory": lost}


def _counted(dirty: list[dict[str, Any]]) -> Answer:
    """Count the files that are not uploaded, and their bytes; error: that of the first failed upload."""
    errors = [str(each["error"]) for each in dirty if each["error"]]
    size = sum(each["bytes"] for each in dirty)
    return {"files": len(dirty), "bytes": size, "failed": len(errors), "error": errors[0] if errors else ""}


def _error_line(channel: socket.socket, error: BaseException) -> None:
    known = isinstance(error, DatastoreError)
    line = str(error) if known else f"the mount server could not start: {type(error).__name__}: {error}"
    frames.send(channel, {"error": line, "kind": type(error).__name__ if known else "MountFailed"})


def run(channel: socket.socket, builder: str, *, confined: bool) -> int:
    """Talk to the supervisor (the messages are in supervisor/serverprocess.py) and serve; return the exit code."""
    unconfined = None
    try:
        message, descriptors = frames.receive(channel, SPEC_TIMEOUT_S)
        if message.get("prepare"):
            load_builder(builder)  # import everything before the present server is asked to leave
            frames.send(channel, {"prepared": True})
            message, descriptors = frames.receive(channel, PREPARED_TIMEOUT_S)
        opens_fd = descriptors[0] if descriptors else -1
        with open(message["log"], "ab") as file:  # the supervisor may not have known before which log it is
            for fd in (1, 2):
                os.dup2(file.fileno(), fd)
        spec = from_json(message["spec"])
        control = ControlServer(Path(spec.state_dir))
        build = load_builder(str(message.get("builder", builder)))  # before confine(): some imports start programs
        if confined:
            control.bind()  # a confined process can't make a Unix socket
            from .confinement import confine

            unconfined = confine(spec)
            for line in unconfined:
                what = "a compromised mount server could reach what belongs to others"
                log.warning(what, extra=fields(missing=line))
        resumed, restarts = message.get("resumed") is True, int(message.get("restarts", 0))
        metrics = Metrics(spec.metrics, resumed=resumed)
        try:
            store = build(spec, resumed=resumed)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise MountFailed(f"the disk of the state directory {spec.state_dir} is full: make room on it") from error
    except PeerGone:
        return EXIT_FAILED
    except Exception as error:
        if not isinstance(error, DatastoreError):
            log.exception("could not build the mount")
        _error_line(channel, error)
        return EXIT_FAILED
    try:
        frames.send(channel, {"probed": True})
        message, descriptors = frames.receive(channel, DEVICE_TIMEOUT_S)
        device_fd, own_fd = (*descriptors, -1, -1)[:2]  # a supervisor that is older than this code sends no clone
        settled: dict[str, Any] | None = message.get("negotiated")
        server = Server(spec, store, channel, metrics, control, restarts, unconfined)
        return server.run(device_fd, own_fd, opens_fd, Negotiated(**settled) if settled else None)
    except PeerGone:  # the supervisor could not mount
        return EXIT_FAILED
    except DatastoreError as error:
        _error_line(channel, error)
        return EXIT_FAILED


def main(arguments: list[str]) -> NoReturn:
    """Run the command line. It ends with _exit, so that a thread that hangs on the network can't keep the process."""
    parser = argparse.ArgumentParser(prog="python -m datastore.fuse --server")
    parser.add_argument("channel", type=int)
    parser.add_argument("--builder", required=True)
    parser.add_argument("--confined", metavar="STATE_DIR", help="drop rights that a server on a node does not need")
    options = parser.parse_args(arguments)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # some were inherited as blocked
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # all stacks into the log: for the report of a mount that hangs
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    os.umask(0o077)
    logs.setup()
    code = run(socket.socket(fileno=options.channel), options.builder, confined=bool(options.confined))
    logging.shutdown()
    os._exit(code)

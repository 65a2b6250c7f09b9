"""The mount server: builds the store and the file system, serves the kernel, answers its control socket, ends in order.

    python -m datastore.fuse --server FD --builder module:function   (by the supervisor; FD: its serverprocess.py)

Exit code 0 says that the mount is gone and everything that could be is in S3; anything else makes the supervisor start
another one.
Threads: the main one waits for what happens, one serves the kernel (kernel/session.py), others the control socket.
"""

from __future__ import annotations

import argparse
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
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from datastore import frames, logs
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
"""Less than the mount daemon waits: it replaces a server that does not take new settings."""
FLUSH_TIMEOUT_S = 3600.0
WARM_TIMEOUT_S = 24 * 3600.0
END_TIMEOUT_S = 45.0
"""From the unmount to the end of the last request and of the file system."""
SWITCH_INTERVAL_S = 0.001
"""How soon the loop gets the interpreter back from a busy lane; Python's 5 ms is a long time for a cached answer."""
EXIT_OK, EXIT_FAILED, EXIT_LEFT = 0, 1, 3
LEAVE_S = 5.0
"""What is under way when another server takes over may end within this time; the rest is sent to that one again."""
METRICS_TRIES, METRICS_PAUSE_S = 60, 0.5
"""How long the address of an endpoint is waited for."""
PREPARED_TIMEOUT_S = 2_000_000.0
"""23 days: a server that stands by waits for its turn, or for the end of its supervisor."""


def own_process() -> dict[str, int | float]:
    """rssBytes, openFiles, threads, cpuSeconds of this process; the first two only where there is a /proc."""
    own: dict[str, int | float] = {"threads": threading.active_count(), "cpuSeconds": round(time.process_time(), 2)}
    proc = Path("/proc/self")
    with suppress(OSError):
        own["rssBytes"] = int(proc.joinpath("statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        own["openFiles"] = len(os.listdir(proc / "fd")) - 1  # the descriptor that lists them
    return own


class Metrics:
    """The endpoint of a mount at HOST:PORT, or none for ''.

    A new mount whose address is taken is refused. A server that takes over a living mount tries for a while instead,
    until the one before it has let go, and then goes on without.
    """

    def __init__(self, address: str, *, resumed: bool = False) -> None:
        """Errors: MountFailed, unless resumed."""
        self._address = address
        self._endpoint: Endpoint | None = None
        self._stopping = threading.Event()
        if address and not resumed:
            self._endpoint = _endpoint(address)

    def start(self, source: Callable[[], Mapping[str, Any]]) -> None:
        """Serve what `source` gives at each scrape."""
        if self._endpoint is not None:
            self._endpoint.start(source)
        elif self._address:
            threading.Thread(target=self._take_over, args=(source,), name="metrics-bind", daemon=True).start()

    def status(self) -> dict[str, str]:
        """metrics: where to scrape."""
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
    from .prometheus import Endpoint  # here: 60 ms that a mount without an endpoint need not wait

    return Endpoint(address)


class MountedStore(Protocol):
    """What a builder makes of a MountSpec; it has asked the storage, and raised DatastoreError if that said no."""

    @property
    def filesystem(self) -> Filesystem: ...
    def status(self) -> dict[str, object]:
        """For `datastore status`; quick, no request to the storage. `dirty`: each file that is not uploaded, with its
        `bytes` and `error`."""

    def warm(self, path: str, progress: Callable[[dict[str, object]], None]) -> dict[str, object]:
        """Fetch what lies below `path` (relative to the mount); calls progress now and then."""

    def apply(self, spec: MountSpec) -> list[str]:
        """Be as this specification of the same mount says, as far as that is possible while it is mounted.

        The names of the fields of MountSpec that only a next server can change. Credentials change at once.
        """

    def discard(self, path: str) -> int:
        """Drop what could not be stored of a file that nobody has open; how many versions of it there were."""

    def flush_all(self) -> list[str]:
        """Put everything into the storage; one line for each file that is not there, none when all are."""


def load_builder(name: str) -> Callable[..., MountedStore]:
    """`module:function`, which makes the store of a mount: build(spec, resumed=...). Its errors: DatastoreError.

    resumed: the kernel already knows nodes of an earlier server.
    """
    module, _, function = name.partition(":")
    build: Callable[..., MountedStore] = getattr(importlib.import_module(module), function)
    return build


@dataclass(eq=False)
class Server:
    """One serving process of one mount."""

    spec: MountSpec
    store: MountedStore
    channel: socket.socket
    metrics: Metrics
    control: ControlServer
    restarts: int
    """How many servers of this mount died before this one."""
    unconfined: list[str] | None
    """What confinement.confine says is missing; None: nobody asked for that."""

    def __post_init__(self) -> None:
        self._session: Session | None = None
        self._events: SimpleQueue[str] = SimpleQueue()
        self._ended = threading.Event()
        self._crashed = False
        self._started = time.monotonic()

    def run(self, device_fd: int, opens_fd: int, negotiated: Negotiated | None) -> int:
        """Serve until the mount is gone; the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._events.put("terminate"))
        signal.signal(signal.SIGUSR2, lambda *_: self._events.put("leave"))
        self.control.start(
            {
                "status": (self._status, STATUS_TIMEOUT_S),
                "flush": (self._flush, FLUSH_TIMEOUT_S),
                "discard": (self._discard, STATUS_TIMEOUT_S),
                "warm": (self._warm, WARM_TIMEOUT_S),
                "settings": (self._settings, SETTINGS_TIMEOUT_S),
                "stop": (self._stop, FLUSH_TIMEOUT_S),
            }
        )
        self.metrics.start(lambda: self._status({}, lambda _: None))
        if self.spec.transport == "kernel":
            fs, ready = self.store.filesystem, self._ready
            self._session = Session(device_fd, fs, Settings(), negotiated=negotiated, opens_fd=opens_fd, ready=ready)
            serve: Callable[[], object] = self._session.serve
        else:
            serve = self._libfuse()
        gc.collect()
        gc.freeze()  # what start-up made stays; the collector needn't look at it again
        threading.Thread(target=self._serve, args=(serve,), name="fuse-loop", daemon=True).start()
        try:
            event = self._events.get()
            if event == "leave" and self._session is not None:
                # Nothing is flushed: what is unsent is in the journal, and its next owner sends it.
                self._session.leave(LEAVE_S)
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
        if sys.platform == "linux":
            os.environ.setdefault("FUSE_LIBRARY_NAME", "fuse3")  # mfusepy would take version 2 first
        try:
            from .libfuse.adapter import serve  # here: it needs libfuse and mfusepy, which the other transport doesn't
        except (ImportError, OSError, AttributeError) as error:
            raise MountFailed(
                f"the libfuse transport can't be loaded ({error}); install libfuse (apt-get install libfuse3-3 fuse3,"
                " or macFUSE) and kube-datastore[libfuse]"
            ) from error
        spec = self.spec
        return lambda: serve(
            self.store.filesystem,
            mountpoint=spec.mountpoint,
            name=spec.name,
            read_only=spec.read_only,
            allow_other=spec.allow_other,
            ttl_s=spec.metadata_ttl_s / 2,  # the other half is the mount's own: vfs/build.believed_s
            ready=lambda: frames.send(self.channel, {"negotiated": {}}),
        )

    def _terminate(self) -> bool:
        """A signal: flush, unmount, end, whatever is in the way; what is not uploaded stays in the state directory.

        False: it is still mounted. A confined server may not change that, and the supervisor does.
        """
        try:
            for line in self.store.flush_all():
                log.error("not in the storage, kept on disk", extra=fields(what=line))
        except MountFailed as error:  # somebody has unmounted it meanwhile
            log.info("nothing is flushed", extra=fields(error=error))
        if self.unconfined is not None:
            return False
        try:
            device.unmount(self.spec.mountpoint)
        except MountFailed as error:
            log.warning("detached while in use", extra=fields(error=error))
            device.unmount(self.spec.mountpoint, lazy=True)
        try:
            while self._events.get(timeout=END_TIMEOUT_S) != "ended":
                pass  # another signal
        except Empty:
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
        """How what is held locally gets to a reader, and why so (S-53)."""
        if self._session is None:
            return {"path": "keep-cache", "why": "served by libfuse, which knows nothing faster"}
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
        later = self.store.apply(from_json(str(request.get("spec", ""))))
        log.info("new settings", extra=fields(later=", ".join(later) or "none"))
        return {"later": later}

    def _stop(self, request: Answer, _progress: Progress) -> Answer:
        force, detach = request.get("force") is True, request.get("detach") is True
        # from when it was asked for: where this thread began late, who asked has given up before it sees that
        began, within_s = time.monotonic(), float(request.get("withinSeconds", FLUSH_TIMEOUT_S))
        began = min(began, float(request.get("asked", began)))
        errors = first_of(self.store.flush_all())
        if not errors and time.monotonic() - began > within_s:
            errors = [f"it took longer than {within_s:.0f} s, and who asked for it has given up"]
        if errors and not force:
            return failed(*errors)
        used = device.unmount_or_detach(self.spec.mountpoint, force=force, detach=detach)
        if used and detach:
            return {"detached": used, "errors": errors}
        if not self._ended.wait(END_TIMEOUT_S) and not force:
            errors = [*errors, "unmounted, but requests still run"]
        return {"ok": force or not errors, "errors": errors}


def _counted(dirty: list[dict[str, Any]]) -> Answer:
    """Files that are not uploaded, as numbers; error: of the first that could not be."""
    errors = [str(each["error"]) for each in dirty if each["error"]]
    size = sum(each["bytes"] for each in dirty)
    return {"files": len(dirty), "bytes": size, "failed": len(errors), "error": errors[0] if errors else ""}


def _error_line(channel: socket.socket, error: BaseException) -> None:
    known = isinstance(error, DatastoreError)
    line = str(error) if known else f"the mount server could not start: {type(error).__name__}: {error}"
    frames.send(channel, {"error": line, "kind": type(error).__name__ if known else "MountFailed"})


def run(channel: socket.socket, builder: str, *, confined: bool) -> int:
    """The supervisor's side of the story is supervisor/serverprocess.py; the exit code."""
    unconfined = None
    try:
        message, descriptors = frames.receive(channel, SPEC_TIMEOUT_S)
        if message.get("prepare"):
            load_builder(builder)  # everything is imported before the server that serves now is asked to leave
            frames.send(channel, {"prepared": True})
            message, descriptors = frames.receive(channel, PREPARED_TIMEOUT_S)
        opens_fd = descriptors[0] if descriptors else -1
        _log_to(message["log"])
        spec = from_json(message["spec"])
        control = ControlServer(Path(spec.state_dir))
        build = load_builder(str(message.get("builder", builder)))  # some modules start programs when they are imported
        if confined:
            control.bind()  # no other Unix socket is made after that
            unconfined = _confine(spec)
        resumed, restarts = message.get("resumed") is True, int(message.get("restarts", 0))
        metrics = Metrics(spec.metrics, resumed=resumed)
        store = build(spec, resumed=resumed)
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
        device_fd = descriptors[0] if descriptors else -1
        settled: dict[str, Any] | None = message.get("negotiated")
        server = Server(spec, store, channel, metrics, control, restarts, unconfined)
        return server.run(device_fd, opens_fd, Negotiated(**settled) if settled else None)
    except PeerGone:  # the supervisor could not mount
        return EXIT_FAILED
    except DatastoreError as error:
        _error_line(channel, error)
        return EXIT_FAILED


def _confine(spec: MountSpec) -> list[str]:
    from .confinement import confine

    missing = confine(spec)
    for line in missing:
        log.warning("a mount server that is taken over is not kept from all others have", extra=fields(missing=line))
    return missing


def _log_to(path: str) -> None:
    """From now on our output goes there; until then the supervisor may not have known where."""
    with open(path, "ab") as file:
        for fd in (1, 2):
            os.dup2(file.fileno(), fd)


def _prepare_process() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the supervisor has blocked some
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # all stacks into the log: what to send when a mount hangs
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    os.umask(0o077)
    logs.setup()


def main(arguments: list[str]) -> NoReturn:
    """The command line. It ends with _exit: a lane that hangs on the network must not keep the process."""
    parser = argparse.ArgumentParser(prog="python -m datastore.fuse --server")
    parser.add_argument("channel", type=int)
    parser.add_argument("--builder", required=True)
    parser.add_argument("--confined", metavar="STATE_DIR", help="give up what a server on a cluster's node needs not")
    options = parser.parse_args(arguments)
    _prepare_process()
    code = run(socket.socket(fileno=options.channel), options.builder, confined=bool(options.confined))
    logging.shutdown()
    os._exit(code)

"""`python -m tests.csi.attacking`: a mount server that somebody has taken over tries what it can reach on its node.

Reads from standard input {"own": MountSpec, "other": {"state_dir", "cache_dir", "mountpoint", "server_pid"},
"daemon_pid", "sockets", "file"}, confines itself as the server of `own`, tries everything, and writes
{"attacks": {NAME: "refused" or what it got}, "missing": what confine() says, "worked": [...]}.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from datastore.api.mountspec import from_json
from datastore.fuse.confinement import confine

MS_BIND, CLONE_NEWNS, PTRACE_ATTACH = 4096, 0x00020000, 16
CALLS = {"x86_64": {"ptrace": 101, "process_vm_readv": 310, "pidfd_open": 434, "bpf": 321, "open_by_handle_at": 304}}
CALLS["aarch64"] = {"ptrace": 117, "process_vm_readv": 270, "pidfd_open": 434, "bpf": 280, "open_by_handle_at": 265}
libc = ctypes.CDLL(None, use_errno=True)


def called(answer: int) -> int:
    """Check the return value of a function of libc. Errors: OSError."""
    if answer < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return answer


def syscall(name: str, *arguments: int) -> int:
    return called(libc.syscall(CALLS[os.uname().machine][name], *(ctypes.c_long(each) for each in arguments)))


def connected(path: str) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(path)
        return "connected"


def datagram_pair(path: str) -> str:
    one, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    one.connect(path)
    return "connected"


def owner(pid: int) -> str:
    """Have the kernel send a signal on our behalf."""
    one, _ = socket.socketpair()
    fcntl.fcntl(one, fcntl.F_SETOWN, pid)
    return "owned"


def forked() -> str:
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return "forked"


def attacks(given: Mapping[str, Any]) -> dict[str, Callable[[], object]]:
    """Return all attacks, by name."""
    own = Path(given["own_state"])
    state, cache = Path(given["other"]["state_dir"]), Path(given["other"]["cache_dir"])
    neighbour, daemon = given["other"]["server_pid"], given["daemon_pid"]
    found: dict[str, Callable[[], object]] = {
        "list another's state": lambda: os.listdir(state),
        "list another's cache": lambda: os.listdir(cache),
        "list all volumes": lambda: os.listdir(state.parent),
        "list what the kubelet has": lambda: os.listdir(state.parent.parent.parent),
        "list /": lambda: os.listdir("/"),
        "list the host by another's /proc": lambda: os.listdir(f"/proc/{daemon}/root"),
        "read another's record": (state / "mount.json").read_bytes,
        "read another's log": (state / "mount.log").read_bytes,
        "change another's file": lambda: (state / "mount.json").write_text("{}"),
        "shorten another's file": lambda: os.truncate(state / "mount.json", 0),
        "remove another's file": lambda: os.unlink(state / "mount.json"),
        "move another's file": lambda: os.rename(state / "mount.json", own / "taken"),
        "link another's file": lambda: os.link(state / "mount.json", own / "taken"),
        "take another's rights": lambda: os.chmod(state / "mount.json", 0),
        "give another's file away": lambda: os.chown(state / "mount.json", 1, 1),
        "touch another's file": lambda: os.utime(state / "mount.json", (1, 1)),
        "mark another's file": lambda: os.setxattr(state / "mount.json", "user.x", b"1"),
        "read a file of the host": lambda: Path(given["file"]).read_text(),
        "write a file of the host": lambda: Path(given["file"]).write_text("taken"),
        "write where programs are": lambda: (Path(sys.prefix) / "taken").write_text("x"),
        "write a new file in /etc": lambda: Path("/etc/datastore-taken").write_text("x"),
        "lead who reads our state elsewhere": lambda: os.symlink(state, own / "mount.json.new"),
        "have who reads our state wait": lambda: os.mkfifo(own / "fifo"),
        "make a device": lambda: os.mknod(own / "device", 0o60600, os.makedev(8, 0)),
        "open a device": lambda: os.open("/dev/fuse", os.O_RDWR),
        "read another's memory": lambda: Path(f"/proc/{neighbour}/mem").read_bytes(),
        "read another's environment": lambda: Path(f"/proc/{daemon}/environ").read_bytes(),
        "list another's descriptors": lambda: os.listdir(f"/proc/{daemon}/fd"),
        "trace another": lambda: syscall("ptrace", PTRACE_ATTACH, neighbour, 0, 0),
        "read another's memory at once": lambda: syscall("process_vm_readv", neighbour, 0, 0, 0, 0, 0),
        "take another's descriptors": lambda: syscall("pidfd_open", neighbour, 0),
        "load a program into the kernel": lambda: syscall("bpf", 0, 0, 0),
        "open a file by its number": lambda: syscall("open_by_handle_at", 0, 0, 0),
        "kill another": lambda: os.kill(neighbour, signal.SIGTERM),
        "kill the mount daemon": lambda: os.kill(daemon, 0),
        "kill everybody": lambda: os.kill(-1, 0),
        "have the kernel signal another": lambda: owner(neighbour),
        "limit another": lambda: resource.prlimit(daemon, resource.RLIMIT_NOFILE, (8, 8)),
        "slow another down": lambda: os.setpriority(os.PRIO_PROCESS, daemon, 19),
        "keep another from processors": lambda: os.sched_setaffinity(daemon, {0}),
        "mount": lambda: called(libc.mount(bytes(state), bytes(own), None, MS_BIND, None)),
        "unmount another's": lambda: called(libc.umount2(os.fsencode(given["other"]["mountpoint"]), 2)),
        "leave its view of the tree": lambda: called(libc.unshare(CLONE_NEWNS)),
        "start a program": lambda: subprocess.run(["/bin/true"], check=True),
        "be two": forked,
        "use a datagram's socket": lambda: datagram_pair(given["sockets"]["mount daemon"]),
    }
    for name, path in given["sockets"].items():
        found[f"ask the {name}"] = lambda path=path: connected(path)  # type: ignore[misc]
    return found


def outcome(attack: Callable[[], object]) -> str:
    try:
        return f"done: {attack()!r:.80}"
    except PermissionError:
        return "refused"
    except OSError as error:  # a link to another directory is refused as a link between disks is
        return "refused" if error.errno == 18 else f"failed: {error}"


def main() -> None:
    given = json.load(sys.stdin)
    spec = from_json(given["own"])
    left_open = os.open(Path(spec.state_dir) / "attacked", os.O_RDWR | os.O_CREAT, 0o600)
    missing = confine(spec)
    answers = {name: outcome(attack) for name, attack in attacks({**given, "own_state": spec.state_dir}).items()}
    # What a server does goes on as before.
    worked: list[str] = []
    thread = threading.Thread(target=lambda: worked.append("a thread"))
    thread.start()
    thread.join()
    draft, final = Path(spec.state_dir) / "draft", Path(spec.cache_dir) / "final"
    draft.write_text("x")
    os.replace(draft, final)
    os.utime(left_open)
    os.ftruncate(left_open, 4096)
    mmap.mmap(left_open, 4096).close()
    os.unlink(final)
    os.kill(os.getpid(), 0)
    assert socket.getaddrinfo("localhost", 80)
    assert Path("/proc/self/statm").read_text()
    print(json.dumps({"missing": missing, "attacks": answers, "worked": worked}))


if __name__ == "__main__":
    main()

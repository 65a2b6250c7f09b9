"""Ctrl-C and kill -9 while the store hangs (docs/SEMANTICS.md, S-190). Each line of CALLS is timed."""

from __future__ import annotations

import json
import signal
import subprocess
import time

import pytest

from tests.mount.conftest import Breaking
from tests.mount.mounts import TTL, TTL_S, user
from tests.patience import eventually
from tests.promises import promise

pytestmark = [pytest.mark.fuse, pytest.mark.timeout(300)]

END_S = 30.0
"""An interrupted call ends long before the time for which the store is tried (60 s). The second that is promised is the
machine's as well."""

ASKING = {
    "stat": "libc.access(P('unknown'), 0)",
    "list": "err = list_('d')",
    "read": "libc.read(cold, buffer, 4096)",
    "open": "libc.open(P('old'), os.O_RDONLY)",
}
"""When what is known is too old."""
CHANGING = {
    "create exclusively": "libc.open(P('create/file'), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)",
    "mkdir": "libc.mkdir(P('mkdir/directory'), 0o755)",
    "symlink": "libc.symlink(b'target', P('symlink/link'))",
    "mkfifo": "libc.mkfifo(P('mkfifo/pipe'), 0o644)",
    "unlink": "libc.unlink(P('unlink/file'))",
    "rmdir": "libc.rmdir(P('rmdir/empty'))",
    "rename": "libc.rename(P('rename/from'), P('rename/to'))",
    "chmod": "libc.chmod(P('chmod/file'), 0o600)",
    "truncate": "libc.truncate(P('truncate/file'), ctypes.c_long(5000))",
    "setxattr": "libc.setxattr(P('setxattr/file'), b'user.a', b'b', 1, 0)",
    "write into a block": "libc.pwrite(part, b'x', 1, ctypes.c_long(10))",
    "fsync": "libc.fsync(synced)",
    "close": "libc.close(closed)",
}
"""When all names are known, so that the change itself waits."""

PROGRAM = """
import ctypes, errno, json, os, signal, sys, threading, time
root = sys.argv[1]
libc = ctypes.CDLL(None, use_errno=True)
P = lambda name: os.path.join(root, name).encode()
def list_(name):
    try:
        os.listdir(P(name))
    except KeyboardInterrupt:
        return errno.EINTR
    return 0
if "mkdir" in sys.argv[2]:
    for place, names, files in os.walk(root):
        for name in files:
            os.lstat(os.path.join(place, name))
buffer = ctypes.create_string_buffer(4096)
cold = os.open(P("cold"), os.O_RDONLY)
part = os.open(P("part"), os.O_RDWR)
synced, closed = (os.open(P(name), os.O_WRONLY | os.O_CREAT) for name in ("synced", "closed"))
for fd in (synced, closed):
    os.write(fd, b"written")
print("in use", flush=True)
sys.stdin.readline()
time.sleep(float(sys.argv[3]))  # what is known by now is too old then
main = threading.main_thread().ident
came = []
def note(number, frame):
    came.append(time.monotonic())
    if "list_" in call:
        raise KeyboardInterrupt
stack = f"/proc/self/task/{threading.main_thread().native_id}/stack"
def interrupt(name):
    # When the call waits in the kernel: before that a signal would interrupt nothing.
    time.sleep(0.5)
    while now == name:
        with open(stack) as file:
            where = file.read()
        if "fuse" in where or "folio_wait" in where:
            came.append(time.monotonic())
            signal.pthread_kill(main, signal.SIGINT)
            break
        time.sleep(0.01)
signal.signal(signal.SIGINT, note)
for name, call in json.loads(sys.argv[2]).items():
    interrupting = threading.Thread(target=interrupt, args=(name,))
    came.clear()
    err = None
    now = name
    interrupting.start()
    if call.startswith("err"):
        exec(call)
    else:
        ctypes.set_errno(0)
        exec("result = " + call)
        err = ctypes.get_errno() if result < 0 else 0
    took = time.monotonic() - came[0] if came else -1.0
    now = ""
    interrupting.join()
    print(json.dumps([name, errno.errorcode.get(err, "done"), round(took, 3)]), flush=True)
os.kill(os.getpid(), signal.SIGKILL)  # an orderly end would wait for the closes
"""


@promise("S-190")
@pytest.mark.parametrize(("calls", "ttl"), [(ASKING, TTL), (CHANGING, "600s")], ids=["asking", "changing"])
def test_every_call_that_waits_for_the_store_ends_within_a_second_of_ctrl_c(
    breaking: Breaking, calls: dict[str, str], ttl: str
) -> None:
    """With EINTR; what was begun goes on, and nothing of it is lost."""
    body = b"0123456789" * 2000
    with breaking(metadataTTL=ttl) as (storage, mount):
        objects = mount.objects
        for key in ("cold", "old", "d/inside", "part", *(f"{name.split()[0]}/file" for name in CHANGING)):
            objects.put(key, body)
        for key in ("create/file", "rmdir/file"):
            objects.delete(key)
        for key in ("create/", "rmdir/", "rmdir/empty/", "rename/from"):
            objects.put(key, b"" if key.endswith("/") else b"renamed")
        with user(PROGRAM, mount.path, json.dumps(calls), str(TTL_S + 0.1)) as process:
            storage.freeze()
            out, _ = process.communicate("\n", timeout=200)
        told = [json.loads(line) for line in out.splitlines()]
        print("seconds from Ctrl-C to the end of the call:", *told, sep="\n")
        assert [name for name, _, _ in told] == list(calls)
        assert [line for line in told if line[1] != "EINTR" or not 0 <= line[2] < END_S] == []
        storage.thaw()
        eventually(lambda: mount.told()["dirty"] == [], "what was begun has ended")
        assert objects.get("closed") == objects.get("synced") == b"written"
        if calls is CHANGING:
            made = ("create/file", "mkdir/directory/", "symlink/link.rclonelink", "mkfifo/pipe", "rename/to")
            gone = ("unlink/file", "rmdir/empty/", "rename/from")
            eventually(lambda: all(map(objects.exists, made)), "what was begun was done")
            eventually(lambda: not any(map(objects.exists, gone)), "what was begun was done")
            eventually(lambda: objects.head("setxattr/file")["Metadata"].get("xattr"), "the attribute is there")
            assert objects.get("rename/to") == b"renamed"
            assert objects.get("truncate/file") == body[:5000]
            assert objects.get("part") == body[:10] + b"x" + body[11:]
            assert objects.head("chmod/file")["Metadata"]["mode"] == str(0o100600)
        (mount.path / "after").write_text("works")
        assert objects.get("after") == b"works"


@promise("S-190")
@pytest.mark.parametrize(("what", "signum"), [("waits in read", signal.SIGTERM), ("closes at its end", signal.SIGKILL)])
def test_a_killed_process_ends_within_a_second_and_its_bytes_arrive(
    breaking: Breaking, what: str, signum: signal.Signals
) -> None:
    """The end of who waits, and of who has a changed file open, which the kernel closes for him."""
    body = "os.read(os.open('cold', os.O_RDONLY), 9)" if what == "waits in read" else "signal.pause()"
    program = f"""
import os, signal, sys
os.chdir(sys.argv[1])
file = open("file", "wb", buffering=0)
file.write(b"precious")
print("in use", flush=True)
sys.stdin.readline()
print("waits", flush=True)
{body}
"""
    with breaking(metadataTTL=TTL) as (storage, mount):
        mount.objects.put("cold", b"never read")
        with user(program, mount.path) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            storage.freeze()
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "waits\n"
            time.sleep(0.5)
            began = time.monotonic()
            process.send_signal(signum)
            process.wait(60)
            took_s = time.monotonic() - began
        print(f"{what}: gone {took_s:.2f} s after {signum.name}")
        assert process.returncode == -signum
        assert took_s < END_S
        storage.thaw()
        eventually(lambda: mount.objects.exists("file"), "the bytes arrive")
        assert mount.objects.get("file") == b"precious"


@promise("S-18", "S-190")
def test_a_process_that_ends_by_itself_waits_until_its_file_is_sent(breaking: Breaking) -> None:
    """Who does not close a file is no killed one: its end is the close."""
    with breaking(metadataTTL=TTL) as (storage, mount):
        program = "import os, sys; os.write(os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY), b'x')"
        program += "; print('in use', flush=True); sys.stdin.readline()"
        with user(program, mount.path / "file") as process:
            storage.freeze()
            assert process.stdin is not None
            process.stdin.close()
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1.5)
            storage.thaw()
            assert process.wait(60) == 0
            assert mount.objects.exists("file")


@promise("S-190")
def test_what_follows_an_interrupted_removal_comes_after_it(breaking: Breaking) -> None:
    """Ctrl-C of `rm file`, then a new file of that name: the removal, which goes on, does not take that one."""
    with breaking(metadataTTL=TTL) as (storage, mount):
        file = mount.path / "file"
        file.write_text("old")
        storage.freeze()
        with subprocess.Popen(["rm", str(file)], stderr=subprocess.DEVNULL) as removing:
            eventually(lambda: "UNLINK" in mount.told()["requests"], "it removes the file")
            time.sleep(0.5)
            began = time.monotonic()
            removing.send_signal(signal.SIGINT)
            removing.wait(60)
            assert time.monotonic() - began < END_S
        with subprocess.Popen(["sh", "-c", f"echo new > {file}"]) as writing:
            with pytest.raises(subprocess.TimeoutExpired):
                writing.wait(1)
            storage.thaw()
            assert writing.wait(60) == 0
        assert file.read_text() == "new\n"
        assert mount.objects.get("file") == b"new\n"
        mount.remount()
        assert file.read_text() == "new\n"

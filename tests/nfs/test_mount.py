"""A mounted export, as programs see it through the kernel."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mount.mounts import error_of, fails, runs
from tests.nfs.host.guest import Guest
from tests.nfs.host.network import GATEWAY
from tests.nfs.host.server import FOR_ALL, NFSServer
from tests.nfs.mounts import TTL_S, ExportMount, digest, mounted, on_the_host
from tests.patience import eventually
from tests.plain_user import USER, plain_place
from tests.promises import promise
from tests.servers import tools_dir
from tests.tools.mounting import NAME

pytestmark = [pytest.mark.fuse, pytest.mark.timeout(900)]

TTL = f"{TTL_S * 1000:.0f}ms"
MIB = 1 << 20
ALICE = 1001
WAITS_NO_MORE_S = 60.0
"""Far less than a call waits for a host that is away."""
PUNCH_HOLE = 3
"""fallocate(2): and keep the size."""


@pytest.fixture(scope="module")
def served(nfs_host: NFSServer) -> Iterator[str]:
    """The export that the tests of this module share."""
    yield nfs_host.export("shared")
    nfs_host.unexport("shared")


@pytest.fixture(scope="module")
def mount(nfs_host: NFSServer, served: str, clean_environment: Path) -> Iterator[ExportMount]:
    with mounted(nfs_host, served, clean_environment, options=("--allow-other",), metadataTTL=TTL) as made:
        clean_environment.chmod(0o755)
        made.folder.chmod(0o755)
        yield made


@pytest.fixture
def area(mount: ExportMount, request: pytest.FixtureRequest) -> Path:
    """A directory of the mount for one test."""
    made = mount.path / str(request.node.name)[:60]
    made.mkdir(mode=0o777)
    made.chmod(0o777)
    return made


def as_alice(script: str, *arguments: str | Path, groups: tuple[int, ...] = ()) -> str:
    """Run a script as another user; what it printed."""
    done = subprocess.run(
        ["/usr/bin/env", "python3", "-c", f"import os, sys\n{script}", *map(str, arguments)],
        user=ALICE,
        group=ALICE,
        extra_groups=groups,
        cwd="/",
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.stdout + done.stderr


@promise("S-263")
def test_a_tree_of_all_kinds(area: Path, nfs_host: NFSServer, served: str) -> None:
    """Symbolic and hard links, empty directories, FIFOs, modes and times, as the host has them."""
    (area / "empty").mkdir(mode=0o750)
    (area / "file").write_bytes(b"content")
    (area / "file").chmod(0o4755)
    os.utime(area / "file", ns=(10**18 + 1, 10**18 + 2))
    (area / "link").symlink_to("somewhere/else")
    os.link(area / "file", area / "hard")
    os.mkfifo(area / "fifo", 0o600)
    (area / "file").rename(area / "empty" / "moved")
    there = f"{served}/{area.name}"
    told = nfs_host.shell(f"cd {there}; find . -mindepth 1 -printf '%P %y %m %n %s %T@ %l\\n' | sort; stat -c %i hard")
    *lines, ino = told.splitlines()
    assert [line.split(" ")[:2] for line in lines] == [
        ["empty", "d"], ["empty/moved", "f"], ["fifo", "p"], ["hard", "f"], ["link", "l"],
    ]  # fmt: skip
    assert lines[1].split(" ")[2:5] == ["4755", "2", "7"]
    assert lines[1].split(" ")[5] == "1000000000.0000000020"
    assert lines[4].endswith("somewhere/else")
    seen = [os.stat(area / name) for name in ("hard", "empty/moved")]
    assert {each.st_ino for each in seen} == {int(ino)}
    assert (area / "link").readlink() == Path("somewhere/else")
    assert sorted(os.listdir(area)) == ["empty", "fifo", "hard", "link"]


@promise("S-262")
def test_what_is_closed_is_on_the_hosts_disk(area: Path, nfs_host: NFSServer, served: str) -> None:
    """Or synced."""
    content = os.urandom(3 * MIB + 17)
    (area / "closed").write_bytes(content)
    with (area / "synced").open("wb", buffering=0) as file:
        file.write(content)
        os.fsync(file)
        nfs_host.reboot(orderly=False)
    found = on_the_host(nfs_host, f"{served}/{area.name}")
    assert found == {name: digest(content) for name in ("closed", "synced")}


@promise("S-263")
def test_random_writes_maps_and_appends(area: Path, nfs_host: NFSServer, served: str) -> None:
    path = area / "file"
    with path.open("w+b", buffering=0) as file:
        os.ftruncate(file.fileno(), 2 * MIB)
        os.pwrite(file.fileno(), b"hole", 3 * MIB)
        with mmap.mmap(file.fileno(), 3 * MIB) as mapped:
            mapped[MIB : MIB + 6] = b"mapped"
            mapped.flush()
    with path.open("ab") as file:
        file.write(b"end")
    content = bytearray(3 * MIB) + b"holeend"
    content[MIB : MIB + 6] = b"mapped"
    assert path.read_bytes() == bytes(content)
    assert on_the_host(nfs_host, f"{served}/{area.name}") == {"file": digest(bytes(content))}


@promise("S-263")
def test_a_sparse_file_takes_as_many_blocks_as_on_the_host(area: Path, nfs_host: NFSServer, served: str) -> None:
    with (area / "file").open("wb") as file:
        file.truncate(64 * MIB)
        file.write(b"x" * 4096)
    there = nfs_host.shell(f"stat -c '%b %B' {served}/{area.name}/file").split()
    assert os.stat(area / "file").st_blocks * 512 == int(there[0]) * int(there[1]) < MIB


@promise("S-265")
def test_removed_and_replaced_files_stay_for_who_has_them_open(area: Path) -> None:
    """The other name cannot be removed either, and goes with the last close."""
    for name in ("removed", "replaced"):
        (area / name).write_bytes(name.encode())
    with (area / "removed").open("r+b") as removed, (area / "replaced").open("rb") as replaced:
        (area / "removed").unlink()
        (area / "new").write_bytes(b"new")
        (area / "new").replace(area / "replaced")
        assert not (area / "removed").exists()
        assert (area / "replaced").read_bytes() == b"new"
        assert replaced.read() == b"replaced"
        removed.write(b"written")
        removed.seek(0)
        assert removed.read() == b"written"
        assert os.fstat(removed.fileno()).st_nlink == 0
        hidden = [name for name in os.listdir(area) if name.startswith(".nfs")]
        assert len(hidden) == 2
        fails(errno.EBUSY, os.unlink, area / hidden[0])
        fails(errno.ENOTEMPTY, area.rmdir)
    eventually(lambda: os.listdir(area) == ["replaced"], "the other names are removed")


@promise("S-264")
def test_permissions_are_the_servers(area: Path) -> None:
    """With the caller's own user, group and other groups."""
    (area / "private").write_bytes(b"1")
    (area / "private").chmod(0o600)
    (area / "team").mkdir()
    os.chown(area / "team", 0, 4242)
    (area / "team").chmod(0o2770)
    read = "print(open(sys.argv[1]).read())"
    write = "open(sys.argv[1], 'w').write('x'); print(os.stat(sys.argv[1]).st_uid, os.stat(sys.argv[1]).st_gid)"
    assert "Permission denied" in as_alice(read, area / "private")
    assert "Permission denied" in as_alice(write, area / "team" / "f")
    assert as_alice(write, area / "team" / "f", groups=(4242,)) == f"{ALICE} 4242\n"
    assert as_alice(write, area / "own") == f"{ALICE} {ALICE}\n"


@promise("S-264")
def test_a_squashed_root_may_not_what_nobody_may_not(
    nfs_host: NFSServer, export: Callable[..., str], clean_environment: Path
) -> None:
    """Refused by the server at the open, and listed as the caller."""
    path = export(options=FOR_ALL.replace("no_root_squash", "root_squash"))
    nfs_host.shell(f"cd {path}; echo 1 >f; chmod 600 f; mkdir -m 700 d; chown alice:alice f d; touch d/x")
    with mounted(nfs_host, path, clean_environment, options=("--allow-other",)) as mount:
        mount.folder.chmod(0o755)
        fails(errno.EACCES, open, mount.path / "f")
        fails(errno.EACCES, os.listdir, mount.path / "d")
        assert (
            as_alice("print(open(sys.argv[1]).read(), os.listdir(sys.argv[2]))", mount.path / "f", mount.path / "d")
            == "1\n ['x']\n"
        )


@promise("S-268")
def test_a_quota_is_shown_and_met(nfs_host: NFSServer, export: Callable[..., str], clean_environment: Path) -> None:
    """What was written before stays, and so does what fits afterwards."""
    path = export(quota_bytes=16 * MIB)
    with mounted(nfs_host, path, clean_environment) as mount:
        size = os.statvfs(mount.path)
        assert size.f_blocks * size.f_frsize == 16 * MIB
        (mount.path / "kept").write_bytes(b"k" * MIB)

        def fill() -> None:
            with (mount.path / "full").open("wb", buffering=0) as file:
                for _ in range(32):
                    file.write(bytes(MIB))

        assert error_of(fill) in (errno.ENOSPC, errno.EDQUOT)
        assert (mount.path / "kept").read_bytes() == b"k" * MIB
        (mount.path / "full").unlink()
        eventually(lambda: error_of((mount.path / "small").write_bytes, b"s" * MIB) == 0, "there is room again")


@promise("S-266")
def test_what_others_change_is_seen(
    mount: ExportMount, area: Path, nfs_host: NFSServer, served: str, clean_environment: Path
) -> None:
    """By another mount and on the host itself; at an open, and after metadataTTL."""
    with mounted(nfs_host, served, clean_environment, metadataTTL=TTL) as second:
        there, host = second.path / area.name, f"{served}/{area.name}"
        for number in range(3):
            (area / "f").write_bytes(b"%d" % number * 5000)
            assert not (there / f"new{number}").exists() or number
            time.sleep(TTL_S + 0.05)
            assert (there / "f").read_bytes() == b"%d" % number * 5000
            nfs_host.shell(f"echo {number} >{host}/f; touch {host}/new{number}")
            time.sleep(TTL_S + 0.05)
            for each in (area, there):
                assert (each / "f").read_bytes() == b"%d\n" % number
                assert f"new{number}" in os.listdir(each)
                assert (each / f"new{number}").exists()
        with (there / "f").open("rb", buffering=0) as held:
            held.read()
            (area / "f").write_bytes(b"while it is open")
            time.sleep(TTL_S + 0.05)
            held.seek(0)
            eventually(lambda: os.pread(held.fileno(), 100, 0) == b"while it is open", "an open file follows")
        (area / "f").unlink()
        time.sleep(TTL_S + 0.05)
        assert not (there / "f").exists()


@promise("S-266")
def test_what_was_read_is_kept_by_the_kernel(mount: ExportMount, area: Path) -> None:
    """A file is read from the server once, until it changes."""
    (area / "f").write_bytes(bytes(4 * MIB))
    assert len((area / "f").read_bytes()) == 4 * MIB
    before = reads(mount)
    for _ in range(5):
        assert len((area / "f").read_bytes()) == 4 * MIB
    assert reads(mount) == before


def reads(mount: ExportMount) -> int:
    """Calls of READ so far."""
    store: dict[str, dict[str, int]] = mount.told()["store"]
    return store.get("read", {"calls": 0})["calls"]


@promise("S-263")
def test_a_large_directory_is_listed_while_it_changes(area: Path) -> None:
    """Every name that stays is listed once."""
    names = {f"{number:04}" for number in range(1500)}
    for name in names:
        (area / name).touch()
    seen = []
    with os.scandir(area) as entries:
        for count, entry in enumerate(entries):
            seen.append(entry.name)
            if count % 100 == 0:
                (area / f"come-{count}").touch()
                (area / f"come-{count}").unlink()
    assert sorted(name for name in seen if not name.startswith("come")) == sorted(names)


@promise("S-269")
def test_what_version_3_does_not_have_is_refused_at_once(area: Path) -> None:
    (area / "f").write_bytes(b"1")
    fails(errno.EOPNOTSUPP, os.setxattr, area / "f", "user.a", b"1")
    fails(errno.EOPNOTSUPP, os.getxattr, area / "f", "user.a")
    fails(errno.ENAMETOOLONG, (area / ("x" * 256)).touch)
    with (area / "f").open("r+b") as file:
        fails(errno.EOPNOTSUPP, _punch, file.fileno())
        assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) == 1
    os.utime(area / "f", (0, 2**33))
    assert os.stat(area / "f").st_mtime == 2**32 - 1


def _punch(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(descriptor, PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(1)):
        raise OSError(ctypes.get_errno(), "fallocate")


@promise("S-269")
def test_locks_hold_within_the_mount(area: Path) -> None:
    """Between its processes, and not between mounts."""
    (area / "f").touch()
    script = "import fcntl, sys\nfcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    with (area / "f").open("r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        held = subprocess.run([sys.executable, "-c", script, area / "f"], capture_output=True, check=False)
        assert b"BlockingIOError" in held.stderr
    subprocess.run([sys.executable, "-c", script, area / "f"], check=True)


def holding(path: Path) -> subprocess.Popen[bytes]:
    """A program that has written ten bytes to a file and keeps it open."""
    hold = "file = open(sys.argv[1], 'wb', 0)\nfile.write(b'not stored')\nprint('written', flush=True)\ninput()"
    program = [sys.executable, "-c", f"import sys\n{hold}", str(path)]
    writer = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"written\n"
    return writer


@promise("S-261")
def test_what_the_host_refuses_to_store_is_not_lost_in_silence(
    nfs_host: NFSServer, export: Callable[..., str], clean_environment: Path
) -> None:
    """As another client removed the file. The unmount says so, status too, and a forced unmount says what is lost."""
    path = export()
    with mounted(nfs_host, path, clean_environment) as mount:
        (mount.path / "d").mkdir()
        writer = holding(mount.path / "d" / "g")
        try:
            nfs_host.shell(f"rm {path}/d/g")
            refused = mount.umount()
            assert refused.returncode == 6
            assert "d/g: the NFS server says: Stale file handle" in refused.stderr
            (kept,) = mount.told()["dirty"]
            assert (kept["path"], kept["bytes"]) == ("d/g", 10)
            assert "Stale file handle" in kept["error"]
            forced = mount.umount("--force", "--timeout", "3s")
            assert forced.returncode == 6
            assert "that is lost: 10 B of d/g: the NFS server says: Stale file handle" in forced.stderr
        finally:
            writer.kill()
            writer.communicate()


@promise("S-261")
def test_a_host_that_is_away_can_be_left(
    nfs_host: NFSServer, export: Callable[..., str], clean_environment: Path
) -> None:
    """Who waits can be ended, status says since when, and a forced unmount ends, and says what is lost."""
    path = export()
    with mounted(nfs_host, path, clean_environment) as mount:
        (mount.path / "f").write_bytes(b"1")
        began = time.time()
        writer = holding(mount.path / "g")
        time.sleep(1.1)
        nfs_host.cut_power()
        try:
            waiting = subprocess.Popen(["cat", mount.path / "f"], stderr=subprocess.DEVNULL)
            eventually(lambda: "storage" in mount.told() and mount.told()["storage"], "status says so")
            assert waiting.poll() is None
            waiting.send_signal(signal.SIGINT)
            assert waiting.wait(WAITS_NO_MORE_S) != 0
            assert mount.told()["inMemory"] == 10
            (kept,) = mount.told()["dirty"]
            assert (kept["path"], kept["bytes"]) == ("g", 10)
            assert began <= kept["since"] <= time.time()
            forced = mount.umount("--force")
            assert forced.returncode == 6
            assert "that is lost: 10 B of g: storage has not answered" in forced.stderr
            eventually(lambda: not any(map(runs, mount.pids)), "nothing of the mount is left")
        finally:
            writer.kill()
            writer.communicate()
            nfs_host.start()
            nfs_host.ready()


@promise("S-263")
def test_it_is_served_by_libfuse_too(nfs_host: NFSServer, export: Callable[..., str], clean_environment: Path) -> None:
    path = export()
    with mounted(nfs_host, path, clean_environment, options=("--transport", "libfuse")) as mount:
        (mount.path / "d").mkdir()
        (mount.path / "d" / "f").write_bytes(b"1" * 300_000)
        os.link(mount.path / "d" / "f", mount.path / "g")
        assert (mount.path / "g").read_bytes() == b"1" * 300_000
        assert sorted(os.listdir(mount.path)) == ["d", "g"]
    assert on_the_host(nfs_host, path) == {name: digest(b"1" * 300_000) for name in ("d/f", "g")}


@promise("S-270")
def test_a_plain_user_mounts_it(nfs_host: NFSServer, export: Callable[..., str], tmp_path: Path) -> None:
    """By fusermount3, from a port that anybody may have."""
    path = export()
    with plain_place(f"{USER}-nfs") as place:
        home = Path(place.environment.get("TMPDIR", tmp_path))
        manifest = home / "ds.yaml"
        manifest.write_text(ExportMount(nfs_host.address, path, folder=home).manifest())
        manifest.chmod(0o644)
        script = (
            f"set -e; mkdir m; datastore mount {manifest} {NAME} $PWD/m; echo hello >m/f; mkdir m/d; cat m/f; "
            "ls m; stat -c %u m/f; datastore umount $PWD/m"
        )
        out = home / "out"
        with out.open("wb") as output:
            environment = {**os.environ, "XDG_RUNTIME_DIR": str(home), "KUBE_DATASTORE_TOOLS": str(tools_dir().parent)}
            for kind in ("CACHE", "CONFIG", "STATE", "DATA"):
                environment[f"XDG_{kind}_HOME"] = str(home / kind)
            process = place.popen(["sh", "-c", f"cd {home}; {script}"], environment, output)
            assert process.wait(600) == 0, out.read_text()
        said = out.read_text()
        assert "hello\nd\nf\n" in said
        assert f"\n{place.uid}\n" in said


@promise("S-270")
def test_doctor_says_what_a_mount_would_say(
    nfs_host: NFSServer, export: Callable[..., str], clean_environment: Path
) -> None:
    """With the same exit code, and nothing else."""
    good, not_mine = export(), export(clients="10.99.0.77")
    for server, path, level in (
        (nfs_host.address, good, "ok"),
        (nfs_host.address, not_mine, "fail"),
        (nfs_host.address, f"{good}/none", "fail"),
        (GATEWAY, "/x", "fail"),
    ):
        mount = ExportMount(server, path, folder=Path(tempfile.mkdtemp(prefix="n", dir=clean_environment)))
        done = mount.try_mount()
        doctor = mount.command("doctor", mount.folder / "datastore.yaml", "-o", "json")
        if level == "ok":
            mount.end()
        (found,) = (each for each in json.loads(doctor.stdout) if each["check"] == NAME)
        assert (found["level"], doctor.returncode, doctor.stderr) == (level, done.returncode, "")
        assert level == "ok" or found["text"] in done.stderr


@promise("S-266")
def test_the_kernels_client_and_ours_share_an_export(
    nfs_host: NFSServer, nfs_client: Guest, export: Callable[..., str], clean_environment: Path
) -> None:
    """What one closed the other one reads."""
    path = export()
    with mounted(nfs_host, path, clean_environment, metadataTTL=TTL) as mount:
        nfs_client.shell(f"mkdir -p /mnt/both; mount -t nfs -o vers=4.2,actimeo=0 {nfs_host.address}:{path} /mnt/both")
        try:
            (mount.path / "ours").write_bytes(b"ours" * 100_000)
            theirs = nfs_client.shell("sha256sum </mnt/both/ours; seq 100000 >/mnt/both/theirs; ln -s x /mnt/both/link")
            assert theirs.split()[0] == digest(b"ours" * 100_000)
            time.sleep(TTL_S + 0.05)
            assert (mount.path / "theirs").read_text().split()[-1] == "100000"
            assert (mount.path / "link").readlink() == Path("x")
        finally:
            nfs_client.shell("umount -f /mnt/both")

"""A mounted directory of an SSH server, as programs see it through the kernel."""

from __future__ import annotations

import errno
import mmap
import os
import random
import shutil
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.mount.mounts import error_of, fails, runs
from tests.patience import eventually
from tests.promises import promise
from tests.sftp.mounts import TTL_S, DirectoryMount, mounted
from tests.sftp.sshd import SSHServer, running
from tests.survival.running import kill_server
from tests.tools import fsx_tier

pytestmark = [pytest.mark.fuse, pytest.mark.timeout(900), pytest.mark.plain_user]

TTL = f"{TTL_S * 1000:.0f}ms"
WAITS_NO_MORE_S = 60.0
"""Far less than a call waits for a server that is away."""
MIB = 1 << 20
OPERATIONS = int(os.environ.get("FSX_OPERATIONS", "2000"))
SEEDS = int(os.environ.get("FSX_SEEDS", "1"))


@pytest.fixture(scope="module")
def served(clean_environment: Path) -> Path:
    """The directory that the tests of this module share, as the server has it."""
    made = clean_environment / "served"
    made.mkdir()
    return made


@pytest.fixture(scope="module")
def mount(sshd: SSHServer, served: Path, clean_environment: Path) -> Iterator[DirectoryMount]:
    with mounted(sshd, served, clean_environment, metadataTTL=TTL) as made:
        yield made


@pytest.fixture
def area(mount: DirectoryMount, request: pytest.FixtureRequest) -> Path:
    """A directory of the mount for one test."""
    made = mount.path / str(request.node.name)[:60]
    made.mkdir()
    return made


@pytest.fixture
def there(area: Path, served: Path) -> Path:
    """The same directory on the server's side."""
    return served / area.name


@promise("S-272")
def test_files_and_directories_are_the_servers(area: Path, there: Path) -> None:
    """Names, bytes, modes and times; the login is shown as who mounts; the server's umask takes nothing."""
    name = "ü \n\\'$(x)"
    os.umask(0o022)
    (area / name).write_bytes(b"1" * 3 * MIB)
    assert (there / name).read_bytes() == b"1" * 3 * MIB
    with (area / name).open("r+b") as file:
        file.seek(MIB)
        file.write(b"2" * MIB)
        file.truncate(2 * MIB)
        os.fsync(file.fileno())
        assert os.fstat(file.fileno()).st_size == 2 * MIB
    assert (there / name).read_bytes() == b"1" * MIB + b"2" * MIB
    with (area / name).open("ab") as file:
        file.write(b"3")
    assert (area / name).read_bytes()[-2:] == b"23"
    (area / name).chmod(0o640)
    os.utime(area / name, (1_000_000_000, 2_000_000_000))
    seen = (area / name).stat()
    assert (stat.S_IMODE(seen.st_mode), seen.st_mtime, seen.st_atime) == (0o640, 2_000_000_000, 1_000_000_000)
    assert (seen.st_uid, seen.st_gid) == (os.getuid(), os.getgid())
    assert stat.S_IMODE((there / name).stat().st_mode) == 0o640
    os.umask(0)
    try:
        (area / "d").mkdir(mode=0o777)
        os.close(os.open(area / "d" / "f", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    finally:
        os.umask(0o022)
    assert [stat.S_IMODE((there / each).stat().st_mode) for each in ("d", "d/f")] == [0o777, 0o666]
    (area / "link").symlink_to("../nowhere")
    assert (there / "link").readlink() == Path("../nowhere")
    assert {each.name: each.is_dir() for each in os.scandir(area)} == {name: False, "d": True, "link": False}
    (area / "d").rename(area / "e")
    assert (there / "e" / "f").exists()
    assert not (area / "d").exists()


@promise("S-272")
def test_every_access_mode_opens_a_file(area: Path) -> None:
    """Also the fourth one, by which programs ask a device without reading it."""
    (area / "f").write_bytes(b"1")
    for mode in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_ACCMODE):
        os.close(os.open(area / "f", mode))


@promise("S-273")
def test_errors_say_what_a_disk_would(area: Path) -> None:
    """Although version 3 has one word for most of them."""
    (area / "f").write_bytes(b"1")
    (area / "d").mkdir()
    (area / "d" / "x").touch()
    fails(errno.EEXIST, os.open, area / "f", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    fails(errno.EEXIST, (area / "d").mkdir)
    fails(errno.EEXIST, (area / "f").symlink_to, "x")
    fails(errno.ENOENT, (area / "none").read_bytes)
    fails(errno.ENOENT, (area / "none").rename, area / "f")
    fails(errno.ENOTEMPTY, (area / "d").rmdir)
    (area / "d2").mkdir()
    fails(errno.ENOTEMPTY, (area / "d2").rename, area / "d")
    fails(errno.EISDIR, (area / "f").rename, area / "d")
    fails(errno.ENAMETOOLONG, (area / ("x" * 256)).touch)
    fails(errno.EPERM, os.link, area / "f", area / "g")
    fails(errno.EPERM, os.mkfifo, area / "p")
    fails(errno.EOPNOTSUPP, os.setxattr, area / "f", "user.a", b"1")
    os.utime(area / "f", (0, 2**33))
    assert os.stat(area / "f").st_mtime == 2**32 - 1


@promise("S-273")
def test_a_path_that_is_too_long_for_the_server_is_said_so(area: Path) -> None:
    """A program gets there step by step, by short paths."""
    reached = [os.open(area, os.O_RDONLY)]

    def go_down() -> None:
        while len(reached) < 30:
            os.mkdir("d" * 200, dir_fd=reached[-1])
            reached.append(os.open("d" * 200, os.O_RDONLY, dir_fd=reached[-1]))

    try:
        with pytest.raises(OSError, match="File name too long"):
            go_down()
    finally:
        for each in reached:
            os.close(each)
    assert 16 < len(reached) < 22
    shutil.rmtree(area / ("d" * 200))


@promise("S-273")
def test_statfs_is_the_servers(area: Path, there: Path) -> None:
    def same() -> bool:
        seen, theirs = os.statvfs(area), os.statvfs(there)
        return (seen.f_frsize * seen.f_blocks, seen.f_files) == (theirs.f_frsize * theirs.f_blocks, theirs.f_files)

    eventually(same, "both are of one moment: others use the disk too, on which room for files may go with bytes")


@promise("S-273")
@pytest.mark.root_only
def test_a_full_disk_is_said_so(sshd: SSHServer, clean_environment: Path) -> None:
    small = clean_environment / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", small], check=True)
    try:
        with mounted(sshd, small, clean_environment) as mount:
            assert error_of((mount.path / "f").write_bytes, bytes(8 * MIB)) == errno.ENOSPC
            (mount.path / "f").unlink()
            # A file's last close is not waited for, and until then it is kept under another name.
            eventually(lambda: not error_of((mount.path / "g").write_bytes, b"1" * MIB), "there is room again")
            assert (small / "g").read_bytes() == b"1" * MIB
    finally:
        subprocess.run(["umount", "--lazy", small], check=True)  # the server's session may end a moment later


@promise("S-273")
@pytest.mark.root_only
def test_a_read_only_disk_of_the_server_is_said_so(sshd: SSHServer, clean_environment: Path) -> None:
    """For each kind of change."""
    disk = clean_environment / "read-only"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", disk], check=True)
    try:
        (disk / "f").write_bytes(b"1")
        (disk / "d").mkdir()
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with mounted(sshd, disk, clean_environment) as mount:
            here = mount.path / "here"
            fails(errno.EROFS, here.touch)
            fails(errno.EROFS, here.mkdir)
            fails(errno.EROFS, here.symlink_to, "f")
            fails(errno.EROFS, (mount.path / "f").write_bytes, b"2")
            fails(errno.EROFS, (mount.path / "f").chmod, 0o600)
            fails(errno.EROFS, (mount.path / "f").unlink)
            fails(errno.EROFS, (mount.path / "d").rmdir)
            fails(errno.EROFS, (mount.path / "f").rename, here)
            fails(errno.EROFS, (mount.path / "f").rename, mount.path / "f2")
            assert (mount.path / "f").read_bytes() == b"1"
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)  # the server's session may end a moment later


@promise("S-273")
@pytest.mark.root_only
def test_a_rename_to_another_disk_of_the_server_is_exdev(sshd: SSHServer, clean_environment: Path) -> None:
    """So that mv copies. A taken name is replaced by that, too."""
    disk = clean_environment / "shown" / "disk"
    disk.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", disk], check=True)
    try:
        with mounted(sshd, disk.parent, clean_environment) as mount:
            (mount.path / "f").write_bytes(b"1")
            (mount.path / "disk" / "taken").write_bytes(b"0")
            fails(errno.EXDEV, (mount.path / "f").rename, mount.path / "disk" / "f")
            fails(errno.EXDEV, (mount.path / "f").rename, mount.path / "disk" / "taken")
            subprocess.run(["mv", mount.path / "f", mount.path / "disk" / "taken"], check=True, timeout=60)
            assert (disk / "taken").read_bytes() == b"1"
            assert not (disk.parent / "f").exists()
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)  # the server's session may end a moment later


@promise("S-274")
def test_removed_and_replaced_files_stay_for_who_has_them_open(mount: DirectoryMount, area: Path, there: Path) -> None:
    """Also when the connection or the mount's server dies meanwhile."""
    for name in ("removed", "replaced"):
        (area / name).write_bytes(name.encode())
    with (area / "removed").open("r+b", buffering=0) as removed, (area / "replaced").open("rb", buffering=0) as old:
        (area / "removed").unlink()
        (area / "new").write_bytes(b"new")
        (area / "new").replace(area / "replaced")
        assert (area / "replaced").read_bytes() == b"new"
        mount.server.break_connections()
        assert old.read() == b"replaced"
        removed.write(b"written")
        kill_server(mount, random.Random(1))
        assert os.pread(removed.fileno(), 100, 0) == b"written"
        assert len([name for name in os.listdir(there) if name.startswith(".sftp")]) == 2
    eventually(lambda: os.listdir(there) == ["replaced"], "the other names are removed")


@promise("S-275")
def test_what_others_change_is_seen(area: Path, there: Path) -> None:
    """At an open, even within the same second and of the same size; without one after metadataTTL."""
    for number in range(3):
        (there / "f").write_bytes(b"%d" % number)
        assert (area / "f").read_bytes() == b"%d" % number
    with (area / "f").open("rb", buffering=0) as held:
        assert held.read() == b"2"
        (there / "f").write_bytes(b"longer")
        time.sleep(TTL_S + 0.05)
        eventually(lambda: os.pread(held.fileno(), 100, 0) == b"longer", "an open file follows")
    with (area / "f").open("rb", buffering=0) as held:
        assert held.read() == b"longer"
        (there / "f").write_bytes(b"larger")
        os.utime(there / "f", (1, 1))
        time.sleep(TTL_S + 0.05)
        os.fstat(held.fileno())
        eventually(lambda: os.pread(held.fileno(), 100, 0) == b"larger", "also if the size stays")
    (there / "f").unlink()
    time.sleep(TTL_S + 0.05)
    assert not (area / "f").exists()
    assert os.listdir(area) == []


@promise("S-274")
def test_an_open_file_that_another_client_replaces_stays_as_it_is(area: Path, there: Path) -> None:
    """Who has it open reads all of it, whatever others here ask about its name, and they see the new one."""
    old = b"old" * MIB
    for content in (b"new", b"new" * MIB):
        (there / "f").write_bytes(old)
        time.sleep(TTL_S + 0.05)
        with (area / "f").open("rb", buffering=0) as held:
            assert os.pread(held.fileno(), 4096, 0) == old[:4096]
            (there / "new").write_bytes(content)
            os.utime(there / "new", (1, 1))
            (there / "new").replace(there / "f")
            time.sleep(TTL_S + 0.05)
            assert (area / "f").stat().st_size == len(content)
            assert (area / "f").read_bytes() == content
            assert os.fstat(held.fileno()).st_size == len(old)
            assert os.pread(held.fileno(), 2 * len(old), 0) == old


@promise("S-274")
def test_an_open_file_that_another_client_replaces_is_not_read_in_its_place(area: Path, there: Path) -> None:
    """Though the kernel asks for the name no sooner than after metadataTTL."""
    for number in range(5):
        (area / "f").write_bytes(b"old" * 100_000)
        with (area / "f").open("rb", buffering=0) as held:
            (there / "new").write_bytes(b"new" * 100_000)
            os.utime(there / "new", (number, number))
            (there / "new").replace(there / "f")
            assert (area / "f").read_bytes() == b"new" * 100_000
            assert held.read() == b"old" * 100_000


@promise("S-274")
def test_a_file_that_another_client_replaces_again_and_again_is_read_whole(area: Path, there: Path) -> None:
    """By many at once, who open and close it all the time."""
    (there / "f").write_bytes(b"0" * 10_000)
    ended, wrong = threading.Event(), []

    def read() -> None:
        while not ended.is_set():
            try:
                file = (area / "f").open("rb", buffering=0)
            except OSError as error:
                if error.errno != errno.ESTALE:  # it was replaced again while the kernel tried again
                    raise
                continue
            with file:
                content = file.read(100)
                time.sleep(0.01)
                content += file.read()
            if content != content[:1] * (10_000 + int(content[:1])):
                wrong.append(content)

    with ThreadPoolExecutor(3) as readers:
        reading = [readers.submit(read) for _ in range(3)]
        try:
            for number in range(100):
                (there / "new").write_bytes(b"%d" % (number % 10) * (10_000 + number % 10))
                (there / "new").replace(there / "f")
                time.sleep(0.03)
        finally:
            ended.set()
        for each in reading:
            each.result()
    assert not wrong


@promise("S-275")
def test_a_map_of_a_file_is_shared(area: Path, there: Path) -> None:
    """What is written through it is the server's after msync."""
    (area / "f").write_bytes(bytes(100_000))
    with (area / "f").open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[50_000:50_004] = b"here"
        mapped.flush()
        assert (there / "f").read_bytes()[50_000:50_004] == b"here"


@promise("S-272")
@pytest.mark.slow
def test_a_large_directory_is_listed(area: Path, there: Path) -> None:
    names = {f"{number:04}" for number in range(2500)}
    for name in names:
        (there / name).touch()
    assert set(os.listdir(area)) == names
    assert sum(each.stat().st_size == 0 for each in os.scandir(area)) == 2500


@promise("S-272")
@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_fsx(area: Path) -> None:
    """With and without memory maps. SFTP makes no holes, and no room beforehand."""
    assert fsx_tier.run_all(area, OPERATIONS, SEEDS, absent=("punch_hole", "posix_fallocate")) == 0


@promise("S-272")
def test_a_path_may_be_a_symbolic_link_to_a_directory(sshd: SSHServer, served: Path, clean_environment: Path) -> None:
    """And what is done to the mounted directory itself is done to that one."""
    directory, link = served / "linked", served / "link"
    directory.mkdir()
    link.symlink_to(directory)
    with mounted(sshd, link, clean_environment) as mount:
        (mount.path / "f").write_bytes(b"1")
        mount.path.chmod(0o750)
        assert stat.S_IMODE(mount.path.stat().st_mode) == 0o750
        assert stat.S_IMODE(directory.stat().st_mode) == 0o750
        assert os.listdir(mount.path) == os.listdir(directory) == ["f"]


@promise("S-272")
def test_who_mounts_may_give_a_file_to_himself(clean_environment: Path) -> None:
    """As tar and cp do, also where the login begins in a directory of root, by which it does not know itself."""
    directory = clean_environment / "confined"
    directory.mkdir()
    with (
        running(clean_environment, more="Subsystem sftp internal-sftp -d /") as server,
        mounted(server, directory, clean_environment) as mount,
    ):
        (mount.path / "f").write_bytes(b"1")
        before = (directory / "f").stat()
        os.chown(mount.path / "f", os.getuid(), os.getgid())
        os.chown(mount.path / "f", -1, os.getgid())
        after = (directory / "f").stat()
        assert (after.st_uid, after.st_gid) == (before.st_uid, before.st_gid)


@promise("S-272")
def test_it_is_served_by_libfuse_too(sshd: SSHServer, served: Path, clean_environment: Path) -> None:
    directory = served / "libfuse"
    directory.mkdir()
    with mounted(sshd, directory, clean_environment, transport="libfuse") as mount:
        (mount.path / "d").mkdir()
        (mount.path / "d" / "f").write_bytes(b"1" * 300_000)
        assert os.listdir(mount.path) == ["d"]
        assert (mount.path / "d" / "f").read_bytes() == (directory / "d" / "f").read_bytes() == b"1" * 300_000


@promise("S-277")
def test_a_server_that_is_away_can_be_left(clean_environment: Path) -> None:
    """Who waits can be ended, status says since when, and a forced unmount ends."""
    with running(clean_environment) as server:
        directory = clean_environment / "away"
        directory.mkdir()
        with mounted(server, directory, clean_environment) as mount:
            (mount.path / "f").write_bytes(b"1")
            time.sleep(1.1)
            server.stop()
            waiting = subprocess.Popen(["cat", mount.path / "f"], stderr=subprocess.DEVNULL)
            eventually(lambda: mount.told()["storage"], "status says so")
            assert waiting.poll() is None
            waiting.send_signal(signal.SIGINT)
            assert waiting.wait(WAITS_NO_MORE_S) != 0
            server.start()
            assert (mount.path / "f").read_bytes() == b"1"
            server.stop()
            assert mount.umount("--force").returncode == 0
            eventually(lambda: not any(map(runs, mount.pids)), "nothing of the mount is left")


@promise("S-277")
@pytest.mark.slow
def test_a_server_that_falls_silent_is_left_for_a_new_connection(clean_environment: Path) -> None:
    """It is noticed within 20 s, and programs go on when it answers again."""
    with running(clean_environment) as server:
        directory = clean_environment / "silent"
        directory.mkdir()
        with mounted(server, directory, clean_environment) as mount:
            (mount.path / "f").write_bytes(b"1")
            with server.silent():
                reading = subprocess.Popen(["cat", mount.path / "f"], stdout=subprocess.PIPE)
                eventually(lambda: mount.told()["storage"].get("error"), "the connection is given up")
                assert reading.poll() is None
            assert reading.communicate(timeout=WAITS_NO_MORE_S)[0] == b"1"

"""Exports of their own on a real NFS host, made over real SSH: datastore.backends.nfs.hostexport and its script."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count

import pytest

from datastore.api.source import SSHCredentials
from datastore.backends.base import Measured, Owner, Policy
from datastore.backends.nfs import hostexport, hostscript, ssh
from datastore.backends.nfs.hostexport import HostExport
from datastore.backends.nfs.ssh import SESSIONS
from datastore.errors import (
    AlreadyExists,
    CredentialsInvalid,
    DatastoreError,
    DeadlineExceeded,
    HostUntrusted,
    InvalidRequest,
    NotFound,
    ServerFault,
    Throttled,
    Unreachable,
)
from datastore.secret import Secret
from tests.nfs.host.guest import RECOVERED_S, Guest
from tests.nfs.host.network import GATEWAY
from tests.nfs.host.server import NFSServer
from tests.nfs.hosting import Class, location
from tests.patience import eventually
from tests.promises import promise

pytestmark = pytest.mark.timeout(900, func_only=True)
MIB = 1 << 20
LIMIT_S, CONNECT_S = 60.0, 30.0
"""An emulated machine takes its time."""
SCRIPT = hostexport.script()
RM_S = 3.0


@pytest.fixture
def cls(nfs_host: NFSServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Class]:
    monkeypatch.setattr(hostexport, "LIMIT_S", LIMIT_S)
    monkeypatch.setattr(ssh, "CONNECT_S", CONNECT_S)
    made = Class(host=nfs_host)
    nfs_host.shell(f"mkdir -m 0755 {made.root}")
    yield made
    made.hosts.close()
    nfs_host.shell(
        f"for each in $(grep -l ' {made.name}\\|{made.root}/' /etc/exports.d/*.exports); do rm $each; done\n"
        f"exportfs -ra; rm -rf {made.root}"
    )


def mount(client: Guest, cls: Class, path: str, name: str = "a") -> str:
    where = f"/mnt/{cls.name}-{name}"
    client.shell(f"mkdir -p {where}; mount -t nfs -o vers=4.2 {cls.host.address}:{path} {where}")
    return where


@promise("S-281", "S-282")
def test_a_quota_holds_harms_no_neighbour_and_grows_under_open_files(cls: Class, nfs_client: Guest) -> None:
    first, other = cls.export("first"), cls.export("other")
    made = first.ensure()
    assert (made.owner, made.measured and made.measured.objects) == (Owner.THIS, 0)
    assert first.ensure() == made, "repeated, it is the same answer"
    here = mount(nfs_client, cls, location(made).path, "first")
    there = mount(nfs_client, cls, location(other.ensure()).path, "other")
    try:
        with pytest.raises(AssertionError, match=r"No space left on device|Disk quota exceeded"):
            nfs_client.shell(f"dd if=/dev/zero of={here}/file bs=1M count=32 conv=fsync")
        nfs_client.shell(f"dd if=/dev/zero of={there}/file bs=1M count=15 conv=fsync")
        full = first.ensure().measured
        assert full is not None
        assert full.objects == 1
        assert 15 * MIB <= full.size_bytes <= 17 * MIB
        # A program that has a file open goes on when there is more room.
        nfs_client.shell(
            f"(exec 3>>{here}/file; while ! head -c 1048576 /dev/zero >&3 2>/dev/null; do sleep 0.2; done;"
            f" touch /tmp/went-on-{cls.name}) >/dev/null 2>&1 &"
        )
        grown = cls.export("first", capacity=64 * MIB).ensure()
        assert location(grown) == location(made)
        went_on = f"[ ! -e /tmp/went-on-{cls.name} ] || echo yes"
        eventually(lambda: nfs_client.shell(went_on), "the program goes on")
        assert int(nfs_client.shell(f"df --output=size --block-size=1M {here} | tail -n 1")) == 64
        # Empty files take no blocks: they have a limit of their own.
        files = int(nfs_client.shell(f"df --output=itotal {there} | tail -n 1"))
        assert files == 16 * MIB // hostscript.BLOCK + hostscript.FEWEST_FILES
    finally:
        nfs_client.shell(f"umount -f {here} {there}")


@promise("S-282")
def test_a_quota_larger_than_the_disk_and_a_disk_that_is_full_are_no_missing_quota(cls: Class) -> None:
    """XFS then shows less than the quota as the directory's size."""
    cls.export("small").ensure()
    path = location(cls.export("large", capacity=1 << 40).ensure()).path
    cls.host.shell(f"head -c {MIB} /dev/zero >{path}/file")
    filler = f"{cls.root}/filler"
    try:
        cls.host.shell(f"fallocate -l $(($(df --output=avail --block-size=1 /srv | tail -n 1) - {8 * MIB})) {filler}")
        full = cls.export("large", capacity=1 << 40, made=True).ensure()
        assert full.measured == Measured(objects=1, size_bytes=MIB)
        assert cls.export("small", made=True).ensure().measured == Measured(objects=0, size_bytes=0)
    finally:
        cls.host.shell(f"rm -f {filler}")


@promise("S-282")
def test_a_directory_that_was_restored_without_its_quota_is_told(cls: Class) -> None:
    """A backup knows nothing of projects: its files would count for nobody."""
    path = location(cls.export().ensure()).path
    cls.host.shell(f"rm -r {path}; mkdir -m 0777 {path}; echo restored >{path}/file")
    with pytest.raises(InvalidRequest, match=r"does not count for its quota.*xfs_quota") as caught:
        cls.export(made=True).ensure()
    cls.host.shell(str(caught.value).partition(": ")[2].partition(": ")[2])
    assert cls.export(made=True).ensure().measured == Measured(objects=1, size_bytes=4096)


@promise("S-290")
@pytest.mark.parametrize(
    ("parameters", "user", "owner"),
    [
        ({}, "1000:1000", "1000:1000"),
        ({}, "0:0", "0:0"),
        ({"squash": "root"}, "0:0", "65534:65534"),
        ({"squash": "all"}, "1000:1000", "65534:65534"),
        ({"group": "2000"}, "1000:1000", "1000:2000"),
    ],
)
def test_access_determines_who_writes_and_as_whom(
    cls: Class, nfs_client: Guest, parameters: dict[str, str], user: str, owner: str
) -> None:
    """A container that is not root and has an fsGroup can write, as the class says."""
    cls.parameters = parameters
    here = mount(nfs_client, cls, location(cls.export().ensure()).path)
    uid, _, gid = user.partition(":")
    try:
        groups = "--clear-groups" if uid == "0" else "--groups=2000"
        nfs_client.shell(f"setpriv --reuid={uid} --regid={gid} {groups} sh -c 'echo a >{here}/file; cat {here}/file'")
        assert nfs_client.shell(f"stat -c %u:%g {here}/file").strip() == owner
        if "group" in parameters:
            with pytest.raises(AssertionError, match="Permission denied"):
                nfs_client.shell(f"setpriv --reuid=1001 --regid=1001 --clear-groups ls {here}")
    finally:
        nfs_client.shell(f"umount -f {here}")


@promise("S-283")
def test_only_the_clients_of_the_class_mount_and_they_change_at_once_for_all(cls: Class, nfs_client: Guest) -> None:
    """A node that comes has all exports of the class, with the first look at any of them."""
    cls.nodes = ["10.99.0.77"]
    paths = [location(cls.export(name).ensure()).path for name in ("a", "b", "c")]
    with pytest.raises(AssertionError, match=r"access denied|No such file|not permitted"):
        mount(nfs_client, cls, paths[0])
    cls.nodes = ["10.99.0.77", nfs_client.address, "fd00::7"]
    cls.export("c").ensure()
    for name, path in zip("abc", paths, strict=True):
        nfs_client.shell(f"umount {mount(nfs_client, cls, path, name)}")
    served = cls.left()["served"]
    assert len(served) == 9
    assert sum(nfs_client.address in line for line in served) == 3
    cls.nodes = ["10.99.0.77"]
    cls.export("a").ensure()
    assert len(cls.left()["served"]) == 3


@promise("S-284", "S-288")
def test_an_exportfs_that_takes_longer_than_a_request_goes_on_and_hinders_nobody(
    cls: Class, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time grows with the exports of the host and their clients; what it was started for is done in the end."""
    stays = cls.export("stays")
    stays.ensure()
    go = f"/tmp/go-{cls.name}"
    slow = SCRIPT.replace("timeout 300 exportfs", f"until [ -e {go} ]; do sleep 0.1; done; timeout 300 exportfs")
    assert slow != SCRIPT
    try:
        with monkeypatch.context() as busy:
            busy.setattr(hostexport, "script", lambda: slow)
            busy.setattr(hostexport, "LIMIT_S", 12.0)
            with pytest.raises(Throttled, match=r"exportfs takes longer than .* s .*, and goes on"):
                cls.export("new").ensure()
            assert stays.ensure().owner is Owner.THIS
            cls.parameters = {"exportOptions": "async"}
            with pytest.raises(Throttled, match="exportfs is at work on an earlier change"):
                cls.export("stays", made=True).ensure()
    finally:
        cls.host.shell(f"touch {go}")
    eventually(lambda: any("team_new" in line for line in cls.left()["served"]), "what was begun is done")
    # Options that no exportfs has read yet are not forgotten; what one has read is not read again.
    cls.export("stays", made=True).ensure()
    monkeypatch.setattr(hostexport, "script", lambda: SCRIPT.replace("exportfs -ra", "sleep 200"))
    assert cls.export("stays", made=True).ensure().owner is Owner.THIS
    cls.parameters = {}
    assert cls.export("new", made=True).ensure().owner is Owner.THIS
    monkeypatch.setattr(hostexport, "script", lambda: SCRIPT)
    assert ["async" in line for line in cls.left()["served"] if "team_stays" in line] == [True]
    assert cls.export("new", made=True).release(Policy.DELETE, lambda: True).done


@promise("S-281")
def test_fsids_are_unique_and_stay(cls: Class) -> None:
    for name in ("a", "b"):
        cls.export(name).ensure()
    before = cls.left()["served"]
    numbers = re.findall(r"fsid=(\d+)", " ".join(before))
    assert len(set(numbers)) == 2
    # Another one that would have the same: the number of who was first is taken.
    taken = cls.host.shell(f"cat {cls.root}/team_a_uid-a/owner.json")
    cls.host.shell(f"mv {cls.root}/team_a_uid-a {cls.root}/other; sed -i s/uid-a/uid-x/ {cls.root}/other/owner.json")
    cls.export("a").ensure()
    again = cls.host.shell(f"cat {cls.root}/team_a_uid-a/owner.json")
    number = re.compile(r'"number": (\d+)')
    assert number.findall(taken) != number.findall(again)
    cls.export("b").ensure()
    assert [each for each in cls.left()["served"] if "team_b" in each] == [each for each in before if "team_b" in each]


# -- ends


@promise("S-287")
@pytest.mark.parametrize("policy", list(Policy))
def test_each_reclaim_policy_does_what_it_says_with_the_data(cls: Class, policy: Policy) -> None:
    """In any case nothing is exported any more, and nothing of others is touched."""
    path = location(cls.export("goes").ensure()).path
    cls.export("stays").ensure()
    cls.host.shell(f"mkdir {path}/deep; echo data >{path}/deep/file; ln -s {cls.root}/team_stays_uid-stays {path}/link")
    done = cls.export("goes", made=True).release(policy, lambda: True)
    assert done.done
    assert cls.export("goes", made=True).release(policy, lambda: True).done, "repeated, it is done"
    left = cls.left()
    names = {
        Policy.RETAIN: ["team_goes_uid-goes"],
        Policy.ARCHIVE: ["archived_team_goes_uid-goes"],
        Policy.DELETE: [],
    }[policy]
    assert left["names"] == sorted([f".clients_{cls.uid}", *names, "team_stays_uid-stays"])
    assert left["exports"] == ["/etc/exports.d/datastore-uid-stays.exports"]
    assert len(left["served"]) == 1
    for name in names:
        assert cls.host.shell(f"cat {cls.root}/{name}/data/deep/file") == "data\n"
        assert f"{cls.root}/{name}" in done.message
    if policy is Policy.DELETE:
        assert cls.export("stays", made=True).release(policy, lambda: True).done
        assert cls.left() == {"names": [], "exports": [], "served": []}


@promise("S-287")
def test_a_large_tree_is_removed_piece_by_piece(cls: Class, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the pieces others are asked whether it may go on."""
    path = location(cls.export().ensure()).path
    cls.host.shell(f"for i in $(seq 40); do mkdir {path}/$i; touch $(seq -f {path}/$i/%g 100); done")
    answers = iter([True, False])
    with monkeypatch.context() as slow:
        slow.setattr(hostexport, "script", _slow_rm)
        stopped = cls.export(made=True).release(Policy.DELETE, lambda: next(answers))
    assert not stopped.done
    assert "served" in cls.left()
    assert cls.left()["served"] == [], "nobody writes to what is being removed"
    assert cls.export(made=True).release(Policy.DELETE, lambda: True).done
    assert cls.left() == {"names": [], "exports": [], "served": []}


@promise("S-284", "S-287")
def test_a_removal_that_fails_in_the_middle_keeps_the_mark_for_the_next_try(cls: Class) -> None:
    """As where a disk has errors, or an administrator has mounted something."""
    path = location(cls.export().ensure()).path
    cls.host.shell(f"mkdir {path}/busy; mount -t tmpfs none {path}/busy")
    try:
        with pytest.raises(ServerFault, match=r"can't be removed: .*busy"):
            cls.export(made=True).release(Policy.DELETE, lambda: True)
    finally:
        cls.host.shell(f"umount {cls.root}/*/data/busy || umount {cls.root}/.deleted_*/data/busy")
    assert cls.export(made=True).release(Policy.DELETE, lambda: True).done
    assert cls.left() == {"names": [], "exports": [], "served": []}


def _slow_rm() -> str:
    """The script, on a host whose rm takes longer than the request has left for it: RM_S."""
    slow = SCRIPT.replace('"rm", "-rf", "--one-file-system", "--", name', '"sleep", "600"')
    return re.sub(r"^LEFT_S = .*$", f"LEFT_S = {LIMIT_S - RM_S}", slow, count=1, flags=re.M)


@promise("S-286")
def test_a_missing_directory_is_not_made_anew(cls: Class) -> None:
    """Its disk may not be mounted, and programs would write beside the data."""
    cls.export().ensure()
    cls.host.shell(f"mv {cls.root} {cls.root}.away; mkdir -m 0755 {cls.root}")
    try:
        with pytest.raises(NotFound, match="is its disk mounted"):
            cls.export(made=True).ensure()
        assert cls.left()["names"] == []
    finally:
        cls.host.shell(f"rm -rf {cls.root}; mv {cls.root}.away {cls.root}")
    assert cls.export(made=True).ensure().owner is Owner.THIS


@promise("S-286", "S-287")
@pytest.mark.parametrize("policy", [Policy.RETAIN, Policy.DELETE])
def test_a_deletion_waits_for_the_disk_of_the_data(cls: Class, policy: Policy) -> None:
    """Else it would say that the data is removed, which comes back with its disk, and is then exported again."""
    cls.export().ensure()
    cls.host.shell(f"mv {cls.root} {cls.root}.away; mkdir -m 0755 {cls.root}")
    try:
        with pytest.raises(NotFound, match="is its disk mounted"):
            cls.export(made=True).release(policy, lambda: True)
    finally:
        cls.host.shell(f"rm -rf {cls.root}; mv {cls.root}.away {cls.root}")
    assert cls.export(made=True).release(policy, lambda: True).done
    left = cls.left()
    assert (left["exports"], left["served"]) == ([], [])
    assert ("team_digits_uid-digits" in left["names"]) == (policy is Policy.RETAIN)


@promise("S-284", "S-287")
def test_a_directory_without_its_marker_stays_and_is_not_exported(cls: Class) -> None:
    """Nor does a file of exports stay that a provisioning had not finished when it was cut off."""
    path = location(cls.export().ensure()).path
    cls.host.shell(f"echo mine >{path}/file; echo rubbish >{path}/../owner.json")
    cls.host.shell(f"echo '{path} *(rw)' >/etc/exports.d/.datastore-uid-digits.exports.new")
    done = cls.export(made=True).release(Policy.DELETE, lambda: True)
    assert done.done
    assert "has no mark of ours" in done.message
    assert cls.host.shell(f"cat {path}/file") == "mine\n"
    left = cls.left()
    assert (left["exports"], left["served"]) == ([], [])


@promise("S-281")
def test_exports_and_quotas_outlive_a_reboot_of_the_host(cls: Class, nfs_client: Guest) -> None:
    """A program that writes and reads with an open file waits, and goes on."""
    # The number of its quota is that of its uid: what is full, and removed while a client is away, is no other test's.
    uid = f"uid-{cls.name}"
    here = mount(nfs_client, cls, location(cls.export(uid=uid).ensure()).path)
    loop = (
        f"exec 3>>{here}/log; i=0; while [ ! -e /tmp/stop-{cls.name} ]; do i=$((i+1)); echo $i >&3 || exit 1;"
        f" head -c 4096 /dev/urandom >{here}/f$((i%4)) && sha256sum {here}/f$((i%4)) >/tmp/sums-{cls.name} &&"
        f" sha256sum -c --quiet /tmp/sums-{cls.name} || exit 2;"
        f" echo $i >/tmp/round-{cls.name}; mv /tmp/round-{cls.name} /tmp/rounds-{cls.name}; done; echo well"
    )
    nfs_client.shell(f"({loop}) >/tmp/said-{cls.name} 2>&1 &")

    def rounds() -> int:
        look = f"cat /tmp/said-{cls.name}; echo :; sleep 0.3; cat /tmp/rounds-{cls.name} 2>/dev/null || echo 0"
        said, _, number = nfs_client.shell(look).rpartition(":")
        assert said == "", said
        return int(number)

    try:
        eventually(lambda: rounds() > 0, "the program is at work")
        cls.host.shell("sync")
        cls.host.stop()
        try:
            before = rounds()
        finally:
            cls.host.start()
            cls.host.ready()
        eventually(lambda: rounds() > before + 4, "the program goes on", RECOVERED_S)
        eventually(lambda: _reached(cls.export(uid=uid, made=True)), "the host is reached again", RECOVERED_S)
        nfs_client.shell(f"touch /tmp/stop-{cls.name}")
        eventually(lambda: bool(nfs_client.shell(f"cat /tmp/said-{cls.name}")), "the loop has ended")
        assert nfs_client.shell(f"cat /tmp/said-{cls.name}") == "well\n"
        with pytest.raises(AssertionError, match=r"No space left on device|Disk quota exceeded"):
            nfs_client.shell(f"dd if=/dev/zero of={here}/large bs=1M count=32 conv=fsync")
    finally:
        nfs_client.shell(f"touch /tmp/stop-{cls.name}; umount -f {here} || umount -l {here}")


def _reached(export: HostExport) -> bool:
    try:
        return export.ensure().owner is Owner.THIS
    except (Unreachable, DeadlineExceeded):
        return False


# -- half-done work


SWEPT = """
import os as _os, signal as _signal, sys as _sys
_left = [{steps}]
_CHANGES = {{
    "os.mkdir", "os.rename", "os.remove", "os.chmod", "os.chown", "fcntl.ioctl", "fcntl.flock", "subprocess.Popen"
}}
def _cut(event, arguments):
    if event in _CHANGES or (event == "open" and isinstance(arguments[2], int) and arguments[2] & 3):
        if _left[0] == 0:
            _os.kill(_os.getpid(), _signal.SIGKILL)
        _left[0] -= 1
_sys.addaudithook(_cut)
"""
"""The script dies before its Nth change of anything; what it was about to do is not done."""


def _swept(steps: int) -> str:
    first = "import contextlib\n"
    return SCRIPT.replace(first, SWEPT.format(steps=steps) + first, 1)


@promise("S-284")
@pytest.mark.parametrize(("operation", "changes", "most"), [("ensure", 12, 40), ("release", 6, 30)])
def test_work_that_is_cut_off_after_any_step_converges_and_leaves_nothing(
    cls: Class, monkeypatch: pytest.MonkeyPatch, operation: str, changes: int, most: int
) -> None:
    exports = [cls.export(f"d{number}") for number in range(most)]
    beside = cls.export("beside")
    beside.ensure()
    cuts, ended = 0, False
    while not ended:
        export = exports[cuts]
        if operation == "release":
            export.ensure()
        monkeypatch.setattr(hostexport, "script", partial(_swept, cuts))
        try:
            export.ensure() if operation == "ensure" else export.release(Policy.DELETE, lambda: True)
            ended = True
        except ServerFault:
            cuts += 1
        monkeypatch.setattr(hostexport, "script", lambda: SCRIPT)
        if operation == "ensure":
            made = export.ensure()
            assert made.measured is not None, f"no quota after {cuts} changes"
        else:
            assert export.release(Policy.DELETE, lambda: True).done
    assert changes < cuts < most
    left = cls.left()
    there = ["beside", *(f"d{number}" for number in range(cuts + 1) if operation == "ensure")]
    assert left["names"] == sorted([f".clients_{cls.uid}", *(f"team_{name}_uid-{name}" for name in there)])
    assert sorted(left["exports"]) == sorted(f"/etc/exports.d/datastore-uid-{name}.exports" for name in there)
    assert len(left["served"]) == len(there)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda export: export.release(Policy.DELETE, lambda: True), [beside, *exports[: cuts + 1]]))
    assert cls.left() == {"names": [], "exports": [], "served": []}


# -- names and values that mean harm


@promise("S-285")
@pytest.mark.parametrize(
    "name",
    ["../../etc", "a b", "'a\"b", "$(touch /srv/pwned)", "`touch /srv/pwned`", "a\ntouch /srv/pwned", "a/b"],
)
def test_hostile_names_reach_no_shell_and_no_foreign_path(cls: Class, name: str) -> None:
    """The API server lets none of them through; the host does not depend on that."""
    for export in (cls.export(name), cls.export(namespace=name), cls.export(uid=name)):
        with pytest.raises(InvalidRequest, match="no name of a directory"):
            export.ensure()
        with pytest.raises(InvalidRequest, match="no name of a directory"):
            export.release(Policy.DELETE, lambda: True)
    assert cls.left()["names"] == []
    assert "pwned" not in cls.host.shell("ls /srv")


@promise("S-285")
def test_a_root_with_any_name_is_exported_as_it_is(cls: Class, nfs_client: Guest) -> None:
    name = "a b $(touch pwned) 'q\" #x"
    quoted = "'" + f"{cls.root}/{name}".replace("'", "'\\''") + "'"
    cls.host.shell(f"mkdir -m 0755 {quoted}")
    cls.parameters = {"root": f"{cls.root}/{name}"}
    path = location(cls.export().ensure()).path
    assert path == f"{cls.root}/{name}/team_digits_uid-digits/data"
    there = "'" + f"{cls.host.address}:{path}".replace("'", "'\\''") + "'"
    nfs_client.shell(
        f"mkdir -p /mnt/{cls.name}; mount -t nfs -o vers=4.2 {there} /mnt/{cls.name}; umount /mnt/{cls.name}"
    )
    assert cls.export().release(Policy.DELETE, lambda: True).done
    assert cls.host.shell(f"cd {quoted}; ls; ls {cls.root}").split("\n")[0] == name


@promise("S-285")
def test_links_planted_in_the_root_lead_nowhere(cls: Class) -> None:
    directory = "team_digits_uid-digits"
    cls.host.shell(f"mkdir /srv/{cls.name}-bait; echo bait >/srv/{cls.name}-bait/file")
    bait = f"/srv/{cls.name}-bait"
    try:
        for name in (directory, f".deleted_{directory}"):
            cls.host.shell(f"ln -s {bait} {cls.root}/{name}")
            with pytest.raises(InvalidRequest, match="is no directory of ours"):
                cls.export().release(Policy.DELETE, lambda: True)
            cls.host.shell(f"rm {cls.root}/{name}")
        cls.host.shell(f"ln -s {bait} {cls.root}/{directory}")
        with pytest.raises(InvalidRequest, match="is no directory of ours"):
            cls.export().ensure()
        cls.host.shell(f"rm {cls.root}/{directory}")
        # What is swept as half-made is a name, not what it leads to; the lock and the clients are none either.
        cls.host.shell(f"cd {cls.root}; ln -s {bait} .new_{directory}; ln -s {bait}/file .clients_{cls.uid}")
        cls.export().ensure()
        cls.host.shell(f"cd {cls.root}/{directory}; rm -r data; ln -s {bait} data")
        with pytest.raises(InvalidRequest, match="is no directory of ours"):
            cls.export(made=True).ensure()
        # A link inside of the data is removed itself.
        cls.host.shell(f"cd {cls.root}/{directory}; rm data; mkdir data; ln -s {bait} data/link")
        assert cls.export(made=True).release(Policy.DELETE, lambda: True).done
        assert cls.host.shell(f"ls {bait}; cat {bait}/file") == "file\nbait\n"
    finally:
        cls.host.shell(f"rm -rf {bait}")


@promise("S-287")
def test_a_directory_without_this_datastores_marker_is_never_touched(cls: Class) -> None:
    directory = "team_digits_uid-digits"
    cls.host.shell(f"mkdir -p {cls.root}/{directory}/data; echo mine >{cls.root}/{directory}/data/file")
    with pytest.raises(AlreadyExists, match="has no mark of ours"):
        cls.export().ensure()
    done = cls.export().release(Policy.DELETE, lambda: True)
    assert done.done
    assert "has no mark of ours" in done.message
    cls.host.shell(f'echo \'{{"uid": "another"}}\' >{cls.root}/{directory}/owner.json')
    with pytest.raises(AlreadyExists, match="belongs to another Datastore"):
        cls.export().ensure()
    assert "belongs to another" in cls.export().release(Policy.ARCHIVE, lambda: True).message
    assert cls.host.shell(f"cat {cls.root}/{directory}/data/file") == "mine\n"


@promise("S-285")
def test_a_root_that_others_may_write_to_is_refused(cls: Class) -> None:
    """They could plant anything there."""
    cls.host.shell(f"chmod 0777 {cls.root}")
    with pytest.raises(InvalidRequest, match="must belong to root, and nobody else may write to it"):
        cls.export().ensure()
    cls.host.shell(f"chown alice {cls.root}; chmod 0755 {cls.root}")
    with pytest.raises(InvalidRequest, match="must belong to root"):
        cls.export().ensure()


# -- hosts that are not as the class says


@promise("S-282")
def test_a_host_without_quotas_is_refused_with_the_remedy(cls: Class) -> None:
    """Nothing is exported without the quota that was asked for."""
    cls.parameters = {"root": "/var/tmp"}
    cls.host.shell("chmod 0755 /var/tmp")
    with pytest.raises(InvalidRequest, match="mounted with prjquota"):
        cls.export().ensure()
    assert cls.host.shell("ls -A /var/tmp | grep team || true") == ""


@promise("S-288")
def test_a_mistake_in_another_exports_file_blocks_no_export(cls: Class) -> None:
    cls.host.shell("echo '/srv *(frobnicate)' >/etc/exports.d/broken.exports")
    try:
        assert cls.export().ensure().owner is Owner.THIS
        assert len(cls.left()["served"]) == 1
        assert cls.export().release(Policy.DELETE, lambda: True).done
        assert cls.left() == {"names": [], "exports": [], "served": []}
    finally:
        cls.host.shell("rm /etc/exports.d/broken.exports")


@promise("S-283", "S-287")
def test_clients_that_another_exports_file_admits_are_named(cls: Class) -> None:
    """The controller changes no file of somebody else."""
    path = location(cls.export().ensure()).path
    cls.host.shell(f"echo '{path} *(ro)' >/etc/exports.d/other.exports; exportfs -ra")
    try:
        with pytest.raises(InvalidRequest, match=r"is exported to \* too.*/etc/exports"):
            cls.export(made=True).ensure()
        with pytest.raises(InvalidRequest, match=r"is exported to \* too.*/etc/exports"):
            cls.export(made=True).release(Policy.DELETE, lambda: True)
    finally:
        cls.host.shell("rm /etc/exports.d/other.exports; exportfs -ra")
    assert cls.export(made=True).release(Policy.DELETE, lambda: True).done


@promise("S-288")
def test_a_host_with_another_key_is_not_logged_in_to(cls: Class) -> None:
    other = cls.known_hosts.replace(cls.known_hosts.split()[2][-20:], "A" * 19 + "=")
    with pytest.raises((HostUntrusted, DatastoreError), match="knownHosts"):
        cls.export(known_hosts=other).ensure()
    with pytest.raises(HostUntrusted, match="has no key in knownHosts"):
        cls.export(known_hosts=cls.known_hosts.replace(cls.host.address, "10.99.0.9")).ensure()


@promise("S-288")
def test_a_key_that_the_host_does_not_take(cls: Class) -> None:
    wrong = SSHCredentials(username="root", password=Secret("secret"))
    with pytest.raises(CredentialsInvalid) as caught:
        cls.export(credentials=wrong).ensure()
    assert "secret" not in str(caught.value)
    nobody = SSHCredentials(username="alice", private_key=Secret((cls.host.directory / "id").read_text()))
    with pytest.raises(CredentialsInvalid, match="has to be root"):
        cls.export(credentials=nobody).ensure()


@promise("S-288")
def test_an_unreachable_or_silent_host_costs_only_its_timeout(cls: Class, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for the same host waits together."""
    monkeypatch.setattr(ssh, "CONNECT_S", 3.0)
    with pytest.raises(Unreachable):
        cls.export(host=GATEWAY, port=1).ensure()
    with socket.create_server((GATEWAY, 0), backlog=32) as silent:
        exports = [cls.export(f"d{number}", host=GATEWAY, port=silent.getsockname()[1]) for number in range(12)]

        def fails(number: int) -> bool:
            with pytest.raises((Unreachable, DeadlineExceeded)):
                exports[number].ensure()
            return True

        with ThreadPoolExecutor(12) as pool:
            assert all(pool.map(fails, range(12)))
        assert _connections(silent) < 4, "one, unless somebody came when that had been given up"


def _connections(server: socket.socket) -> int:
    """How many were made to a server that has taken none yet."""
    server.setblocking(False)
    for number in count():
        try:
            server.accept()[0].close()
        except BlockingIOError:
            return number
    raise AssertionError


@promise("S-288")
def test_one_connection_serves_many_and_outlives_a_reboot(cls: Class) -> None:
    with ThreadPoolExecutor(2 * SESSIONS) as pool:
        list(pool.map(lambda number: cls.export(f"d{number % 4}").ensure(), range(8)))
    served = "ps -e -o args | grep -c '^sshd: root@notty' || true"
    # Those of earlier tests end in their own time.
    eventually(lambda: 1 <= int(cls.host.shell(served)) <= 3, "ours, and those of the tests")
    cls.host.shell("for each in $(pgrep -f '^sshd: root@notty'); do [ $each = $PPID ] || kill $each; done &")
    eventually(lambda: _reached(cls.export("d1")), "the host is reached again")

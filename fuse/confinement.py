"""The sandbox of a mount server on a cluster's node: an attacker who takes it over has only the rights that it needs.

The server stays root, because its files are root's. These restrict the process, in this order:
- capabilities: it keeps those that its kind of source needs (capabilities(7));
- Landlock: it may use its own mount's state and cache directories, and read what it needs to run (landlock(7)). It can
  make no symbolic link and no device, so it can't mislead a process that works in these directories as root, such as
  its supervisor. It can neither mount nor unmount; the mount daemon does that;
- seccomp: it can't start, signal or inspect processes, connect to a Unix socket, or change a file by its path
  (seccomp(2), by libseccomp).
Where the kernel or the system lacks one of these, the others apply, and confine() returns what is missing (S-215).
Threads: only while the process has a single thread, because Landlock applies to the calling thread and its children.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import datastore
from datastore.api.mountspec import MountSpec
from datastore.api.source import S3Location
from datastore.errors import MountFailed

PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 4, 24, 38
CAP_NET_BIND_SERVICE, CAP_SYS_ADMIN = 1 << 10, 1 << 21
CAPABILITIES: Mapping[str, int] = {"s3": CAP_SYS_ADMIN, "nfs": CAP_NET_BIND_SERVICE}
"""The capabilities to keep, by the kind of the source: for FUSE passthrough (FUSE_DEV_IOC_BACKING_OPEN), and for a port
below 1024, which NFS servers ask of their clients."""
_VERSION_3 = 0x20080522
LAST = Path("/proc/sys/kernel/cap_last_cap")
TASKS = Path("/proc/self/task")

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""Numbers of system calls; like all since Linux 5.1 they are the same on every architecture."""
_ASK_VERSION, _PATH_BENEATH = 1, 1
LEAST_LANDLOCK = 2
"""The lowest version of Landlock that is used (Linux 5.19). Version 1 refuses every rename to another directory."""
WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 14
READ = READ_FILE | READ_DIR
OWN = READ | WRITE_FILE | TRUNCATE | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 13
"""The rights in the server's own directories: to read, write, create, remove and rename files and directories."""
OF_FILES = READ_FILE | WRITE_FILE | TRUNCATE
_EVERYTHING = {2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""The rights that are refused unless a rule grants them, by version: 3 added truncate, 5 added ioctl on devices."""
_SCOPES_SINCE, _SCOPED = 6, 0b11
"""From Landlock 6 on: no abstract Unix sockets of, and no signals to, processes outside the sandbox."""

SYSTEM = (
    "/etc", "/lib", "/lib64", "/opt", "/usr", "/dev/urandom", "/sys/devices/system/cpu",
    "/proc/cpuinfo", "/proc/meminfo", "/proc/self", "/proc/stat", "/proc/sys/kernel/random",
)  # fmt: skip
"""Paths that every program may have to read: libraries, certificates, host and user names."""
RESOLVER = "/etc/resolv.conf"
"""Often a symbolic link; the directory of its target is made readable, because the file there is replaced at times."""
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")
NODE_KEYS = (
    "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
)  # fmt: skip
"""Environment variables that name files with the node's credentials, for a volume without credentials of its own."""

_LIBSECCOMP = "libseccomp.so.2"
_ALLOW, _EPERM, _ENOSYS = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
_NE, _EQ, _GT, _MASKED_EQ = 1, 4, 6, 7
DENIED: Mapping[str, str] = {
    "other processes, their memory, files and fate": (
        "ptrace process_vm_readv process_vm_writev process_madvise process_mrelease kcmp pidfd_getfd pidfd_open"
        " pidfd_send_signal tkill rt_sigqueueinfo rt_tgsigqueueinfo setpriority ioprio_set sched_setattr sched_setparam"
        " sched_setscheduler migrate_pages move_pages"
    ),
    "processes of its own": "execve execveat fork vfork",
    "what is mounted, and other views of it": (
        "mount umount2 pivot_root move_mount open_tree open_tree_attr fsopen fsconfig fsmount fspick mount_setattr"
        " statmount listmount setns unshare chroot quotactl quotactl_fd swapon swapoff"
    ),
    "files past their paths, and what happens to others'": (
        "open_by_handle_at name_to_handle_at fanotify_init fanotify_mark inotify_add_watch"
    ),
    "files by path, which not every Landlock keeps it from; it has descriptors of its own": (
        "chmod fchmodat fchmodat2 chown lchown fchownat setxattr lsetxattr setxattrat removexattr lremovexattr"
        " removexattrat utime utimes futimesat file_setattr truncate"
    ),
    "the kernel itself, and calls with a history of holes": (
        "bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register keyctl add_key request_key"
        " kexec_load kexec_file_load init_module finit_module delete_module syslog acct reboot sethostname"
        " setdomainname settimeofday clock_settime iopl ioperm modify_ldt lsm_set_self_attr"
    ),
}
"""The forbidden system calls, grouped by what they act on."""
_CLONE_THREAD = 0x00010000
_NAMESPACES = (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)
_AF_INET, _AF_INET6, _AF_NETLINK, _SOCK_STREAM = 2, 10, 16, 1
_INT = 0xFFFFFFFF
_OWNERS = {"fcntl": (8, 10, 15), "ioctl": (0x8901, 0x8902)}
"""Forbidden commands. With F_SETOWN, F_SETSIG, F_SETOWN_EX, FIOSETOWN and SIOCSPGRP the kernel signals any process."""

Argument = tuple[int, int, int, int]
"""The index of a system call's argument, the comparison, and the comparison's two values."""
_held: list[int] = []
"""Open descriptors of the allowed paths below /proc: once closed, the same path would be another file to Landlock."""


def confine(spec: MountSpec) -> list[str]:
    """Restrict this process for good to serving this mount; return messages about the restrictions that are missing.

    Errors: MountFailed when a restriction that the system supports is refused, or when another thread runs.
    """
    if len(os.listdir(TASKS)) > 1:
        raise MountFailed("a mount server can't be confined: it has started threads before")
    seccomp = None
    with suppress(OSError):
        seccomp = ctypes.CDLL(_LIBSECCOMP)
    libc = ctypes.CDLL(None, use_errno=True)
    _drop_capabilities(libc, CAPABILITIES.get(spec.source.kind, 0))
    _done(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _done(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0))
    missing = []
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(_ASK_VERSION))
    if version < LEAST_LANDLOCK:
        missing.append("the files of other volumes: the kernel has no Landlock, or none of Linux 5.19 or later")
    else:
        own = [Path(spec.state_dir), Path(spec.cache_dir)]
        _restrict(libc, version, own, readable(spec, sys.path, os.environ))
    if seccomp is None:
        missing.append(f"system calls: {_LIBSECCOMP} is not installed")
    else:
        _filter(seccomp)
    return missing


def readable(spec: MountSpec, modules: Iterable[str], environment: Mapping[str, str]) -> list[Path]:
    """Return what a server may read besides its own directories; a path above one of these, such as /, is left out."""
    package = Path(__file__).resolve().parent
    found = [*SYSTEM, os.path.dirname(os.path.realpath(RESOLVER)), *modules, sys.prefix, sys.base_prefix]
    found += [str(package), *datastore.__path__]  # in a checkout the project's modules are not below sys.path
    named = [environment[each] for each in CERTIFICATES if environment.get(each)]
    if isinstance(spec.source, S3Location) and spec.source.credentials is None:
        found.append(os.path.expanduser("~/.aws"))
        named += [environment[each] for each in NODE_KEYS if environment.get(each)]
    found += [each if os.path.isdir(each) else os.path.dirname(each) for each in named]  # a file may be replaced
    own = [Path(each).resolve() for each in (spec.state_dir, spec.cache_dir)]
    paths = [Path(os.path.realpath(each) if each != "/proc/self" else each) for each in found if os.path.isabs(each)]
    return [each for each in dict.fromkeys(paths) if not any(mine.is_relative_to(each) for mine in own)]


def _drop_capabilities(libc: ctypes.CDLL, kept: int) -> None:
    for capability in range(int(LAST.read_text()) + 1):
        if not kept >> capability & 1:
            _done(libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0))
    low, high = kept & 0xFFFFFFFF, kept >> 32
    _done(libc.capset(struct.pack("Ii", _VERSION_3, 0), struct.pack("6I", low, low, 0, high, high, 0)))


def _restrict(libc: ctypes.CDLL, version: int, own: Sequence[Path], read: Sequence[Path]) -> None:
    """Apply Landlock."""
    handled = _EVERYTHING[max(each for each in _EVERYTHING if each <= version)]
    attributes = struct.pack("=QQQ", handled, 0, _SCOPED)[: 24 if version >= _SCOPES_SINCE else 8]
    ruleset = libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))
    _done(min(ruleset, 0))
    try:
        rules = (
            [(each, OWN) for each in own] + [(each, READ) for each in read] + [(Path(os.devnull), READ | WRITE_FILE)]
        )
        for path, allowed in rules:
            try:
                fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue  # this system does not have it
            if not os.path.isdir(path):
                allowed &= OF_FILES
            rule = struct.pack("=Qi", allowed & handled, fd)
            _done(libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, ctypes.c_uint(0)))
            if path.is_relative_to("/proc"):
                _held.append(fd)
            else:
                os.close(fd)
        _done(libc.syscall(_RESTRICT_SELF, ruleset, ctypes.c_uint(0)))
    finally:
        os.close(ruleset)


class _Comparison(ctypes.Structure):
    """struct scmp_arg_cmp."""

    _fields_ = (
        ("argument", ctypes.c_uint), ("operation", ctypes.c_int),
        ("first", ctypes.c_uint64), ("second", ctypes.c_uint64),
    )  # fmt: skip


def _filter(library: ctypes.CDLL) -> None:
    """Apply seccomp. System calls that this machine or an older libseccomp does not know are left out."""
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ALLOW)))
    try:
        for name, answer, *arguments in _rules(os.getpid()):
            number = library.seccomp_syscall_resolve_name(name.encode())
            if number < 0:
                continue
            given = (_Comparison * max(1, len(arguments)))(*(_Comparison(*each) for each in arguments))
            code = library.seccomp_rule_add_array(context, ctypes.c_uint32(answer), number, len(arguments), given)
            if code < 0:
                raise MountFailed(f"a mount server can't be confined: {name}: {os.strerror(-code)}")
        code = library.seccomp_load(context)
        if code < 0:
            raise MountFailed(f"a mount server can't be confined: seccomp: {os.strerror(-code)}")
    finally:
        library.seccomp_release(context)


def _rules(own_pid: int) -> Iterable[tuple[str, int, *tuple[Argument, ...]]]:
    """Yield rules: a system call, the answer, conditions that all have to hold. A call's rules are alternatives."""
    yield from ((name, _EPERM) for names in DENIED.values() for name in names.split())
    # It may start threads only. A filter can't see the arguments of clone3, so the C library has to use clone.
    yield "clone3", _ENOSYS
    yield "clone", _EPERM, (0, _MASKED_EQ, _CLONE_THREAD, 0)
    yield from (("clone", _EPERM, (0, _MASKED_EQ, each, each)) for each in _NAMESPACES)
    # These may act on the process itself only.
    yield "kill", _EPERM, (0, _NE, own_pid, 0)
    yield "tgkill", _EPERM, (0, _NE, own_pid, 0)
    yield "prlimit64", _EPERM, (0, _NE, 0, 0)
    yield "sched_setaffinity", _EPERM, (0, _NE, 0, 0)
    yield "utimensat", _EPERM, (1, _NE, 0, 0)
    for name, commands in _OWNERS.items():
        yield from ((name, _EPERM, (1, _MASKED_EQ, _INT, each)) for each in commands)
    # Sockets: IP, and netlink for getaddrinfo. The only Unix sockets are stream pairs, which reach no other process.
    for family in range(_AF_NETLINK):
        if family not in (_AF_INET, _AF_INET6):
            yield "socket", _EPERM, (0, _EQ, family, 0)
    yield "socket", _EPERM, (0, _GT, _AF_NETLINK, 0)
    yield "socket", _EPERM, (0, _EQ, _AF_NETLINK, 0), (2, _NE, 0, 0)
    for kind in range(16):
        if kind != _SOCK_STREAM:
            yield "socketpair", _EPERM, (1, _MASKED_EQ, 0xF, kind)


def _done(answer: int) -> None:
    if answer != 0:
        number = ctypes.get_errno()
        raise MountFailed(f"a mount server can't be confined: {os.strerror(number)}")

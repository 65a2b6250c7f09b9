"""A mount server of a cluster's node gives up all that it does not need: whoever takes it over has that much less.

It stays root, as its files are. What holds it, in this order:
- capabilities: those of its kind of source, and none more (capabilities(7));
- Landlock: of the file system it sees the state and the cache of its own mount, and may read what it needs to run
  (landlock(7)). It makes no symbolic link and no device, so that nobody who works in its directories as root, such as
  its supervisor, is led elsewhere; nothing is mounted or unmounted, so its mount daemon does that;
- seccomp: it neither starts nor signals nor looks into processes, connects to no Unix socket, and changes no file by
  its path (seccomp(2), by libseccomp).
Where the kernel or the system lacks one of these, the others hold, and the answer says what is missing (S-215).
Threads: before any other is started, because Landlock holds only who asks for it, and whom that one starts.
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
"""By the kind of the source. The kernel reads cached files by itself for nobody else (FUSE_DEV_IOC_BACKING_OPEN), and
NFS servers ask for a port below 1024."""
_VERSION_3 = 0x20080522
LAST = Path("/proc/sys/kernel/cap_last_cap")
TASKS = Path("/proc/self/task")

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""The same on every architecture, as all system calls since Linux 5.1."""
_ASK_VERSION, _PATH_BENEATH = 1, 1
LEAST_LANDLOCK = 2
"""Linux 5.19. The first version refuses every rename to another directory."""
WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 14
READ = READ_FILE | READ_DIR
OWN = READ | WRITE_FILE | TRUNCATE | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 13
"""And remove directories and files, make them, and rename between them."""
OF_FILES = READ_FILE | WRITE_FILE | TRUNCATE
_EVERYTHING = {2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""What is refused unless a rule allows it, by version: the third knows truncate, the fifth ioctl on devices."""
_SCOPES_SINCE, _SCOPED = 6, 0b11
"""Abstract Unix sockets and signals, of processes that are not confined like us."""

SYSTEM = (
    "/etc", "/lib", "/lib64", "/opt", "/usr", "/dev/urandom", "/sys/devices/system/cpu",
    "/proc/cpuinfo", "/proc/meminfo", "/proc/self", "/proc/stat", "/proc/sys/kernel/random",
)  # fmt: skip
"""What a program reads: libraries, certificates, names."""
RESOLVER = "/etc/resolv.conf"
"""Often a link to elsewhere, where it is replaced now and then."""
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")
NODE_KEYS = (
    "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
)  # fmt: skip
"""Variables that name files with keys of the node; for a volume that has none of its own."""

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
"""System calls, by what they are about."""
_CLONE_THREAD = 0x00010000
_NAMESPACES = (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)
_AF_INET, _AF_INET6, _AF_NETLINK, _SOCK_STREAM = 2, 10, 16, 1
_INT = 0xFFFFFFFF
_OWNERS = {"fcntl": (8, 10, 15), "ioctl": (0x8901, 0x8902)}
"""F_SETOWN, F_SETSIG, F_SETOWN_EX, FIOSETOWN and SIOCSPGRP have the kernel send signals to any process."""

Argument = tuple[int, int, int, int]
"""Which argument of the call, the comparison, and its two values."""
_held: list[int] = []
"""Descriptors of what is allowed below /proc, whose files are others (to Landlock) once nobody has them open."""


def confine(spec: MountSpec) -> list[str]:
    """From now on this process is the server of this mount, and nothing else; what is missing of that, for people.

    Errors: MountFailed when what every system has is refused, or when another thread runs.
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
    """What the server of a mount may read besides its own: nothing that has its own state below it, as / has."""
    package = Path(__file__).resolve().parent
    found = [*SYSTEM, os.path.dirname(os.path.realpath(RESOLVER)), *modules, sys.prefix, sys.base_prefix]
    found += [str(package), *datastore.__path__]  # in a checkout our modules are not below sys.path
    named = [environment[each] for each in CERTIFICATES if environment.get(each)]
    if isinstance(spec.source, S3Location) and spec.source.credentials is None:
        found.append(os.path.expanduser("~/.aws"))
        named += [environment[each] for each in NODE_KEYS if environment.get(each)]
    found += [each if os.path.isdir(each) else os.path.dirname(each) for each in named]  # files are replaced
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
    """Landlock."""
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
                continue  # not on this system
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
    """seccomp. What this machine or an older library has not is left out."""
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
    """Call, answer, and for which arguments; those of a call are alternatives, those of a rule hold together."""
    yield from ((name, _EPERM) for names in DENIED.values() for name in names.split())
    # Threads only. The kernel shows a filter no arguments of clone3, so the C library has to do with clone.
    yield "clone3", _ENOSYS
    yield "clone", _EPERM, (0, _MASKED_EQ, _CLONE_THREAD, 0)
    yield from (("clone", _EPERM, (0, _MASKED_EQ, each, each)) for each in _NAMESPACES)
    # Itself only.
    yield "kill", _EPERM, (0, _NE, own_pid, 0)
    yield "tgkill", _EPERM, (0, _NE, own_pid, 0)
    yield "prlimit64", _EPERM, (0, _NE, 0, 0)
    yield "sched_setaffinity", _EPERM, (0, _NE, 0, 0)
    yield "utimensat", _EPERM, (1, _NE, 0, 0)
    for name, commands in _OWNERS.items():
        yield from ((name, _EPERM, (1, _MASKED_EQ, _INT, each)) for each in commands)
    # IP, and what getaddrinfo asks the kernel for; no Unix socket but a pair, which leads nowhere.
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

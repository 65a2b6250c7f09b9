"""Measures a replica's processes, from /proc and the kernel's socket tables, without privileges or cgroups.

Sources: proc(5), sock_diag(7), tcp_info of linux/tcp.h.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST_DUMP = 0x301
_NLMSG_DONE, _NLMSG_ERROR = 3, 2
_INET_DIAG_INFO = 2
_ALL_STATES = 0xFFFFFFFF
_BYTES_ACKED = 120
"""The offset of tcpi_bytes_acked in tcp_info; tcpi_bytes_received follows. Both exist since Linux 4.1."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process in the table. cpu_s: its CPU seconds and those of children that it has waited for."""

    pid: int
    parent: int
    cpu_s: float
    memory_bytes: int


def table() -> dict[int, Process]:
    """Return all processes in /proc, by pid."""
    found = {}
    for name in os.listdir(PROC):
        if name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                text = (PROC / name / "stat").read_text()
                # The name, in parentheses, may contain any characters, so the fields after it are used.
                fields = text[text.rindex(")") + 2 :].split()
                ticks = sum(int(each) for each in fields[11:15])
                found[int(name)] = Process(int(name), int(fields[1]), ticks / _TICKS, int(fields[21]) * _PAGE)
    return found


def below(root: int, processes: Mapping[int, Process]) -> list[Process]:
    """Return a process and all its descendants."""
    children: dict[int, list[Process]] = {}
    for each in processes.values():
        children.setdefault(each.parent, []).append(each)
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        if pid in processes:
            found.append(processes[pid])
        waiting += [each.pid for each in children.get(pid, [])]
    return found


def with_variable(name: str, value: str) -> list[int]:
    """Return the pids of this user's processes that were started with this variable in their environment."""
    mark = f"{name}={value}".encode()
    found = []
    for each in os.listdir(PROC):
        if each.isdigit():
            with suppress(OSError):
                if mark in (PROC / each / "environ").read_bytes().split(b"\0"):
                    found.append(int(each))
    return found


def end_with_variable(name: str, value: str, timeout_s: float) -> None:
    """Kill this user's processes that were started with this variable, until none is left, for at most timeout_s."""
    deadline = time.monotonic() + timeout_s
    while (found := with_variable(name, value)) and time.monotonic() < deadline:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def command_below(root: int) -> int | None:
    """Return the pid of the user's command, or None. It is the child of bwrap's child, process 1 of the namespace."""
    for _ in range(2):
        try:
            listed = (PROC / str(root) / "task" / str(root) / "children").read_text().split()
        except OSError:
            return None
        if not listed:
            return None
        root = int(listed[0])
    return root


def socket_inodes(pids: Iterable[int]) -> set[int]:
    """Return the inode numbers of the sockets that these processes have open."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            for entry in os.scandir(PROC / str(pid) / "fd"):
                with suppress(OSError, ValueError):
                    target = os.readlink(entry.path)
                    if target.startswith("socket:["):
                        found.add(int(target[8:-1]))
    return found


class Traffic:
    """Adds up, at each look(), the bytes that the TCP sockets of each replica received and sent since the look before.
    The bytes of a socket after the last look and before its close are missed."""

    def __init__(self) -> None:
        self._sockets: dict[int, tuple[int, int]] = {}
        self._totals: dict[str, tuple[int, int]] = {}

    def look(self, sockets: Mapping[str, set[int]]) -> dict[str, tuple[int, int]]:
        """Return (received, sent) of each replica so far. sockets: the inodes of each replica's. Errors: OSError."""
        now = dict(tcp_bytes())
        for name, inodes in sockets.items():
            received, sent = self._totals.get(name, (0, 0))
            for inode in inodes & now.keys():
                before = self._sockets.get(inode, (0, 0))
                received += max(0, now[inode][0] - before[0])
                sent += max(0, now[inode][1] - before[1])
            self._totals[name] = (received, sent)
        self._sockets = now
        return {name: self._totals[name] for name in sockets}


def tcp_bytes() -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield the TCP sockets of this network namespace: inode, (bytes received, bytes acknowledged). Errors: OSError."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as channel:  # NETLINK_SOCK_DIAG
            channel.settimeout(2.0)
            wanted = struct.pack("=BBBxI48x", family, socket.IPPROTO_TCP, 1 << (_INET_DIAG_INFO - 1), _ALL_STATES)
            head = struct.pack("=IHHII", 16 + len(wanted), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0)
            channel.send(head + wanted)
            yield from _answers(channel)


def _answers(channel: socket.socket) -> Iterator[tuple[int, tuple[int, int]]]:
    while True:
        data = channel.recv(1 << 18)
        at = 0
        while at + 16 <= len(data):
            length, kind = struct.unpack_from("=IH", data, at)
            if kind == _NLMSG_DONE:
                return
            if kind == _NLMSG_ERROR:
                raise OSError("the kernel does not tell about sockets")
            if found := _answer(data[at + 16 : at + length]):
                yield found
            at += (length + 3) & ~3


def _answer(message: bytes) -> tuple[int, tuple[int, int]] | None:
    """Return what tcp_bytes() yields, from one inet_diag_msg (72 bytes) and its attributes; None without tcp_info."""
    (inode,) = struct.unpack_from("=I", message, 68)
    at = 72
    while at + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, at)
        if length < 4:
            return None
        if kind == _INET_DIAG_INFO and length >= 4 + _BYTES_ACKED + 16:
            acked, received = struct.unpack_from("=QQ", message, at + 4 + _BYTES_ACKED)
            return inode, (received, acked)
        at += (length + 3) & ~3
    return None

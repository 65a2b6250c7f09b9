"""A network namespace with a bridge: the guests' network, which nothing else of this machine is in."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

GATEWAY = "10.99.0.1"
SERVER = "10.99.0.2"
CLIENT = "10.99.0.3"
PREFIX = 24
CLONE_NEWNET = 0x40000000
COMMAND_TIMEOUT_S = 60.0


def ip(*arguments: str) -> None:
    """ip(8). Errors: CalledProcessError."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=COMMAND_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class Network:
    """One namespace, by its name as `ip netns` knows it."""

    name: str

    @property
    def path(self) -> Path:
        """The file that stands for it."""
        return Path("/run/netns", self.name)

    def create(self) -> None:
        """Make it, with a tap device for each guest on a bridge that has the address GATEWAY."""
        ip("netns", "add", self.name)
        here = ("-n", self.name)
        ip(*here, "link", "set", "lo", "up")
        ip(*here, "link", "add", "guests", "type", "bridge")
        ip(*here, "address", "add", f"{GATEWAY}/{PREFIX}", "dev", "guests")
        ip(*here, "link", "set", "guests", "up")
        for tap in ("server", "client"):
            ip(*here, "tuntap", "add", tap, "mode", "tap")
            ip(*here, "link", "set", tap, "master", "guests")
            ip(*here, "link", "set", tap, "up")

    def remove(self) -> None:
        """Idempotent."""
        if self.path.exists():
            ip("netns", "delete", self.name)

    def command(self, *words: str) -> list[str]:
        """The command to run `words` in it."""
        return ["nsenter", f"--net={self.path}", "--", *words]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """This thread, and the threads and processes that it starts meanwhile, are in the namespace."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            inside = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                _setns(inside)
            finally:
                os.close(inside)
            yield
        finally:
            _setns(before)
            os.close(before)


def _setns(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")
